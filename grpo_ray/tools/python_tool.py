"""Tool that runs Python code: each call in a new interpreter, started by a sandbox process of the completion.

    rollout: {tools: ["grpo_ray.tools.python_tool:python"]}

The interpreter is the one of this environment: the code can import the packages that are installed in it, such as
NumPy or SymPy, but neither modules of PYTHONPATH nor files of the working folder. It has almost no environment
variables, at most `MAX_OPEN_FILES` open files, and the limits of the sandbox: `rollout.time_limit`,
`rollout.memory_gib`, `rollout.max_processes`, `rollout.disk_gib`, `rollout.max_files`. Variables are lost between
calls; files in the working folder are kept until the completion ends, and an environment finds them in `code_folder()`.
Python's random numbers follow the seed of the completion; those of NumPy do not.

The code is confined (`processes/isolation.py`): it reads the interpreter, its packages and the system's programs,
writes its working folder, and reaches nothing else: no network, no files of the user or of other completions, no other
processes. `rollout.isolation` sets the behaviour on systems that cannot confine it.
"""

import contextlib
import ctypes
import os
import random
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

from grpo_ray.processes import isolation
from grpo_ray.processes.limits import die_with_parent

CODE_FOLDER = "GRPO_RAY_CODE_FOLDER"
"""Variable of the environment's process: the folder in which the Python tool runs the code of its completion."""
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
MAX_OPEN_FILES = 256
END_BYTES = 31 << 10
"""Bytes kept of the start, and of the end, of a longer output; together less than the longest result of a tool."""
POLL_SECONDS = 0.05
"""Seconds between checks whether the interpreter has ended; a process that it started may keep the output open."""
CHILD = Path(__file__).with_name("python_child.py")


def python(code: str) -> str:
    """Run Python code and return what it prints, and the value of a last expression. Variables are not kept.

    Args:
        code: The Python code.

    Returns:
        The output and errors of the code.
    """
    process = subprocess.Popen(
        [sys.executable, "-s", "-P", str(CHILD), str(random.getrandbits(32))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
        start_new_session=True,
        preexec_fn=_restrict,
    )
    try:
        output = _exchange(process, code.encode("utf-8", "replace"))
    finally:
        _end(process)
    return shown_output(output, process.returncode)


def shown_output(output: bytes, code: int) -> str:
    """Return the text that the policy reads after an interpreter has ended.

    Args:
        code: its exit code; negative: the signal that ended it.
    """
    text = output.decode("utf-8", "replace")
    if code == 0:
        return text or "[no output]"
    separator = "\n" if text and not text.endswith("\n") else ""
    return f"{text}{separator}[{_ending(code)}]"


def code_folder() -> Path:
    """Return the folder in which the Python tool runs a completion's code, for use in an environment or another tool.

    The policy writes the files in it: they may be links to any file that this process can read.
    """
    return Path(os.environ[CODE_FOLDER])


def _ending(code: int) -> str:
    """Describe an exit code other than 0, or the signal that ended the interpreter.

    An exception of the code gives exit code 0: its traceback is part of the output.
    """
    if code > 0:
        return f"exit code {code}"
    # Most real-time signals have no name.
    return f"ended by {next((each.name for each in signal.Signals if each == -code), f'signal {-code}')}"


def _environment() -> dict[str, str]:
    """Return the environment variables of the interpreter."""
    folder = os.getcwd()
    # One thread: on a machine of many cores the buffers of a linear algebra library alone exceed the memory limit.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
    if "LD_LIBRARY_PATH" in os.environ:
        own["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    # A fixed hash seed gives sets of strings the same order in every run.
    return own | threads | {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _restrict() -> None:
    """Restrict the forked process, before it becomes the interpreter."""
    die_with_parent()
    leave_network()
    limits = isolation.hard_limits() | {resource.RLIMIT_NOFILE: MAX_OPEN_FILES}
    isolation.confine(os.getcwd(), limits, files=[str(CHILD)])


def leave_network() -> bool:
    """Move this process to a new network namespace, which has no interface. Returns False if that is not allowed.

    It is allowed for root, and inside a user namespace: the one that the episode's process may have entered, until this
    process executes a program, or else a new one.
    """
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if not sys.platform.startswith("linux") or unshare is None:
        return False
    return unshare(CLONE_NEWNET) == 0 or unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0


def _exchange(process: "subprocess.Popen[bytes]", code: bytes) -> bytes:
    """Write the code to the interpreter, and return its whole output; the middle of a long one is omitted."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended; its output has the reason
        process.stdin.write(code)
        process.stdin.close()
    output, descriptor = BoundedOutput(), process.stdout.fileno()
    while True:
        ended = process.poll() is not None  # before the check for output, so that none is missed
        if select.select([descriptor], [], [], 0 if ended else POLL_SECONDS)[0]:
            if not (data := os.read(descriptor, 1 << 16)):
                break
            output.append(data)
        elif ended:
            break
    process.wait()
    return output.value()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the interpreter and the remaining processes of its group, and close its pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left, or, on macOS, only ended ones
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


class BoundedOutput:
    """Start and end of a stream of bytes."""

    def __init__(self) -> None:
        self._start = bytearray()
        self._end = bytearray()
        self._omitted = 0

    def append(self, data: bytes) -> None:
        """Append bytes; if there are too many, drop the oldest ones after the start."""
        room = END_BYTES - len(self._start)
        self._start += data[:room]
        self._end += data[room:]
        if (extra := len(self._end) - END_BYTES) > 0:
            del self._end[:extra]
            self._omitted += extra

    def value(self) -> bytes:
        """Return all bytes, or the start and the end with the number of omitted bytes between them."""
        between = f" [... {self._omitted} bytes omitted ...] ".encode() if self._omitted else b""
        return bytes(self._start + between + self._end)
