"""Goodput accounting: time that a run lost to failures, restarts and wasted samples.

Goodput is the share of wall time spent on steps that are part of the final result; badput is the rest. All numbers are
computed from the run's `events.jsonl` and `metrics.jsonl` alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

GOODPUT_METRICS = (
    "step/seconds",
    "group/equal_share",
    "completion/truncated_share",
    "reward/unscorable_share",
    "group/rounds",
)
"""Metrics that `compute_goodput` reads from each row."""
MAX_DUPLICATE_DISTANCE = 1000
"""Largest distance at which a duplicate of an event is recognised, in events of known kinds."""


@dataclass(frozen=True)
class Goodput:
    """Productive and lost time of a run, over all of its launches. Seconds, rounded to a tenth."""

    failures: int
    """Attempts and launches that ended unexpectedly. A change of the worker count is not a failure."""
    redone_steps: int
    """Steps lost because the next attempt resumed from an earlier checkpoint; a step lost twice counts twice."""
    redone_seconds: float
    """Time from the step of that checkpoint to the end of the attempt, including an unfinished step."""
    restart_seconds: float
    """Time from each detected failure until training continues; for a launch after a dead driver, from the launch."""
    startup_seconds: float
    """Time from launch to training, for the first launch and for each launch after one that ended normally."""
    no_signal_seconds: float
    """Step time multiplied by the share of zero-variance groups, assuming that all groups take equally long.

    May overlap with `truncated_seconds` and `unscorable_seconds`.
    """
    truncated_seconds: float
    """Step time multiplied by the share of completions that were cut off at the length limit."""
    unscorable_seconds: float
    """Step time multiplied by the share of completions without a verdict."""
    gpu_seconds_lost: float
    """`redone_seconds` and `restart_seconds`, multiplied by the number of workers of the attempt; 0 on CPU."""
    trained_seconds: float
    """Time of all steps in the final result, including checkpoints and evaluation."""
    put_aside_seconds: float = 0.0
    """Step time multiplied by the share of generated groups that no step used (`grpo.dynamic_sampling`), assuming that
    all groups take equally long. Most of these groups also have zero variance."""


def compute_goodput(events: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]], use_gpu: bool) -> Goodput:
    """Compute the goodput of a run, reading events and rows once, one by one.

    An incomplete sequence of events is not an error: only known intervals count.

    Args:
        events: lines of `events.jsonl` in the order of writing; duplicates and unknown kinds are ignored.
        rows: metrics of the steps in the final result, one row per step. A row without metrics of completions is a
            later step on the same generation batch as the row before.
        use_gpu: whether the workers had GPUs; without, `gpu_seconds_lost` is 0.
    """
    timeline = _Timeline()
    for event in _deduplicated(events):
        timeline.add(event)
    timeline.close()

    trained = no_signal = truncated = unscorable = put_aside = 0.0
    batch: Mapping[str, Any] = {}
    for row in rows:
        seconds = row.get("step/seconds", 0.0)
        # Only the first logging step on a generation batch has the metrics of its completions.
        batch = row if "group/equal_share" in row else batch
        row = {**batch, **row}
        trained += seconds
        no_signal += seconds * row.get("group/equal_share", 0.0)
        truncated += seconds * row.get("completion/truncated_share", 0.0)
        unscorable += seconds * row.get("reward/unscorable_share", 0.0)
        put_aside += seconds * (1 - 1 / row.get("group/rounds", 1.0))

    return Goodput(
        failures=timeline.failures,
        redone_steps=timeline.redone_steps,
        redone_seconds=round(timeline.redone_seconds, 1),
        restart_seconds=round(timeline.restart_seconds, 1),
        startup_seconds=round(timeline.startup_seconds, 1),
        no_signal_seconds=round(no_signal, 1),
        truncated_seconds=round(truncated, 1),
        unscorable_seconds=round(unscorable, 1),
        gpu_seconds_lost=round(timeline.worker_seconds, 1) if use_gpu else 0.0,
        trained_seconds=round(trained, 1),
        put_aside_seconds=round(put_aside, 1),
    )


def goodput_rows(goodput: Goodput) -> list[tuple[str, str]]:
    """Return a (name, value) row for each loss that is not zero, for the table at the end of a run."""

    def share_of_training(seconds: float) -> str:
        return f"{_format(seconds)} of training ({seconds / goodput.trained_seconds:.0%})".replace("%", " %")

    rows = []
    if goodput.startup_seconds:
        rows.append(("startup", _format(goodput.startup_seconds)))
    if goodput.failures:
        rows.append(("failures", str(goodput.failures)))
    if goodput.redone_steps or goodput.redone_seconds:
        steps = {0: "part of a step", 1: "1 step"}.get(goodput.redone_steps, f"{goodput.redone_steps} steps")
        rows.append(("steps repeated", f"{steps}, {_format(goodput.redone_seconds)}"))
    if goodput.restart_seconds:
        rows.append(("restarts", _format(goodput.restart_seconds)))
    if goodput.gpu_seconds_lost:
        rows.append(("GPU time lost", f"{_format(goodput.gpu_seconds_lost)}, all workers together"))
    if goodput.no_signal_seconds:
        rows.append(("zero-variance groups", share_of_training(goodput.no_signal_seconds)))
    if goodput.put_aside_seconds:
        rows.append(("unused groups", f"{share_of_training(goodput.put_aside_seconds)}, generated but not trained on"))
    if goodput.truncated_seconds:
        rows.append(("truncated completions", share_of_training(goodput.truncated_seconds)))
    if goodput.unscorable_seconds:
        rows.append(("unscorable completions", share_of_training(goodput.unscorable_seconds)))
    return rows


def _format(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _deduplicated(events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the events of known kinds, without the duplicates that a repeated write left shortly after."""
    seen: dict[tuple[Any, ...], None] = {}  # in the order of the events
    for event in events:
        if event["event"] in _HANDLERS and (key := (event["event"], event["at"], event.get("step"))) not in seen:
            seen[key] = None
            if len(seen) > MAX_DUPLICATE_DISTANCE:
                del seen[next(iter(seen))]
            yield event


def _elapsed(start: float, end: float) -> float:
    return max(0.0, end - start)  # the coordinator's clock may be set back


@dataclass
class _Attempt:
    """One worker group: its start, and those of its steps that are still part of the result."""

    start: int
    """Step that it resumed from."""
    workers: int
    reached: list[tuple[int, float]] = field(default_factory=list)
    """(step, time of its report) of the steps that are still part of the result, ascending; the first entry is
    (`start`, time when training began)."""
    failed_at: float | None = None
    """Time of its failure; None while it runs, and where no failure was recorded."""

    @property
    def end(self) -> float:
        return self.reached[-1][1] if self.failed_at is None else self.failed_at

    def discard_after(self, step: int) -> tuple[int, float]:
        """Discard the steps after `step`; return their number and the seconds that they took."""
        # If neither this step nor a later one was reported, no loss is known: the step itself may have been the one
        # that was unfinished when the attempt ended.
        at = next((at for reached, at in self.reached if reached >= step), None)
        if at is None:
            return 0, 0.0
        lost = self.reached[-1][0] - max(step, self.start), _elapsed(at, self.end)
        self.reached = [each for each in self.reached if each[0] < step]
        if self.reached:
            self.reached.append((step, at))
        self.failed_at = at
        return lost


class _Timeline:
    """State machine over a run's events. At any time the run trains, starts, restarts, or is idle."""

    def __init__(self) -> None:
        self.failures = self.redone_steps = 0
        self.redone_seconds = self.restart_seconds = self.startup_seconds = 0.0
        self.worker_seconds = 0.0
        """Lost seconds, multiplied by the workers of their attempt."""
        self._attempts: list[_Attempt] = []
        """Attempts with steps that are still part of the result."""
        self._running: _Attempt | None = None
        self._workers = 0
        """Worker count of the newest attempt."""
        self._launch_open = False
        """True while a launch has not ended normally."""
        self._failure_counted = False
        """True if the end of the running attempt already counts as a failure."""
        self._starting_since: float | None = None
        """Time at which the current start or restart began; None if there is none."""
        self._restarting = False
        """True if the current start follows an interruption."""
        self._last_event_at = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        """Advance the state by one event."""
        _HANDLERS[event["event"]](self, event)
        self._last_event_at = event["at"]

    def close(self) -> None:
        """Account for the time up to the last event."""
        self._end_start(self._last_event_at)

    def on_launched(self, event: Mapping[str, Any]) -> None:
        driver_died = self._launch_open
        if driver_died and not self._failure_counted:
            self.failures += 1
        self._end_start(self._last_event_at)  # a start of the dead launch counts up to its last event
        self._begin_start(event["at"], restarting=driver_died)
        self._running, self._launch_open, self._failure_counted = None, True, False

    def on_began(self, event: Mapping[str, Any]) -> None:
        if self._starting_since is None:
            # No failure: the worker count changed, or nodes were drained.
            resized = self._running is not None
            self._begin_start(self._running.end if self._running else event["at"], restarting=resized)
        self._discard_after(event["step"])
        self._running = _Attempt(event["step"], event["workers"])
        self._attempts.append(self._running)
        self._workers = event["workers"]
        self._launch_open, self._failure_counted = True, False

    def on_training(self, event: Mapping[str, Any]) -> None:
        if self._running and not self._running.reached:
            self._running.reached.append((self._running.start, event["at"]))
            self._end_start(event["at"])

    def on_step(self, event: Mapping[str, Any]) -> None:
        self.on_training(event)  # in case the `training` event is missing
        if self._running and event["step"] > self._running.reached[-1][0]:
            self._running.reached.append((event["step"], event["at"]))

    def on_failed(self, event: Mapping[str, Any]) -> None:
        self.failures += 1
        if self._running:
            self._running.failed_at = event["at"]
        self._end_start(event["at"])  # a first start that failed counts as startup, not as restart
        self._begin_start(event["at"], restarting=True)
        self._running, self._launch_open, self._failure_counted = None, True, True

    def on_ended(self, event: Mapping[str, Any]) -> None:
        self._starting_since = None  # the launch of a finished run starts no training
        self._running, self._launch_open, self._failure_counted = None, False, False

    def _begin_start(self, at: float, restarting: bool) -> None:
        self._starting_since, self._restarting = at, restarting

    def _end_start(self, at: float) -> None:
        """End the current start or restart, because training began or because it was interrupted."""
        if self._starting_since is None:
            return
        seconds = _elapsed(self._starting_since, at)
        if self._restarting:
            self.restart_seconds += seconds
            self.worker_seconds += seconds * self._workers
        else:
            self.startup_seconds += seconds
        self._starting_since = None

    def _discard_after(self, step: int) -> None:
        for attempt in self._attempts:
            steps, seconds = attempt.discard_after(step)
            self.redone_steps += steps
            self.redone_seconds += seconds
            self.worker_seconds += seconds * attempt.workers
        self._attempts = [attempt for attempt in self._attempts if attempt.reached]


_HANDLERS: dict[str, Callable[[_Timeline, Mapping[str, Any]], None]] = {
    "launched": _Timeline.on_launched,
    "began": _Timeline.on_began,
    "training": _Timeline.on_training,
    "step": _Timeline.on_step,
    "failed": _Timeline.on_failed,
    "ended": _Timeline.on_ended,
}
"""Kind of event -> its handler; events of other kinds are ignored."""
