"""Key numbers of a run: accuracy before and after, checkpoints, time per phase, and goodput."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from grpo_ray.config.heldout_keys import ranking_metric
from grpo_ray.config.schema import RunConfig
from grpo_ray.pages.report.charts import short
from grpo_ray.pages.report.read import MALFORMED_DATA_ERRORS, RunData
from grpo_ray.storage.checkpoints import CheckpointInfo, best_checkpoint
from grpo_ray.storage.numbers import LARGEST_NUMBER, is_plausible, to_float
from grpo_ray.telemetry.goodput import GOODPUT_METRICS, Goodput, compute_goodput, goodput_rows
from grpo_ray.telemetry.measures import (
    ACCURACY_MEASURES,
    BASELINE_MEASURES,
    Measure,
    heldout_measure,
    heldout_title,
    recorded_measure,
)
from grpo_ray.telemetry.profiler import PHASE_CATEGORIES, PHASES, seconds_by_phase
from grpo_ray.telemetry.run_facts import RunFacts, batch_sums
from grpo_ray.text.display import pluralize, safe_text

MAX_CHECKPOINTS_UNFOLDED, MAX_CHECKPOINTS = 12, 200
"""Rows of the checkpoint table that are shown without unfolding it, and rows in all."""
MAX_NAME_CHARS, MAX_LINE_CHARS = 120, 600
"""Longest name and longest line of text on the page, characters."""
WINDOW = 10
"""Logging steps at each end of a run over which the "first" and "last" means are taken."""
MEDIAN_WINDOW = 100
"""Latest logging steps that medians are taken over."""


@dataclass(frozen=True)
class PhaseShare:
    """Time spent in one phase of a step."""

    phase: str
    category: str
    """Category of phases that it belongs to, a key of `PHASE_CATEGORIES`."""
    colour: int
    """Number of the category's colour on the page, from 0."""
    seconds: float
    """Mean seconds per logging step."""
    share: float
    """Share of the time of all logging steps, 0 to 1."""
    meaning: str


@dataclass(frozen=True)
class CheckpointRow:
    """Row of the checkpoint table."""

    name: str
    step: int
    heldout: Mapping[str, Measure | None]
    """Key of each held-out set -> accuracy; None where it was not measured."""
    reward: float | None
    kept: bool
    """True if the checkpoint still exists."""
    best: bool


def run_name(run: RunData) -> str:
    return safe_text(run.folder.name, MAX_NAME_CHARS)


def last_step(run: RunData) -> int:
    """Return the latest logged step; 0 if there is none."""
    return int(run.rows[-1]["step"]) if run.rows else 0


def max_steps(run: RunData) -> int | None:
    """Return the configured number of steps; None if the config holds none."""
    value = to_float(run.section("grpo").get("max_steps"))
    return int(value) if 0 < value < LARGEST_NUMBER else None


def format_utc(seconds: float) -> str:
    """Format a time (seconds since 1970) as date and time in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a year outside of the calendar's range
        return "at an unknown time"


def baseline_accuracy(run: RunData, key: str) -> Measure | None:
    """Return the initial policy's accuracy on a held-out set; None if it was not measured."""
    return recorded_measure(run.baselines.get(key, {}).get("pass_at_1"), BASELINE_MEASURES)


def best_metric(run: RunData) -> str:
    """Return the metric that checkpoints are ranked by."""
    metric = safe_text(run.section("run").get("best_metric", RunConfig.best_metric), MAX_NAME_CHARS)
    return ranking_metric(metric, run.heldout_keys)


def checkpoint_rows(run: RunData) -> list[CheckpointRow]:
    """List every checkpoint that was ever written, by rising step; the best one that still exists is marked."""
    metrics_of_step = {int(row["step"]): row for row in run.rows}
    kept = {checkpoint.name: checkpoint for checkpoint in run.checkpoints}
    best = best_kept_checkpoint(run)
    steps = run.checkpoint_steps | {name: checkpoint.step for name, checkpoint in kept.items()}
    rows = []
    for name, step in sorted(steps.items(), key=lambda item: (item[1], item[0])):
        metrics = dict(metrics_of_step.get(step, {})) | dict(kept[name].metrics if name in kept else {})
        reward = to_float(metrics.get("reward/mean"))
        rows.append(
            CheckpointRow(
                name=safe_text(name, MAX_NAME_CHARS),
                step=step,
                heldout={key: heldout_measure(metrics, key) for key in run.heldout_keys},
                reward=reward if math.isfinite(reward) else None,
                kept=name in kept,
                best=best is not None and name == best.name,
            )
        )
    return rows


def best_kept_checkpoint(run: RunData) -> CheckpointInfo | None:
    """Return the best checkpoint that still exists; None if no existing one has a finite score."""
    return best_checkpoint(run.checkpoints, best_metric(run))


def finite_mean(values: Iterable[float]) -> float | None:
    """Return the mean of the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def recent_speed(run: RunData) -> tuple[float | None, float | None]:
    """Return seconds per logging step and completions per second: medians over the latest `MEDIAN_WINDOW` steps.

    Only one logging step of a generation batch includes sampling, so the medians are taken over whole batches. Either
    is None if it was not measured.
    """
    timed = [row for row in run.rows if is_plausible(row.get("step/seconds"))]
    per_batch = max(1, min(RunFacts.recorded(run.config).rows_per_batch, len(timed)))
    timed = timed[-max(per_batch, MEDIAN_WINDOW) :]
    seconds = batch_sums([row["step/seconds"] for row in timed], per_batch)
    completions = batch_sums(
        [row["step/seconds"] * row.get("step/completions_per_second", math.nan) for row in timed], per_batch
    )
    rates = [
        count / duration
        for count, duration in zip(completions, seconds, strict=True)
        if duration and math.isfinite(count)
    ]
    return (
        statistics.median(seconds) / per_batch if seconds else None,
        statistics.median(rates) if rates else None,
    )


def first_and_last_reward(run: RunData) -> tuple[float | None, float | None]:
    """Return the mean reward of the first and of the last `WINDOW` logging steps."""
    values = [value for _, value in run.series("reward/mean")]
    return finite_mean(values[:WINDOW]), finite_mean(values[-WINDOW:])


def summary_tiles(run: RunData) -> list[tuple[str, str, str]]:
    """Return the headline numbers: name, value, and a note below it."""
    tiles = []
    best = next((row for row in checkpoint_rows(run) if row.best), None)
    noun = RunFacts.recorded(run.config).heldout_noun
    for key in run.heldout_keys:
        before = baseline_accuracy(run, key)
        after = (best.heldout[key] if best else None) or _final_accuracy(run, key)
        if before or after:
            values = [f"{accuracy.value:.3f}" if accuracy else "?" for accuracy in (before, after)]
            tiles.append((heldout_title(key, noun), " → ".join(values), _compare_intervals(before, after)))
    first, last = first_and_last_reward(run)
    if first is not None and last is not None:
        tiles.append(("mean reward", f"{first:.3f} → {last:.3f}", f"first and last {WINDOW} logging steps"))
    planned = max_steps(run)
    tiles.append(("steps", f"{last_step(run)}{f' of {planned}' if planned else ''}", _count_groups(run)))
    # Medians, because the first steps and the steps with a checkpoint take longer.
    seconds, rate = recent_speed(run)
    if seconds is not None:
        note = f"{short(rate)} completions/s; medians" if rate is not None else ""
        tiles.append(("time per logging step", f"{short(seconds)} s", note))
    if memory := gpu_memory(run):
        tiles.append(memory)
    goodput = run_goodput(run)
    if goodput and goodput.failures:
        tiles.append(("failures", str(goodput.failures), f"{pluralize(goodput.redone_steps, 'step')} repeated"))
    return tiles


def gpu_memory(run: RunData) -> tuple[str, str, str] | None:
    """Return the tile of measured and estimated GPU memory; None if it was not measured."""
    memory = run.summary.get("memory")
    parts = [memory.get(name) if isinstance(memory, Mapping) else None for name in ("measured", "estimated")]
    measured, estimated = (part if isinstance(part, Mapping) else {} for part in parts)
    used, total, expected = (
        to_float(value) for value in (measured.get("used_gib"), measured.get("total_gib"), estimated.get("used_gib"))
    )
    if not math.isfinite(used + total):
        return None
    note = f"per GPU; {short(expected)} GiB estimated" if math.isfinite(expected) else "per GPU"
    return "GPU memory", f"{short(used)} of {short(total)} GiB", note


def _final_accuracy(run: RunData, key: str) -> Measure | None:
    """Return the best checkpoint's accuracy from the summary; its evaluation may have ended only after training."""
    sets = run.summary.get("heldout")
    summary = sets.get(key) if isinstance(sets, Mapping) else None
    return recorded_measure(summary.get("after") if isinstance(summary, Mapping) else None, ACCURACY_MEASURES)


def _compare_intervals(before: Measure | None, after: Measure | None) -> str:
    if before is None or after is None:
        return "initial policy not evaluated" if before is None else "no checkpoint evaluated yet"
    if not (before.has_interval and after.has_interval):
        return ""
    note = "; the intervals overlap, so the change may be noise" if before.overlaps(after) else ""
    return f"95 %: {before.interval()} → {after.interval()}{note}"


def _count_groups(run: RunData) -> str:
    if not len(run.groups):
        return ""
    import pyarrow.compute as pc

    num_problems = pc.count_distinct(run.groups["problem"]).as_py()
    return f"{pluralize(len(run.groups), 'group')}, {pluralize(num_problems, 'problem')}"


def phase_shares(run: RunData) -> list[PhaseShare]:
    """Return the time per phase, in the order of `PHASE_CATEGORIES`; phases without time are omitted."""
    metrics = [f"phase/{phase}" for phase in PHASES]
    plausible = (
        {name: row[name] for name in metrics if name in row.columns and is_plausible(row[name])} for row in run.rows
    )
    seconds = seconds_by_phase(plausible)
    num_timed = sum(is_plausible(row.get("phase/other")) for row in run.rows)
    total = sum(seconds.values())
    return [
        PhaseShare(
            phase=phase,
            category=category,
            colour=colour,
            seconds=seconds[phase] / num_timed,
            share=seconds[phase] / total,
            meaning=PHASES[phase],
        )
        for colour, (category, phases) in enumerate(PHASE_CATEGORIES.items())
        for phase in phases
        if total > 0 and seconds.get(phase, 0.0) > 0
    ]


def run_goodput(run: RunData) -> Goodput | None:
    """Compute the goodput so far; None if the events are malformed."""
    finite = (
        {name: row[name] for name in GOODPUT_METRICS if name in row.columns and math.isfinite(row[name])}
        for row in run.rows
    )
    timed = (row for row in finite if "step/seconds" in row)
    try:
        return compute_goodput(run.events, timed, use_gpu=bool(run.section("cluster").get("use_gpu")))
    except MALFORMED_DATA_ERRORS:  # events that this package did not write
        return None


def goodput_lines(run: RunData) -> list[tuple[str, str]]:
    """Return name and value of each part of the goodput that is not zero."""
    goodput = run_goodput(run)
    return goodput_rows(goodput) if goodput else []
