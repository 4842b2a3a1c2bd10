"""Process of one episode: its limits on itself, its environment, and the requests that it serves.

It is forked from the supervisor, which has imported the user's modules. Where the system allows it, the process is the
first of a PID namespace of its own: when it ends, the kernel kills every process that a tool has started.
"""

import asyncio
import contextlib
import ctypes
import inspect
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from grpo_ray.processes import isolation
from grpo_ray.rewards.sandbox.worker import die_with_parent, set_soft_limit
from grpo_ray.tools.sandbox.protocol import CallError, cut_middle, pack, receive

CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
OPEN_FILES = 1024
"""Most files that an episode's process may open."""
FILE_BYTES = 1 << 30
"""Largest file that a tool may write."""
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "TZ")
"""Environment variables that tools see; all others, such as tokens, are removed."""


def run_episode(
    sock: socket.socket,
    spec: Mapping[str, Any],
    load: Callable[[str], Any],
    memory: int,
    folder: str,
    *,
    is_first: bool,
    confine: bool = False,
) -> None:
    """Serve requests until the socket closes.

    Args:
        spec: message that opened the episode.
        load: returns the function or class of a path.
        memory: address space in bytes, beyond what is in use.
        folder: working folder.
        is_first: True if this process is the first of a PID namespace already.
        confine: True if this process is confined, with all its tools.
    """
    die_with_parent()
    if not is_first and enter_pid_namespace():
        if first := os.fork():
            sock.close()
            os.waitpid(first, 0)
            return
        die_with_parent()
    _restrict(sock, folder, memory)
    if confine:
        isolation.confine(folder, isolation.hard_limits())
    _serve(sock, spec, load)


def enter_pid_namespace() -> bool:
    """Have the next child be the first process of a new PID namespace. Returns False where that is not allowed."""
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    flags = CLONE_NEWPID if os.geteuid() == 0 else CLONE_NEWPID | CLONE_NEWUSER
    return sys.platform.startswith("linux") and unshare is not None and unshare(flags) == 0


class PidNamespaces:
    """Maker of PID namespaces for children of this process. Only root can make them without a process in between."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if self._is_possible() else None

    def _is_possible(self) -> bool:
        has_calls = hasattr(self._libc, "unshare") and hasattr(self._libc, "setns")
        return has_calls and os.geteuid() == 0 and os.path.exists("/proc/self/ns/pid")

    def fork(self) -> tuple[int, bool]:
        """Fork. Returns what `os.fork` returns, and True if the child is the first process of a new namespace."""
        is_new = self._own is not None and self._libc.unshare(CLONE_NEWPID) == 0
        try:
            return os.fork(), is_new
        finally:
            if is_new:  # further children of this process belong into its own namespace again
                self._libc.setns(self._own, CLONE_NEWPID)


def _restrict(sock: socket.socket, folder: str, memory: int) -> None:
    """Give the process its folder, its limits, and nothing of the supervisor's descriptors and variables."""
    os.setsid()
    os.chdir(folder)
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    os.environ.clear()
    os.environ.update(kept | {"HOME": folder, "TMPDIR": folder})
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    own = sock.fileno()
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd"))):
        if descriptor > 2 and descriptor != own:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(descriptor)
    os.set_inheritable(own, False)
    set_soft_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    set_soft_limit(resource.RLIMIT_CORE, 0)
    set_soft_limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    set_soft_limit(resource.RLIMIT_AS, used + memory)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _serve(sock: socket.socket, spec: Mapping[str, Any], load: Callable[[str], Any]) -> None:
    seed_random(spec["call_seed"])
    own = os.getpid()
    episode = _Episode(spec, load)
    for message in receive(sock):
        try:
            answer = episode.respond(message)
        except MemoryError:
            answer = {"status": "memory"}
        except CallError as error:
            answer = {"status": error.status, "text": cut_middle(error.text)}
        except SystemExit as error:
            answer = {"status": "error", "text": f"SystemExit: {error}"}
        except Exception as error:  # of any tool: it is told to the policy
            answer = {"status": "error", "text": cut_middle(f"{type(error).__name__}: {error}")}
        if os.getpid() != own:  # a tool has forked, and its child has returned as well
            os._exit(0)
        sock.sendall(pack({**answer, "id": message["id"]}))


def seed_random(seed: int) -> None:
    """Seed the random numbers of Python, and of NumPy if it is loaded."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


class _Episode:
    """The environment of an episode, and the tools beside it."""

    def __init__(self, spec: Mapping[str, Any], load: Callable[[str], Any]):
        self.spec = spec
        self.functions = {(function := load(path)).__name__: function for path in spec["tools"]}
        self.load = load
        self.environment: Any = None

    def respond(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Serve one request."""
        if message["op"] == "reset":
            self.environment = self.load(self.spec["environment"])(**self.spec["settings"])
            returned = _run(self.environment.reset, **self._reset_arguments())
        elif message["op"] == "call":
            function = self.functions.get(message["name"]) or getattr(self.environment, message["name"])
            returned = _run(function, **message["arguments"])
        elif message["op"] == "step":
            returned = _run(self.environment.step, message["message"])
        else:
            return {"status": "ok", "value": float(_run(self.environment.get_reward))}
        text = None if returned is None else cut_middle(str(returned))
        return {"status": "ok", "text": text, "done": bool(getattr(self.environment, "done", False))}

    def _reset_arguments(self) -> dict[str, Any]:
        """Return the columns and the seed, as far as `reset` takes them; a column `seed` chooses the task itself."""
        given = {"seed": self.spec["seed"], **self.spec["columns"]}
        parameters = inspect.signature(self.environment.reset).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return given
        names = {each.name for each in parameters}
        return {name: value for name, value in given.items() if name in names}


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; await what an `async def` one returns."""
    returned = function(*args, **kwargs)
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned
