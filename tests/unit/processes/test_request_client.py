"""Tests of the client of a process that answers one request at a time."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_server
from process_watch import is_running, wait_until
from small_server import KILL, LONG, LONG_BYTES

from grpo_ray.processes.request_client import RequestClient


@pytest.fixture
def client() -> Iterator[RequestClient]:
    client = RequestClient(small_server.__name__, lambda name: True)
    yield client
    client.stop()


def test_requests_are_answered_by_one_process(client: RequestClient) -> None:
    assert client.pid is None
    assert client.ask(b"a" * 200_000) == (b"A" * 200_000, None)
    first = client.pid
    assert client.ask(b"") == (b"", None)
    assert client.pid == first is not None


def test_started_process_answers_the_first_request(client: RequestClient) -> None:
    client.start()
    first = client.pid
    assert client.ask(b"a") == (b"A", None)
    assert client.pid == first is not None


def test_process_that_ends_gives_its_exit_code_and_another_one_answers(client: RequestClient) -> None:
    assert client.ask(KILL) == (None, -signal.SIGTERM)
    assert client.pid is None
    assert client.ask(b"a") == (b"A", None)


def test_process_that_was_killed_between_requests_gives_its_exit_code(client: RequestClient) -> None:
    client.ask(b"a")
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)  # which `nohup make test` does not ignore
    wait_until(lambda: not is_running(pid))
    assert client.ask(b"a") == (None, -signal.SIGUSR1)


def test_answer_above_the_limit_ends_the_process(client: RequestClient) -> None:
    answer, code = client.ask(LONG, LONG_BYTES)
    assert answer is not None and code is None
    assert client.ask(LONG, LONG_BYTES - 1) == (None, -signal.SIGKILL)


def test_process_that_cannot_start_has_no_exit_code(client: RequestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert not client.wait_until_ready()
    assert client.ask(b"a") == (None, None)


def test_stop_ends_the_process_and_the_next_request_starts_another(client: RequestClient) -> None:
    client.ask(b"a")
    first = client.pid
    assert client.stop() == -signal.SIGKILL and client.stop() is None
    assert not Path(f"/proc/{first}").exists()
    assert client.ask(b"b") == (b"B", None) and client.pid != first
