"""The supervisor process of a verifier pool: forks workers, gives them items, and ends those that exceed a limit.

`pool.VerifierPool` starts one supervisor in a fresh interpreter, without anything of the trainer (CUDA, threads, a
heavy `__main__`). It is single-threaded, loads and warms up the parser, and never parses a completion itself; each
worker is a fork of it, started warm in 2 ms. The supervisor measures time outside the worker and ends it with SIGKILL,
so even a worker that holds its interpreter lock for ever in C code is ended.

Limits per item:

- `time_limit` seconds of wall-clock time, extended for a starved worker (`processes/limits.py`), so that a right answer
  does not count as wrong on a busy machine.
- RLIMIT_CPU as a second limit, which holds even if the supervisor is stopped.
- RLIMIT_AS for memory; no core files.

Where the system supports it, the workers are also confined (`grpo_ray.processes`): they can neither write files nor use
the network.

The supervisor ends when its socket closes or its parent is gone, and each worker dies with the supervisor
(PR_SET_PDEATHSIG), so a trainer killed by SIGKILL leaves no process behind.

The messages are in `protocol`, the code of the workers in `worker`.
"""

import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_ray.errors import ConfinementError
from grpo_ray.processes.client_connection import ClientConnection
from grpo_ray.processes.confinement import Confinement
from grpo_ray.processes.isolation import package_places, readable_places
from grpo_ray.processes.limits import is_starved
from grpo_ray.processes.process_tree import process_usage
from grpo_ray.processes.supervisors import begin_supervisor, share_memory_with_forks
from grpo_ray.rewards.sandbox.protocol import (
    CRASH,
    MEMORY,
    OK,
    READY,
    RESULT,
    TIMEOUT,
    pack_result,
    unpack_items,
    unpack_results,
)
from grpo_ray.rewards.sandbox.worker import LATE_IMPORTS, WORKER_LIMITS, run_worker, warm_up

_MAX_RETRIES = 3
"""Retries of an item whose worker was killed by another process."""
_EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals by which other processes (users, the OOM killer) end a worker."""
_MAX_PREFETCH_BYTES = 16 << 10
"""Maximum size of an item that is sent to a worker before the worker has answered the previous one."""
_MAX_ITEMS_PER_WORKER = 5_000
"""Items after which a worker is replaced: the parser's caches only grow."""
_SLOW_SECONDS = 0.2
"""Seconds; after an item that took longer, the worker's memory is checked."""
_MAX_RESIDENT_FRACTION = 1 / 4
"""Fraction of the memory limit; a worker with more resident memory after a slow item is replaced."""
_PARENT_CHECK_SECONDS = 2.0
_REFUSED, _CANNOT_GRADE = 1, 2
"""Exit codes of the process that tries the confinement."""


@dataclass
class _Item:
    """A packed item and its retries."""

    number: int
    message: bytes
    retries: int = 0


@dataclass
class _Worker:
    """A worker process and the items that it has not answered yet."""

    pid: int
    sock: socket.socket
    items: list[_Item] = field(default_factory=list)
    """Items of the worker, at most two: the first is being graded, the second is prefetched in the worker's socket."""
    started: float = 0.0
    """Monotonic seconds at which the first item was started."""
    cpu_before: float = 0.0
    """CPU seconds that the worker had used before the first item."""
    deadline: float = 0.0
    """Monotonic seconds at which the first item's time is checked."""
    timed_out: bool = False
    graded: int = 0
    """Items answered."""


class Supervisor:
    """Event loop between the pool and the workers. Results are sent in the order in which they are ready."""

    def __init__(
        self,
        parent: socket.socket,
        processes: int,
        time_limit: float,
        memory_limit: int,
        confinement: Confinement | None = None,
    ) -> None:
        """Start without workers; they are forked as items arrive.

        Args:
            parent: Connection to the pool.
            processes: Maximum number of workers.
            time_limit: Seconds per item.
            memory_limit: Bytes of address space per worker.
            confinement: Confinement of the workers; None if they are not confined.
        """
        self.client = ClientConnection(parent)
        self.confinement = confinement
        self.processes = processes
        self.time_limit = time_limit
        self.memory_limit = memory_limit
        self.queue: deque[_Item] = deque()
        self.workers: dict[int, _Worker] = {}
        """Workers by the descriptor of their socket."""
        self.parent_pid = os.getppid()

    def run(self) -> None:
        """Serve until the parent closes its end of the socket or is gone."""
        while self._serve_once():
            pass
        for worker in list(self.workers.values()):
            self._terminate(worker)

    def _serve_once(self) -> bool:
        """Wait for one round of events and handle them. Returns False when the supervisor must end."""
        self._assign_items()
        poller = select.poll()
        poller.register(self.client, self.client.events)
        busy = [worker for worker in self.workers.values() if worker.items]
        for worker in self.workers.values():
            poller.register(worker.sock, select.POLLIN)
        now = time.monotonic()
        wait = min([_PARENT_CHECK_SECONDS, *(max(0.0, worker.deadline - now) for worker in busy)])
        for descriptor, _ in poller.poll(wait * 1000 + 1):
            if descriptor == self.client.fileno():
                if not self._take_items():
                    return False
            elif descriptor in self.workers:
                self._receive_result(self.workers[descriptor])
        self._enforce_time_limit()
        return os.getppid() == self.parent_pid

    # --- the pool

    def _take_items(self) -> bool:
        """Send pending results and queue new items. Returns False if the pool has closed its end."""
        is_open = self.client.exchange()
        self.queue.extend(_Item(number, message) for number, message in unpack_items(self.client.incoming))
        return is_open

    def _send_result(self, item: _Item, status: int, reward: float | None) -> None:
        self.client.send(pack_result(item.number, status, reward))

    # --- the workers

    def _assign_items(self) -> None:
        """Give queued items to idle and new workers, and prefetch a second item for busy workers."""
        idle = [worker for worker in self.workers.values() if not worker.items]
        while self.queue and (idle or len(self.workers) < self.processes):
            self._assign_next_item(idle.pop() if idle else self._fork_worker())
        for worker in list(self.workers.values()):
            # With a long queue, a second item is sent ahead, so that a worker does not wait for the supervisor between
            # items. Small items only: a full socket would block the supervisor.
            is_long = len(self.queue) > 2 * self.processes
            if is_long and len(worker.items) == 1 and len(self.queue[0].message) <= _MAX_PREFETCH_BYTES:
                self._assign_next_item(worker)

    def _assign_next_item(self, worker: _Worker) -> None:
        item = self.queue.popleft()
        worker.items.append(item)
        if len(worker.items) == 1:
            self._start_clock(worker)
        try:
            worker.sock.sendall(item.message)
        except OSError:
            self._handle_lost_worker(worker)

    def _start_clock(self, worker: _Worker) -> None:
        worker.started = time.monotonic()
        worker.cpu_before = process_usage(worker.pid)[0]
        worker.deadline = worker.started + self.time_limit

    def _fork_worker(self) -> _Worker:
        supervisor_end, worker_end = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                # If the worker kept these descriptors open, the others and the supervisor could not see them close.
                supervisor_end.close()
                self.client.close()
                for worker in self.workers.values():
                    worker.sock.close()
                run_worker(worker_end, self.time_limit, self.memory_limit, self.confinement)
                status = 0
            finally:
                os._exit(status)
        worker_end.close()
        # A worker that does not read (stopped by a signal, say) must not block the supervisor.
        supervisor_end.settimeout(self.time_limit)
        worker = _Worker(pid, supervisor_end)
        self.workers[supervisor_end.fileno()] = worker
        return worker

    def _receive_result(self, worker: _Worker) -> None:
        """Pass a worker's result on to the parent, and replace the worker if it has used too much memory."""
        try:
            data = worker.sock.recv(RESULT.size)
        except OSError:
            data = b""
        if len(data) < RESULT.size or not worker.items:
            self._handle_lost_worker(worker)
            return
        item = worker.items.pop(0)
        ((number, status, reward),) = unpack_results(bytearray(data))
        if number != item.number:
            raise RuntimeError(f"worker answered item {number}, expected was item {item.number}")
        worker.graded += 1
        self._send_result(item, status, reward)
        was_slow = time.monotonic() - worker.started > _SLOW_SECONDS
        if (
            status == MEMORY
            or worker.graded >= _MAX_ITEMS_PER_WORKER
            or (was_slow and process_usage(worker.pid)[1] > self.memory_limit * _MAX_RESIDENT_FRACTION)
        ):
            # The next item must have as much memory as the first, or its verdict would depend on this one.
            self.queue.extendleft(reversed(worker.items))
            self._terminate(worker)
        elif worker.items:
            self._start_clock(worker)

    def _enforce_time_limit(self) -> None:
        """End the workers that exceed the time limit; extend the deadline of starved ones."""
        now = time.monotonic()
        for worker in list(self.workers.values()):
            if not worker.items or now < worker.deadline:
                continue
            cpu_seconds = process_usage(worker.pid)[0] - worker.cpu_before
            if is_starved(self.time_limit, now - worker.started, cpu_seconds):
                worker.deadline = now + self.time_limit / 10  # check again soon
                continue
            worker.timed_out = True
            self._handle_lost_worker(worker)

    def _handle_lost_worker(self, worker: _Worker) -> None:
        """End a worker that is dead or out of time, and requeue its second item.

        If another process killed the worker, the first item is graded again, at most `_MAX_RETRIES` times; otherwise
        its result is a timeout or a crash.
        """
        exit_signal = self._terminate(worker)
        if not worker.items:
            return
        item, *prefetched = worker.items
        self.queue.extendleft(reversed(prefetched))
        if worker.timed_out or exit_signal == signal.SIGXCPU:
            self._send_result(item, TIMEOUT, 0.0)
        elif exit_signal in _EXTERNAL_SIGNALS and item.retries < _MAX_RETRIES:
            # Neither the supervisor nor the item ended the worker, so the item is graded again.
            item.retries += 1
            self.queue.appendleft(item)
        else:
            self._send_result(item, CRASH, 0.0)

    def _terminate(self, worker: _Worker) -> int:
        """Kill and reap a worker. Returns the signal that ended it (SIGKILL if this call did), 0 if none."""
        del self.workers[worker.sock.fileno()]
        worker.sock.close()
        # A worker that died before keeps its own exit status: an exiting process cannot be killed again.
        os.kill(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def prepare_confinement(make: Callable[[list[str]], Confinement] = Confinement) -> Confinement | None:
    """Prepare a confinement in which workers read the interpreter's files, write no files and have no network.

    A worker runs no code of the policy, but parses untrusted text with large libraries, which it may read wherever they
    are installed. If the system cannot confine workers, or a confined one cannot grade, this returns None and reports
    the reason on stderr: grading then continues under the other limits.
    """
    try:
        confinement = make([*readable_places(), *package_places()])
        try_confinement(confinement)
    except ConfinementError as error:
        os.write(2, f"verifier: its processes are not confined here: {error}\n".encode())
        return None
    return confinement


def try_confinement(confinement: Confinement) -> None:
    """Confine a forked process and grade one answer in it. Raises ConfinementError if either fails."""
    if (pid := os.fork()) == 0:
        status = _REFUSED
        try:
            from grpo_ray.rewards.math.verify import correctness

            confinement.apply([], WORKER_LIMITS)
            status = _CANNOT_GRADE
            # SymPy imports more modules for this; if it could not read them, right answers would count as wrong.
            if correctness(*LATE_IMPORTS) == 1.0:
                status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == _CANNOT_GRADE:
        raise ConfinementError("a confined process cannot read all modules that it grades with")
    if status != 0:
        raise ConfinementError("the kernel refused a step of the confinement")


def main(descriptor: int, processes: int, time_limit: float, memory_limit: int) -> None:
    """Run a supervisor process. `descriptor` is its end of the socket to the pool."""
    parent = begin_supervisor(descriptor)
    warm_up()
    share_memory_with_forks()
    confinement = prepare_confinement()
    parent.sendall(pack_result(READY, OK, float(confinement is not None)))
    Supervisor(parent, processes, time_limit, memory_limit, confinement).run()
