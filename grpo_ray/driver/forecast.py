"""Forecast of a run from a few of its steps: signal, hours, GPU hours, and the smallest significant gain.

`grpo-ray check --forecast` takes a few steps with the run's own problems, sizes, workers, held-out sets and checkpoint,
in a separate run folder. The learning rate is 0, so that all steps measure the initial policy.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.driver.cluster.connection import gpus_beside_workers
from grpo_ray.driver.trial import StoppedTrialError, constant_rate, run_trial, trial_run
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.confidence import wilson_interval
from grpo_ray.storage.jsonl import read_events, read_metrics
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
    """Groups that were generated for these steps, including those discarded by `grpo.dynamic_sampling`."""
    signal: Measure
    """Share of the groups whose rewards differ, so that they have a gradient, with its 95 % interval."""
    reward: float
    """Mean reward of the initial policy; NaN if no reward applied."""
    length: float
    """Mean length of its completions, tokens."""
    truncated_share: float
    startup_seconds: float
    """Time from the command to the first step: start of workers and engines, and the measurement before training."""
    step_seconds: float
    """Duration of one step without measurement and checkpoint: mean over the steps of each generation batch, then the
    median over the batches after the first one."""
    saving_seconds: float
    """Duration of one checkpoint, including its measurement unless a separate engine measures."""
    hours: float
    """Duration of the whole run: start, steps, checkpoints."""
    gpus: int
    """GPUs of the trial's workers, and of a separate engine that measures."""
    gpu_hours: float
    """Hours multiplied by the number of GPUs; 0 without GPUs."""
    cost: float | None
    """GPU hours multiplied by the price; None without a price."""
    baseline: Mapping[str, Measure]
    """Key of each held-out set -> accuracy, or mean score, of the initial policy."""
    smallest_gain: Mapping[str, float]
    """Key of each held-out set with an interval -> smallest difference from the initial policy that is statistically
    significant, at 95 %."""
    folder: str
    """Run folder of the trial."""

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast in JSON's types, None in place of NaN."""
        return _without_nan(asdict(self))


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(each) for name, each in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def forecast(config: Config, steps: int = STEPS, price: float | None = None) -> Forecast:
    """Take some steps of a run, and estimate the whole of it.

    Args:
        steps: optimizer steps; rounded up to whole generation batches, at least two.
        price: price of a GPU for an hour, in any currency.

    Raises:
        StoppedTrialError: a signal stopped the trial.
        GrpoRayError: the trial was refused, or its workers failed.
    """
    trial = run_trial(forecast_config(config, steps), config.run)
    if trial.stopped is not None:
        raise StoppedTrialError(trial.stopped, trial.folder)
    events = list(read_events(trial.folder))
    workers = next((event["workers"] for event in events if event["event"] == "began"), config.cluster.max_workers)
    measured = [event["metrics"] for event in events if event["event"] == "baseline"]
    measures = ((key, heldout_measure(measured[-1] if measured else {}, key)) for key in config.heldout_keys)
    return summarize_trial(
        config,
        list(read_metrics(trial.folder)),
        baseline={key: measure for key, measure in measures if measure is not None},
        startup_seconds=compute_goodput(events, (), config.cluster.use_gpu).startup_seconds,
        gpus=math.ceil(workers + gpus_beside_workers(config)) if config.cluster.use_gpu else 0,
        folder=trial.folder.uri,
        price=price,
    )


def forecast_config(config: Config, steps: int) -> Config:
    """Return the config of the trial: the run's, without learning, and with one checkpoint at the end."""
    batches = max(2, math.ceil(steps / config.steps_per_batch))
    grpo = replace(
        config.grpo,
        max_steps=batches * config.steps_per_batch,
        save_steps=batches * config.steps_per_batch,
        logging_steps=1,
        learning_rate=0.0,
        trl=constant_rate(config.grpo),  # some schedules cannot begin at 0
    )
    return replace(config, run=trial_run(config, "forecast"), grpo=grpo)


def summarize_trial(
    config: Config,
    rows: Sequence[Mapping[str, Any]],
    *,
    baseline: Mapping[str, Measure],
    startup_seconds: float,
    gpus: int,
    folder: str,
    price: float | None = None,
) -> Forecast:
    """Estimate a run from the metrics of some of its steps.

    Args:
        config: config of the run, not of the trial.
        rows: metrics of each step of whole generation batches, the last of which has a checkpoint.
        baseline: key of each held-out set -> accuracy of the initial policy.
        gpus: GPUs that the run holds.
    """
    grpo, batch = config.grpo, config.steps_per_batch
    sampled = [row for row in rows if "group/equal_share" in row]
    if not sampled:
        raise ConfigError("the forecast has no metrics of completions; run it again, with more --steps")
    sizes = [round(grpo.prompts_per_step * grpo.steps_per_generation * row.get("group/rounds", 1)) for row in sampled]
    verdicts = [
        float(place < round(size * (1 - row["group/equal_share"])))
        for size, row in zip(sizes, sampled, strict=True)
        for place in range(size)
    ]
    plain = [row["step/seconds"] - sum(row.get(name, 0.0) for name in SAVING_PHASES) for row in rows]
    batches = (plain[first : first + batch] for first in range(0, len(plain), batch))
    per_step = [statistics.fmean(seconds) for seconds in batches]
    step_seconds = statistics.median(per_step[1:] or per_step)
    saving_seconds = sum(rows[-1].get(name, 0.0) for name in SAVING_PHASES)
    hours = startup_seconds + grpo.max_steps * step_seconds
    hours = (hours + math.ceil(grpo.max_steps / grpo.save_steps) * saving_seconds) / 3600

    def mean(name: str) -> float:
        values = [row[name] for row in sampled if name in row]
        return statistics.fmean(values) if values else math.nan

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
        gpus=gpus,
        gpu_hours=hours * gpus,
        cost=None if price is None else hours * gpus * price,
        baseline=baseline,
        smallest_gain={
            key: gain for key, measure in baseline.items() if not math.isnan(gain := smallest_gain(measure))
        },
        folder=folder,
    )


def smallest_gain(baseline: Measure) -> float:
    """Return the smallest statistically significant difference between two means of a held-out set, at 95 %.

    Two independent means whose intervals have the half-width h differ significantly if they differ by more than
    sqrt(2) h. This is an upper bound, since policies are compared on the same problems, where smaller differences can
    be significant (`evaluation/paired.py`). NaN if the interval is unknown.
    """
    return math.sqrt(2) * (baseline.high - baseline.low) / 2
