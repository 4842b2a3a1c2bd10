"""The first numbers of a run: before and after, its checkpoints, and what failures cost."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from grpo_ray.config.schema import RunConfig
from grpo_ray.report.charts import short
from grpo_ray.report.read import SPOILT, Run, number
from grpo_ray.report.text import counted, plain
from grpo_ray.storage.checkpoints import CheckpointInfo, best_checkpoint
from grpo_ray.telemetry.goodput import Goodput, goodput_rows
from grpo_ray.telemetry.goodput import compute_goodput as reckon
from grpo_ray.telemetry.profiler import GROUPS, PHASES, total_seconds

FEW_CHECKPOINTS, MOST_CHECKPOINTS = 12, 200
"""So many are shown at once, and so many at all."""
NAME, LINE = 120, 600
"""Characters of a name and of a line of text."""


@dataclass(frozen=True)
class MeasuredAccuracy:
    """A share with its interval; the ends are NaN where they are not known."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = f" [{self.low:.3f}, {self.high:.3f}]" if math.isfinite(self.low + self.high) else ""
        return f"{self.value:.3f}{interval}"


@dataclass(frozen=True)
class PhaseShare:
    """Where a part of the run's time went."""

    phase: str
    what: str
    """The group of phases that it belongs to."""
    colour: int
    """The group's colour on the page."""
    seconds: float
    """Mean seconds of a logging step."""
    share: float
    """Of the time of all steps, 0 to 1."""
    meaning: str


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint that was written."""

    name: str
    step: int
    heldout: MeasuredAccuracy | None
    reward: float | None
    there: bool
    """Whether it is still kept."""
    best: bool


def name_of(run: Run) -> str:
    return plain(run.folder.name, NAME)


def steps_of(run: Run) -> int:
    return int(run.rows[-1]["step"]) if run.rows else 0


def max_steps(run: Run) -> int | None:
    """The steps that the run is to take, where the config says so."""
    value = number(run.fields("grpo").get("max_steps"))
    return int(value) if 0 < value < 1e15 else None


def clock(at: float) -> str:
    """A time as UTC."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # years that no calendar has
        return "at an unknown time"


def measured(values: Mapping[str, Any]) -> MeasuredAccuracy | None:
    """The held-out accuracy among a checkpoint's metrics."""
    found = [number(values.get(name)) for name in ("heldout/accuracy", "heldout/low", "heldout/high")]
    return MeasuredAccuracy(*found) if math.isfinite(found[0]) else None


def heldout_before(run: Run) -> MeasuredAccuracy | None:
    """The held-out accuracy of the policy that the run began with."""
    share = run.before.get("pass_at_1")
    if not isinstance(share, Mapping):
        return None
    found = [number(share.get(name)) for name in ("value", "low", "high")]
    return MeasuredAccuracy(*found) if math.isfinite(found[0]) else None


def best_metric(run: Run) -> str:
    return plain(run.fields("run").get("best_metric", RunConfig.best_metric), NAME)


def checkpoints(run: Run) -> list[CheckpointRow]:
    """All that were ever written, in the order of steps; of those that are there, the best is marked."""
    rows = {int(row["step"]): row for row in run.rows}
    stored = {each.name: each for each in run.stored}
    best = best_stored(run)
    steps = run.saved | {name: each.step for name, each in stored.items()}
    found = []
    for name, step in sorted(steps.items(), key=lambda item: (item[1], item[0])):
        values = dict(rows.get(step, {})) | dict(stored[name].metrics if name in stored else {})
        reward = number(values.get("reward/mean"))
        found.append(
            CheckpointRow(
                name=plain(name, NAME),
                step=step,
                heldout=measured(values),
                reward=reward if math.isfinite(reward) else None,
                there=name in stored,
                best=best is not None and name == best.name,
            )
        )
    return found


def best_stored(run: Run) -> CheckpointInfo | None:
    """The best of the checkpoints that are there."""
    metric = best_metric(run)
    return best_checkpoint([each for each in run.stored if math.isfinite(number(each.metrics.get(metric)))], metric)


def mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None


def usual(run: Run, metric: str) -> float | None:
    """Median of a metric over the last 100 logging steps."""
    known = [value for _, value in run.values(metric) if math.isfinite(value)][-100:]
    return statistics.median(known) if known else None


def reward_ends(run: Run) -> tuple[float | None, float | None]:
    """Mean reward of the first and of the last ten logging steps."""
    values = [value for _, value in run.values("reward/mean")]
    return mean(values[:10]), mean(values[-10:])


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The first numbers that one wants to know: what, the number, and what belongs to it."""
    found = []
    before, saved = heldout_before(run), checkpoints(run)
    best = next((each for each in saved if each.best), None)
    after = best.heldout if best else None
    again = number(run.summary.get("heldout_after"))
    if after is None and math.isfinite(again):  # of a checkpoint that was not measured while the run went on
        after = MeasuredAccuracy(again, math.nan, math.nan)
    if before or after:
        value = f"{before.value:.3f}" if before else "?"
        found.append(
            ("held-out accuracy", f"{value} → {f'{after.value:.3f}' if after else '?'}", _intervals(before, after))
        )
    first, last = reward_ends(run)
    if first is not None and last is not None:
        found.append(("mean reward", f"{first:.3f} → {last:.3f}", "first and last ten logging steps"))
    wanted = max_steps(run)
    found.append(("steps", f"{steps_of(run)}{f' of {wanted}' if wanted else ''}", _groups(run)))
    # Medians: the first steps and those with a checkpoint take longer.
    seconds, rate = (usual(run, metric) for metric in ("step/seconds", "step/completions_per_second"))
    if seconds is not None:
        said = f"{short(rate)} completions/s; medians" if rate is not None else ""
        found.append(("a logging step takes", f"{short(seconds)} s", said))
    cost = goodput(run)
    if cost and cost.failures:
        found.append(("failures", str(cost.failures), f"{counted(cost.redone_steps, 'step')} taken again"))
    return found


def _intervals(before: MeasuredAccuracy | None, after: MeasuredAccuracy | None) -> str:
    if before is None or after is None:
        return "before is not measured" if before is None else "no measured checkpoint yet"
    if not math.isfinite(before.low + before.high + after.low + after.high):
        return ""
    said = f"95 %: [{before.low:.3f}, {before.high:.3f}] → [{after.low:.3f}, {after.high:.3f}]"
    apart = before.high < after.low or after.high < before.low
    return said + ("" if apart else "; they overlap, so it may be chance")


def _groups(run: Run) -> str:
    if not len(run.groups):
        return ""
    import pyarrow.compute as pc

    return (
        f"{counted(len(run.groups), 'group')}, {counted(pc.count_distinct(run.groups['problem']).as_py(), 'problem')}"
    )


def time_spent(run: Run) -> list[PhaseShare]:
    """Where the run's time went, in the order of a step; what took no time is left out."""
    sane = ({name: value for name, value in row.items() if 0 <= value < 1e15} for row in run.rows)
    timed = [row for row in sane if "phase/other" in row]
    seconds = total_seconds(timed)
    total = sum(seconds.values())
    return [
        PhaseShare(phase, name, colour, seconds[phase] / len(timed), seconds[phase] / total, PHASES[phase])
        for colour, (name, phases) in enumerate(GROUPS.items())
        for phase in phases
        if total > 0 and seconds.get(phase, 0.0) > 0
    ]


def goodput(run: Run) -> Goodput | None:
    """What failures and waste cost so far; None where the events make no sense."""
    rows = [{name: value for name, value in row.items() if math.isfinite(value)} for row in run.rows]
    timed = [row for row in rows if "step/seconds" in row]
    try:
        return reckon(run.events, timed, use_gpu=bool(run.fields("cluster").get("use_gpu")))
    except SPOILT:  # whoever wrote the events, it was not this package
        return None


def goodput_lines(run: Run) -> list[tuple[str, str]]:
    cost = goodput(run)
    if cost is None:
        return []
    gpu = [("GPU time lost", f"{cost.gpu_seconds_lost / 3600:.2f} h")] if cost.gpu_seconds_lost else []
    return [*goodput_rows(cost), *gpu]
