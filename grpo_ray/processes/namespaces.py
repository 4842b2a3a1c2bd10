"""PID namespaces: when the first process of one ends, the kernel ends all others; none can reach processes outside."""

import contextlib
import ctypes
import os
import sys

from grpo_ray.processes.mounts import map_user

CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000


def enter_pid_namespace() -> bool:
    """Make the next child the first process of a new PID namespace; return False if that is not allowed."""
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if not sys.platform.startswith("linux") or unshare is None:
        return False
    if os.geteuid() == 0:
        return unshare(CLONE_NEWPID) == 0
    uid, gid = os.geteuid(), os.getegid()
    if unshare(CLONE_NEWPID | CLONE_NEWUSER) != 0:
        return False
    map_user(uid, gid)
    return True


def is_first_of_namespace(pid: int) -> bool:
    """Return True if a process is the first one of a PID namespace below this process's own."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as status:
        for line in status:
            if line.startswith(b"NSpid:"):
                return len(ids := line.split()[1:]) > 1 and ids[-1] == b"1"
    return False


class PidNamespaces:
    """Factory of PID namespaces for children of this process, for root only.

    Other users need an intermediate process between this one and the child (`enter_pid_namespace`).
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if self._is_possible() else None

    def _is_possible(self) -> bool:
        has_calls = hasattr(self._libc, "unshare") and hasattr(self._libc, "setns")
        return has_calls and os.geteuid() == 0 and os.path.exists("/proc/self/ns/pid")

    def fork(self) -> tuple[int, bool]:
        """Fork; return the result of `os.fork`, and True if the child is the first process of a new namespace."""
        is_new = self._own is not None and self._libc.unshare(CLONE_NEWPID) == 0
        try:
            return os.fork(), is_new
        finally:
            if is_new:  # later children of this process start in its own namespace again
                self._libc.setns(self._own, CLONE_NEWPID)
