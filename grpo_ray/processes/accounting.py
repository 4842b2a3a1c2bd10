"""Total memory and disk space of several processes.

Without privileges, the kernel limits only the address space of each process and the size of each file. The supervisor
of tools therefore measures the totals. Folders are read and removed without recursion: code may nest them deeper than
Python's stack and the longest path allow.
"""

import contextlib
import errno
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


def _nothing(_pid: int) -> int:
    return 0


def exceeds_memory(pids: Iterable[int], max_bytes: int, inherited: Callable[[int], int] = _nothing) -> bool:
    """Return True if processes together use more than `max_bytes` of memory.

    Resident memory is read first, in microseconds: it counts a shared page once for each process, so its sum is never
    too low. Only if the sum is above the limit, the shared pages are divided among the processes that share them.

    Args:
        inherited: see `memory_in_use`.
    """
    processes = list(pids)
    return sum(map(_resident_bytes, processes)) > max_bytes and memory_in_use(processes, inherited) > max_bytes


def memory_in_use(pids: Iterable[int], inherited: Callable[[int], int] = _nothing) -> int:
    """Return the memory of processes in bytes; a shared page is divided among all processes that share it.

    Args:
        inherited: returns the bytes that a process shares with the one that it was forked from. They are not counted
            if the process hides its memory from this user, so that its shared pages are unknown.
    """
    return sum(_proportional_bytes(pid, inherited) for pid in pids)


def disk_in_use(folder: str, pids: Iterable[int] = (), mapping: Iterable[int] = ()) -> int:
    """Return the bytes allocated below a folder, as far as it can be read, plus one for each file and folder.

    Args:
        pids, mapping: see `disk_excess`.
    """
    used = 0
    with contextlib.suppress(OSError):
        for size in _file_sizes(folder, pids, mapping):
            used += 1 + size
    return used


def disk_excess(
    folder: str, pids: Iterable[int], max_bytes: int, max_files: int, mapping: Iterable[int] = ()
) -> str | None:
    """Describe the limit that the files of a folder, with those that have no name but are in use, exceed; None if none.

    Args:
        folder: its files and folders are counted, at all depths.
        pids: processes whose open files without a name are counted: deleted files, and memory of `memfd_create`.
        max_bytes: allocated space; holes in files do not count.
        max_files: number of files and folders.
        mapping: processes whose mapped files without a name are counted, even if they are closed: deleted files, and
            memory shared with forks, which stays allocated after `madvise` has taken it out of the resident memory. Of
            those that are closed, only root can measure the space; for other users, it is the size of the mappings.
    """
    used, count = 0, 0
    try:
        for size in _file_sizes(folder, pids, mapping):
            used += size
            count += 1
            if used > max_bytes:
                return f"more than {max_bytes / 2**30:g} GiB of files"
            if count > max_files:
                return f"more than {max_files} files"
    except OSError as error:  # a path that is too long, or a folder that its mode hides
        return f"a folder that cannot be listed ({error.strerror})"
    return None


def remove_folder(folder: str, at_most: int | None = None) -> bool:
    """Remove a folder as far as possible, whatever its depth and modes. No process may still write to it.

    Nested folders are first moved to the top, so that no path becomes too long.

    Args:
        at_most: most files and folders, at all depths, that are removed; None: all.

    Returns:
        False if there was more to remove.
    """
    budget = _Budget(math.inf if at_most is None else at_most)
    for number in range(1 << 30):
        removed = []
        for name in _names(folder):
            if not budget.spend():
                return False
            removed.append(_remove_level(folder, os.path.join(folder, name), number, budget))
        if not any(removed):
            break
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return True


@dataclass
class _Budget:
    """Number of files and folders that may still be removed."""

    left: float

    def spend(self) -> bool:
        """Count one removal; return False if none is left."""
        self.left -= 1
        return self.left >= 0


def _remove_level(top: str, path: str, number: int, budget: _Budget) -> bool:
    """Remove a file, or a folder after moving its subfolders to `top`, within the budget.

    Returns False if nothing could be done.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return True
        below = _names(path)
    except OSError:
        return False
    changed = False
    for name in below:
        if not budget.spend():
            return True
        inner = os.path.join(path, name)
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.lstat(inner).st_mode):
                os.chmod(inner, 0o700)  # a folder without write permission cannot be moved
                os.rename(inner, os.path.join(top, f"{number}-{secrets.token_hex(8)}"))
            else:
                os.unlink(inner)
            changed = True
    with contextlib.suppress(OSError):
        os.rmdir(path)
        changed = True
    return changed


def _names(folder: str) -> list[str]:
    """Make a folder accessible and return the names in it; none if that fails."""
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
        return os.listdir(folder)
    return []


def _statuses(folder: str, pids: Iterable[int]) -> Iterator[os.stat_result]:
    """Yield the status of each file and folder below a folder, and of each open file without a name."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        yield (status := entry.stat(follow_symlinks=False))
                        if stat.S_ISDIR(status.st_mode):
                            waiting.append(entry.path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # it was removed meanwhile
                raise
    for pid in pids:
        descriptors: list[str] = []
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            descriptors = os.listdir(f"/proc/{pid}/fd")
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    yield status


def _file_sizes(folder: str, pids: Iterable[int], mapping: Iterable[int]) -> Iterator[int]:
    """Yield the allocated bytes of each file and folder once; see `disk_excess`."""
    seen: set[tuple[int, int]] = set()
    for status in _statuses(folder, pids):
        if status.st_nlink != 1 and not stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
        yield _BLOCK_BYTES * status.st_blocks
    mapped: dict[tuple[int, int], int] = {}
    for pid in mapping:
        for file, size in _mapped_files(pid).items():
            mapped[file] = max(size, mapped.get(file, 0))  # of processes that share it
    yield from (size for file, size in mapped.items() if file not in seen)


def _mapped_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the allocated bytes of each mapped file without a name, by device and inode, or else its mapped bytes."""
    sizes: dict[tuple[int, int], int] = {}
    known: set[tuple[int, int]] = set()
    lines: list[bytes] = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        lines = [line for line in maps if line.endswith(b"(deleted)\n")]
    for line in lines:  # such as "7fd4f00bb000-7fd4f04bb000 rw-s 00000000 00:01 1325     /dev/zero (deleted)"
        addresses, _, _, device, inode = line.split()[:5]
        start, end = (int(each, 16) for each in addresses.split(b"-"))
        major, minor = (int(each, 16) for each in device.split(b":"))
        file = os.makedev(major, minor), int(inode)
        if file in known:
            continue
        try:
            status = os.stat(f"/proc/{pid}/map_files/{start:x}-{end:x}")
            known.add(file)
            sizes[file] = 0 if status.st_nlink else _BLOCK_BYTES * status.st_blocks  # it may have another name
        except OSError:
            sizes[file] = sizes.get(file, 0) + end - start
    return sizes


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # it has ended
        return 0


def _proportional_bytes(pid: int, inherited: Callable[[int], int]) -> int:
    """Return resident bytes, with shared pages divided among the processes that share them."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as maps:
            for line in maps:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:  # it has ended, or hides its memory from this user
        return max(0, _resident_bytes(pid) - inherited(pid))
    return 0
