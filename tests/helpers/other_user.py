"""Commands run as another user than root, who may read the interpreter and this checkout."""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NOBODY = 65534
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 4096, 16384, 1 << 18
ROOT = Path(__file__).resolve().parents[2]


def is_in_chroot() -> bool:
    """Return True if this process's root folder is not the system's: it can then change no mounts, nor have a user
    namespace of its own."""
    try:
        return not os.path.samefile("/proc/1/root", "/")
    except PermissionError:  # only root may look, and not even root where process 1 has more rights
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return not any(
            line.split()[4] == "/" for line in mounts
        )  # the root folder is below a mount that is not visible


needs_own_root = pytest.mark.skipif(is_in_chroot(), reason="mounts cannot be changed in a chroot")


def as_another_user(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command as the user nobody; where this process is not root, as its own user."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        if os.geteuid() == 0:
            os.chmod(folder, 0o755)
            home = Path(folder, "home")
            home.mkdir()
            os.chown(home, NOBODY, NOBODY)
            variables |= {"HOME": str(home), "TMPDIR": str(home)}
        return subprocess.run(
            command,
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=550,
            preexec_fn=_become_nobody if os.geteuid() == 0 else None,
        )


def _become_nobody() -> None:
    """Show the interpreter and the checkout at their paths in a mount namespace, and give up all rights."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None) == 0
    needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    closed = {folder for path in needed for folder in path.parents if not folder.stat().st_mode & 0o001}
    for folder in sorted(closed):
        below = [path for path in needed if folder in path.parents]
        descriptors = [os.open(path, os.O_PATH) for path in below]
        assert libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), b"mode=755") == 0
        for path, descriptor in zip(below, descriptors, strict=True):
            path.mkdir(parents=True, exist_ok=True)
            source = f"/proc/self/fd/{descriptor}".encode()
            assert libc.mount(source, os.fsencode(path), None, ctypes.c_ulong(MS_BIND), None) == 0
            os.close(descriptor)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
