"""What a run is and what came of it, in words and numbers: `config.yaml` and `summary.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.resilience.nodes import versions
from grpo_ray.storage import checkpoints
from grpo_ray.storage.jsonl import EventsFile, read_metrics
from grpo_ray.storage.run_folder import RunFolder, redact_credentials
from grpo_ray.telemetry.goodput import Goodput
from grpo_ray.telemetry.goodput import compute_goodput as reckon
from grpo_ray.telemetry.profiler import seconds_by_group, total_seconds


@dataclass(frozen=True)
class RunSummary:
    """What came of a run; `summary.json` in its folder."""

    steps: int
    wall_seconds: float
    """Of this launch, from the command to the end."""
    train_seconds: float
    """Of all steps, checkpoints and measuring included, over all launches of the run."""
    completions_per_second: float
    """Completions generated, scored and learned from, per second of `train_seconds`."""
    reward_first: float | None
    reward_last: float | None
    """Mean reward of the first and of the last ten logged steps."""
    heldout_before: float | None
    heldout_after: float | None
    """Held-out accuracy of the policy that the run began with, and of its best checkpoint (greedy, `evaluate.py`)."""
    heldout_problems: int
    best_checkpoint: str | None
    latest_checkpoint: str | None
    stopped: str | None
    """Signal that stopped the run before its last step; None if nothing did."""
    price: Goodput
    """What failures and waste cost."""
    phase_seconds: Mapping[str, float]
    """Seconds of each phase (`phases.PHASES`) over all steps; empty where none were measured."""


def describe_run(config: Config) -> dict[str, Any]:
    """The resolved config with the versions and the commit that ran it."""
    described = config.to_dict() | {"versions": versions()}
    described["run"]["storage_path"] = redact_credentials(config.run.storage_path)
    return described


def summarize_run(
    config: Config,
    folder: RunFolder,
    before: Any,
    after: float | None,
    heldout_problems: int,
    wall_seconds: float,
    stopped: str | None = None,
) -> RunSummary:
    """Summarise the whole run from `metrics.jsonl`, `events.jsonl` and its checkpoints.

    before: evaluation of the policy that the run began with, in JSON's types, or None.
    after: held-out accuracy of the best checkpoint; None or NaN if there is none.
    wall_seconds: of this launch.
    """
    rows = read_metrics(folder)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    seconds = sum(row["step/seconds"] for row in rows)
    steps = int(rows[-1]["step"]) if rows else 0
    stored = checkpoints.stored_checkpoints(folder)
    best = checkpoints.best_checkpoint(stored, config.run.best_metric)
    return RunSummary(
        steps=steps,
        wall_seconds=round(wall_seconds, 1),
        train_seconds=round(seconds, 1),
        completions_per_second=round(steps * config.completions_per_step / seconds, 1) if seconds else 0.0,
        reward_first=_mean(rewards[:10]),
        reward_last=_mean(rewards[-10:]),
        heldout_before=_finite(before["pass_at_1"]["value"] if before else None),
        heldout_after=_finite(after),
        heldout_problems=heldout_problems,
        best_checkpoint=best.uri if best else None,
        latest_checkpoint=stored[-1].uri if stored else None,
        stopped=stopped,
        price=reckon(EventsFile(folder).rows, rows, config.cluster.use_gpu),
        phase_seconds={phase: round(seconds, 2) for phase, seconds in total_seconds(rows).items()},
    )


def phase_breakdown(phase_seconds: Mapping[str, float]) -> str:
    """The parts of a run's time in a line, the largest first, without those below half a percent; "-" of nothing."""
    parts = seconds_by_group(phase_seconds)
    total = sum(parts.values())
    shares = [(seconds / total, name) for name, seconds in parts.items()] if total > 0 else []
    return (
        ", ".join(f"{name} {share:.0%}".replace("%", " %") for share, name in sorted(shares)[::-1] if share >= 0.005)
        or "-"
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(accuracy: float | None) -> float | None:
    """The accuracy, or None where nothing could be measured (NaN)."""
    return accuracy if accuracy is not None and math.isfinite(accuracy) else None
