"""Confinement of a process that is about to run model-written code, and of all that it starts, without privilege.

    Confinement(["/usr", "/lib"]).apply(["/tmp/own"], {resource.RLIMIT_NOFILE: 256})   # in the forked process

Landlock restricts files, TCP and signals (`landlock.py`), and a filter system calls (`seccomp.py`); capabilities are
dropped, and resource limits are hard. The confinement cannot be undone, and it holds after `execve`. It requires Linux
on x86_64 or aarch64 with Landlock (5.13), and works as root, as another user, and in containers without namespaces.
"""

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable, Mapping

from grpo_ray.errors import ConfinementError
from grpo_ray.processes import landlock
from grpo_ray.processes.seccomp import MACHINES, seccomp_program

_SET_SECCOMP, _DROP_BOUND, _NO_NEW_PRIVILEGES, _AMBIENT = 22, 24, 38, 47
"""Options of `prctl`."""
_SECCOMP_FILTER, _CLEAR_ALL = 2, 4
_CAPABILITIES_VERSION = 0x20080522
"""Version of `capset`'s structures with two words of 32 bits for each set."""
_libc = ctypes.CDLL(None, use_errno=True)


class Confinement:
    """Rules for confined processes: files that they may read, system calls that they may make.

    It is built once, and applied in each process.
    """

    def __init__(self, read: Iterable[str], *, has_pid_namespace: bool = False, version: int | None = None):
        """Assemble the filter.

        Args:
            read: files and folders that can be read and executed; those that do not exist are left out.
            has_pid_namespace: True if signals reach the process's own descendants only. Otherwise, where Landlock does
                not restrict them (before version 6), no signals can be sent.
            version: of Landlock; None: that of this system.

        Raises:
            ConfinementError: this system cannot confine processes.
        """
        self.read = tuple(read)
        machine = platform.machine()
        if machine not in MACHINES or struct.calcsize("P") != 8:
            raise ConfinementError(f"processes are confined on {' and '.join(MACHINES)} only, not on {machine}")
        self.version = landlock.landlock_version() if version is None else version
        if self.version < 1:
            raise ConfinementError("the kernel has no Landlock (Linux 5.13), or the container refuses it")
        program = seccomp_program(
            machine,
            restricts_signals=has_pid_namespace or self.version >= landlock.SIGNALS_SINCE,
            restricts_truncation=self.version >= landlock.TRUNCATION_SINCE,
        )
        self._program = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(self._program))  # struct sock_fprog
        self._header = ctypes.create_string_buffer(header, len(header))

    def apply(self, own: Iterable[str], limits: Mapping[int, int]) -> None:
        """Confine this process, which must be single-threaded, and must end if this raises.

        Args:
            own: folders in which it can write.
            limits: resource (`RLIMIT_...`) -> limit, which it cannot raise again. Core dumps are always off.

        Raises:
            ConfinementError: the kernel refused a step.
        """
        for kind, limit in {resource.RLIMIT_CORE: 0, resource.RLIMIT_MSGQUEUE: 0, **limits}.items():
            hard = resource.getrlimit(kind)[1]
            lowered = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (lowered, lowered))
        _check(_prctl(_NO_NEW_PRIVILEGES, 1), "no_new_privs")
        landlock.restrict_files(self.read, own, self.version)
        _drop_capabilities()
        _check(_prctl(_SET_SECCOMP, _SECCOMP_FILTER, ctypes.addressof(self._header)), "seccomp")


def _drop_capabilities() -> None:
    for capability in range(64):
        if _prctl(_DROP_BOUND, capability) < 0:  # none is left, or none may be dropped: then none can be gained
            break
    _prctl(_AMBIENT, _CLEAR_ALL)
    _check(_libc.capset(struct.pack("Ii", _CAPABILITIES_VERSION, 0), bytes(24)), "capset")


def _prctl(*arguments: int) -> int:
    """Call `prctl`, whose arguments all have 64 bits; ctypes would pass plain integers with 32 bits."""
    return int(_libc.prctl(*(ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:5])))


def _check(result: int, what: str) -> None:
    if result < 0:
        raise ConfinementError(f"{what}: {os.strerror(ctypes.get_errno())}")
