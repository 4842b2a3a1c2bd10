"""Tests of reading processes from /proc, and of the end of a whole tree."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from process_watch import is_running, wait_until

from grpo_ray.processes.process_tree import (
    children,
    descendants,
    is_runnable,
    kill_all,
    process_state,
    process_usage,
)

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system has no /proc")

TREE = """
import os, signal
if os.fork() == 0:
    os.fork()
    os.setsid()
signal.pause()
"""
"""Program with one process below it, and one below that, each in a session of its own."""


@pytest.fixture
def root() -> Iterator[int]:
    """Return the id of the first of three processes."""
    process = subprocess.Popen([sys.executable, "-c", TREE], start_new_session=True)
    wait_until(lambda: len(descendants(process.pid)) == 2)
    yield process.pid
    kill_all(process.pid)
    process.wait()


def test_descendants_are_found_at_all_depths(root: int) -> None:
    (child,) = children(root)
    assert sorted(descendants(root)) == sorted([child, *children(child)])
    assert root in children(os.getpid())


def test_search_for_descendants_ends_above_its_limit(root: int) -> None:
    assert len(descendants(root, at_most=0)) == 1


def test_tree_is_killed_across_sessions(root: int) -> None:
    below = descendants(root)
    kill_all(root)
    assert process_state(root) == ""  # reaped
    wait_until(lambda: not any(map(is_running, below)))


def test_stopped_process_is_not_runnable(root: int) -> None:
    os.kill(root, signal.SIGSTOP)
    wait_until(lambda: process_state(root) == "T")
    assert not is_runnable(root) and is_runnable(os.getpid())


def test_usage_counts_processor_time_and_memory() -> None:
    before, _ = process_usage(os.getpid())
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after, resident = process_usage(os.getpid())
    assert after - before > 0.05 and resident > 1 << 20


def test_process_that_does_not_exist_has_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert (children(process.pid), descendants(process.pid), process_state(process.pid)) == ([], [], "")
    assert process_usage(process.pid) == (0.0, 0)
