"""Linux processes: children, descendants, state and CPU time; and waiting for a condition."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for a condition. The time limit only ends a broken test; no result depends on it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


def in_a_fork(call: Callable[[], object]) -> str:
    """Call a function in a fork of this process, and return the representation of its result, up to 4 KiB."""
    readable, writable = os.pipe()
    if (fork := os.fork()) == 0:
        try:
            os.write(writable, repr(call()).encode())
        except BaseException as error:  # no cleanup of the parent's in this process
            os.write(writable, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writable)
    os.waitpid(fork, 0)
    with open(readable, "rb") as pipe:
        return pipe.read().decode()


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(root: int) -> Iterator[tuple[int, str]]:
    """Yield id and command line of all descendants of a process."""
    parents, names = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            name, _, rest = Path("/proc", entry, "stat").read_text().partition(" (")[2].rpartition(") ")
            parents[int(entry)] = int(rest.split()[1])
            names[int(entry)] = Path("/proc", entry, "cmdline").read_text().replace("\0", " ") or name
        except OSError:  # the process has just ended
            continue
    for process in parents:
        ancestor = process
        while ancestor in parents and ancestor != root:
            ancestor = parents[ancestor]
        if ancestor == root:
            yield process, names[process]


def is_running(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        return _stat(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, its running children, and the children that it has reaped."""
    own, reaped = slice(11, 13), slice(13, 15)
    ticks = sum(map(int, _stat(pid)[own] + _stat(pid)[reaped]))
    for child in children(pid):
        ticks += sum(map(int, _stat(child)[own]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; field 0 is the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
