"""Tests of the client of a supervisor: start, results, death, close, and forks of its owner."""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import small_supervisor
from process_watch import in_a_fork, is_running, wait_until
from small_supervisor import CODE, CRASH, HANG

from grpo_ray.processes.messages import frame, unpack_frames
from grpo_ray.processes.supervisor_client import MAX_FAILED_STARTS, SupervisorClient

WAIT = 60.0
"""Seconds after which a test gives up."""


class Owner:
    """Owner of a client, in place of a pool."""

    def __init__(self, passes: Callable[[str], bool] = lambda name: True, close_seconds: float = WAIT):
        self.received: queue.Queue[bytes] = queue.Queue()
        self.ended: queue.Queue[int] = queue.Queue()
        self.client = SupervisorClient(
            small_supervisor.__name__,
            passes=passes,
            receive=self._receive,
            ended=self.ended.put,
            close_seconds=close_seconds,
        )

    def _receive(self, buffer: bytearray) -> None:
        for body in unpack_frames(buffer):
            self.received.put(body)

    def start(self, *arguments: float) -> int:
        """Start a supervisor, wait until it runs, and return its id."""
        with self.client.lock:
            self.client.start(*arguments)
        assert self.received.get(timeout=WAIT) == repr(arguments).encode()
        assert self.client.pid is not None
        return self.client.pid

    def send(self, body: bytes) -> None:
        with self.client.lock:
            self.client.send(frame(body))

    def close(self) -> None:
        self.client.close(lambda: None)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


def test_client_without_a_start_has_no_process(owner: Owner) -> None:
    assert owner.client.pid is None and not owner.client.is_running


def test_supervisor_gets_its_arguments_and_answers(owner: Owner) -> None:
    owner.start(2, 0.5)
    for body in (b"x" * 200_000, b""):
        owner.send(body)
        assert owner.received.get(timeout=WAIT) == body


def test_supervisor_that_ends_is_reported_with_its_exit_code_and_replaced(owner: Owner) -> None:
    first = owner.start()
    owner.send(CRASH)
    assert owner.ended.get(timeout=WAIT) == CODE
    assert owner.client.pid is None and not owner.client.is_running
    assert owner.start() != first
    owner.send(b"next")
    assert owner.received.get(timeout=WAIT) == b"next"


def test_message_to_a_supervisor_that_was_killed_is_dropped(owner: Owner) -> None:
    pid = owner.start()
    with owner.client.lock:  # so that its end is noticed after the message
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        owner.client.send(frame(b"lost"))
    assert owner.ended.get(timeout=WAIT) == -signal.SIGKILL


def test_starts_without_a_result_count_as_failed_in_a_row(owner: Owner) -> None:
    def crash() -> bool:
        owner.start()
        owner.send(CRASH)
        owner.ended.get(timeout=WAIT)
        return owner.client.has_failed

    fails = [False] * (MAX_FAILED_STARTS - 1)
    assert [crash() for _ in fails] == fails
    with owner.client.lock:
        owner.client.count_result()
    assert [crash() for _ in (*fails, True)] == [*fails, True]


def test_process_that_cannot_be_started_leaves_no_socket(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    before = os.listdir("/proc/self/fd")
    with owner.client.lock, pytest.raises(OSError):
        owner.client.start()
    assert os.listdir("/proc/self/fd") == before
    assert not owner.client.is_running


def test_clean_up_comes_before_the_supervisor_is_reaped(owner: Owner) -> None:
    seen: list[tuple[int, int | None]] = []

    def clean_up(process: subprocess.Popen[bytes]) -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        seen.append((process.pid, process.returncode))

    with owner.client.lock:
        owner.client.start(clean_up=clean_up)
        pid = owner.client.pid
    owner.close()
    assert seen == [(pid, None)]


def test_close_settles_once_and_ends_the_supervisor() -> None:
    owner = Owner()
    pid = owner.start()
    settled = []
    owner.client.close(lambda: settled.append(owner.client.is_closed))
    assert settled == [True] and not Path(f"/proc/{pid}").exists()
    assert owner.client.is_closed and not owner.client.is_running
    owner.close()
    assert owner.ended.empty()


def test_close_kills_a_supervisor_that_does_not_end() -> None:
    owner = Owner(close_seconds=0.0)
    pid = owner.start()
    owner.send(HANG)
    owner.close()
    assert not Path(f"/proc/{pid}").exists()


def test_supervisor_gets_the_variables_that_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root reads the variables of another process for certain")
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.setenv("WITHHELD", "1")
    owner = Owner(passes=lambda name: name != "WITHHELD")
    try:
        variables = Path(f"/proc/{owner.start()}/environ").read_bytes().split(b"\0")
    finally:
        owner.close()
    assert b"GIVEN=1" in variables and b"WITHHELD=1" not in variables


def forget(client: SupervisorClient) -> tuple[bool, ...]:
    return client.forget_after_fork(), client.is_running, client.forget_after_fork()


def close(client: SupervisorClient) -> tuple[bool, ...]:
    client.close(lambda: None)
    return client.is_closed, client.is_running, client.forget_after_fork()


@pytest.mark.parametrize("drop", [forget, close])
def test_supervisor_dropped_in_a_fork_stays_its_parents(
    owner: Owner, drop: Callable[[SupervisorClient], tuple[bool, ...]]
) -> None:
    pid = owner.start()
    assert not owner.client.forget_after_fork()
    assert in_a_fork(lambda: drop(owner.client)) == "(True, False, False)"
    assert owner.client.pid == pid
    owner.send(b"still here")
    assert owner.received.get(timeout=WAIT) == b"still here"
