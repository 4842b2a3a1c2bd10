"""Profiler of a worker: exclusive time of each phase of a step, and a Chrome trace of all spans.

A span is one stretch of time in which a thread is in a phase. Spans nest, and each phase is charged its exclusive time:
the time inside a nested span counts for the inner phase only. Time outside all spans is the phase `other`, so the
phases sum to the wall time of the step. On a GPU a call returns as soon as its work is queued; a span with queued
work has to call `wait_for_device` before it ends. The profiler itself never waits.
"""

import functools
import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

PHASES = {
    "wait": "Seconds spent waiting for the step's problems.",
    "sync": "Seconds spent copying the learner's weights to the engine, if it needs them, and comparing checksums.",
    "generate": "Seconds in which the engine generated; with rollout.max_staleness, only while the learner waited.",
    "tools": "Seconds spent waiting for tools and environments, and reading their results into the conversations.",
    "wait_workers": "Seconds spent waiting for the other workers' engines to finish.",
    "score": "Seconds of scoring after the last completion was generated, on the slowest worker.",
    "prepare": "Seconds spent on tokenizing, padding, advantages and packing micro-batches.",
    "forward_backward": "Seconds of forward and backward passes, including the gradient exchange between workers.",
    "optimizer": "Seconds of gradient clipping and the optimizer step.",
    "measure": "Seconds in which training waited for the evaluation of a checkpoint.",
    "checkpoint": "Seconds in which training waited for a checkpoint to be written, without its upload.",
    "other": "Seconds outside all other phases.",
}
"""Phase -> description of its metric `phase/<name>`, in the order of a step."""

PHASE_CATEGORIES = {
    "generating": ("generate",),
    "learning": ("forward_backward", "optimizer"),
    "scoring": ("score",),
    "syncing": ("sync",),
    "waiting": ("wait", "tools", "wait_workers"),
    "checkpoints": ("measure", "checkpoint"),
    "all else": ("prepare", "other"),
}
"""Category shown in summaries -> its phases."""

PRODUCTIVE_PHASES = ("generate", "forward_backward", "optimizer")
"""Phases that no step can do without; the time of all others is overhead."""

MAX_TRACE_EVENTS = 50_000
"""Events kept for a trace, about 4 MB; older ones are dropped."""
MIN_TRACE_SECONDS = 5e-5
"""Shortest span drawn in a trace, seconds. Shorter ones cannot be seen there; they still count for their phase."""
LEARNER = "learner"
"""Trace lane of the thread that takes the steps."""


class PhaseProfiler:
    """Phase times and trace of one worker.

    The thread that creates the profiler is the learner's; only its spans count for the phases of the step. Spans of
    other threads appear in lanes of their own in the trace.
    """

    def __init__(
        self,
        trace: bool = False,
        wait_for_device: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """
        Args:
            trace: record events for `chrome_trace`.
            wait_for_device: function that returns when all work queued on the device is done.
            clock: monotonic clock, seconds from any origin.
        """
        self.trace = trace
        self.wait_for_device = wait_for_device
        self._clock = clock
        # Converts the clock to seconds since 1970, which are comparable between workers.
        self._clock_offset = time.time() - clock()
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._threads.lane = _Lane(LEARNER)
        self._learner: _Lane = self._threads.lane
        self._concurrent: Counter[str] = Counter()
        self._concurrent_since: dict[str, float] = {}
        self._events: deque[_TraceEvent] = deque(maxlen=MAX_TRACE_EVENTS)
        self._dropped_events = 0
        self.progress = 0
        """Signs of progress so far: spans that began or ended, and calls of `note_progress`; for the hang watchdog."""
        self.reset()

    def reset(self) -> None:
        """Set all phase times and token counts to zero; the trace is kept."""
        with self._lock:
            now = self._clock()
            self._seconds: dict[str, float] = defaultdict(float)
            self._productive_seconds: dict[str, float] = defaultdict(float)
            self._tokens: Counter[str] = Counter()
            self._reported_at = self._learner.charged_until = now

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Charge the time of a `with` block to a phase."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end()

    def begin(self, phase: str) -> None:
        """Begin a span; the next `end` on the same thread ends it. For callbacks, which cannot use `with`."""
        lane = self._lane(phase)
        with self._lock:
            now = self._charge(lane)
            lane.open_spans.append(_Span(phase, now))
            self.progress += 1

    def end(self) -> None:
        """End the span of this thread that was begun last."""
        lane = self._lane("")
        with self._lock:
            now = self._charge(lane)
            span = lane.open_spans.pop()
            self.progress += 1
            if span.produced_tokens:
                self._productive_seconds[span.phase] += span.exclusive_seconds
            # A span directly inside one of the same phase would be drawn twice.
            if not (lane.open_spans and lane.open_spans[-1].phase == span.phase):
                self._record(_TraceEvent(span.phase, lane.name, span.start, now - span.start))
        if not lane.open_spans and lane is not self._learner:
            del self._threads.lane

    def timed_iterator(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; the time that each one takes to arrive is charged to the phase."""
        iterator = iter(items)
        while True:
            with self.span(phase):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def begin_concurrent(self, lane: str) -> Callable[..., None]:
        """Begin a trace-only task that may overlap others of its lane; return the function that ends it.

        The lane shows the intervals in which at least one task was running. The returned function ignores its
        arguments, so that it can be a future's callback.
        """
        if not self.trace:
            return _ignore
        with self._lock:
            self._concurrent[lane] += 1
            if self._concurrent[lane] == 1:
                self._concurrent_since[lane] = self._clock()

        def end(*ignored: object) -> None:
            with self._lock:
                self._concurrent[lane] -= 1
                if not self._concurrent[lane]:
                    start = self._concurrent_since[lane]
                    self._record(_TraceEvent(lane, lane, start, self._clock() - start))

        return end

    def mark_instant(self, name: str) -> None:
        """Add an instant event to the trace."""
        with self._lock:
            self._record(_TraceEvent(name, LEARNER, self._clock(), None))

    def note_progress(self) -> None:
        """Count a sign of progress inside a long span."""
        with self._lock:
            self.progress += 1

    def count_tokens(self, source: str, tokens: int) -> None:
        """Count tokens for the throughput of the engine or the learner.

        Tokens belong to the innermost open span of this thread. Spans without tokens only waited, for example for
        generation in another thread, so their time does not enter the engine's throughput.

        Args:
            source: "engine" or "learner".
            tokens: number of tokens generated or read.
        """
        lane: _Lane | None = getattr(self._threads, "lane", None)
        with self._lock:
            self._tokens[source] += tokens
            if lane and lane.open_spans:
                lane.open_spans[-1].produced_tokens = True

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, and start over.

        Returns:
            `step/seconds` (wall time), `phase/<name>` for each phase (exclusive seconds), `step/overhead_share`, and
            `engine/tokens_per_second` and `learner/tokens_per_second` where tokens were counted.
        """
        with self._lock:
            now = self._charge(self._learner)
            seconds, productive, tokens = self._seconds, self._productive_seconds, self._tokens
            wall_seconds, self._reported_at = now - self._reported_at, now
            self._seconds, self._productive_seconds = defaultdict(float), defaultdict(float)
            self._tokens = Counter()
        seconds["other"] += max(0.0, wall_seconds - sum(seconds.values()))
        metrics = {"step/seconds": wall_seconds} | {f"phase/{phase}": seconds[phase] for phase in PHASES}
        if wall_seconds > 0:
            metrics["step/overhead_share"] = 1 - sum(seconds[phase] for phase in PRODUCTIVE_PHASES) / wall_seconds
        # The engine may run in another thread, so its time is that of all spans with tokens. The learner counts its
        # tokens once per step, so its time is the whole phase.
        for source, busy in (("engine", productive["generate"]), ("learner", seconds["forward_backward"])):
            if busy > 0 and source in tokens:
                metrics[f"{source}/tokens_per_second"] = tokens[source] / busy
        return metrics

    def chrome_trace(self, rank: int) -> bytes:
        """Return all recorded events in Chrome's trace event format: one process per worker, one thread per lane.

        Timestamps are microseconds since 1970, so that the files of several workers can be merged.
        """
        with self._lock:
            recorded, dropped = list(self._events), self._dropped_events
        names = dict.fromkeys([LEARNER, *(event.lane for event in recorded)])
        lanes = {lane: number for number, lane in enumerate(names)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"worker {rank}"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        ]
        for lane, number in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
        for event in recorded:
            timestamp = round((self._clock_offset + event.start) * 1e6, 1)
            common = {"name": event.name, "pid": rank, "tid": lanes[event.lane], "ts": timestamp}
            if event.seconds is None:
                events.append(common | {"ph": "i", "s": "t"})
            else:
                events.append(common | {"ph": "X", "dur": round(event.seconds * 1e6, 1)})
        trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"older_events_left_out": dropped}}
        return json.dumps(trace, separators=(",", ":")).encode()

    def _lane(self, phase: str) -> "_Lane":
        """Return this thread's lane; a new one is named after the phase that it begins with."""
        lane: _Lane | None = getattr(self._threads, "lane", None)
        if lane is None:
            lane = self._threads.lane = _Lane(phase)
        return lane

    def _charge(self, lane: "_Lane") -> float:
        """Charge the time since the lane's last change to its innermost span; return the current time."""
        now = self._clock()
        if lane.open_spans:
            lane.open_spans[-1].exclusive_seconds += now - lane.charged_until
            if lane is self._learner:
                self._seconds[lane.open_spans[-1].phase] += now - lane.charged_until
        lane.charged_until = now
        return now

    def _record(self, event: "_TraceEvent") -> None:
        if self.trace and (event.seconds is None or event.seconds >= MIN_TRACE_SECONDS):
            self._dropped_events += len(self._events) == MAX_TRACE_EVENTS
            self._events.append(event)


class _TraceEvent(NamedTuple):
    """Event of the trace. Times are the profiler's clock, seconds."""

    name: str
    lane: str
    start: float
    seconds: float | None
    """Duration; None for an instant event."""


@dataclass
class _Span:
    """Open span of a thread."""

    phase: str
    start: float
    exclusive_seconds: float = 0.0
    """Time so far, without nested spans."""
    produced_tokens: bool = False
    """True once tokens were counted in it."""


class _Lane:
    """Open spans of one thread, innermost last."""

    def __init__(self, name: str):
        self.name = name
        self.open_spans: list[_Span] = []
        self.charged_until = 0.0


def _ignore(*ignored: object) -> None:
    """Do nothing; the end function of a task while no trace is recorded."""


class _HasProfiler(Protocol):
    profiler: PhaseProfiler


Owner = TypeVar("Owner", bound=_HasProfiler)


def in_phase(
    phase: str,
) -> Callable[[Callable[Concatenate[Owner, P], T]], Callable[Concatenate[Owner, P], T]]:
    """Decorate a method so that its time is charged to a phase of the object's `profiler`."""

    def decorate(method: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
        @functools.wraps(method)
        def timed(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with self.profiler.span(phase):
                return method(self, *args, **kwargs)

        return timed

    return decorate


def seconds_by_phase(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sum the seconds of each phase over the rows of `metrics.jsonl`; empty if no row has phases."""
    seconds: dict[str, float] = {}
    for row in rows:
        if "phase/other" in row:
            seconds = {phase: seconds.get(phase, 0.0) + row.get(f"phase/{phase}", 0.0) for phase in PHASES}
    return seconds


def seconds_by_category(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sum the result of `seconds_by_phase` over each of `PHASE_CATEGORIES`; empty if it is empty."""
    if not seconds:
        return {}
    return {name: sum(seconds[phase] for phase in phases) for name, phases in PHASE_CATEGORIES.items()}
