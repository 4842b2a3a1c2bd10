"""State of a run as the live view shows it, accumulated from the feed. Nothing is drawn here, and no clock is read."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from grpo_ray.config.heldout_keys import heldout_label
from grpo_ray.telemetry.events import event_line, event_text
from grpo_ray.telemetry.measures import Measure, heldout_measures
from grpo_ray.telemetry.profiler import seconds_by_category, seconds_by_phase
from grpo_ray.text.display import one_line

RECENT_ROWS = 20
"""Logging steps over which speed, remaining time and shares of phases are averaged."""
CURVE_POINTS = 512
"""Largest number of points of a curve; longer runs have a point for several steps."""
WARNINGS_KEPT = 20
STAGES_KEPT = 100


@dataclass
class Stage:
    """One part of the work outside of the steps, such as `starting the engine`."""

    text: str
    begun: float
    """Seconds since 1970."""
    ended: float | None = None
    done: int | None = None
    total: int | None = None
    """Progress in any unit; None: unknown."""

    def seconds(self, now: float) -> float:
        """Return the duration so far."""
        return max(0.0, (now if self.ended is None else self.ended) - self.begun)


class Curve:
    """Mean of a metric over equal intervals of steps, in bounded memory."""

    def __init__(self, max_points: int = CURVE_POINTS):
        self._max_points = max_points
        self._steps_per_point = 1
        self._points: list[tuple[int, float, int]] = []
        """Number of the interval, sum, count."""

    def add(self, step: int, value: float) -> None:
        """Add the value of a step that is later than all others; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        interval = step // self._steps_per_point
        if self._points and self._points[-1][0] == interval:
            _, total, count = self._points.pop()
            self._points.append((interval, total + value, count + 1))
        else:
            self._points.append((interval, value, 1))
        if len(self._points) > self._max_points:
            self._steps_per_point *= 2
            self._points = [
                (interval, sum(each[1] for each in pair), sum(each[2] for each in pair))
                for interval, group in groupby(self._points, key=lambda each: each[0] // 2)
                for pair in [list(group)]
            ]

    def forget_after(self, step: int) -> None:
        """Drop the points of later steps; one that holds the step itself is kept."""
        while self._points and self._points[-1][0] * self._steps_per_point > step:
            self._points.pop()

    def means(self, count: int) -> list[float]:
        """Return at most `count` means over equal intervals, oldest first; an interval without values is left out."""
        if not self._points or count < 1:
            return []
        first, last = self._points[0][0], self._points[-1][0]
        width = -(-(last - first + 1) // count)
        return [
            sum(each[1] for each in interval) / sum(each[2] for each in interval)
            for _, group in groupby(self._points, key=lambda each: (each[0] - first) // width)
            for interval in [list(group)]
        ]


@dataclass(frozen=True)
class PolicyMeasure:
    """Accuracy of one policy on one held-out set."""

    accuracy: Measure
    step: int | None = None
    """Step of the measured policy; None for the initial one."""


def policy_measures(metrics: Mapping[str, Any], step: int | None = None) -> dict[str, PolicyMeasure]:
    """Return the accuracy of a step's policy by held-out label, which is "" for a single unnamed set."""
    measures = heldout_measures(metrics)
    return {one_line(heldout_label(key)): PolicyMeasure(measure, step) for key, measure in measures.items()}


@dataclass
class RunView:
    """Progress of a run up to now.

    Args:
        name: of the run.
        max_steps: last step of the run.
        workers: number of workers at the start; an elastic run may change it.
        uses_gpus: each worker has a GPU.
        started: start of this launch, seconds since 1970.
    """

    max_steps: int
    started: float
    name: str = ""
    workers: int = 1
    uses_gpus: bool = False

    step: int = 0
    first_step: int = 0
    """Step that this launch, or its latest attempt, continued from."""
    is_training: bool = False
    """False while there is a stage to show."""
    attempts: int = 0
    failures: int = 0
    last_failure: str = ""
    stages: list[Stage] = field(default_factory=list)
    """Stages of the latest start, oldest first; the last one may be unfinished."""
    rewards: Curve = field(default_factory=Curve)
    signal: Curve = field(default_factory=Curve)
    heldout: dict[str, PolicyMeasure] = field(default_factory=dict)
    """Label of a held-out set -> latest measure."""
    best: dict[str, PolicyMeasure] = field(default_factory=dict)
    baseline: dict[str, PolicyMeasure] = field(default_factory=dict)
    warnings: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=WARNINGS_KEPT))
    """Latest events `warning`, oldest first; their texts are safe lines."""
    last_event: tuple[float, str] | None = None
    """Time, seconds since 1970, and text."""
    rows: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT_ROWS))
    """Latest rows of metrics."""
    _step_counts: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_ROWS))
    """Steps that each of these rows covers."""

    def begin_stage(self, text: str, done: int | None, total: int | None, now: float) -> None:
        """Begin a stage, or note the progress of the current one."""
        text = one_line(text)
        if self.is_training:
            self.is_training, self.stages = False, []
        current = self.stages[-1] if self.stages else None
        if current is None or current.text != text or current.ended is not None:
            self.end_stage(now)
            current = Stage(text, now)
            self.stages = [*self.stages, current][-STAGES_KEPT:]
        current.done, current.total = done, total

    def end_stage(self, now: float) -> None:
        """End the current stage, if there is one."""
        if self.stages and self.stages[-1].ended is None:
            self.stages[-1].ended = now

    def begin_training(self, now: float) -> None:
        """Note that the workers take steps."""
        self.end_stage(now)
        self.is_training = True

    def add_event(self, entry: Mapping[str, Any], now: float) -> None:
        """Update the state from an entry of `events.jsonl`."""
        kind = entry["event"]
        if kind == "began":
            self.attempts += 1
            self.workers = entry.get("workers") or self.workers
        elif kind == "training":
            self.begin_training(now)
        elif kind == "failed":
            self.failures += 1
            self.last_failure = one_line(event_text(entry))
        elif kind == "baseline":
            self.baseline |= policy_measures(entry["metrics"])
        elif kind == "warning":
            self.warnings.append({**entry, "what": one_line(entry["what"])})
        is_start = kind == "began" and not entry.get("checkpoint")
        if not is_start and (line := event_line(entry, "live view")):
            self.last_event = (entry["at"], one_line(line))

    def resume(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Go back to a step, and discard the state after it: the later steps are taken again.

        Args:
            rows: metrics up to this step; rows later than the latest step shown are added.
        """
        for curve in (self.rewards, self.signal):
            curve.forget_after(step)
        for measures in (self.heldout, self.best):
            for label in [label for label, each in measures.items() if (each.step or 0) > step]:
                del measures[label]
        for row in rows:
            if self.step < row["step"] <= step:
                self._add_values(row)
        self.step = self.first_step = step
        self.rows.clear()
        self._step_counts.clear()

    def add_step(self, row: Mapping[str, Any], now: float) -> None:
        """Add the metrics of a logging step."""
        if not self.is_training:
            self.begin_training(now)
        self._step_counts.append(row["step"] - self.step)
        self.rows.append(row)
        self._add_values(row)
        self.step = row["step"]

    def _add_values(self, row: Mapping[str, Any]) -> None:
        if "reward/mean" in row:
            self.rewards.add(row["step"], row["reward/mean"])
        if (share := signal_share(row)) is not None:
            self.signal.add(row["step"], share)
        self.add_measures(row["step"], row)

    def add_measures(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the held-out metrics of a step's policy."""
        for label, measure in policy_measures(metrics, step).items():
            latest, best = self.heldout.get(label), self.best.get(label)
            # A driver measures the checkpoint that it resumes from before it receives the older rows.
            if latest is None or (latest.step or 0) <= step:
                self.heldout[label] = measure
            if best is None or measure.accuracy.value > best.accuracy.value:
                self.best[label] = measure

    @property
    def latest(self) -> Mapping[str, Any]:
        """Metrics of the latest step; empty before the first one."""
        return self.rows[-1] if self.rows else {}

    @property
    def seconds_per_step(self) -> float | None:
        """Mean duration of the recent steps; None before the first one."""
        steps = sum(self._step_counts)
        seconds = sum(row.get("step/seconds", 0.0) for row in self.rows)
        return seconds / steps if steps and seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the last step; None if it is unknown."""
        per_step = self.seconds_per_step
        return None if per_step is None else max(0, self.max_steps - self.step) * per_step

    @property
    def completions_per_second(self) -> float | None:
        """Recent completions per second of one GPU, or of one worker on CPUs; all time included."""
        return self._per_worker(lambda row: row.get("step/completions_per_second"))

    @property
    def tokens_per_second(self) -> float | None:
        """Recent completion tokens per second of one GPU, or of one worker on CPUs; all time included."""
        length: float | None = None

        def tokens(row: Mapping[str, Any]) -> float | None:
            nonlocal length
            # Only the first logging step on a generation batch has the length of its completions.
            length = row.get("completion/length_mean", length)
            completions = row.get("step/completions_per_second")
            return None if completions is None or length is None else completions * length

        return self._per_worker(tokens)

    def _per_worker(self, rate: Callable[[Mapping[str, Any]], float | None]) -> float | None:
        """Average a rate over the time of the recent rows, and divide it by the number of workers."""
        weighted = [
            (row["step/seconds"], value)
            for row in self.rows
            if row.get("step/seconds") and (value := rate(row)) is not None
        ]
        seconds = sum(each for each, _ in weighted)
        return sum(each * value for each, value in weighted) / seconds / self.workers if seconds else None

    @property
    def engines(self) -> int:
        """Number of dedicated engines in the latest step; 0 with colocated ones."""
        return int(self.rows[-1].get("engine/count", 0)) if self.rows else 0

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of the recent steps' time by category of phases; empty if it was not measured."""
        seconds = seconds_by_category(seconds_by_phase(self.rows))
        total = sum(seconds.values())
        return {name: value / total for name, value in seconds.items()} if total > 0 else {}


def signal_share(row: Mapping[str, Any]) -> float | None:
    """Return the share of a step's groups that have signal; None if it is unknown."""
    if "group/signal_share" in row:
        return float(row["group/signal_share"])
    return 1.0 - row["group/equal_share"] if "group/equal_share" in row else None
