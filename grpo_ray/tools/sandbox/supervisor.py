"""The supervisor process of an episode pool: forks the processes of episodes, and ends those that exceed a limit.

`pool.EpisodePool` starts one supervisor in a fresh interpreter, without anything of the trainer (CUDA, threads, a heavy
`__main__`). It imports the user's modules once, so that an episode's process is a fork that starts in milliseconds and
shares nothing that changes. It measures time outside of the tools, and ends a process with all its children.

It ends when its socket closes, and every process of an episode dies with it (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import gc
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpo_ray.errors import ConfinementError
from grpo_ray.processes import isolation
from grpo_ray.rewards.sandbox.supervisor import process_usage
from grpo_ray.rewards.sandbox.worker import set_soft_limit
from grpo_ray.tools import python_tool
from grpo_ray.tools.definitions import load
from grpo_ray.tools.sandbox.episode import PidNamespaces, run_episode
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
STARVED_CPU_SHARE = 1 / 3
"""Share of the time limit; a process that could run and has used less CPU time is starved."""
STARVED_FACTOR = 4
"""Time limits that a starved process gets."""
STARTS = 4
"""Processes that are started before results are read again: with much memory in use, a fork takes tens of ms."""
OPEN_FILES = 1 << 16
"""Most files that the supervisor may open; each episode needs one, and the usual limit of 1,024 is too low."""


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
    process: _Process | None = None
    queue: deque[dict[str, Any]] = field(default_factory=deque)
    """Requests that wait; the first one is being served if there is a process."""
    started: float = 0.0
    """Monotonic seconds at which the first request was sent; 0 if it was not."""
    cpu_before: float = 0.0
    is_lost: bool = False
    """True if the environment's process has ended: no request can be served any more."""
    failure: CallResult | None = None
    """Cause of the process's end between two requests; the result of the next request."""


class Supervisor:
    """Event loop between the pool and the processes of episodes."""

    def __init__(
        self,
        parent: socket.socket,
        folder: str,
        time_limit: float,
        memory: int,
        max_processes: int,
        *,
        confine: bool = False,
    ):
        """
        Args:
            parent: connection to the pool.
            folder: in which the episodes' working folders are made.
            time_limit: seconds per request.
            memory: bytes of address space of an episode's process.
            max_processes: most processes of one episode.
            confine: True if the episodes' processes are confined.
        """
        self.confine = confine
        self.parent, self.folder = parent, folder
        self.time_limit, self.memory, self.max_processes = time_limit, memory, max_processes
        self.namespaces = PidNamespaces()
        self.episodes: dict[int, _Episode] = {}
        self.unstarted: deque[_Episode] = deque()
        """Episodes with a new request."""
        self.next_check = 0.0
        """Monotonic seconds from which on limits are checked again."""
        self.checks_idle, self.next_idle_check = False, 0.0
        self.helpers = set(children(os.getpid()))
        """Processes that the user's modules have started when they were imported; they live as long as this one."""
        self.incoming, self.outgoing = bytearray(), bytearray()

    def run(self) -> None:
        """Serve until the parent closes its end of the socket."""
        self.parent.setblocking(False)
        while self._serve_once():
            pass
        for episode in self.episodes.values():
            self._end_process(episode)
        for helper in self.helpers:
            kill_all(helper)

    def _serve_once(self) -> bool:
        """Wait for one round of events and handle them. Returns False when the supervisor must end."""
        poller = select.poll()
        poller.register(self.parent, select.POLLIN | (select.POLLOUT if self.outgoing else 0))
        by_descriptor = {}
        for episode in self.episodes.values():
            if episode.process is not None:
                by_descriptor[episode.process.sock.fileno()] = episode
                poller.register(episode.process.sock, select.POLLIN)
        is_busy = any(episode.started for episode in self.episodes.values())
        seconds = WATCH_SECONDS if is_busy else IDLE_WATCH_SECONDS if by_descriptor else IDLE_SECONDS
        for descriptor, _ in poller.poll(0 if self.unstarted else 1000 * seconds):
            if descriptor == self.parent.fileno():
                if not self._communicate_with_parent():
                    return False
            else:
                self._receive(by_descriptor[descriptor])
        for _ in range(min(STARTS, len(self.unstarted))):
            self._start_next(self.unstarted.popleft())
        if time.monotonic() >= self.next_check:  # not at every event: it reads files of each busy process
            # A tool may leave processes that multiply after its call.
            self.checks_idle = time.monotonic() >= self.next_idle_check
            if self.checks_idle:
                self.next_idle_check = time.monotonic() + IDLE_WATCH_SECONDS
            for episode in list(self.episodes.values()):
                self._enforce_limits(episode)
            self._reap_orphans()
            self.next_check = time.monotonic() + WATCH_SECONDS
        return True

    # --- the parent

    def _communicate_with_parent(self) -> bool:
        """Send results and take requests. Returns False if the parent has closed its end."""
        try:
            if self.outgoing:
                with contextlib.suppress(BlockingIOError):  # requests are read then too, or both sides would wait
                    del self.outgoing[: self.parent.send(self.outgoing)]
            data = self.parent.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.incoming += data
        for message in unpack(self.incoming):
            self._take(message)
        return bool(data)

    def _take(self, message: dict[str, Any]) -> None:
        number = message["episode"]
        if message["op"] == "open":
            self.episodes[number] = _Episode(message)
        elif message["op"] == "close":
            if (episode := self.episodes.pop(number, None)) is not None:
                self._end_process(episode)
                while episode.queue:
                    self._send(episode.queue.popleft(), CallResult("skipped", CLOSED))
        elif (episode := self.episodes.get(number)) is None:
            self._send(message, CallResult("skipped", CLOSED))
        else:
            episode.queue.append(message)
            self.unstarted.append(episode)

    def _send(self, request: dict[str, Any], result: CallResult) -> None:
        self.outgoing += pack({"id": request["id"], **result_to_json(result)})

    # --- episodes

    def _start_next(self, episode: _Episode) -> None:
        """Give the episode's process its next request, unless it is busy."""
        while episode.queue and not episode.started:
            if episode.failure is not None:
                self._send(episode.queue.popleft(), episode.failure)
                episode.failure = None
                continue
            if episode.is_lost:
                self._send(episode.queue.popleft(), CallResult("crash", ENDED))
                continue
            try:
                process = episode.process = episode.process or self._fork(episode)
            except OSError as error:  # no process, descriptor or disk space is left; others go on
                self._send(episode.queue.popleft(), CallResult("crash", f"no process could be started: {error}"))
                self._lose(episode)
                continue
            episode.started = time.monotonic()
            episode.cpu_before = self._cpu_seconds(process)
            try:
                process.sock.sendall(pack(episode.queue[0]))
            except OSError:
                self._fail(episode, "crash")

    def _fork(self, episode: _Episode) -> _Process:
        own, theirs = socket.socketpair()
        folder = ""
        try:
            folder = tempfile.mkdtemp(dir=self.folder)
            pid, is_first = self.namespaces.fork()
        except OSError:
            own.close()
            theirs.close()
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if pid == 0:
            try:
                own.close()
                self.parent.close()
                load_tool = partial(load, where="rollout")
                run_episode(
                    theirs, episode.spec, load_tool, self.memory, folder, is_first=is_first, confine=self.confine
                )
            finally:
                os._exit(0)
        theirs.close()
        own.settimeout(self.time_limit)  # a stopped process that does not read must not block this one
        return _Process(pid, own, folder)

    def _receive(self, episode: _Episode) -> None:
        """Take the result of an episode's process, which may send anything."""
        process = episode.process
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
            if not episode.started or message.get("id") != episode.queue[0]["id"]:
                is_broken = True  # no answer to the request that is being served
                break
            request, seconds = episode.queue.popleft(), time.monotonic() - episode.started
            episode.started = 0.0
            result = result_of(message, seconds)
            self._send(request, result)
            if result.status == "memory":  # the next request must have as much as the first
                self._lose(episode)
                break
        if is_broken and episode.process is process:
            self._fail(episode, "crash")
        self._start_next(episode)

    def _enforce_limits(self, episode: _Episode) -> None:
        """End an episode's process that takes too long or has too many children."""
        process = episode.process
        if process is None or not (episode.started or self.checks_idle):
            return
        elapsed = time.monotonic() - episode.started if episode.started else 0.0
        if len(descendants(process.pid, self.max_processes)) > self.max_processes:
            self._fail(episode, "processes")
        elif elapsed > self.time_limit and not (
            elapsed < STARVED_FACTOR * self.time_limit and self._is_starved(process, episode.cpu_before)
        ):
            request = episode.queue[0]
            if is_readable(process.sock):  # the result is there, and this process was busy
                self._receive(episode)
            if episode.queue and episode.queue[0] is request:
                self._fail(episode, "timeout")
        self._start_next(episode)

    def _is_starved(self, process: _Process, cpu_before: float) -> bool:
        """Return True if the process could run, but other processes have the cores. A sleeping one is not starved."""
        used = self._cpu_seconds(process) - cpu_before
        return used < STARVED_CPU_SHARE * self.time_limit and any(
            is_runnable(each) for each in (process.pid, *descendants(process.pid, self.max_processes))
        )

    def _cpu_seconds(self, process: _Process) -> float:
        return sum(process_usage(each)[0] for each in (process.pid, *descendants(process.pid, self.max_processes)))

    def _fail(self, episode: _Episode, status: Status) -> None:
        """End an episode's process, and settle the request that it was serving; between two, the next one."""
        text = {
            "timeout": f"no result within {self.time_limit:g} s",
            "processes": f"more than {self.max_processes} processes",
        }.get(status, "the tool's process has ended")
        seconds = round(time.monotonic() - episode.started, 6) if episode.started else 0.0
        failure = CallResult(status, text, seconds=seconds)
        episode.started = 0.0
        if episode.queue:
            self._send(episode.queue.popleft(), failure)
        else:
            episode.failure = failure
        self._lose(episode)

    def _lose(self, episode: _Episode) -> None:
        """End an episode's process, and settle the requests that wait: many calls that hang take the time of one."""
        self._end_process(episode)
        episode.is_lost = episode.spec["environment"] is not None
        lost = CallResult("crash", ENDED) if episode.is_lost else CallResult("skipped", "an earlier call had no result")
        while episode.queue:
            self._send(episode.queue.popleft(), lost)

    def _end_process(self, episode: _Episode) -> None:
        process, episode.process = episode.process, None
        if process is None:
            return
        process.sock.close()
        kill_all(process.pid)
        shutil.rmtree(process.folder, ignore_errors=True)

    def _reap_orphans(self) -> None:
        """End processes that have left their episode's process, which is possible without a PID namespace."""
        own = {episode.process.pid for episode in self.episodes.values() if episode.process is not None}
        for orphan in set(children(os.getpid())) - own - self.helpers:
            kill_all(orphan)


def is_readable(sock: socket.socket) -> bool:
    """Return True if a read would not block."""
    poller = select.poll()  # `select.select` takes no descriptor above 1,023
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; none if it has ended."""
    found = []
    threads: list[str] = []
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:  # a child belongs to the thread that has started it
        with (
            contextlib.suppress(OSError),  # this thread has ended
            open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file,
        ):
            found += [int(each) for each in file.read().split()]
    return found


def descendants(pid: int, at_most: int = 1 << 20) -> list[int]:
    """Return the ids of the living processes below a process.

    Args:
        at_most: the search ends once it has found more; of processes that multiply faster than they are read, it would
            never end.
    """
    found: list[int] = []
    waiting = children(pid)
    while waiting and len(found) <= at_most:
        pid_below = waiting.pop()
        if process_state(pid_below) not in ("", "Z"):
            found.append(pid_below)
        waiting += children(pid_below)  # also of a zombie: its main thread may have ended, and others not
    return found


def is_runnable(pid: int) -> bool:
    """Return True if a process waits for a core or has one."""
    return process_state(pid) == "R"


def process_state(pid: int) -> str:
    """Return the letter of a process's state, as in `ps`; "" if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def kill_all(pid: int) -> None:
    """Kill a child of this process and all processes below it, and reap the child.

    However fast they multiply, it ends: the kernel kills a PID namespace with its first process, and a process group at
    once. Processes that have left both become children of this process, and are killed when they are reaped. Those of
    another user that this one may not kill are left.
    """
    level = [pid]
    is_foreign = False
    while level:
        below = [child for each in level for child in children(each)]
        for each in level:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:  # of another user, as `sudo` starts them
                is_foreign |= each == pid
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it need not lead a group
                os.killpg(each, signal.SIGKILL)
        level = below
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG if is_foreign else 0)


def main(descriptor: int) -> None:
    """Run a supervisor process. `descriptor` is its end of the socket to the pool, from which the settings come."""
    parent = socket.socket(fileno=descriptor)
    parent.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, tools do not learn how their processes end
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError, ValueError):
        set_soft_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    settings = receive_first(parent)
    is_importing = True

    def close_in_helper() -> None:
        if is_importing:  # a helper with this socket would hide from the pool that the supervisor has ended
            parent.close()

    os.register_at_fork(after_in_child=close_in_helper)
    for path in settings["preload"]:
        load(path, "rollout")
    if settings["remote"] is not None:
        from grpo_ray.tools import remote_python

        remote_python.configure(settings["remote"])
    is_importing = False
    gc.collect()
    gc.freeze()  # the forks share these pages; a garbage collection would copy them all
    try:
        imported = filter(None, sys.path) if settings["confine"] else ()
        level = isolation.prepare(settings["isolation"], settings["folder"], [str(python_tool.CHILD), *imported])
    except ConfinementError as error:
        if settings["needs_isolation"]:
            parent.sendall(pack({"id": None, "refused": str(error)}))
            shutil.rmtree(settings["folder"], ignore_errors=True)
            return
        level = str(error)  # a call of the Python tool by the user's own code will fail
    parent.sendall(pack({"id": None, "isolation": level}))
    limits = settings["time_limit"], settings["memory"], settings["max_processes"]
    try:
        Supervisor(parent, settings["folder"], *limits, confine=settings["confine"]).run()
    finally:
        shutil.rmtree(settings["folder"], ignore_errors=True)
