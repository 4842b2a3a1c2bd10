"""The verifier's helper process: forks workers, hands them items, ends those that pass a limit.

One helper per pool, started by `pool.VerifierPool` in a fresh interpreter, so that nothing of the trainer
(CUDA, threads, a heavy `__main__`) is in it. It is single-threaded, has the parser warm, and never parses a
completion itself; each worker is a fork of it, 2 ms old and warm. The helper holds the clock, so it does not
matter what a worker's interpreter does: a lock held in C for good ends with SIGKILL like everything else.

Limits per item: `limit` seconds on the clock, where a starved worker is given until it has had a third of
that in CPU time (at most four limits), so that a busy machine does not turn an honest item into a wrong one;
RLIMIT_CPU behind it, which holds even if this helper is stopped; RLIMIT_AS for memory; no core files.

The helper ends when its socket closes or its parent is gone, and each worker dies with the helper
(PR_SET_PDEATHSIG), so a trainer killed by SIGKILL leaves nothing behind.

What goes over the sockets: see `frames`. What a worker does: see `work`.
"""

import gc
import os
import select
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field

from grpo_ray.rewards.sandbox.protocol import (
    CRASH,
    ITEM,
    MEMORY,
    OK,
    READY,
    RESULT,
    TIMEOUT,
    pack_result,
    unpack_results,
)
from grpo_ray.rewards.sandbox.worker import preload, run_worker

_MAX_RETRIES = 3
"""How often an item whose worker was killed from outside is tried again."""
_OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_READY_BYTES = 16 << 10
_ITEMS_PER_WORKER = 5_000
"""Items after which a worker is replaced: the parser's caches only grow."""
_SLOW_SECONDS = 0.2
_BLOATED_SHARE = 1 / 4
_STARVED_SHARE = 1 / 3
_STARVED_LIMITS = 4
_PARENT_CHECK_SECONDS = 2.0
_CHUNK = 1 << 20


@dataclass
class _Item:
    number: int
    frame: bytes
    tries: int = 0


@dataclass
class _Worker:
    pid: int
    sock: socket.socket
    items: list[_Item] = field(default_factory=list)
    """What it was handed and has not answered: the first is being judged, a second lies ready in its socket.
    """
    started: float = 0.0
    """Monotonic seconds."""
    cpu_before: float = 0.0
    """CPU seconds of the worker when it began its first item."""
    deadline: float = 0.0
    expired: bool = False
    served: int = 0


class Supervisor:
    """Takes items from `parent`, gives results back in the order in which they are done."""

    def __init__(self, parent: socket.socket, processes: int, limit: float, memory: int) -> None:
        self.parent = parent
        self.processes = processes
        self.limit = limit
        self.memory = memory
        self.waiting: deque[_Item] = deque()
        self.workers: dict[int, _Worker] = {}
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.parent_pid = os.getppid()

    def run(self) -> None:
        """Serves until the parent closes its end or is gone."""
        self.parent.setblocking(False)
        while self._serve_once():
            pass
        for worker in list(self.workers.values()):
            self._end(worker)

    def _serve_once(self) -> bool:
        self._hand_out()
        poller = select.poll()
        poller.register(self.parent, select.POLLIN | (select.POLLOUT if self.outgoing else 0))
        busy = [worker for worker in self.workers.values() if worker.items]
        for worker in self.workers.values():
            poller.register(worker.sock, select.POLLIN)
        now = time.monotonic()
        wait = min([_PARENT_CHECK_SECONDS, *(max(0.0, worker.deadline - now) for worker in busy)])
        for descriptor, _ in poller.poll(wait * 1000 + 1):
            if descriptor == self.parent.fileno():
                if not self._talk_to_parent():
                    return False
            elif descriptor in self.workers:
                self._hear(self.workers[descriptor])
        self._keep_time()
        return os.getppid() == self.parent_pid

    # --- the parent

    def _talk_to_parent(self) -> bool:
        self._flush()
        try:
            data = self.parent.recv(_CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self.incoming += data
        start = 0
        while len(self.incoming) >= start + ITEM.size:
            number, completion_size, solution_size, _ = ITEM.unpack_from(self.incoming, start)
            end = start + ITEM.size + completion_size + solution_size
            if len(self.incoming) < end:
                break
            self.waiting.append(_Item(number, bytes(self.incoming[start:end])))
            start = end
        del self.incoming[:start]
        return True

    def _report(self, item: _Item, status: int, reward: float | None) -> None:
        self.outgoing += pack_result(item.number, status, reward)
        self._flush()

    def _flush(self) -> None:
        """Sends what the parent takes now; never waits, or both sides might do so for ever."""
        if not self.outgoing:
            return
        try:
            del self.outgoing[: self.parent.send(self.outgoing)]
        except BlockingIOError:
            return
        except OSError:
            # The parent is gone; the next read says so.
            self.outgoing.clear()

    # --- the workers

    def _hand_out(self) -> None:
        idle = [worker for worker in self.workers.values() if not worker.items]
        while self.waiting and (idle or len(self.workers) < self.processes):
            self._give(idle.pop() if idle else self._fork())
        for worker in list(self.workers.values()):
            # A second item lies ready while work is plenty, so that no worker waits for this process between
            # two. Small ones only: a full socket would make the helper wait.
            plenty = len(self.waiting) > 2 * self.processes
            if plenty and len(worker.items) == 1 and len(self.waiting[0].frame) <= _READY_BYTES:
                self._give(worker)

    def _give(self, worker: _Worker) -> None:
        item = self.waiting.popleft()
        worker.items.append(item)
        if len(worker.items) == 1:
            self._start_clock(worker)
        try:
            worker.sock.sendall(item.frame)
        except OSError:
            self._lost(worker)

    def _start_clock(self, worker: _Worker) -> None:
        worker.started = time.monotonic()
        worker.cpu_before = process_usage(worker.pid)[0]
        worker.deadline = worker.started + self.limit

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                # A worker that kept these would hide from the others, and from us, that a socket closed.
                ours.close()
                self.parent.close()
                for worker in self.workers.values():
                    worker.sock.close()
                run_worker(theirs, self.limit, self.memory)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        # A worker that does not read (stopped from outside, say) must not stop the helper.
        ours.settimeout(self.limit)
        worker = _Worker(pid, ours)
        self.workers[ours.fileno()] = worker
        return worker

    def _hear(self, worker: _Worker) -> None:
        try:
            data = worker.sock.recv(RESULT.size)
        except OSError:
            data = b""
        if len(data) < RESULT.size or not worker.items:
            self._lost(worker)
            return
        item = worker.items.pop(0)
        ((number, status, reward),) = unpack_results(bytearray(data))
        if number != item.number:
            raise RuntimeError(f"worker answered item {number}, asked was {item.number}")
        worker.served += 1
        self._report(item, status, reward)
        slow = time.monotonic() - worker.started > _SLOW_SECONDS
        if (
            status == MEMORY
            or worker.served >= _ITEMS_PER_WORKER
            or (slow and process_usage(worker.pid)[1] > self.memory * _BLOATED_SHARE)
        ):
            # The next item must find the same memory as the first, or its verdict would depend on this one.
            self.waiting.extendleft(reversed(worker.items))
            self._end(worker)
        elif worker.items:
            self._start_clock(worker)

    def _keep_time(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers.values()):
            if not worker.items or now < worker.deadline:
                continue
            spent = process_usage(worker.pid)[0] - worker.cpu_before
            if spent < self.limit * _STARVED_SHARE and now - worker.started < self.limit * _STARVED_LIMITS:
                # It hardly ran: other work has the cores. Look again soon.
                worker.deadline = now + self.limit / 10
                continue
            worker.expired = True
            self._lost(worker)

    def _lost(self, worker: _Worker) -> None:
        """A worker is dead, or must be: find out why, settle its item, take back the one that lay ready."""
        exit_signal = self._end(worker)
        if not worker.items:
            return
        item, *ready = worker.items
        self.waiting.extendleft(reversed(ready))
        if worker.expired or exit_signal == signal.SIGXCPU:
            self._report(item, TIMEOUT, 0.0)
        elif exit_signal in _OUTSIDE_SIGNALS and item.tries < _MAX_RETRIES:
            # Not our doing, so not the item's either: someone outside ended the worker.
            item.tries += 1
            self.waiting.appendleft(item)
        else:
            self._report(item, CRASH, 0.0)

    def _end(self, worker: _Worker) -> int:
        """Ends and reaps a worker. Returns the signal that ended it (SIGKILL if that was this call), 0 if
        none.
        """
        del self.workers[worker.sock.fileno()]
        worker.sock.close()
        # Where it died before, its status stays what it was: a process that is exiting cannot be killed
        # again.
        os.kill(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def process_usage(pid: int) -> tuple[float, int]:
    """CPU seconds and resident bytes of a process; zeros where the system does not tell, which only lengthens
    limits.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0, 0
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return cpu, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def main(descriptor: int, processes: int, limit: float, memory: int) -> None:
    """Entry of the helper process: `descriptor` is its end of the socket to the pool."""
    parent = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload()
    # The forks share these pages; a collection would copy them all.
    gc.collect()
    gc.freeze()
    parent.sendall(pack_result(READY, OK, 0.0))
    Supervisor(parent, processes, limit, memory).run()
