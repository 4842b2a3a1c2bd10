"""Process trees, read from /proc: children, descendants and state of a process; and the killing of a whole tree."""

import contextlib
import os
import signal
from dataclasses import dataclass


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; none if it has ended."""
    found = []
    for thread in _threads(pid):  # a child belongs to the thread that has started it
        with (
            contextlib.suppress(OSError),  # this thread has ended
            open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file,
        ):
            found += [int(each) for each in file.read().split()]
    return found


@dataclass(frozen=True)
class ProcessTree:
    """Processes below a process."""

    living: list[int]
    """Their ids. For one whose main thread has ended, the id of another of its threads: only the files in /proc of a
    thread that runs show the memory and the open files of the process."""
    threads: int
    """Process ids that the tree uses: one for each thread, that process's own included, and for each zombie."""


def tree_below(pid: int, at_most: int = 1 << 20, most_threads: int = 1 << 20) -> ProcessTree:
    """Find the processes below a process.

    Args:
        at_most: the search ends once it has found more processes; otherwise it would never end if they multiplied
            faster than they are read.
        most_threads: the search ends once it has found more threads, since each of them takes a while to read.
    """
    living: list[int] = []
    _, threads = _state_and_threads(pid)
    waiting = children(pid) if threads <= most_threads else []
    while waiting and len(living) <= at_most and threads <= most_threads:
        pid_below = waiting.pop()
        state, own_threads = _state_and_threads(pid_below)
        threads += own_threads
        if state not in ("", "Z"):
            living.append(pid_below)
        elif own_threads > 1:
            living += _threads(pid_below, without=pid_below)[:1]
        if threads <= most_threads:
            waiting += children(pid_below)  # also of a zombie: its main thread may have ended while others run
    return ProcessTree(living, threads)


def descendants(pid: int) -> list[int]:
    """Return the ids of the living processes below a process, as in `ProcessTree`."""
    return tree_below(pid).living


def _threads(pid: int, without: int | None = None) -> list[int]:
    """Return the ids of a process's threads, except that of `without`; none if it has ended."""
    with contextlib.suppress(OSError):
        return [int(each) for each in os.listdir(f"/proc/{pid}/task") if int(each) != without]
    return []


def is_runnable(pid: int) -> bool:
    """Return True if a process waits for a core or has one."""
    return process_state(pid) == "R"


def process_state(pid: int) -> str:
    """Return the letter of a process's state, as in `ps`; "" if there is none."""
    return _state_and_threads(pid)[0]


def _state_and_threads(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state and the number of its threads, 1 for a zombie; "" and 0 if there is none.

    A zombie with more than one thread is a process whose main thread has ended while others run.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[17])


def kill_all(pid: int) -> None:
    """Kill a child of this process and all processes below it, and reap the child.

    Terminates however fast the processes multiply: the kernel kills a PID namespace with its first process, and a
    process group in one call. Processes that have left both become children of this process, and are killed when they
    are reaped. Processes of another user that this one may not kill are left running.
    """
    level = [pid]
    is_foreign = False
    while level:
        below = [child for each in level for child in children(each)]
        for each in level:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:  # of another user, as `sudo` starts them
                is_foreign |= each == pid
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it need not lead a group
                os.killpg(each, signal.SIGKILL)
        level = below
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG if is_foreign else 0)


def process_usage(pid: int) -> tuple[float, int]:
    """Return a process's CPU seconds and resident bytes.

    Both are 0 on a system without /proc; time limits that depend on them are then longer, never shorter.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0, 0
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return cpu, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
