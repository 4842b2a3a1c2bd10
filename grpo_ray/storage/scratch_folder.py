"""Scratch folders on the local disk, which are deleted once the process that made them has ended, however it ended."""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

LOCK = "lock"
"""File in a scratch folder that the process keeps locked while it lives."""


def create_scratch_folder(run: str) -> str:
    """Create a local folder for this process alone, so that no half-written file of an earlier one is found.

    Scratch folders of processes that have ended on this node, of any run, are deleted: each may hold a policy.
    """
    for lock_path in Path(tempfile.gettempdir()).glob(f"grpo_ray-*/{LOCK}"):
        with suppress(OSError), _open_own(lock_path) as lock:  # locked by a living process, or just deleted
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"grpo_ray-{run}-"))
    fcntl.flock(os.open(scratch / "new", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)  # until this process ends
    (scratch / "new").rename(scratch / LOCK)  # other processes see the file only once it is locked
    return str(scratch)


def _open_own(path: Path) -> IO[bytes]:
    """Open a regular file of this user. Raises PermissionError for another kind or owner.

    Any user can create files in the temporary folder: opening a FIFO would block for ever, and a link may lead
    elsewhere.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        file.close()
        raise PermissionError(f"{path} is no regular file of this user")
    return file
