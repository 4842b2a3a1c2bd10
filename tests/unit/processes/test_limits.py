"""Tests of the limits that a process sets on itself, and of the rule for starved processes."""

import os
import resource
import signal
import subprocess
import sys

import pytest
from process_watch import is_running, wait_until

from grpo_ray.processes.limits import is_starved, set_soft_limit


@pytest.mark.parametrize(
    ("elapsed", "cpu_seconds", "starved"),
    [
        (3.1, 0.0, True),
        (3.1, 0.9, True),
        (3.1, 1.0, False),  # a third of the limit
        (11.9, 0.9, True),
        (12.0, 0.9, False),  # four limits
    ],
)
def test_process_is_starved_up_to_four_limits(elapsed: float, cpu_seconds: float, starved: bool) -> None:
    assert is_starved(3.0, elapsed, cpu_seconds) == starved


def test_soft_limit_stays_within_the_hard_one() -> None:
    readable, writable = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 100))
            for amount in (50, 1000):
                set_soft_limit(resource.RLIMIT_NOFILE, amount)
                os.write(writable, b"%d %d\n" % resource.getrlimit(resource.RLIMIT_NOFILE))
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable, encoding="ascii") as limits:
        assert limits.read() == "50 100\n100 100\n"
    os.waitpid(pid, 0)


FORK = """
import os, signal
from grpo_ray.processes.limits import die_with_parent

ready, tell = os.pipe()
if (child := os.fork()) == 0:
    die_with_parent()
    os.write(tell, b"+")
    signal.pause()
os.read(ready, 1)
print(child, flush=True)
signal.pause()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a process with its parent")
def test_process_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FORK], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(child))
