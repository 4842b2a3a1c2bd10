"""Restriction of a process to named files and folders, with Landlock.

Landlock is part of Linux since 5.13 and needs no privilege. Later versions of it restrict more: moving files between
folders (2), truncation (3), TCP (4), devices (5), and signals and abstract sockets to processes outside (6).

Source: `landlock(7)`, and the kernel's "Landlock: unprivileged access control".
"""

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable

from grpo_ray.errors import ConfinementError

EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER, REMOVE_FOLDER, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_FOLDER, MAKE_FILE, MAKE_LINK, MOVE, TRUNCATE = (1 << bit for bit in (7, 8, 12, 13, 14))
READ = EXECUTE | READ_FILE | READ_FOLDER
USE_DEVICE = WRITE_FILE | READ_FILE | TRUNCATE
OWN = READ | USE_DEVICE | REMOVE_FOLDER | REMOVE_FILE | MAKE_FOLDER | MAKE_FILE | MAKE_LINK | MOVE
"""Rights in a folder of the process's own, without those to make devices, sockets and FIFOs."""
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
"""Rights that a rule for a file may have; the others apply to folders only."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Version -> number of rights on files; 16 in later versions."""
SIGNALS_SINCE, TRUNCATION_SINCE = 6, 3
"""Version from which on signals to processes outside, and truncation, are restricted."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on every machine."""
_GET_VERSION = 1
_PATH_BENEATH = 1
_ALL_TCP, _ALL_SCOPES = 0b11, 0b11
_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return Landlock's version; 0 if the kernel lacks it or is not Linux, or if a container refuses it."""
    if not sys.platform.startswith("linux"):  # the number belongs to another system call there
        return 0
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)))


def restrict_files(read: Iterable[str], own: Iterable[str], version: int) -> None:
    """Restrict this process, and all that it starts, to these files. PR_SET_NO_NEW_PRIVS must be set.

    From version 4 on TCP is refused; from version 6 on signals and abstract sockets reach restricted processes only.

    Args:
        read: files and folders that can be read and executed; those that do not exist are left out.
        own: folders in which files can be written too.
        version: of Landlock, at least 1.

    Raises:
        ConfinementError: a folder in `own` does not exist, or the kernel refused a step.
    """
    handled = (1 << FILE_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("QQQ", handled, _ALL_TCP, _ALL_SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path in own:
            _add_rule(rules, path, OWN & handled)
        for path, rights in [*((path, READ) for path in read), *((path, USE_DEVICE) for path in DEVICES)]:
            if os.path.exists(path):
                _add_rule(rules, path, rights & handled)
        _call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _add_rule(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise ConfinementError(f"{path}: {error.strerror}") from None
    try:
        is_folder = stat.S_ISDIR(os.fstat(place).st_mode)
        rule = struct.pack("=Qi", rights if is_folder else rights & ON_FILES, place)
        _call(_ADD_RULE, rules, _PATH_BENEATH, rule, 0)
    finally:
        os.close(place)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise ConfinementError(f"Landlock's system call {number}: {os.strerror(ctypes.get_errno())}")
    return result
