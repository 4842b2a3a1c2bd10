"""Seccomp filter of the system calls of processes that run model-written code.

`syscalls.csv` lists the calls, their numbers, which never change, and the treatment of each:

| treatment | the call |
|---|---|
| allowed | is executed, with any arguments; Landlock restricts the files |
| checked | is executed with some arguments only (`_checks`) |
| without effect | succeeds and does nothing |
| unsupported | fails as on a file system without extended attributes |
| substitute | fails as on an old kernel, for which the C library has a substitute |
| refused | fails with EPERM, like every call that is not listed |

Changes of modes and times are without effect because Landlock does not restrict them, and programs that unpack archives
need them to succeed. Changes of the process group are without effect because a process that left its group would
outlive the others. Calls with a substitute have their arguments in memory, which a filter cannot read. A call that
later kernels add fails with ENOSYS, as on an older kernel. A program of another architecture is killed at its first
call.

Source: `seccomp(2)`, and the kernel's "Seccomp BPF (SECure COMPuting with filters)".
"""

import csv
import errno
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("syscalls.csv")
"""Columns: name of a system call, its number on each machine of `MACHINES` (empty: it does not exist), treatment."""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Name of a machine (`platform.machine`) -> its number in `struct seccomp_data` (AUDIT_ARCH)."""

LAST_KNOWN = 450
"""Number of the last call that the C library relies on; calls above it fail with ENOSYS unless they are listed."""

TERMINAL_QUERIES = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""Requests of `ioctl` that are allowed: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2."""
OWNER_COMMANDS = (8, 10, 15, 1024, 1026)
"""Commands of `fcntl` that are refused, because they can send signals to any process, or lock files of others:
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY."""
PRCTL_OPTIONS = (3, 15, 16, 23, 39)
"""Options of `prctl` that are allowed: PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ,
PR_GET_NO_NEW_PRIVS."""
NAMESPACES = 0x7E020000
"""Flags of `clone` that make namespaces."""
AF_UNIX, SOCK_STREAM, SOCKET_TYPES = 1, 1, 0xF
O_TRUNC, ACCESS_MODES = 0o1000, 0o3
X32 = 0x40000000
"""Bit that is set in all call numbers of the x32 ABI (x86-64 with 32-bit pointers), which is refused as a whole."""

_LOAD, _EQUAL, _GREATER, _AT_LEAST, _HAS_BITS, _AND, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
"""Results of the filter: SECCOMP_RET_ALLOW, _KILL_PROCESS, and _ERRNO, to which the error's number is added."""

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if the comparison holds and if it does not, and operand, as in `struct sock_filter`."""


RESULTS = {
    "allowed": ALLOW,
    "without effect": FAIL,
    "unsupported": FAIL | errno.ENOTSUP,
    "substitute": FAIL | errno.ENOSYS,
}
"""Treatment of a call -> the filter's result for any arguments."""


@dataclass(frozen=True)
class SystemCall:
    """A row of `syscalls.csv` on one machine."""

    name: str
    number: int
    treatment: str


@cache
def system_calls(machine: str) -> tuple[SystemCall, ...]:
    """Return the listed system calls of a machine (a key of `MACHINES`)."""
    with TABLE.open(encoding="ascii", newline="") as table:
        rows = [row for row in csv.DictReader(table) if row[machine]]
    return tuple(SystemCall(row["name"], int(row[machine]), row["treatment"]) for row in rows)


def seccomp_program(machine: str, *, restricts_signals: bool, restricts_truncation: bool) -> bytes:
    """Assemble the filter.

    Args:
        machine: a key of `MACHINES`.
        restricts_signals: True if signals cannot reach processes outside, by Landlock or by a PID namespace. Otherwise
            no signals can be sent at all.
        restricts_truncation: True if Landlock restricts truncation. Otherwise only files that are open for writing can
            be truncated.

    Returns:
        An array of `struct sock_filter`.
    """
    calls = system_calls(machine)
    program = [_load(_MACHINE), (_EQUAL, 1, 0, MACHINES[machine]), _result(KILL), _load(_NUMBER)]
    if machine == "x86_64":
        program += [(_HAS_BITS, 0, 1, X32), _result(KILL)]
    checks = _checks(restricts_signals, restricts_truncation)
    for call in calls:
        if call.treatment == "checked":
            block = checks[call.name]
            program += [(_EQUAL, 0, len(block), call.number), *block]
    for treatment, result in RESULTS.items():
        for first, last in _ranges(call.number for call in calls if call.treatment == treatment):
            program += [(_AT_LEAST, 0, 2, first), (_GREATER, 1, 0, last), _result(result)]
    program += [(_GREATER, 0, 1, LAST_KNOWN), _result(FAIL | errno.ENOSYS), _result(FAIL | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *each) for each in program)


def _checks(restricts_signals: bool, restricts_truncation: bool) -> dict[str, list[Instruction]]:
    """Return the instructions of the calls whose arguments matter; each block ends with a result."""
    refuse, allow = _result(FAIL | errno.EPERM), _result(ALLOW)
    is_stream_pair = [
        *(_load_argument(0), (_EQUAL, 1, 0, AF_UNIX), refuse),
        # Sockets of other types could send to the address of another process's socket.
        *(_load_argument(1), (_AND, 0, 0, SOCKET_TYPES), (_EQUAL, 0, 1, SOCK_STREAM), allow, refuse),
    ]
    without_address = [
        *(_load_argument(4), (_EQUAL, 1, 0, 0), refuse),
        *(_load_argument(4, high=True), (_EQUAL, 1, 0, 0), refuse, allow),
    ]
    signal = [_load_argument(0), (_EQUAL, 0, 1, 0xFFFFFFFF), refuse, allow if restricts_signals else refuse]  # -1: all
    checks = {
        "ioctl": _one_of(1, TERMINAL_QUERIES, ALLOW, FAIL | errno.EPERM),
        "fcntl": _one_of(1, OWNER_COMMANDS, FAIL | errno.EPERM, ALLOW),
        "prctl": _one_of(0, PRCTL_OPTIONS, ALLOW, FAIL | errno.EINVAL),
        "prlimit64": _one_of(0, (0,), ALLOW, FAIL | errno.EPERM),  # only its own limits
        "clone": [_load_argument(0), (_HAS_BITS, 0, 1, NAMESPACES), refuse, allow],
        "socketpair": is_stream_pair,
        "sendto": without_address,
        **dict.fromkeys(("kill", "tkill", "tgkill"), signal),
        "truncate": [allow if restricts_truncation else refuse],
    }
    for name, argument in (("open", 1), ("openat", 2)):
        # Truncation of a file that is opened for reading only: Landlock before version 3 counts that as reading.
        is_truncated = [_load_argument(argument), (_AND, 0, 0, O_TRUNC | ACCESS_MODES), (_EQUAL, 0, 1, O_TRUNC), refuse]
        checks[name] = [*([] if restricts_truncation else is_truncated), allow]
    return checks


def _result(value: int) -> Instruction:
    return _RETURN, 0, 0, value


def _load(offset: int) -> Instruction:
    return _LOAD, 0, 0, offset


def _load_argument(index: int, *, high: bool = False) -> Instruction:
    """Load the lower or the higher 32 bits of an argument; both machines have the lower ones first."""
    return _load(_ARGUMENTS + 8 * index + 4 * high)


def _one_of(argument: int, values: Sequence[int], then: int, otherwise: int) -> list[Instruction]:
    block = [_load_argument(argument)]
    for value in values:
        block += [(_EQUAL, 0, 1, value), _result(then)]
    return [*block, _result(otherwise)]


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the ranges of consecutive numbers, each as its first and last one."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ranges
