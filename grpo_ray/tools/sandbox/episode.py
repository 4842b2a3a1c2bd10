"""Process of one episode: the limits that it sets for itself, its environment, and the requests that it serves.

It is forked from the supervisor, which has imported the user's modules. Where the system allows it, the process is the
first of a PID namespace of its own: when it ends, the kernel kills every process that a tool has started.

An episode has up to two such processes. One runs the environment and the user's tools; the other starts the
interpreters of the Python tool. So the process that computes the score is not an ancestor of one that runs the policy's
code, and shares neither a folder nor a socket with it, nor a PID namespace where the system has them.
"""

import asyncio
import contextlib
import inspect
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.processes import isolation
from grpo_ray.processes.limits import die_with_parent, set_soft_limit
from grpo_ray.processes.namespaces import enter_pid_namespace
from grpo_ray.tools.sandbox.protocol import CallError, cut_middle, pack, receive

OPEN_FILES = 1024
"""Most files that an episode's process may open."""
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "TZ")
"""Environment variables that tools see; all others, such as tokens, are removed."""


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """Limits and folders of one process of an episode."""

    folder: str
    """Working folder."""
    memory: int
    """Limit of the address space in bytes, in addition to the space in use at the start."""
    file_bytes: int
    """Largest file that a tool may write."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides `KEPT_VARIABLES`."""
    confined_to: str | None = None
    """Folder to which this process is confined, with all its tools; None: it is not."""
    has_private_mounts: bool = False
    """True if the process runs only the policy's code, so that all folders but its own can be hidden from it."""


def run_episode(
    sock: socket.socket, spec: Mapping[str, Any], load: Callable[[str], Any], limits: ProcessLimits, *, is_first: bool
) -> None:
    """Serve requests until the socket closes.

    Args:
        spec: message that opened the episode.
        load: returns the function or class of a path.
        is_first: True if this process is the first of a PID namespace already.
    """
    die_with_parent()
    if not is_first and (is_first := enter_pid_namespace()):
        if first := os.fork():
            sock.close()
            os.waitpid(first, 0)
            return
        die_with_parent()
    _restrict(sock, limits)
    if is_first and limits.has_private_mounts:
        isolation.hide_system(limits.folder)
    if limits.confined_to is not None:
        isolation.confine(limits.confined_to, isolation.hard_limits())
    _serve(sock, spec, load)


def _restrict(sock: socket.socket, limits: ProcessLimits) -> None:
    """Set the process's folder and limits, and remove the supervisor's descriptors and environment variables."""
    os.setsid()
    os.chdir(limits.folder)
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    os.environ.clear()
    os.environ.update({**kept, "HOME": limits.folder, "TMPDIR": limits.folder, **limits.variables})
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    own = sock.fileno()
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd"))):
        if descriptor > 2 and descriptor != own:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(descriptor)
    os.set_inheritable(own, False)
    set_soft_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    set_soft_limit(resource.RLIMIT_CORE, 0)
    set_soft_limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    set_soft_limit(resource.RLIMIT_AS, used + limits.memory)
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
        except Exception as error:  # a tool may raise anything; the policy reads it
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
    """Environment and tools of an episode."""

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
        """Return the columns and the seed that `reset` accepts; a column `seed` replaces the episode's seed."""
        given = {"seed": self.spec["seed"], **self.spec["columns"]}
        parameters = inspect.signature(self.environment.reset).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return given
        names = {each.name for each in parameters}
        return {name: value for name, value in given.items() if name in names}


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and await the result of an `async def` one."""
    returned = function(*args, **kwargs)
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned
