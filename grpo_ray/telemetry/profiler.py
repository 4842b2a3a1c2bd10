"""Where the seconds of a step go: a worker's clock of named phases, and what it did when as a Chrome trace.

Phases are disjoint: what is timed inside another phase is taken out of that one, and `other` is what none covers. So
they sum to the step. On a GPU, work is only begun when a call returns; whoever ends a phase with work on its way
calls `wait_for_device` first, and only there.
"""

import functools
import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

PHASES = {
    "wait": "Seconds spent waiting for problems to be drawn.",
    "sync": "Seconds in which the engine got the learner's weights.",
    "generate": "Seconds in which the engine generated.",
    "wait_workers": "Seconds spent waiting for the other workers' engines to finish.",
    "score": "Seconds that scoring took after the last completion was there, on the slowest worker.",
    "prepare": "Seconds of what lies between: tokenising, padding, advantages, arranging micro-batches.",
    "forward_backward": "Seconds of forward and backward passes, waiting for the other workers' gradients included.",
    "optimizer": "Seconds in which the gradient was clipped and the optimizer took its step.",
    "measure": "Seconds that training waited for its checkpoint to be measured.",
    "checkpoint": "Seconds that training waited for its checkpoint to be written, uploading aside.",
    "other": "Seconds that none of the other phases covers.",
}
"""Phase -> what its seconds are, in the order of a step."""

GROUPS = {
    "generating": ("generate",),
    "learning": ("forward_backward", "optimizer"),
    "scoring": ("score",),
    "syncing": ("sync",),
    "waiting": ("wait", "wait_workers"),
    "checkpoints": ("measure", "checkpoint"),
    "all else": ("prepare", "other"),
}
"""What a reader is told of first -> its phases."""

NEEDED = ("generate", "forward_backward", "optimizer")
"""Phases without which there is no step; all others are overhead."""

MOST_EVENTS = 50_000
"""Events of a trace: about 4 MB. The newest are kept."""
SHORTEST = 5e-5
"""Seconds; what is shorter counts, but cannot be seen in a trace and is left out of it."""
LEARNER = "learner"
"""Lane of the thread that takes the steps."""


class PhaseProfiler:
    """One worker's clock. The thread that makes it is the learner's, and only its seconds are those of the step.

    Other threads may use it too: they get lanes of their own in the trace.
    """

    def __init__(
        self,
        trace: bool = False,
        wait_for_device: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """
        trace: keep what happened when, for `trace_file`.
        wait_for_device: returns when the device has done all that it was given.
        clock: seconds from any beginning.
        """
        self.trace = trace
        self.wait_for_device = wait_for_device
        self._clock = clock
        self._began = time.time() - clock()  # from the clock's seconds to those since 1970, alike on all workers
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._threads.lane = _Lane(LEARNER)
        self._learner: _Lane = self._threads.lane
        self._beside: Counter[str] = Counter()
        self._beside_since: dict[str, float] = {}
        self._events: deque[tuple[str, str, float, float | None]] = deque(maxlen=MOST_EVENTS)
        self._left_out = 0
        self.restart()

    def restart(self) -> None:
        """Forget the seconds so far; the trace stays."""
        with self._lock:
            now = self._clock()
            self._seconds: dict[str, float] = defaultdict(float)
            self._busy: dict[str, float] = defaultdict(float)
            self._tokens: Counter[str] = Counter()
            self._taken = self._learner.since = now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """What is done inside belongs to the phase."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end()

    def begin(self, phase: str) -> None:
        """Begin a phase, which the next `end` on this thread ends; for callbacks, which cannot say `with`."""
        lane = self._lane(phase)
        with self._lock:
            now = self._charge(lane)
            lane.open.append(_Span(phase, now))

    def end(self) -> None:
        """End the phase begun last."""
        lane = self._lane("")
        with self._lock:
            now = self._charge(lane)
            span = lane.open.pop()
            if span.worked:
                self._busy[span.phase] += span.own
            if not (lane.open and lane.open[-1].phase == span.phase):  # as a part of itself it would be drawn twice
                self._happened(span.phase, lane.name, span.since, now - span.since)
        if not lane.open and lane is not self._learner:
            del self._threads.lane

    def drawn(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """The items, with the time that each takes to come."""
        iterator = iter(items)
        while True:
            with self(phase):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def beside(self, lane: str) -> Callable[..., None]:
        """For the trace: something begins that others of its kind may overlap. Returns what says that it has ended.

        The lane shows the stretches in which at least one of them was under way.
        """
        if not self.trace:
            return _nothing
        with self._lock:
            self._beside[lane] += 1
            if self._beside[lane] == 1:
                self._beside_since[lane] = self._clock()

        def ended(*ignored: object) -> None:
            with self._lock:
                self._beside[lane] -= 1
                if not self._beside[lane]:
                    since = self._beside_since[lane]
                    self._happened(lane, lane, since, self._clock() - since)

        return ended

    def mark(self, name: str) -> None:
        """Mark a moment in the trace."""
        with self._lock:
            self._happened(name, LEARNER, self._clock(), None)

    def count(self, what: str, tokens: int) -> None:
        """Count tokens of the engine ("engine") or of the learner ("learner") for their speed.

        The innermost phase of this thread is the one that they were made in; one that only waits counts none.
        """
        lane: _Lane | None = getattr(self._threads, "lane", None)
        with self._lock:
            self._tokens[what] += tokens
            if lane and lane.open:
                lane.open[-1].worked = True

    def take(self) -> dict[str, float]:
        """The metrics of the time since they were last taken, `step/seconds`."""
        with self._lock:
            now = self._charge(self._learner)
            seconds, busy, tokens = self._seconds, self._busy, self._tokens
            total, self._taken = now - self._taken, now
            self._seconds, self._busy, self._tokens = defaultdict(float), defaultdict(float), Counter()
        seconds["other"] += max(0.0, total - sum(seconds.values()))
        metrics = {"step/seconds": total} | {f"phase/{phase}": seconds[phase] for phase in PHASES}
        if total > 0:
            metrics["step/overhead_share"] = 1 - sum(seconds[phase] for phase in NEEDED) / total
        # The engine may work in another thread while the learner waits for it; the learner's tokens come step by step.
        for what, worked in (("engine", busy["generate"]), ("learner", seconds["forward_backward"])):
            if worked > 0 and what in tokens:
                metrics[f"{what}/tokens_per_second"] = tokens[what] / worked
        return metrics

    def trace_file(self, rank: int) -> bytes:
        """What happened so far in Chrome's trace event format, a process for the worker and a thread for each lane.

        Times are microseconds since 1970, so that the files of several workers can be laid over each other.
        """
        with self._lock:
            happened, left_out = list(self._events), self._left_out
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys([LEARNER, *(each[1] for each in happened)]))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"worker {rank}"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        ]
        for lane, number in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
        for name, lane, since, seconds in happened:
            at = {"name": name, "pid": rank, "tid": lanes[lane], "ts": round((self._began + since) * 1e6, 1)}
            drawn = {"ph": "i", "s": "t"} if seconds is None else {"ph": "X", "dur": round(seconds * 1e6, 1)}
            events.append(at | drawn)
        whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"older_events_left_out": left_out}}
        return json.dumps(whole, separators=(",", ":")).encode()

    def _lane(self, phase: str) -> "_Lane":
        """This thread's lane; one that is not the learner's is named by the phase that it begins with."""
        if (lane := getattr(self._threads, "lane", None)) is None:
            lane = self._threads.lane = _Lane(phase)
        return lane

    def _charge(self, lane: "_Lane") -> float:
        """Give the lane's seconds since it last changed to its innermost phase; the time now."""
        now = self._clock()
        if lane.open:
            lane.open[-1].own += now - lane.since
            if lane is self._learner:
                self._seconds[lane.open[-1].phase] += now - lane.since
        lane.since = now
        return now

    def _happened(self, name: str, lane: str, since: float, seconds: float | None) -> None:
        if self.trace and (seconds is None or seconds >= SHORTEST):
            self._left_out += len(self._events) == MOST_EVENTS
            self._events.append((name, lane, since, seconds))


@dataclass
class _Span:
    """A phase under way."""

    phase: str
    since: float
    own: float = 0.0
    """Seconds so far, without those of the phases inside it."""
    worked: bool = False
    """Whether tokens were made in it."""


class _Lane:
    """What one thread is at: its open phases, the innermost last."""

    def __init__(self, name: str):
        self.name = name
        self.open: list[_Span] = []
        self.since = 0.0


def _nothing(*ignored: object) -> None:
    """There is no trace."""


def in_phase(phase: str) -> Callable[[Method], Method]:
    """A method whose time belongs to a phase of its object's `phases`."""

    def timed(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.phases(phase):
                return method(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return timed


def total_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each phase over the rows of a run; empty where there are none, as in runs from before there were."""
    timed = [row for row in rows if "phase/other" in row]
    return {phase: sum(row.get(f"phase/{phase}", 0.0) for row in timed) for phase in PHASES} if timed else {}


def seconds_by_group(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each of `GROUPS`, from those of the phases; empty where nothing is known."""
    return {name: sum(seconds[phase] for phase in phases) for name, phases in GROUPS.items()} if seconds else {}
