"""Verification in processes of its own, under limits that really end the work.

    with VerifierPool(processes=4) as pool:
        verdicts = pool.score([(completion, solution), ...])  # in input order

Why processes, and why not others: a completion can hold the interpreter lock for good (`9^{9^9}` in C), where
no thread, alarm or asyncio timeout ever runs again. Pebble 5.2 (forkserver) ends such work too. Measured
beside it, two runs on 4 shared cores with 1, 2 and 4 processes: 4,000 real completions at 4,700-6,900,
7,300-9,900 and 6,100-7,200 /s (this pool 7,600-8,400, 9,000-15,800 and 10,600-11,100 /s), then 252 of them
with 4 that hang, limit 3 s, in 13.4, 6.9 and 3.6 s (this pool 12.1, 6.1 and 3.1 s). What it lacks is more
than speed: a memory limit, a worker killed from outside told apart from one that crashed, and no threads in
the trainer whose `__main__` new workers import.

The pool starts one helper by `subprocess` (a fresh interpreter without torch, Ray, vLLM or the caller's
`__main__`, which must not be forked: it holds CUDA and threads) and the helper forks the workers; see
`helper`. A limit that is hit gives 0.0 and a status, never an exception. A worker, or the helper itself, that
someone else kills is replaced and its items are judged again, so no verdict depends on it.

Cores: each trainer process on a node has its own pool. By default a pool takes its share of the cores that
this process may use (affinity and cgroup quota, divided by LOCAL_WORLD_SIZE); GRPO_RAY_VERIFIER_PROCESSES
overrides it.
"""

import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from grpo_ray.errors import RewardError, VerifierError
from grpo_ray.rewards.sandbox.protocol import READY, STATUSES, pack_item, unpack_results

PROCESSES_VARIABLE = "GRPO_RAY_VERIFIER_PROCESSES"
MAX_CHARACTERS = 1 << 20
"""Characters of a completion that are sent, from its end: the answer stands there, and memory stays bounded.
"""
_MAX_FAILED_STARTS = 3
"""Helpers in a row that may end before they answer anything, until the pool gives up."""
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Verdict:
    """What became of one item."""

    reward: float | None
    """1.0 right, 0.0 wrong or not judged, None where the solution is not understood."""
    status: str
    """One of `frames.STATUSES`: ok, timeout, memory, crash, error."""


@dataclass
class _Pending:
    future: Future[Verdict]
    frame: bytes


class VerifierPool:
    """Judges (completion, solution) pairs in worker processes. Starts on first use; safe to call from any
    thread.

    processes: workers; None takes `default_processes()`. limit_seconds: clock time for one item.
    memory_bytes: address space of one worker. strict: see `correctness`. Raises RewardError for settings that
    cannot work.
    """

    def __init__(
        self,
        processes: int | None = None,
        limit_seconds: float = 3.0,
        memory_bytes: int = 1 << 30,
        strict: bool = True,
    ) -> None:
        self.processes = default_processes() if processes is None else processes
        if self.processes < 1:
            raise RewardError(f"processes={processes} must be at least 1, or None for this node's share of cores")
        if limit_seconds <= 0:
            raise RewardError(f"limit_seconds={limit_seconds} must be above 0; 3.0 is the default")
        if memory_bytes < 256 << 20:
            raise RewardError(f"memory_bytes={memory_bytes} must be at least {256 << 20}: the parser itself needs it")
        self.limit_seconds = limit_seconds
        self.memory_bytes = memory_bytes
        self.strict = strict
        self.counts: Counter[str] = Counter()
        """Items by status since the pool was made."""
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._next_number = 0
        self._helper: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._failed_starts = 0
        self._broken: str | None = None
        self._closed = False
        self._owner = os.getpid()

    def score(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts for (completion, solution) pairs, in their order. Raises VerifierError if no helper can
        run.
        """
        futures = [self.submit(completion, solution) for completion, solution in items]
        return [future.result() for future in futures]

    def submit(self, completion: str, solution: str) -> Future[Verdict]:
        """Starts judging one item and returns at once, so that judging hides behind generation."""
        future: Future[Verdict] = Future()
        with self._lock:
            self._forget_after_fork()
            if self._closed:
                raise VerifierError("this VerifierPool is closed; make a new one")
            if self._broken is not None:
                raise VerifierError(self._broken)
            number = self._next_number
            self._next_number += 1
            frame = pack_item(number, completion[-MAX_CHARACTERS:], solution, self.strict)
            self._pending[number] = _Pending(future, frame)
            if self._sock is None:
                self._start()
            else:
                _send(self._sock, frame)
        return future

    @property
    def pid(self) -> int | None:
        """The helper's process id, None before the first item; its children are the workers."""
        return None if self._helper is None else self._helper.pid

    def close(self) -> None:
        """Ends the helper and its workers. Items still open end with VerifierError. Twice is fine."""
        with self._lock:
            self._closed = True
            sock, helper = self._sock, self._helper
            self._sock = self._helper = None
            self._fail_pending(VerifierError("the VerifierPool was closed before this item was judged"))
            if sock is not None:
                # Wakes the reader thread, which closes it, as well as the helper.
                sock.shutdown(socket.SHUT_RDWR)
        if helper is not None:
            try:
                helper.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the helper; all under the lock

    def _start(self) -> None:
        """Starts a helper and gives it everything that is open."""
        ours, theirs = socket.socketpair()
        root = Path(__file__).resolve().parents[3]
        call = f"main({theirs.fileno()}, {self.processes}, {self.limit_seconds!r}, {self.memory_bytes})"
        self._helper = subprocess.Popen(
            [sys.executable, "-c", f"from grpo_ray.rewards.sandbox.supervisor import main; {call}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=_helper_environment(root),
            # `python -c` looks for packages in its working folder first, which may hold another grpo_ray.
            cwd=root,
            # Ctrl-C reaches the trainer only; the helper ends when the trainer's socket closes.
            start_new_session=True,
        )
        theirs.close()
        self._sock = ours
        threading.Thread(target=self._read, args=(ours, self._helper), name="verifier-reader", daemon=True).start()
        for pending in self._pending.values():
            _send(ours, pending.frame)

    def _read(self, sock: socket.socket, helper: subprocess.Popen[bytes]) -> None:
        """Thread: takes results from one helper until its socket closes, then replaces it if work is open."""
        buffer = bytearray()
        while data := _receive(sock):
            buffer += data
            for number, status, reward in unpack_results(buffer):
                if number != READY:
                    self._settle(number, Verdict(reward, STATUSES[status]))
        code = helper.wait()
        with self._lock:
            # After close() the socket is no longer the pool's, and only closed here.
            current = self._sock is sock
            sock.close()
            if not current:
                return
            self._sock = self._helper = None
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                self._broken = (
                    f"the verifier helper ended {_MAX_FAILED_STARTS} times in a row and judged nothing"
                    f" (last exit code {code}, its error is on stderr);"
                    f" is math-verify installed for {sys.executable}?"
                )
                self._fail_pending(VerifierError(self._broken))
            elif self._pending:
                self._start()

    def _settle(self, number: int, verdict: Verdict) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
            self._failed_starts = 0
            if pending is None:
                return
            self.counts[verdict.status] += 1
        pending.future.set_result(verdict)

    def _fail_pending(self, error: VerifierError) -> None:
        for pending in self._pending.values():
            pending.future.set_exception(error)
        self._pending.clear()

    def _forget_after_fork(self) -> None:
        """In a fork of the owner (a data-loading process, say) the helper is the owner's; this one needs its
        own.
        """
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._helper = self._sock = None
            self._pending.clear()


def default_processes() -> int:
    """Worker processes for one pool: GRPO_RAY_VERIFIER_PROCESSES, or this process's share of the node's
    cores.

    Raises RewardError where the variable is not a whole number above 0.
    """
    override = os.environ.get(PROCESSES_VARIABLE)
    if override is not None:
        if not override.isdecimal() or int(override) < 1:
            raise RewardError(f"{PROCESSES_VARIABLE}={override!r} must be a whole number above 0")
        return int(override)
    # Set by Ray Train and torchrun: trainer processes on this node, each with a pool of its own.
    pools = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, available_cores() // max(1, int(pools) if pools.isdecimal() else 1))


def available_cores() -> int:
    """Cores that this process may use: its affinity, and its cgroup's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        amount, period = quota.read_text().split()[:2]
        if amount != "max":
            cores = min(cores, max(1, int(amount) // int(period)))
    return cores


def _helper_environment(root: Path) -> dict[str, str]:
    one_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    )
    # The caller's own path, so that the helper finds the same packages, wherever Ray put them.
    path = [str(root), *(os.path.abspath(entry) for entry in sys.path if entry)]
    return {
        **os.environ,
        **one_thread,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        # Sets and hashes must come out the same in every helper.
        "PYTHONHASHSEED": "0",
    }


def _send(sock: socket.socket, frame: bytes) -> None:
    try:
        sock.sendall(frame)
    except OSError:
        # The helper died; the reader thread sees it too, and gives the item to the next one.
        return


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""
