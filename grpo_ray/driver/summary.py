"""Description and result of a run: `config.yaml` and `summary.json`."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.recorded import CODE_FIELDS, untrusted_rewards, untrusted_tools
from grpo_ray.config.schema import Config
from grpo_ray.resilience.nodes import versions
from grpo_ray.storage import checkpoints
from grpo_ray.storage.jsonl import read_events, read_metrics
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.goodput import Goodput, compute_goodput
from grpo_ray.telemetry.profiler import seconds_by_category, seconds_by_phase
from grpo_ray.text.redaction import known_secrets, redact_settings

PAUSED = "run.pause_at"
"""Value of `RunSummary.stopped` for a run that has reached this step."""
REWARD_ROWS = 10
"""Number of logged steps over which the first, and the last, mean reward is taken."""


@dataclass(frozen=True, kw_only=True)
class HeldoutSummary:
    """Measures of one held-out set (`EvaluationResult.measures`): accuracy, its interval, and more."""

    problems: int
    before: Mapping[str, float]
    """Measures of the initial policy; empty if it was not measured, or no problem can be scored."""
    after: Mapping[str, float]
    """The same of the best checkpoint."""


@dataclass(frozen=True)
class RunSummary:
    """Result of a run, written to `summary.json` in its folder."""

    steps: int
    wall_seconds: float
    """Duration of this launch, from the command to the end."""
    train_seconds: float
    """Duration of all steps over all launches of the run, checkpoints and measurements included."""
    completions_per_second: float
    """Completions generated, scored and learned from, per second of `train_seconds`."""
    reward_first: float | None
    reward_last: float | None
    """Mean reward of the first and of the last ten logged steps."""
    heldout_before: float | None
    heldout_after: float | None
    """Accuracy on the primary held-out set of the initial policy, and of the best checkpoint."""
    heldout_problems: int
    heldout: Mapping[str, HeldoutSummary]
    """Key of each held-out set, `heldout` or `heldout/<name>` -> its measures."""
    best_checkpoint: str | None
    latest_checkpoint: str | None
    stopped: str | None
    """Name of the signal, or of the warning in `run.stop_on`, that stopped the run before its last step; `PAUSED` if it
    has reached `run.pause_at`; None if it has taken all steps."""
    price: Goodput
    """Time lost to failures, restarts and wasted samples."""
    phase_seconds: Mapping[str, float]
    """Seconds of each phase (`profiler.PHASES`) over all steps; empty where none were measured."""
    has_own_tools: bool
    """True if the run has tools, an environment or a rollout function of the user, which `grpo-ray eval` runs with
    --trust-tools only."""
    has_own_score: bool
    """True if held-out completions are scored by code of the user, which `grpo-ray eval` runs with --trust-rewards
    only."""
    memory: Mapping[str, Any] | None
    """`estimated` and `measured`: memory of a worker, GiB, the largest over all workers, as of the last measurement
    (`training/memory_use.py`). Without GPUs nothing is estimated, and `resident_peak_gib` of the process is measured.
    None if no attempt took enough steps."""


def describe_run(config: Config) -> dict[str, Any]:
    """Return the resolved config with the versions and the commit that run it; secrets are hidden."""
    described: dict[str, Any] = redact_settings(config.to_dict(), known_secrets())
    described["run"]["best_metric"] = config.run.best_metric  # one of a list of names, and never a secret
    return described | {"versions": versions()}


def summarize_run(
    config: Config,
    folder: RunFolder,
    heldout: Mapping[str, HeldoutSummary],
    wall_seconds: float,
    stopped: str | None = None,
) -> RunSummary:
    """Summarise the whole run from `metrics.jsonl`, `events.jsonl` and its checkpoints.

    Args:
        heldout: key of each held-out set -> its measures.
        wall_seconds: duration of this launch.
        stopped: name of the signal or warning that stopped this launch, or `PAUSED`.
    """
    # One row at a time: the files of a long run do not fit into memory.
    first_rewards: list[float] = []
    last_rewards: deque[float] = deque(maxlen=REWARD_ROWS)
    steps, seconds, completions = 0, 0.0, 0.0
    for row in read_metrics(folder):
        if "reward/mean" in row:
            last_rewards.append(row["reward/mean"])
            first_rewards += [row["reward/mean"]] if len(first_rewards) < REWARD_ROWS else []
        seconds += row.get("step/seconds", 0.0)
        completions += row.get("step/seconds", 0.0) * row.get("step/completions_per_second", 0.0)
        steps = int(row["step"])
    stored = checkpoints.list_checkpoints(folder)
    best = checkpoints.best_checkpoint(stored, config.ranking_metric)
    primary = heldout[config.primary_heldout]
    return RunSummary(
        steps=steps,
        wall_seconds=round(wall_seconds, 1),
        train_seconds=round(seconds, 1),
        completions_per_second=round(completions / seconds, 1) if seconds else 0.0,
        reward_first=_mean(first_rewards),
        reward_last=_mean(last_rewards),
        heldout_before=primary.before.get("accuracy"),
        heldout_after=primary.after.get("accuracy"),
        heldout_problems=primary.problems,
        heldout=heldout,
        best_checkpoint=best.uri if best else None,
        latest_checkpoint=stored[-1].uri if stored else None,
        stopped=stopped,
        price=compute_goodput(read_events(folder), read_metrics(folder), config.cluster.use_gpu),
        phase_seconds={phase: round(seconds, 2) for phase, seconds in seconds_by_phase(read_metrics(folder)).items()},
        has_own_tools=bool(untrusted_tools(*(getattr(config.rollout, name) for name in CODE_FIELDS))),
        has_own_score=any(
            untrusted_rewards(config.heldout_score_of(source), config.rewards_of(source))
            for source in map(config.source_of, config.heldout_keys)
        ),
        memory=_last_memory(folder),
    )


def _last_memory(folder: RunFolder) -> dict[str, Any] | None:
    """Return the run's last `memory` event without its name and time; None if there is none."""
    latest = deque((event for event in read_events(folder) if event["event"] == "memory"), maxlen=1)
    return {name: latest[0].get(name) for name in ("estimated", "measured")} if latest else None


def phase_breakdown(phase_seconds: Mapping[str, float]) -> str:
    """Format the shares of a run's time, largest first; "-" if there are none.

    Shares below half a percent are left out.
    """
    categories = seconds_by_category(phase_seconds)
    total = sum(categories.values())
    shares = [(seconds / total, name) for name, seconds in categories.items()] if total > 0 else []
    parts = [f"{name} {share:.0%}".replace("%", " %") for share, name in sorted(shares)[::-1] if share >= 0.005]
    return ", ".join(parts) or "-"


def _mean(values: Collection[float]) -> float | None:
    return sum(values) / len(values) if values else None
