"""Episode pool: tools and environments in processes of their own, under limits of time, memory and processes.

    with EpisodePool(definition, SandboxLimits(time_limit=10.0)) as pool:
        episode = pool.open(None, seed=0, columns={}, call_seed=0)
        result = episode.call("multiply", {"a": 6, "b": 7}).result()
        episode.close()

Processes, and not threads: a call may hang with the interpreter lock held, crash, or start processes of its own, and
must then end without the trainer. An episode has a process of its own, so that no completion sees the state of another
one, and a second one for the Python tool, so that no process with an environment runs the policy's code.

The user's own tools run with the rights of the user. The code that the policy writes for the Python tool is confined
(`processes/isolation.py`).
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.config.tool_paths import uses_python_tool
from grpo_ray.errors import ToolError
from grpo_ray.processes.accounting import remove_folder
from grpo_ray.processes.supervisors import is_needed, secret_variables, supervisor_environment
from grpo_ray.tools.definitions import RolloutDefinition
from grpo_ray.tools.remote.sandbox import RemoteSettings
from grpo_ray.tools.sandbox.protocol import CallResult, pack, result_of, unpack

MAX_FAILED_STARTS = 3
"""Supervisors in a row that may end without a result before the pool gives up."""
CLOSE_SECONDS = 10.0
"""Time for the supervisor to end its processes before it is killed."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of an episode's processes."""

    time_limit: float = 10.0
    """Seconds for one request."""
    memory_bytes: int = 1 << 30
    """Address space of a process, and memory of all processes in sum, beyond that of the imported modules."""
    max_processes: int = 32
    """Processes below the episode's own."""
    disk_bytes: int = 1 << 30
    """Size of a file, and space of all files in sum."""
    max_files: int = 10_000
    """Files and folders in the working folders."""
    isolation: str = "required"
    """`rollout.isolation`."""
    confine: bool = False
    """`rollout.confine`."""
    remote: RemoteSettings | None = None
    """Remote sandbox of the tool `remote_python`."""

    @staticmethod
    def of(config: RolloutConfig) -> "SandboxLimits":
        return SandboxLimits(
            time_limit=config.time_limit,
            memory_bytes=int(config.memory_gib * 2**30),
            max_processes=config.max_processes,
            disk_bytes=int(config.disk_gib * 2**30),
            max_files=config.max_files,
            isolation=config.isolation,
            confine=config.confine,
            remote=RemoteSettings.of(config),
        )


class EpisodePool:
    """Opener of episodes. All methods may be called from any thread; the processes start with the first request."""

    def __init__(
        self,
        definition: RolloutDefinition,
        limits: SandboxLimits,
        folder: str | None = None,
        variables: Sequence[str] = (),
    ):
        """
        Args:
            variables: `rollout.variables`.
            folder: in which the processes' working folders are made; None: that of the system for temporary files.
        """
        self.definition, self.limits, self.folder = definition, limits, folder
        self._has_own = definition.has_own or (limits.remote is not None and limits.remote.has_own_provider)
        """True if the supervisor imports modules of the user."""
        self.withheld = [name for name in secret_variables() if name not in variables] if self._has_own else []
        """Environment variables that the user's modules do not see."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[CallResult]] = {}
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._sock: socket.socket | None = None
        self._generation = 0
        """Number of the supervisor; an episode belongs to one of them."""
        self._failed_starts = 0
        self._closed = False
        self._refusal: str | None = None
        """Reason why no supervisor runs here."""
        self.isolation: str | None = None
        """Isolation that was reached, for people; None before the first result, and where none is needed."""

    def __enter__(self) -> "EpisodePool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The supervisor's process id, None before the first request."""
        return None if self._supervisor is None else self._supervisor.pid

    @property
    def needs_isolation(self) -> bool:
        """True if processes are to be confined: completions can call the Python tool, or the user wishes it."""
        return self.limits.confine or uses_python_tool(self.definition.tools)

    def open(self, environment: str | None, seed: int, columns: Mapping[str, Any], call_seed: int) -> "Episode":
        """Open an episode; its process starts with its first request.

        Args:
            environment: name of the environment; None: the one without a name, or none.
            seed, columns: arguments of its `reset`.
            call_seed: seed of random numbers in the episode's process.
        """
        facts = self.definition.environments.get(environment)
        spec = {
            "op": "open",
            "episode": next(self._numbers),
            "tools": self.definition.tools,
            "environment": None if facts is None else facts.path,
            "settings": {} if facts is None else dict(self.definition.settings.get(facts.path, {})),
            "columns": dict(columns),
            "seed": seed,
            "call_seed": call_seed,
        }
        return Episode(self, spec)

    def close(self) -> None:
        """End all processes. Pending requests fail with ToolError. A second call does nothing."""
        with self._lock:
            self._closed = True
            sock, supervisor, reader = self._sock, self._supervisor, self._reader
            self._sock = self._supervisor = self._reader = None
            self._settle_all(ToolError("the tools' processes were closed before this call had a result"))
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)  # wakes the supervisor, and the reader, which closes the socket
        if supervisor is not None and reader is not None:
            reader.join(CLOSE_SECONDS)
            if reader.is_alive():
                supervisor.kill()
                reader.join()

    def request(self, episode: "Episode", message: dict[str, Any]) -> "Future[CallResult]":
        """Send a request of an episode. Raises ToolError if no supervisor can run, or the pool is closed."""
        future: Future[CallResult] = Future()
        with self._lock:
            self._require_supervisor()
            if episode.generation != self._generation:
                if episode.generation is not None and episode.has_environment:
                    future.set_result(CallResult("crash", "the environment's process has ended"))
                    return future
                episode.generation = self._generation
                self._send(episode.spec)
            number = next(self._numbers)
            self._pending[number] = future
            self._send({**message, "id": number, "episode": episode.spec["episode"]})
        return future

    def close_episode(self, episode: "Episode") -> None:
        with self._lock:
            if self._sock is not None and episode.generation == self._generation:
                self._send({"op": "close", "episode": episode.spec["episode"]})

    # --- the supervisor; the lock is held in all methods but _read

    def _require_supervisor(self) -> None:
        if self._closed:
            raise ToolError("these tools' processes are closed")
        if self._refusal is not None:
            raise ToolError(self._refusal)
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise ToolError(
                f"the process that runs tools ended {MAX_FAILED_STARTS} times in a row without a result; see its error "
                "on stderr, and check that the modules of rollout.tools and rollout.environment can be imported there"
            )
        if self._sock is not None:
            return
        folder = tempfile.mkdtemp(prefix="grpo_ray-tools-", dir=self.folder)
        own, theirs = socket.socketpair()
        root = Path(__file__).resolve().parents[3]
        try:
            self._supervisor = supervisor = subprocess.Popen(
                [sys.executable, "-c", f"from grpo_ray.tools.sandbox.supervisor import main; main({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=supervisor_environment(root, self._passes),
                cwd=root,  # `python -c` searches its working directory first
                start_new_session=True,  # Ctrl-C reaches the trainer only
            )
        except OSError:
            own.close()
            remove_folder(folder)
            raise
        finally:
            theirs.close()
        self._sock, self._generation = own, self._generation + 1
        paths = [*self.definition.tools, *(facts.path for facts in self.definition.environments.values())]
        self._send({
            "preload": paths,
            "folder": folder,
            "limits": asdict(replace(self.limits, remote=None)),
            "needs_isolation": self.needs_isolation,
            "remote": None if self.limits.remote is None else self.limits.remote.to_json(),
        })  # fmt: skip
        arguments = (own, supervisor, folder)
        self._reader = threading.Thread(target=self._read, args=arguments, name="tools-reader", daemon=True)
        self._reader.start()

    def _passes(self, name: str) -> bool:
        """Return True if the supervisor gets an environment variable."""
        return name not in self.withheld if self._has_own else is_needed(name)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._sock is not None
        try:
            self._sock.sendall(pack(message))
        except OSError:
            return  # the supervisor has died; the reader notices it too, and settles what is pending

    def _read(self, sock: socket.socket, supervisor: "subprocess.Popen[bytes]", folder: str) -> None:
        """Settle the results of one supervisor until its socket closes. Runs in a thread of its own."""
        buffer = bytearray()
        while data := _receive(sock):
            buffer += data
            for message in unpack(buffer):
                if message["id"] is None:  # it has started
                    self._refusal = message.get("refused")
                    self.isolation = message.get("isolation") if self.needs_isolation else None
                    continue
                with self._lock:
                    self._failed_starts = 0
                    future = self._pending.pop(message["id"], None)
                if future is not None:
                    future.set_result(result_of(message, float(message["seconds"])))
        # Not reaped at once: as long as its id is taken, the group is that of the supervisor, and of the helpers that
        # the user's modules have started. If it was killed, they and its folder are left.
        with contextlib.suppress(ChildProcessError):  # children are reaped by the system, where SIGCHLD is ignored
            os.waitid(os.P_PID, supervisor.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
        remove_folder(folder)
        with self._lock:
            is_current = self._sock is sock
            sock.close()
            if is_current:
                self._sock = self._supervisor = self._reader = None
                self._failed_starts += 1
                self._settle_all(None if self._refusal is None else ToolError(self._refusal))

    def _settle_all(self, error: ToolError | None) -> None:
        """Settle what is pending: with an error, or as calls whose process has ended."""
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if error is None:
                future.set_result(CallResult("crash", "the tool's process has ended"))
            else:
                future.set_exception(error)


class Episode:
    """Processes of one completion; they serve requests in their order."""

    def __init__(self, pool: EpisodePool, spec: dict[str, Any]):
        self.pool, self.spec = pool, spec
        self.generation: int | None = None
        """Number of the supervisor that knows this episode; None before the first request."""
        self.has_environment = spec["environment"] is not None

    def reset(self) -> "Future[CallResult]":
        """Create the environment and reset it; the text is that of its first observation."""
        return self.pool.request(self, {"op": "reset"})

    def call(self, name: str, arguments: Mapping[str, Any]) -> "Future[CallResult]":
        """Call a tool, or a method of the environment."""
        return self.pool.request(self, {"op": "call", "name": name, "arguments": dict(arguments)})

    def step(self, message: str) -> "Future[CallResult]":
        """Have the environment answer a turn without a call."""
        return self.pool.request(self, {"op": "step", "message": message})

    def reward(self) -> "Future[CallResult]":
        """Have the environment score the completion; `value` is the reward."""
        return self.pool.request(self, {"op": "reward"})

    def close(self) -> None:
        """End the process."""
        self.pool.close_episode(self)


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""
