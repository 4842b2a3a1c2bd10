"""Tests of the filter of system calls, which a small interpreter of its instructions runs for every call."""

import errno
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_ray.processes.seccomp import (
    ALLOW,
    FAIL,
    KILL,
    LAST_KNOWN,
    MACHINES,
    RESULTS,
    X32,
    SystemCall,
    seccomp_program,
    system_calls,
)

REFUSED = FAIL | errno.EPERM


def verdict(
    machine: str, number: int, *arguments: int, audit: int | None = None, signals: bool = True, truncation: bool = True
) -> int:
    """Return the filter's result for a call."""
    program = seccomp_program(machine, restricts_signals=signals, restricts_truncation=truncation)
    all_arguments = (*arguments, *[0] * 6)[:6]
    data = struct.pack("IIQ6Q", number, MACHINES[machine] if audit is None else audit, 0, *all_arguments)
    return interpret(list(struct.iter_unpack("HBBI", program)), data)


def interpret(program: list[tuple[int, ...]], data: bytes) -> int:
    """Run instructions of classic BPF as the kernel does."""
    position = accumulator = 0
    while True:
        code, if_true, if_false, operand = program[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x06:
            return operand
        else:
            holds = {
                0x15: accumulator == operand,
                0x25: accumulator > operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[code]
            position += if_true if holds else if_false


def calls(treatment: str) -> Iterator[tuple[str, SystemCall]]:
    for machine in MACHINES:
        for call in system_calls(machine):
            if call.treatment == treatment:
                yield machine, call


@pytest.mark.parametrize("treatment", RESULTS)
def test_listed_call_gets_its_treatment(treatment: str) -> None:
    found = {(machine, call.name): verdict(machine, call.number) for machine, call in calls(treatment)}
    assert set(found.values()) == {RESULTS[treatment]} and len({machine for machine, _ in found}) == 2


def test_refused_calls_and_those_that_are_not_listed_fail() -> None:
    for machine in MACHINES:
        listed = {call.number: call.treatment for call in system_calls(machine)}
        for number in range(LAST_KNOWN + 1):
            if listed.get(number, "refused") == "refused":
                assert verdict(machine, number) == REFUSED, (machine, number)
    assert {"socket", "ptrace", "setns", "unshare", "mount", "pidfd_getfd", "bpf", "io_uring_setup", "sendmsg"} <= {
        call.name for _, call in calls("refused")
    }


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_later_kernels_do_not_exist(machine: str) -> None:
    listed = {call.number for call in system_calls(machine)}
    later = [number for number in range(LAST_KNOWN + 1, 600) if number not in listed]
    assert {verdict(machine, number) for number in later} == {FAIL | errno.ENOSYS}


def test_call_of_another_architecture_ends_the_process() -> None:
    i386, arm = 0x40000003, 0x40000028
    assert {verdict(machine, 0, audit=audit) for machine in MACHINES for audit in (i386, arm, 0)} == {KILL}
    assert verdict("x86_64", 39 | X32) == KILL


def test_row_of_each_call_has_a_known_treatment() -> None:
    treatments = {call.treatment for machine in MACHINES for call in system_calls(machine)}
    assert treatments == {*RESULTS, "checked", "refused"}


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),  # which aarch64 uses as it is
}


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("the kernel's headers are not installed")
    text = HEADERS[machine].read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    known = {"newfstatat": known.get("fstatat", -1), **known}
    listed = [call for call in system_calls(machine) if call.name in known]
    assert [call for call in listed if known[call.name] != call.number] == []
    assert len(listed) > 0.95 * len(system_calls(machine))


def number_of(name: str) -> int:
    return next(call.number for call in system_calls("x86_64") if call.name == name)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("ioctl", (0, 0x5413), ALLOW),  # TIOCGWINSZ
        ("ioctl", (0, 0x5412), REFUSED),  # TIOCSTI, which types into a terminal
        ("fcntl", (0, 3), ALLOW),
        ("fcntl", (0, 8), REFUSED),  # F_SETOWN
        ("prctl", (15,), ALLOW),
        ("prctl", (1,), FAIL | errno.EINVAL),  # PR_SET_PDEATHSIG, which could be turned off
        ("prctl", (4,), FAIL | errno.EINVAL),
        ("prlimit64", (0,), ALLOW),
        ("prlimit64", (1234,), REFUSED),
        ("clone", (0x01200011,), ALLOW),  # fork
        ("clone", (0x003D0F00,), ALLOW),  # a thread
        ("clone", (0x10000011,), REFUSED),  # CLONE_NEWUSER
        ("clone", (0x02000011,), REFUSED),  # CLONE_NEWCGROUP
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (1, 1 | 0o2000000), ALLOW),  # SOCK_CLOEXEC
        ("socketpair", (1, 2), REFUSED),  # SOCK_DGRAM
        ("socketpair", (1, 5), REFUSED),  # SOCK_SEQPACKET
        ("socketpair", (2, 1), REFUSED),
        ("sendto", (3, 0, 0, 0, 0), ALLOW),
        ("sendto", (3, 0, 0, 0, 0x7F00), REFUSED),
        ("sendto", (3, 0, 0, 0, 1 << 40), REFUSED),
        ("kill", (77, 9), ALLOW),
        ("kill", (0xFFFFFFFF, 9), REFUSED),  # -1: all
        ("open", (0, 0o1001), ALLOW),
        ("openat", (0, 0, 0o1000), ALLOW),
        ("truncate", (), ALLOW),
    ],
)
def test_checked_call_is_decided_by_its_arguments(name: str, arguments: tuple[int, ...], result: int) -> None:
    assert verdict("x86_64", number_of(name), *arguments) == result


@pytest.mark.parametrize("name", ["kill", "tkill", "tgkill"])
def test_signals_are_refused_where_nothing_else_restricts_them(name: str) -> None:
    assert verdict("x86_64", number_of(name), 77, signals=False) == REFUSED


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("truncate", (), REFUSED),
        ("open", (0, 0o1000), REFUSED),  # O_RDONLY | O_TRUNC
        ("open", (0, 0o1001), ALLOW),  # O_WRONLY | O_TRUNC
        ("openat", (0, 0, 0o1000), REFUSED),
        ("openat", (0, 0, 0), ALLOW),
    ],
)
def test_truncation_is_refused_where_nothing_else_restricts_it(
    name: str, arguments: tuple[int, ...], result: int
) -> None:
    assert verdict("x86_64", number_of(name), *arguments, truncation=False) == result
