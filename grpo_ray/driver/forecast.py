"""Forecast of a run from a few of its steps: signal, hours, GPU hours, and the smallest gain that can be seen.

`grpo-ray check --forecast` takes some steps of the run as it is, with a learning rate of 0, so that all of them show
the initial policy: the same problems, sizes, workers, held-out sets and checkpoint, in a run folder of its own.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.driver.trial import run_trial, trial_run
from grpo_ray.evaluation.confidence import wilson_interval
from grpo_ray.storage.jsonl import read_events, read_metrics
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.goodput import compute_goodput
from grpo_ray.telemetry.measures import Measure, heldout_measure

STEPS = 4
"""Default number of steps."""
SAVING_PHASES = ("phase/measure", "phase/checkpoint")
"""Phases of a step that occur with a checkpoint only."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Expected course of a run, from some of its steps."""

    steps: int
    """Steps that were taken."""
    groups: int
    signal: Measure
    """Share of the groups whose rewards differ, so that they have a gradient, with its 95 % interval."""
    reward: float
    """Mean reward of the initial policy."""
    length: float
    """Mean length of its completions, tokens."""
    truncated_share: float
    startup_seconds: float
    """From the command to the first step: start of the workers and engines, and the measurement before training."""
    step_seconds: float
    """Median of the steps after the first, without measurement and checkpoint."""
    saving_seconds: float
    """Measurement and checkpoint of one step."""
    hours: float
    """Whole run: start, steps, checkpoints."""
    gpu_hours: float
    """Hours multiplied by the number of GPUs; 0 without."""
    cost: float | None
    """GPU hours multiplied by the price; None without a price."""
    baseline: Mapping[str, Measure]
    """Key of each held-out set -> accuracy, or mean score, of the initial policy."""
    smallest_gain: Mapping[str, float]
    """Key of each held-out set -> smallest difference from the initial policy that is not within chance, at 95 %."""
    folder: str
    """Run folder of the trial."""

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast in JSON's types."""
        return asdict(self)


def forecast(config: Config, steps: int = STEPS, price: float | None = None) -> Forecast:
    """Take some steps of a run, and estimate the whole of it.

    Args:
        steps: optimizer steps, at least 2; rounded up to whole generation batches.
        price: price of a GPU for an hour, in any currency.

    Raises:
        GrpoRayError: the trial was refused, or its workers failed.
    """
    folder, seconds = run_trial(forecast_config(config, steps))
    startup = compute_goodput(read_events(folder), (), config.cluster.use_gpu).startup_seconds
    rows = list(read_metrics(folder))
    return summarize_trial(config, rows, _baseline(config, folder), min(startup, seconds), folder.uri, price)


def forecast_config(config: Config, steps: int) -> Config:
    """Return the config of the trial: the run's, without learning, and with one checkpoint at the end."""
    taken = math.ceil(steps / config.steps_per_batch) * config.steps_per_batch
    grpo = replace(config.grpo, max_steps=taken, save_steps=taken, logging_steps=1, learning_rate=0.0)
    return replace(config, run=trial_run(config, "forecast"), grpo=grpo)


def _baseline(config: Config, folder: RunFolder) -> dict[str, Measure]:
    """Return the accuracy of the initial policy on each held-out set, as the trial has measured it."""
    measured = [event["metrics"] for event in read_events(folder) if event["event"] == "baseline"]
    metrics = measured[-1] if measured else {}
    found = ((key, heldout_measure(metrics, key)) for key in config.heldout_keys)
    return {key: measure for key, measure in found if measure is not None}


def summarize_trial(
    config: Config,
    rows: Sequence[Mapping[str, Any]],
    baseline: Mapping[str, Measure],
    startup_seconds: float,
    folder: str,
    price: float | None = None,
) -> Forecast:
    """Estimate a run from the metrics of some of its steps.

    Args:
        config: config of the run, not of the trial.
        rows: metrics of each step, the last of which has a checkpoint.
        baseline: key of each held-out set -> accuracy of the initial policy.
    """
    sampled = [row for row in rows if "group/equal_share" in row]
    groups = config.grpo.prompts_per_step * config.grpo.steps_per_generation
    with_signal = [round(groups * (1 - row["group/equal_share"])) for row in sampled]
    verdicts = [float(place < count) for count in with_signal for place in range(groups)]
    plain = [row["step/seconds"] - sum(row.get(name, 0.0) for name in SAVING_PHASES) for row in rows]
    step_seconds = statistics.median(plain[1:] or plain)
    saving_seconds = sum(rows[-1].get(name, 0.0) for name in SAVING_PHASES)
    grpo = config.grpo
    seconds = startup_seconds + grpo.max_steps * step_seconds
    seconds += math.ceil(grpo.max_steps / grpo.save_steps) * saving_seconds
    hours = seconds / 3600
    gpu_hours = hours * config.cluster.max_workers if config.cluster.use_gpu else 0.0

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in sampled)

    return Forecast(
        steps=len(rows),
        groups=len(verdicts),
        signal=wilson_interval(verdicts),
        reward=mean("reward/mean"),
        length=mean("completion/length_mean"),
        truncated_share=mean("completion/truncated_share"),
        startup_seconds=startup_seconds,
        step_seconds=step_seconds,
        saving_seconds=saving_seconds,
        hours=hours,
        gpu_hours=gpu_hours,
        cost=None if price is None else gpu_hours * price,
        baseline=baseline,
        smallest_gain={key: smallest_gain(measure) for key, measure in baseline.items()},
        folder=folder,
    )


def smallest_gain(baseline: Measure) -> float:
    """Return the smallest difference between two means of a held-out set that is not within chance, at 95 %.

    Two independent means with intervals of the half-width h differ by more than chance if they differ by more than
    sqrt(2) h. Policies are compared on the same problems, which can show smaller differences (`evaluation/paired.py`),
    so this is an upper bound.
    """
    return math.sqrt(2) * (baseline.high - baseline.low) / 2
