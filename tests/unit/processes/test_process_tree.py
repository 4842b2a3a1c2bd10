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
    tree_below,
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
    assert len(tree_below(root, at_most=0).living) == 1


THREADS = """
import ctypes, os, threading, time
kept = bytearray(os.urandom(1 << 20)) * 8
for _ in range(5):
    threading.Thread(target=time.sleep, args=(999,)).start()
if os.fork() == 0:
    os._exit(0)
if os.fork() == 0:
    threading.Thread(target=time.sleep, args=(999,)).start()
    ctypes.CDLL(None).pthread_exit(None)
time.sleep(999)
"""
"""Program with six threads and, below it, a process that has ended, and one whose main thread has ended."""


def test_threads_and_processes_that_have_ended_count() -> None:
    process = subprocess.Popen([sys.executable, "-c", THREADS], start_new_session=True)
    try:
        wait_until(lambda: sorted(map(process_state, children(process.pid))) == ["Z", "Z"])
        tree = tree_below(process.pid)
        (thread,) = tree.living
        assert tree.threads == 6 + 1 + 2 and thread not in children(process.pid)
        assert process_usage(thread)[1] > 8 << 20  # of its process
        assert tree_below(process.pid, most_threads=5).living == []  # 6 threads, which are not read
        assert tree_below(process.pid, most_threads=5).threads == 6
    finally:
        kill_all(process.pid)
        process.wait()


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
