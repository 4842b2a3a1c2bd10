"""Limits of a process: resources, lifetime (it ends with its parent), and time on a busy machine."""

import ctypes
import os
import resource
import signal
import sys

STARVED_CPU_SHARE = 1 / 3
"""Share of the time limit; a process that has used less CPU time than this counts as starved."""
STARVED_FACTOR = 4
"""Multiple of the time limit that a starved process may take."""
_PR_SET_PDEATHSIG = 1
"""prctl option of Linux: the signal sent to this process when its parent dies."""


def set_soft_limit(kind: int, amount: int) -> None:
    """Set a soft resource limit, within the hard limit that this process already has."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def die_with_parent() -> None:
    """Make Linux kill this process when its parent dies. Other systems have no such signal."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call.
    if os.getppid() != parent:
        os._exit(1)


def is_starved(time_limit: float, elapsed: float, cpu_seconds: float) -> bool:
    """Return True if a process beyond its time limit may continue, because it has had little CPU time.

    Other processes occupy the cores then, and a busy machine must not turn a result into a timeout. A starved process
    may take `STARVED_FACTOR` time limits, until it has used `STARVED_CPU_SHARE` of one limit in CPU time.

    Args:
        time_limit: seconds of wall-clock time.
        elapsed: seconds since the process was given its work.
        cpu_seconds: CPU time that it has used since.
    """
    return cpu_seconds < STARVED_CPU_SHARE * time_limit and elapsed < STARVED_FACTOR * time_limit
