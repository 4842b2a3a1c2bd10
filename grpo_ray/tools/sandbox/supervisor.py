"""The supervisor process of an episode pool: forks the processes of episodes, and ends those that exceed a limit.

`pool.EpisodePool` starts one supervisor in a fresh interpreter, without anything of the trainer (CUDA, threads, a heavy
`__main__`). It imports the user's modules once, so that an episode's process is a fork that starts in milliseconds and
shares no mutable state. It measures the time of requests and the total memory, processes and files of an episode, and
ends a process that exceeds a limit with all its children.

An episode has one process for its environment and the user's tools, and another for the Python tool (`episode.py`).
Each request goes to one of them, and only that one can answer it: the process that starts the policy's code can neither
give a reward nor end a completion.

The supervisor ends when its socket closes, and every process of an episode dies with it (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import os
import resource
import select
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from grpo_ray.config.import_path import import_callable
from grpo_ray.config.tool_paths import runs_policy_code
from grpo_ray.errors import ConfinementError
from grpo_ray.processes import isolation
from grpo_ray.processes.accounting import disk_excess, disk_in_use, exceeds_memory, memory_in_use, remove_folder
from grpo_ray.processes.client_connection import ClientConnection
from grpo_ray.processes.limits import die_with_parent, is_starved, set_soft_limit
from grpo_ray.processes.namespaces import PidNamespaces, is_first_of_namespace
from grpo_ray.processes.process_tree import (
    ProcessTree,
    children,
    is_runnable,
    kill_all,
    process_state,
    process_usage,
    tree_below,
)
from grpo_ray.processes.supervisors import begin_supervisor, share_memory_with_forks
from grpo_ray.tools import python_tool
from grpo_ray.tools.definitions import code_tools
from grpo_ray.tools.python_tool import CODE_FOLDER
from grpo_ray.tools.sandbox.episode import ProcessLimits, run_episode
from grpo_ray.tools.sandbox.pool import SandboxLimits
from grpo_ray.tools.sandbox.protocol import (
    MAX_BYTES,
    CallResult,
    Status,
    pack,
    receive_first,
    result_of,
    result_to_json,
    unpack,
)

PR_SET_CHILD_SUBREAPER = 36
"""prctl option of Linux: orphans among the descendants become children of this process."""
WATCH_SECONDS = 0.05
"""Time between two counts of the processes of a busy episode."""
IDLE_WATCH_SECONDS = 0.5
"""The same between calls, while the policy writes."""
IDLE_SECONDS = 2.0
ENDED = "the environment's process has ended"
CLOSED = "the episode was closed"
STARTS = 4
"""Processes that are started before results are read again: with much memory in use, a fork takes tens of ms."""
THREADS_PER_PROCESS = 64
"""Threads that an episode may have in sum, for each of its processes: their ids are those that all processes of the
machine share, often only 32,768."""
OPEN_FILES = 1 << 16
"""Most files that the supervisor may open; each episode needs one, and the usual limit of 1,024 is too low."""


DISK_SECONDS = 0.25
"""Least time between two measurements of an episode's files."""
DISK_SHARE = 0.05
"""Largest share of time that measuring the files of all episodes takes."""
REMOVED_AT_ONCE = 100
"""Maximum files and folders that the supervisor removes itself; a separate process removes the rest."""
Kind = Literal["own", "code"]
OWN: Kind = "own"
"""Process of the environment and the user's tools, and name of its folder."""
CODE: Kind = "code"
"""Process of the Python tool, and name of its folder."""


@dataclass
class _Process:
    """Process of an episode."""

    pid: int
    sock: socket.socket
    folder: str
    buffer: bytearray = field(default_factory=bytearray)


@dataclass
class _Episode:
    """An episode that is open."""

    spec: dict[str, Any]
    processes: dict[Kind, _Process] = field(default_factory=dict)
    folder: str = ""
    """Folder of the processes' working folders; "" before the first process."""
    queue: deque[dict[str, Any]] = field(default_factory=deque)
    """Requests that wait; the first one is being served if `started`."""
    started: float = 0.0
    """Monotonic seconds at which the first request was sent; 0 if it was not."""
    cpu_before: float = 0.0
    is_lost: bool = False
    """True if the environment's process has ended: no request can be served any more."""
    is_done: bool = False
    """Latest value of the environment's `done`."""
    failure: tuple[Kind, CallResult] | None = None
    """Process that ended between two requests, and the result of its next request."""
    next_disk_check: float = 0.0
    """Monotonic seconds from which on its files are measured again."""

    @property
    def kind(self) -> Kind:
        """Process that serves the first request."""
        request = self.queue[0]
        return CODE if request["op"] == "call" and request["name"] in code_tools(self.spec["tools"]) else OWN


class Supervisor:
    """Event loop between the pool and the processes of episodes."""

    def __init__(self, parent: socket.socket, folder: str, limits: SandboxLimits):
        """
        Args:
            parent: connection to the pool.
            folder: in which the episodes' working folders are made.
        """
        self.client, self.folder, self.limits = ClientConnection(parent), folder, limits
        self.base_bytes = memory_in_use([os.getpid()])
        """Memory of the imported modules, which an episode's process starts with."""
        self.max_threads = THREADS_PER_PROCESS * (limits.max_processes + 2)  # two processes are the supervisor's own
        self.namespaces = PidNamespaces()
        self.episodes: dict[int, _Episode] = {}
        self.unstarted: deque[_Episode] = deque()
        """Episodes with a new request."""
        self.next_check = 0.0
        """Monotonic seconds from which on limits are checked again."""
        self.checks_idle, self.next_idle_check = False, 0.0
        self.helpers = set(children(os.getpid()))
        """Processes that the user's modules started when they were imported; they are ended with this one."""
        self.removers: set[int] = set()
        """Processes that remove large folders."""

    def run(self) -> None:
        """Serve until the parent closes its end of the socket."""
        while self._serve_once():
            pass
        for episode in self.episodes.values():
            self._end_episode(episode)
        for helper in self.helpers | self.removers:
            kill_all(helper)

    def _serve_once(self) -> bool:
        """Wait for one round of events and handle them. Returns False when the supervisor must end."""
        poller = select.poll()
        poller.register(self.client, self.client.events)
        by_descriptor = {}
        for episode in self.episodes.values():
            for kind, process in episode.processes.items():
                by_descriptor[process.sock.fileno()] = episode, kind
                poller.register(process.sock, select.POLLIN)
        is_busy = any(episode.started for episode in self.episodes.values())
        seconds = WATCH_SECONDS if is_busy else IDLE_WATCH_SECONDS if by_descriptor else IDLE_SECONDS
        for descriptor, _ in poller.poll(0 if self.unstarted else 1000 * seconds):
            if descriptor == self.client.fileno():
                if not self._take_requests():
                    return False
            else:
                self._receive(*by_descriptor[descriptor])
        for _ in range(min(STARTS, len(self.unstarted))):
            self._start_next(self.unstarted.popleft())
        if time.monotonic() >= self.next_check:  # not at every event: it reads files of each busy process
            # Idle episodes too, less often: a tool may leave processes that multiply after its call.
            self.checks_idle = time.monotonic() >= self.next_idle_check
            if self.checks_idle:
                self.next_idle_check = time.monotonic() + IDLE_WATCH_SECONDS
            for episode in list(self.episodes.values()):
                self._enforce_limits(episode)
            self._reap_orphans()
            self.next_check = time.monotonic() + WATCH_SECONDS
        return True

    # --- the pool

    def _take_requests(self) -> bool:
        """Send results and take requests. Returns False if the pool has closed its end."""
        is_open = self.client.exchange()
        for message in unpack(self.client.incoming):
            self._take(message)
        return is_open

    def _take(self, message: dict[str, Any]) -> None:
        number = message["episode"]
        if message["op"] == "open":
            self.episodes[number] = _Episode(message)
        elif message["op"] == "close":
            if (episode := self.episodes.pop(number, None)) is not None:
                self._end_episode(episode)
                while episode.queue:
                    self._send(episode.queue.popleft(), CallResult("skipped", CLOSED))
        elif (episode := self.episodes.get(number)) is None:
            self._send(message, CallResult("skipped", CLOSED))
        else:
            episode.queue.append(message)
            self.unstarted.append(episode)

    def _send(self, request: dict[str, Any], result: CallResult) -> None:
        # Sent in the next round, so that a process that is ended because of this result has ended before the pool
        # receives it.
        self.client.add(pack({"id": request["id"], **result_to_json(result)}))

    # --- episodes

    def _start_next(self, episode: _Episode) -> None:
        """Send the episode's next request to its process, unless the episode is busy."""
        while episode.queue and not episode.started:
            request, kind = episode.queue[0], episode.kind
            if episode.failure is not None and episode.failure[0] == kind:
                self._send(episode.queue.popleft(), episode.failure[1])
                episode.failure = None
                continue
            if episode.is_lost and kind == OWN:
                self._send(episode.queue.popleft(), CallResult("crash", ENDED))
                continue
            try:
                process = episode.processes.get(kind) or self._fork(episode, kind)
            except OSError as error:  # out of processes, descriptors or disk space; other episodes go on
                self._send(episode.queue.popleft(), CallResult("crash", f"no process could be started: {error}"))
                self._lose(episode, kind)
                continue
            episode.started = time.monotonic()
            episode.cpu_before = self._cpu_seconds(process)
            try:
                process.sock.sendall(pack(request))
            except OSError:
                self._fail(episode, kind, "crash")

    def _fork(self, episode: _Episode, kind: Kind) -> _Process:
        own, theirs = socket.socketpair()
        try:
            if not episode.folder:
                episode.folder = tempfile.mkdtemp(dir=self.folder)
            limits = self._process_limits(episode, kind)
            pid, is_first = self.namespaces.fork()
        except OSError:
            own.close()
            theirs.close()
            raise
        if pid == 0:
            try:
                own.close()
                self.client.close()
                spec, load_tool = _spec_of(episode.spec, kind), partial(import_callable, where="rollout")
                run_episode(theirs, spec, load_tool, limits, is_first=is_first)
            finally:
                os._exit(0)
        theirs.close()
        own.settimeout(self.limits.time_limit)  # a stopped process that does not read must not block this one
        process = episode.processes[kind] = _Process(pid, own, limits.folder)
        return process

    def _process_limits(self, episode: _Episode, kind: Kind) -> ProcessLimits:
        """Make the folders of an episode's process, and return its limits."""
        folders: dict[Kind, str] = {OWN: os.path.join(episode.folder, OWN), CODE: os.path.join(episode.folder, CODE)}
        for each in (kind, CODE) if code_tools(episode.spec["tools"]) else (kind,):
            os.makedirs(folders[each], exist_ok=True)
        confined_to = episode.folder if kind == OWN else folders[CODE]
        return ProcessLimits(
            folder=folders[kind],
            memory=self.limits.memory_bytes,
            file_bytes=self.limits.disk_bytes,
            variables={CODE_FOLDER: folders[CODE]} if kind == OWN else {},
            confined_to=confined_to if self.limits.confine else None,
            has_private_mounts=kind == CODE,
        )

    def _receive(self, episode: _Episode, kind: Kind) -> None:
        """Take the result of an episode's process, which may send anything."""
        process = episode.processes.get(kind)
        if process is None:
            return
        try:
            data = process.sock.recv(1 << 20)
            process.buffer += data
            messages = list(unpack(process.buffer, MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            data, messages = b"", []
        is_broken = not data
        for message in messages:
            if not episode.started or kind != episode.kind or message.get("id") != episode.queue[0]["id"]:
                is_broken = True  # not an answer to the request that this process is serving
                break
            request, seconds = episode.queue.popleft(), time.monotonic() - episode.started
            episode.started = 0.0
            result = result_of(message, seconds)
            if kind == OWN:
                episode.is_done = result.done
            else:  # the Python tool's process has neither reward nor state
                result = replace(result, value=None, done=episode.is_done)
            self._send(request, result)
            if result.status == "memory":  # the next request must have as much memory as the first
                self._lose(episode, kind)
                break
        if is_broken and episode.processes.get(kind) is process:
            self._fail(episode, kind, "crash")
        self._start_next(episode)

    def _enforce_limits(self, episode: _Episode) -> None:
        """End an episode's process that takes too long, or all of them if they use too much in sum."""
        if not episode.processes or not (episode.started or self.checks_idle):
            return
        elapsed = time.monotonic() - episode.started if episode.started else 0.0
        trees = {kind: self._tree(each) for kind, each in episode.processes.items()}
        below = {kind: tree.living for kind, tree in trees.items()}
        threads = {kind: tree.threads for kind, tree in trees.items()}
        pids = [pid for kind, each in episode.processes.items() for pid in (each.pid, *below[kind])]
        memory = self.limits.memory_bytes + len(episode.processes) * self.base_bytes
        if len(pids) - len(below) > self.limits.max_processes:
            self._fail_largest(episode, {kind: len(each) for kind, each in below.items()}, "processes")
        elif sum(threads.values()) > self.max_threads:
            text = f"more than {self.max_threads} threads, zombies included"
            self._fail_largest(episode, threads, "processes", text)
        elif exceeds_memory(pids, memory, inherited := self._inherited(episode, below)):
            used = {
                kind: memory_in_use([each.pid, *below[kind]], inherited) for kind, each in episode.processes.items()
            }
            self._fail_largest(episode, used, "memory")
        elif (excess := self._disk_excess(episode, pids, below.get(CODE, ()))) is not None:
            used = {
                kind: disk_in_use(each.folder, [each.pid, *below[kind]], _programs(below[kind]) if kind == CODE else ())
                for kind, each in episode.processes.items()
            }
            self._fail_largest(episode, used, "disk", excess)
        elif elapsed > self.limits.time_limit and not self._is_starved(episode, elapsed):
            request, kind = episode.queue[0], episode.kind
            if is_readable(episode.processes[kind].sock):  # the result has arrived, but the supervisor was busy
                self._receive(episode, kind)
            if episode.queue and episode.queue[0] is request:
                self._fail(episode, kind, "timeout")
        self._start_next(episode)

    def _inherited(self, episode: _Episode, below: Mapping[Kind, list[int]]) -> Callable[[int], int]:
        """Return the argument `inherited` of `memory_in_use`: bytes of imported modules if a process is a pure fork.

        For users other than root, such a process hides its memory as the supervisor does. A process that runs the
        policy's code has executed an interpreter, and could hide its memory as well, so all of its memory counts.

        Args:
            below: processes below the episode's own.
        """
        forks = {process.pid for process in episode.processes.values()}.union(below.get(OWN, ()))
        return lambda pid: self.base_bytes if pid in forks or is_first_of_namespace(pid) else 0

    def _disk_excess(self, episode: _Episode, pids: list[int], code: Iterable[int]) -> str | None:
        """Measure an episode's files, unless all measurements would then take more than `DISK_SHARE` of the time.

        Args:
            pids: all of the episode's processes.
            code: those below the process of the Python tool.

        Returns a description of the excess, or None.
        """
        start = time.monotonic()
        if start < episode.next_disk_check:
            return None
        excess = disk_excess(episode.folder, pids, self.limits.disk_bytes, self.limits.max_files, _programs(code))
        took = time.monotonic() - start
        episode.next_disk_check = start + max(DISK_SECONDS, len(self.episodes) * took / DISK_SHARE)
        return excess

    def _is_starved(self, episode: _Episode, elapsed: float) -> bool:
        """Return True if the serving process could run but gets too little CPU time. A sleeping one is not starved."""
        process = episode.processes[episode.kind]
        used = self._cpu_seconds(process) - episode.cpu_before
        return is_starved(self.limits.time_limit, elapsed, used) and any(
            is_runnable(each) for each in (process.pid, *self._tree(process).living)
        )

    def _cpu_seconds(self, process: _Process) -> float:
        return sum(process_usage(each)[0] for each in (process.pid, *self._tree(process).living))

    def _tree(self, process: _Process) -> ProcessTree:
        return tree_below(process.pid, self.limits.max_processes, self.max_threads)

    def _fail_largest(
        self, episode: _Episode, used: Mapping[Kind, float], status: Status, text: str | None = None
    ) -> None:
        """End the process of an episode that uses the most."""
        self._fail(episode, max(used, key=lambda kind: used[kind]), status, text)

    def _fail(self, episode: _Episode, kind: Kind, status: Status, text: str | None = None) -> None:
        """End an episode's process, and settle the request that it was serving, or its next one if there was none."""
        text = text or {
            "timeout": f"no result within {self.limits.time_limit:g} s",
            "processes": f"more than {self.limits.max_processes} processes",
            "memory": f"more than {self.limits.memory_bytes / 2**30:g} GiB of memory in all processes",
        }.get(status, "the tool's process has ended")
        if episode.started and episode.kind == kind:
            seconds = round(time.monotonic() - episode.started, 6)
            episode.started = 0.0
            self._send(episode.queue.popleft(), CallResult(status, text, seconds=seconds))
        else:
            episode.failure = kind, CallResult(status, text)
        self._lose(episode, kind)

    def _lose(self, episode: _Episode, kind: Kind) -> None:
        """End an episode's process, and settle the waiting calls, so that many hanging calls take the time of one."""
        self._end_process(episode, kind)
        episode.is_lost |= kind == OWN and episode.spec["environment"] is not None
        lost = CallResult("crash", ENDED) if episode.is_lost else CallResult("skipped", "an earlier call had no result")
        serving = 1 if episode.started else 0  # the other process is serving the first request
        waiting = [episode.queue.pop() for _ in range(len(episode.queue) - serving)][::-1]
        for request in waiting:
            if episode.is_lost or request["op"] == "call":
                self._send(request, lost)
            else:  # the environment is not lost
                episode.queue.append(request)

    def _end_process(self, episode: _Episode, kind: Kind) -> None:
        process = episode.processes.pop(kind, None)
        if process is None:
            return
        process.sock.close()
        kill_all(process.pid)
        self._remove(process.folder)

    def _end_episode(self, episode: _Episode) -> None:
        for kind in list(episode.processes):
            self._end_process(episode, kind)
        if episode.folder:
            self._remove(episode.folder)

    def _remove(self, folder: str) -> None:
        """Remove a folder, in a process of its own if that takes long: thousands of folders take seconds."""
        if remove_folder(folder, REMOVED_AT_ONCE) or not os.path.isdir(folder):
            return
        rest = ""
        try:
            rest = tempfile.mkdtemp(dir=self.folder)
            os.rename(folder, os.path.join(rest, "rest"))  # a new process may need the name
            pid = os.fork()
        except OSError:  # out of disk space or processes: remove it here, while other episodes wait
            for each in filter(None, (rest, folder)):
                remove_folder(each)
            return
        if pid == 0:
            try:
                os.closerange(3, OPEN_FILES)
                die_with_parent()
                remove_folder(rest)
            finally:
                os._exit(0)
        self.removers.add(pid)

    def _reap_orphans(self) -> None:
        """End processes that have left their episode's process, which is possible without a PID namespace."""
        own = {process.pid for episode in self.episodes.values() for process in episode.processes.values()}
        for remover in list(self.removers):
            if process_state(remover) in ("", "Z"):
                kill_all(remover)
                self.removers.remove(remover)
        own |= self.removers
        for orphan in set(children(os.getpid())) - own - self.helpers:
            kill_all(orphan)


def _spec_of(spec: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the part of an episode's opening message that one of its processes needs."""
    tools = [path for path in spec["tools"] if runs_policy_code(path) == (kind == CODE)]
    return {**spec, "tools": tools} if kind == OWN else {**spec, "tools": tools, "environment": None}


def _programs(below: Iterable[int]) -> list[int]:
    """Return the processes that run programs, without the fork of the supervisor that they were started from.

    That fork maps the user's modules, whose files may have been replaced, and so deleted, since they were imported.
    """
    return [pid for pid in below if not is_first_of_namespace(pid)]


def is_readable(sock: socket.socket) -> bool:
    """Return True if a read would not block."""
    poller = select.poll()  # `select.select` takes no descriptor above 1,023
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def main(descriptor: int) -> None:
    """Run a supervisor process. `descriptor` is its end of the socket, on which the pool sends the settings first."""
    parent = begin_supervisor(descriptor)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError, ValueError):
        set_soft_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    settings = receive_first(parent)
    limits = SandboxLimits(**settings["limits"])
    is_importing = True

    def close_in_helper() -> None:
        if is_importing:  # if a helper held this socket, the pool would not notice the end of the supervisor
            parent.close()

    os.register_at_fork(after_in_child=close_in_helper)
    for path in settings["preload"]:
        import_callable(path, "rollout")
    if settings["remote"] is not None:
        from grpo_ray.tools import remote_python

        remote_python.configure(settings["remote"])
    is_importing = False
    share_memory_with_forks()
    try:
        imported = filter(None, sys.path) if limits.confine else ()
        level = isolation.prepare(limits.isolation, settings["folder"], [str(python_tool.CHILD), *imported])
    except ConfinementError as error:
        if settings["needs_isolation"]:
            parent.sendall(pack({"id": None, "refused": str(error)}))
            remove_folder(settings["folder"])
            return
        level = str(error)  # a call of the Python tool by the user's own code will fail
    parent.sendall(pack({"id": None, "isolation": level}))
    try:
        Supervisor(parent, settings["folder"], limits).run()
    finally:
        remove_folder(settings["folder"])
