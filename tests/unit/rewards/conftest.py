"""One verifier pool for the tests that only want verdicts; tests that break a pool make their own."""

from collections.abc import Iterator

import pytest

from grpo_ray.rewards.pool import VerifierPool


@pytest.fixture(scope="session")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(processes=2) as shared:
        yield shared
