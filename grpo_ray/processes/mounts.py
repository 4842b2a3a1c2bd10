"""Private mounts of the process that starts model-written code: a second layer behind Landlock, where namespaces exist.

The process gets a /proc with its own PID namespace only, empty file systems of limited size in place of the folders of
`PRIVATE`, and a read-only root in which only these and its own folder are writable. It needs the right to make mount
namespaces: as root, or in a user namespace. The mounts are made once for each completion, before its first call, and
add no cost to the calls.
"""

import ctypes
import os
import struct
from collections.abc import Iterable

from grpo_ray.errors import ConfinementError
from grpo_ray.processes.supervisors import PR_GET_DUMPABLE, PR_SET_DUMPABLE

CLONE_NEWNS = 0x00020000
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders shared by all users, which are replaced by private ones."""
PRIVATE_BYTES = 64 << 20
PRIVATE_FILES = 1024
"""Size limits of each private folder: bytes, and number of files and folders."""

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_SETATTR = 442
"""Number of the system call `mount_setattr` on every machine; Linux 5.12."""
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = -100, 0x8000, 1
_libc = ctypes.CDLL(None, use_errno=True)


def map_user(uid: int, gid: int) -> None:
    """Map this process's user and group into the user namespace that it has just entered, if the system allows it.

    Without the maps it cannot create files in a file system that it mounts. It is made dumpable while it writes them:
    the kernel assigns its files in /proc to root otherwise.
    """
    was_readable = _libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            try:
                with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                    file.write(text)
            except OSError:  # the system forbids it; there will be no private mounts
                return
    finally:
        _libc.prctl(PR_SET_DUMPABLE, 1 if was_readable == 1 else 0, 0, 0, 0)


def make_private(folder: str, places: Iterable[str]) -> None:
    """Set up private mounts in this process, the first one of a PID namespace. It must end if this raises.

    Args:
        folder: folder that stays writable, at its path; it becomes the working folder.
        places: files and folders that the process reads; a folder of `PRIVATE` that contains one is not replaced.

    Raises:
        ConfinementError: the system refused a step.
    """
    _check(_libc.unshare(CLONE_NEWNS), "a mount namespace")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    folder = os.path.realpath(folder)
    kept = [os.path.realpath(place) for place in places]
    own = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    writable = [folder]
    try:
        for shared in PRIVATE:
            if os.path.realpath(shared) != shared or not os.path.isdir(shared) or _has_any(shared, kept):
                continue
            options = f"size={PRIVATE_BYTES},nr_inodes={PRIVATE_FILES},mode=1777"
            _mount("tmpfs", shared, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
            writable.append(shared)
        os.makedirs(folder, exist_ok=True)
        _mount(f"/proc/self/fd/{own}", folder, None, _MS_BIND)
    except OSError as error:
        raise ConfinementError(f"private mounts: {error}") from None
    finally:
        os.close(own)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _set_attributes("/", _AT_RECURSIVE, _ATTR_RDONLY, 0)
    for path in writable:
        _set_attributes(path, 0, 0, _ATTR_RDONLY)
    os.chdir(folder)


def _has_any(folder: str, paths: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for path in paths)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(result, f"the mount of {target}")


def _set_attributes(path: str, flags: int, added: int, removed: int) -> None:
    attributes = struct.pack("4Q", added, removed, 0, 0)
    arguments = _AT_FDCWD, os.fsencode(path), flags, attributes, ctypes.c_size_t(len(attributes))
    _check(int(_libc.syscall(_MOUNT_SETATTR, *arguments)), f"attributes of the mount of {path}")


def _check(result: int, what: str) -> None:
    if result < 0:
        raise ConfinementError(f"{what}: {os.strerror(ctypes.get_errno())}")
