"""Process trees, read from /proc: children, descendants and state of a process; and the killing of a whole tree."""

import contextlib
import os
import signal


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; none if it has ended."""
    found = []
    threads: list[str] = []
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:  # a child belongs to the thread that has started it
        with (
            contextlib.suppress(OSError),  # this thread has ended
            open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file,
        ):
            found += [int(each) for each in file.read().split()]
    return found


def descendants(pid: int, at_most: int = 1 << 20) -> list[int]:
    """Return the ids of the living processes below a process.

    Args:
        at_most: the search ends once it has found more; otherwise it would never end if processes multiplied faster
            than they are read.
    """
    found: list[int] = []
    waiting = children(pid)
    while waiting and len(found) <= at_most:
        pid_below = waiting.pop()
        if process_state(pid_below) not in ("", "Z"):
            found.append(pid_below)
        waiting += children(pid_below)  # also of a zombie: its main thread may have ended while others run
    return found


def is_runnable(pid: int) -> bool:
    """Return True if a process waits for a core or has one."""
    return process_state(pid) == "R"


def process_state(pid: int) -> str:
    """Return the letter of a process's state, as in `ps`; "" if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


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
