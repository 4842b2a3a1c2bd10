"""Detection of links, devices and sparse files, which grpo_ray does not write, in an untrusted run folder."""

import errno
import os
import stat
from pathlib import Path

SPARSE_BYTES, SPARSE_RATIO = 1 << 26, 16
"""A file of more than `SPARSE_BYTES` counts as sparse if less than 1 / `SPARSE_RATIO` of its size is on disk."""
MAX_EXTENTS = 10_000
"""Most parts between holes that are examined. A file in which all of these together have too little data is sparse."""
WANDB_LOG_LINK = "wandb/*/logs/debug-core.log"
"""Link that W&B makes to the log of its own process, in the user's cache; grpo_ray never reads or writes it."""


def describe_unusual(entry: "os.DirEntry[str]", root: Path) -> str:
    """Return the reason why an entry of a run folder is not used, and the remedy; "" for a plain file or folder."""
    if entry.is_symlink():
        # Also resolves a link whose target is missing: writing to the link would create the target.
        link = Path(entry.path)
        try:
            target = link.resolve()
        except RuntimeError:  # a loop of links, in Python 3.12 and earlier
            target = link
        if target.is_symlink():
            return "is a link to itself; delete it"
        if target.is_relative_to(root) or link.relative_to(root).match(WANDB_LOG_LINK):
            return ""
        return "is a link that leads out of the run; put a copy of the file in its place"
    if entry.is_dir(follow_symlinks=False):
        return ""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # just deleted, for example by the run itself
        return ""
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file; delete it"
    has_few_blocks = status.st_size > SPARSE_BYTES and status.st_blocks * 512 * SPARSE_RATIO < status.st_size
    if has_few_blocks and _has_mostly_holes(entry.path, status.st_size):
        return (
            f"is sparse: it has {status.st_size} bytes, and {status.st_blocks * 512} of them on disk; delete it, or "
            "copy it with cp --sparse=never"
        )
    return ""


def _has_mostly_holes(path: str, size: int) -> bool:
    """Return True if less than one part in `SPARSE_RATIO` of a file is data; False if its holes are unknown.

    ZFS counts the blocks of a new file late, and some file systems in user space count none.
    """
    try:
        # O_NONBLOCK: if a pipe has replaced the file by now, it must not block this process.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    data = end = 0
    try:
        for _ in range(MAX_EXTENTS):
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            data += end - start
            if data * SPARSE_RATIO >= size:
                return False
        return True
    except OSError as error:
        return error.errno == errno.ENXIO  # no data follows; any other error: the file system reports no holes
    finally:
        os.close(descriptor)
