"""Runs that go wrong on purpose, each in one setting, with the curve in which a person sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SETTINGS = [
    "grpo.prompts_per_step=8",
    "grpo.num_generations=8",
    "grpo.save_steps=1000",
    "grpo.learning_rate=3e-4",
    "grpo.max_completion_length=40",
    "data.heldout_limit=24",
]
"""Settings of all runs: the embedded policy, 64 completions in a step. On their own the run learns."""


@dataclass(frozen=True, kw_only=True)
class WrongRun:
    """One setting that makes a run go wrong."""

    overrides: Sequence[str]
    warning: str
    """Warning that names the cause."""
    metric: str
    """Curve in which a person sees it."""
    steps: int = 20
    """Steps after which the warning has come."""


WRONG_RUNS: Mapping[str, WrongRun] = {
    "learning rate 1e-2": WrongRun(overrides=["grpo.learning_rate=1e-2"], warning="truncation", metric="reward/mean"),
    "learning rate 3e-3": WrongRun(
        overrides=["grpo.learning_rate=3e-3"], warning="reward_fallen", metric="reward/mean", steps=40
    ),
    "constant reward": WrongRun(
        overrides=["rewards.functions=['wrong_runs:constant']"], warning="no_signal", metric="group/equal_share"
    ),
    "12 tokens allowed": WrongRun(
        overrides=["grpo.max_completion_length=12"], warning="truncation", metric="completion/truncated_share"
    ),
    "reward for length": WrongRun(
        overrides=["rewards.functions=['wrong_runs:length']", "grpo.temperature=1.2"],
        warning="length_growth",
        metric="completion/length_mean",
        steps=100,
    ),
    "verdicts in 0.1 ms": WrongRun(
        overrides=["rewards.time_limit=1e-4"], warning="verifier_timeouts", metric="reward/verifier_timeouts"
    ),
    "temperature 0.05": WrongRun(
        overrides=["grpo.temperature=0.05"], warning="low_diversity", metric="group/distinct_share"
    ),
}
"""Name of a run -> its setting."""


def constant(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return the same reward for all completions."""
    return [0.5] * len(completions)


def length(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return the length of each completion, in units of 40 tokens."""
    return [len(tokens) / 40 for tokens in completion_ids]


def visible_step(rows: Sequence[Mapping[str, Any]], metric: str) -> int | None:
    """Return the step from which a curve stays nearer to its last level than to its first; None if it does not change.

    Levels are the means of the first 3 and of the last 10 rows. The curve is averaged over 3 rows, as an eye does. This
    knows the end of the run, so it is early for what a person could see at the time.
    """
    steps = [int(row["step"]) for row in rows if metric in row]
    values = [float(row[metric]) for row in rows if metric in row]
    first, last = sum(values[:3]) / 3, sum(values[-10:]) / 10
    spread = max(abs(value - last) for value in values[-10:])
    if abs(last - first) <= spread:
        return None
    smooth = [sum(values[max(0, end - 3) : end]) / min(3, end) for end in range(1, len(values) + 1)]
    near = [abs(value - last) < abs(value - first) for value in smooth]
    return next((steps[index] for index in range(len(near)) if all(near[index:])), None)
