"""Start of a supervisor, the parent of the processes that run untrusted code: environment variables, signals, memory.

A supervisor gets only the secrets that it needs, and other processes of the user cannot read its memory.
"""

import ctypes
import gc
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from grpo_ray.text.redaction import WORKING_FOLDER, is_secret_name, redact_text

PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
HIDDEN_PROCESSES = re.compile(r"(?:^|,)hidepid=(?!0|off)")
"""Mount option of /proc with which processes are hidden from other users."""
NEEDED = re.compile(
    r"PATH|LANG|LC_\w+|TZ|HOME|USER|TMPDIR|TMP|TEMP|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|PYTHON\w+|COVERAGE_\w+"
)
"""Names of the variables that are passed to a supervisor that imports no modules of the user."""
WITHHELD = re.compile(r"\w+_KEY|\w+_CONNECTION_STRING|SSH_AUTH_SOCK")
"""Names of secrets besides those of `redaction.is_secret_name`."""


def is_needed(name: str) -> bool:
    """Return True for a variable that a supervisor without modules of the user needs."""
    return NEEDED.fullmatch(name) is not None


def secret_variables() -> list[str]:
    """Return the sorted names of environment variables that hold a secret, by their name or their value."""
    return sorted(
        name
        for name, value in os.environ.items()
        if name != WORKING_FOLDER
        and not is_needed(name)
        and (is_secret_name(name) or WITHHELD.fullmatch(name) is not None or redact_text(value) != value)
    )


def supervisor_environment(root: Path, passes: Callable[[str], bool]) -> dict[str, str]:
    """Return the environment variables of a supervisor, or of another process that `child.py` starts.

    Args:
        root: folder that contains this package.
        passes: returns True for the name of a variable that the process gets.
    """
    one_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    )
    # The caller's own path, so that the supervisor imports the same packages, even those that Ray has put elsewhere.
    path = [str(root), *(os.path.abspath(entry) for entry in sys.path if entry)]
    return {
        **{name: value for name, value in os.environ.items() if passes(name)},
        **one_thread,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        # Sets and hashes must be the same in every supervisor.
        "PYTHONHASHSEED": "0",
    }


def begin_supervisor(descriptor: int) -> socket.socket:
    """Hide this process's memory, set its signals, and return the socket to its client, closed on `execve`.

    Args:
        descriptor: of the socket.
    """
    hide_memory()
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit codes are lost
    return sock


def share_memory_with_forks() -> None:
    """Keep the memory in use shared with the forks to come: a garbage collection would copy all its pages."""
    gc.collect()
    gc.freeze()


def hide_memory() -> None:
    """Hide memory, variables and descriptors of this process and its forks from other processes of the user.

    Root can still read them. The protection ends with `execve`: a program that a fork executes is an ordinary process
    again. Training workers do not call this: only root could then attach a profiler to them, Ray could not measure
    their memory (`smaps_rollup`) when a node runs short of it, and a crash would leave no core file.

    Where /proc is mounted with `hidepid`, only root finds processes whose memory is hidden; their parent, which has to
    find its forks to measure and end them, does not. There this function does nothing unless the user is root: other
    processes of the user can then read the memory, while those of other users never can.
    """
    if sys.platform.startswith("linux") and (os.geteuid() == 0 or not hides_processes()):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def hides_processes(mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return True if /proc shows a user other than root only those processes whose memory the user can read."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    # Fields: ..., mount point, ..., options of the file system. The last mount covers earlier ones.
    last = [fields[-1] for fields in map(str.split, lines) if len(fields) > 4 and fields[4] == "/proc"][-1:]
    return any(HIDDEN_PROCESSES.search(options) is not None for options in last)
