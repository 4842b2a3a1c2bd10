"""Start of a child process in a fresh interpreter: a supervisor, or a reader of untrusted text.

It is not forked, because this process may hold CUDA, threads and a heavy `__main__`.
"""

import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_ray.processes.supervisors import supervisor_environment

ROOT = Path(__file__).resolve().parents[2]
"""Folder that contains this package."""


@dataclass(frozen=True)
class Child:
    """Child process, and the parent's end of the socket between both. The child ends when that end closes."""

    process: subprocess.Popen[bytes]
    sock: socket.socket


def start_child(module: str, passes: Callable[[str], bool], *arguments: float) -> Child:
    """Run `main(descriptor, *arguments)` of a module; `descriptor` is the process's end of the socket.

    Args:
        module: its full name.
        passes: returns True for the name of an environment variable that the process gets.

    Raises:
        OSError: the process cannot be started.
    """
    own, theirs = socket.socketpair()
    call = ", ".join(map(repr, (theirs.fileno(), *arguments)))
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main({call})"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=supervisor_environment(ROOT, passes),
            # `python -c` searches its working directory first, which may contain another package named grpo_ray.
            cwd=ROOT,
            # Ctrl-C reaches the trainer only; the process ends when the trainer's end of the socket closes.
            start_new_session=True,
        )
    except OSError:
        own.close()
        raise
    finally:
        theirs.close()
    return Child(process, own)
