"""Episode pool: tools and environments in processes of their own, under limits of time, memory and processes.

    with EpisodePool(definition, SandboxLimits(time_limit=10.0)) as pool:
        episode = pool.open(None, seed=0, columns={}, call_seed=0)
        result = episode.call("multiply", {"a": 6, "b": 7}).result()
        episode.close()

Processes, and not threads: a call may hang with the interpreter lock held, crash, or start processes of its own, and
must then be ended without ending the trainer. An episode has a process of its own, so that no completion sees the state
of another one, and a second one for the Python tool, so that no process with an environment runs the policy's code.

The user's own tools run with the rights of the user. The code that the policy writes for the Python tool is confined
(`processes/isolation.py`).
"""

import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.config.tool_paths import uses_python_tool
from grpo_ray.errors import ToolError
from grpo_ray.processes.accounting import remove_folder
from grpo_ray.processes.supervisor_client import MAX_FAILED_STARTS, SupervisorClient
from grpo_ray.processes.supervisors import is_needed, secret_variables
from grpo_ray.tools.definitions import RolloutDefinition
from grpo_ray.tools.remote.sandbox import RemoteSettings
from grpo_ray.tools.sandbox.protocol import CallResult, pack, result_of, unpack

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
    """Pool that opens episodes. Its methods may be called from any thread; processes start with the first request."""

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
            folder: parent of the processes' working folders; None: the system's folder for temporary files.
        """
        self.definition, self.limits, self.folder = definition, limits, folder
        self._has_own = definition.has_own or (limits.remote is not None and limits.remote.has_own_provider)
        """True if the supervisor imports modules of the user."""
        self.withheld = [name for name in secret_variables() if name not in variables] if self._has_own else []
        """Environment variables that are withheld from the user's modules."""
        self._numbers = itertools.count()
        self._pending: dict[int, Future[CallResult]] = {}
        self._client = SupervisorClient(
            "grpo_ray.tools.sandbox.supervisor",
            passes=self._passes,
            receive=self._take_results,
            ended=self._settle_lost,
            close_seconds=CLOSE_SECONDS,
        )
        self._generation = 0
        """Number of the current supervisor; an episode belongs to one supervisor."""
        self._refusal: str | None = None
        """Reason why no supervisor runs here."""
        self.isolation: str | None = None
        """Description of the isolation reached, for people; None before the first result, and where none is needed."""

    def __enter__(self) -> "EpisodePool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The supervisor's process id, None before the first request."""
        return self._client.pid

    @property
    def needs_isolation(self) -> bool:
        """True if processes must be confined: completions can call the Python tool, or `rollout.confine` is set."""
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
        error = ToolError("the tools' processes were closed before this call had a result")
        self._client.close(lambda: self._settle_all(error))

    def request(self, episode: "Episode", message: dict[str, Any]) -> "Future[CallResult]":
        """Send a request of an episode. Raises ToolError if no supervisor can run, or the pool is closed."""
        future: Future[CallResult] = Future()
        with self._client.lock:
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
        with self._client.lock:
            self._forget_after_fork()
            if self._client.is_running and episode.generation == self._generation:
                self._send({"op": "close", "episode": episode.spec["episode"]})

    # --- the supervisor; the client's lock is held in all methods but _take_results

    def _require_supervisor(self) -> None:
        """Start the supervisor if none runs. Raises ToolError if none can."""
        self._forget_after_fork()
        if self._client.is_closed:
            raise ToolError("these tools' processes are closed")
        if self._refusal is not None:
            raise ToolError(self._refusal)
        if self._client.has_failed:
            raise ToolError(
                f"the process that runs tools ended {MAX_FAILED_STARTS} times in a row without a result; see its error "
                "on stderr, and check that the modules of rollout.tools and rollout.environment can be imported there"
            )
        if not self._client.is_running:
            self._start_supervisor()

    def _forget_after_fork(self) -> None:
        """Drop the supervisor and the requests if they belong to the process from which this one was forked."""
        if self._client.forget_after_fork():
            self._pending.clear()

    def _start_supervisor(self) -> None:
        folder = None
        try:
            folder = tempfile.mkdtemp(prefix="grpo_ray-tools-", dir=self.folder)
            self._client.start(clean_up=partial(_end_group, folder=folder))
        except OSError as error:  # out of processes, descriptors or space
            if folder is not None:
                remove_folder(folder)
            raise ToolError(f"no process for tools can be started: {error}") from error
        self._generation += 1
        paths = [*self.definition.tools, *(facts.path for facts in self.definition.environments.values())]
        self._send({
            "preload": paths,
            "folder": folder,
            "limits": asdict(replace(self.limits, remote=None)),
            "needs_isolation": self.needs_isolation,
            "remote": None if self.limits.remote is None else self.limits.remote.to_json(),
        })  # fmt: skip

    def _passes(self, name: str) -> bool:
        """Return True if the supervisor gets an environment variable."""
        return name not in self.withheld if self._has_own else is_needed(name)

    def _send(self, message: dict[str, Any]) -> None:
        self._client.send(pack(message))

    def _take_results(self, buffer: bytearray) -> None:
        for message in unpack(buffer):
            if message["id"] is None:  # the supervisor has started
                self._refusal = message.get("refused")
                self.isolation = message.get("isolation") if self.needs_isolation else None
                continue
            with self._client.lock:
                self._client.count_result()
                future = self._pending.pop(message["id"], None)
            if future is not None:
                future.set_result(result_of(message, float(message["seconds"])))

    def _settle_lost(self, _code: int) -> None:
        """Settle the requests of a supervisor that has ended; the next request starts another one."""
        self._settle_all(None if self._refusal is None else ToolError(self._refusal))

    def _settle_all(self, error: ToolError | None) -> None:
        """Settle pending requests: with an error, or as calls whose process has ended."""
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
        """Number of the supervisor that serves this episode; None before the first request."""
        self.has_environment = spec["environment"] is not None

    def reset(self) -> "Future[CallResult]":
        """Create the environment and reset it; the text is that of its first observation."""
        return self.pool.request(self, {"op": "reset"})

    def call(self, name: str, arguments: Mapping[str, Any]) -> "Future[CallResult]":
        """Call a tool, or a method of the environment."""
        return self.pool.request(self, {"op": "call", "name": name, "arguments": dict(arguments)})

    def step(self, message: str) -> "Future[CallResult]":
        """Request the environment's answer to a turn without a call."""
        return self.pool.request(self, {"op": "step", "message": message})

    def reward(self) -> "Future[CallResult]":
        """Request the environment's score of the completion; `value` is the reward."""
        return self.pool.request(self, {"op": "reward"})

    def close(self) -> None:
        """End the process."""
        self.pool.close_episode(self)


def _end_group(supervisor: "subprocess.Popen[bytes]", folder: str) -> None:
    """Wait until the supervisor has ended; then end the rest of its process group, and remove its folder."""
    # Not reaped yet: while its id is taken, the process group can only be the one of the supervisor and of the helpers
    # that the user's modules have started.
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, the system has reaped it
        os.waitid(os.P_PID, supervisor.pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    remove_folder(folder)
