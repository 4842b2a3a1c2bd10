"""Fixtures of the integration tests: one S3 server for all of them."""

from collections.abc import Iterator

import pytest
from failing_storage import CREDENTIALS, S3Server


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    """S3 server of the whole session, started by the first test that needs it."""
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_server(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The session's S3 server, with its credentials in the environment for one test. Runs need names of their own."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return s3_process
