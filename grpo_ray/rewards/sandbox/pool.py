"""Verifier pool: grading in separate processes, under enforced time and memory limits.

    with VerifierPool(processes=4) as pool:
        verdicts = pool.grade([(completion, solution), ...])  # in input order

Separate processes are needed because grading a completion can hold the interpreter lock for ever (`9^{9^9}` in C code):
no thread, alarm or asyncio timeout of the same process ever runs again.

Pebble 5.2 (forkserver) also ends such items, but has no memory limit, does not distinguish a worker killed by another
process from one that crashed, and starts threads in the trainer, whose `__main__` its new workers import. It is also
slower. Measured on 4 shared cores with 1, 2 and 4 processes, two runs each:

    4,000 real completions, items/s               pebble      4,700-6,900    7,300-9,900     6,100-7,200
                                                  this pool   7,600-8,400    9,000-15,800    10,600-11,100
    252 of them and 4 that hang, limit 3 s, in s  pebble      13.4           6.9             3.6
                                                  this pool   12.1           6.1             3.1

The pool starts one supervisor by `subprocess`: a fresh interpreter without torch, Ray, vLLM or the caller's `__main__`,
which must not be forked because it holds CUDA and threads. The supervisor forks the workers; see `supervisor`. An item
that hits a limit gets 0.0 and a status, never an exception. A worker or supervisor killed by another process is
replaced and its items are graded again; an item whose worker is killed four times counts as a crash.

Cores: each trainer process on a node has its own pool. By default a pool takes its share of the cores that this process
may use (affinity and cgroup quota, divided by LOCAL_WORLD_SIZE); GRPO_RAY_VERIFIER_PROCESSES overrides it.
"""

import itertools
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from grpo_ray.errors import RewardError, VerifierError
from grpo_ray.processes.supervisor_client import MAX_FAILED_STARTS, SupervisorClient
from grpo_ray.processes.supervisors import is_needed
from grpo_ray.rewards.sandbox.protocol import READY, STATUSES, UNDECIDED, pack_item, unpack_results

PROCESSES_VARIABLE = "GRPO_RAY_VERIFIER_PROCESSES"
MAX_CHARACTERS = 1 << 20
"""Maximum characters of a completion that are sent, counted from its end, where the answer is. Bounds the memory."""
_CLOSE_SECONDS = 5.0
"""Seconds that a supervisor gets to end before it is killed."""


@dataclass(frozen=True)
class Verdict:
    """Result of grading one item."""

    reward: float | None
    """1.0 right; 0.0 wrong, or a limit was hit; None if the solution cannot be parsed."""
    status: str
    """Outcome of the grading, from `protocol.STATUSES`: ok, timeout, memory, crash, error."""
    is_undecided: bool = False
    """The answer counts as wrong because its form could not be compared with the solution."""


@dataclass
class _Pending:
    """An item without a verdict yet: its future, and its message, which is sent again to a new supervisor."""

    future: Future[Verdict]
    message: bytes


class VerifierPool:
    """Pool of verifier processes that grade (completion, solution) pairs.

    The processes start on first use. All methods may be called from any thread.
    """

    def __init__(
        self,
        processes: int | None = None,
        time_limit: float = 3.0,
        memory_bytes: int = 1 << 30,
        strict: bool = True,
    ) -> None:
        """Validate and store the settings; start nothing.

        Args:
            processes: Number of workers; None for `default_processes()`.
            time_limit: Wall-clock seconds for one item.
            memory_bytes: Address space of one worker.
            strict: See `grpo_ray.rewards.math.verify.correctness`.

        Raises:
            RewardError: A setting is out of range.
        """
        self.processes = default_processes() if processes is None else processes
        if self.processes < 1:
            raise RewardError(
                f"processes must be at least 1; got {processes}; set None for this process's share of cores"
            )
        if time_limit <= 0:
            raise RewardError(f"time_limit must be above 0; got {time_limit}; the default is 3.0")
        if memory_bytes < 256 << 20:
            raise RewardError(f"memory_bytes must be at least {256 << 20}, which the parser needs; got {memory_bytes}")
        self.time_limit = time_limit
        self.memory_bytes = memory_bytes
        self.strict = strict
        self.counts: Counter[str] = Counter()
        """Graded items by status."""
        self.is_confined: bool | None = None
        """True if the workers are confined (`grpo_ray.processes`); None until the supervisor has started."""
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._failure: str | None = None
        """Reason why no supervisor can run."""
        self._client = SupervisorClient(
            "grpo_ray.rewards.sandbox.supervisor",
            passes=is_needed,
            receive=self._take_results,
            ended=self._replace_supervisor,
            close_seconds=_CLOSE_SECONDS,
        )

    def grade(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Grade (completion, solution) pairs and return their verdicts in input order.

        Raises:
            VerifierError: No supervisor can run, or the pool is closed.
        """
        futures = [self.submit(completion, solution) for completion, solution in items]
        return [future.result() for future in futures]

    def submit(self, completion: str, solution: str) -> Future[Verdict]:
        """Start grading one item and return at once, so that grading overlaps with generation.

        Raises:
            VerifierError: No supervisor can run, or the pool is closed.
        """
        future: Future[Verdict] = Future()
        with self._client.lock:
            if self._client.forget_after_fork():
                self._pending.clear()
            if self._client.is_closed:
                raise VerifierError("this VerifierPool is closed; create a new one")
            if self._failure is not None:
                raise VerifierError(self._failure)
            number = next(self._numbers)
            message = pack_item(number, completion[-MAX_CHARACTERS:], solution, self.strict)
            self._pending[number] = _Pending(future, message)
            if self._client.is_running:
                self._client.send(message)
            else:
                try:
                    self._start_supervisor()
                except OSError as error:  # out of processes or descriptors
                    del self._pending[number]
                    raise VerifierError(f"no verifier process can be started: {error}") from error
        return future

    @property
    def pid(self) -> int | None:
        """The supervisor's process id, None before the first item. Its children are the workers."""
        return self._client.pid

    def close(self) -> None:
        """End the supervisor and its workers. Pending items fail with VerifierError. A second call does nothing."""
        error = VerifierError("the VerifierPool was closed before this item was graded")
        self._client.close(lambda: self._fail_pending(error))

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the supervisor; the client's lock is held in all methods but _take_results and _settle

    def _start_supervisor(self) -> None:
        """Start a supervisor and send it all pending items."""
        self._client.start(self.processes, self.time_limit, self.memory_bytes)
        for pending in self._pending.values():
            self._client.send(pending.message)

    def _take_results(self, buffer: bytearray) -> None:
        for number, status, reward in unpack_results(buffer):
            if number == READY:
                self.is_confined = reward == 1.0
            else:
                self._settle(number, Verdict(reward, STATUSES[status], is_undecided=status == UNDECIDED))

    def _replace_supervisor(self, code: int) -> None:
        """Start another supervisor if items are pending, or give up."""
        if self._client.has_failed:
            self._failure = (
                f"the verifier's supervisor process ended {MAX_FAILED_STARTS} times in a row without a verdict"
                f" (last exit code {code}); see its error on stderr, and check that math-verify is installed for"
                f" {sys.executable}"
            )
            self._fail_pending(VerifierError(self._failure))
        elif self._pending:
            try:
                self._start_supervisor()
            except OSError as error:  # out of processes or descriptors; the waiting callers must get an error
                self._fail_pending(VerifierError(f"no verifier process can be started: {error}"))

    def _settle(self, number: int, verdict: Verdict) -> None:
        """Count an item's verdict and set its future."""
        with self._client.lock:
            pending = self._pending.pop(number, None)
            self._client.count_result()
            if pending is None:
                return
            self.counts[verdict.status] += 1
        pending.future.set_result(verdict)

    def _fail_pending(self, error: VerifierError) -> None:
        for pending in self._pending.values():
            pending.future.set_exception(error)
        self._pending.clear()


def default_processes() -> int:
    """Return the number of workers of one pool: GRPO_RAY_VERIFIER_PROCESSES, or this process's share of the cores.

    Raises:
        RewardError: The variable is not a whole number above 0.
    """
    override = os.environ.get(PROCESSES_VARIABLE)
    if override is not None:
        if not override.isdecimal() or int(override) < 1:
            raise RewardError(f"{PROCESSES_VARIABLE} must be a whole number above 0; got {override!r}")
        return int(override)
    # Set by Ray Train and torchrun: trainer processes on this node, each with a pool of its own.
    pools = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, available_cores() // max(1, int(pools) if pools.isdecimal() else 1))


def available_cores() -> int:
    """Return the number of cores that this process may use: its affinity, and its cgroup's quota if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        amount, period = quota.read_text().split()[:2]
        if amount != "max":
            cores = min(cores, max(1, int(amount) // int(period)))
    return cores
