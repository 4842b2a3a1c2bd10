"""Solve rates of the problems over a run, and sample completions from its first and last steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_ray.pages.report.conversation_view import ShownConversation, show_conversation
from grpo_ray.pages.report.read import RunData
from grpo_ray.storage.numbers import to_float
from grpo_ray.storage.records.group_columns import solve_counts
from grpo_ray.text.display import safe_text

MAX_PERIODS = 10
PERIODS_PER_EPOCH = 4
"""Periods that a run's steps are divided into while it is in its first epoch."""
MAX_GROUPS, MAX_COMPLETIONS = 3, 4
"""Sample groups of the first and of the last steps, and completions shown of each group."""
MAX_TEXT_CHARS = 4200
"""Characters of a text. `rollouts/` stores at most 4,096 bytes of one, so an ASCII text is shown whole."""
RATE_BINS = ("0", "to ¼", "to ½", "to ¾", "below 1", "1")
"""Labels of the bins of the solve-rate histogram; the inner bins exclude their lower bound."""
SOLVE_CLASSES = ("never", "sometimes", "always")
"""Classes of problems by their solve rate: 0, between 0 and 1, and 1."""


@dataclass(frozen=True)
class SolvePeriod:
    """Solve rates of the problems in one epoch, or in a range of steps."""

    label: str
    problems: int
    never: int
    sometimes: int
    always: int
    histogram: list[float]
    """Share of the period's problems in each of `RATE_BINS`."""


@dataclass(frozen=True)
class SolveRates:
    """Solve rates over a run."""

    periods: list[SolvePeriod]
    by_epoch: bool
    """True if the periods are epochs, so that every period has the same problems."""
    transitions: list[tuple[str, list[int]]]
    """Solve class in the first period -> counts of problems by their class in the last period; empty within one epoch.
    Only problems of both periods are counted."""
    highest: float
    """Largest share in the histograms of the first and last period."""


def solve_rates(run: RunData) -> SolveRates | None:
    """Compute the solve rates per epoch, or per range of steps while the run is in its first epoch.

    Returns:
        None if there are no verdicts: the run has no correctness reward, or no groups yet.
    """
    import pyarrow as pa

    table = run.groups
    if not len(table):
        return None
    known, right, _ = solve_counts(table)
    epochs, steps = table["epoch"].to_numpy(), table["step"].to_numpy()
    by_epoch = len(np.unique(epochs)) > 1
    group_period = epochs if by_epoch else _step_periods(steps)
    table = pa.table({"period": group_period, "problem": table["problem"], "known": known, "right": right})
    table = table.group_by(["period", "problem"]).aggregate([("known", "sum"), ("right", "sum")])
    table = table.filter(pa.compute.field("known_sum") > 0)
    if not len(table):
        return None
    period, problem = table["period"].to_numpy(), table["problem"].to_numpy(zero_copy_only=False)
    rate = table["right_sum"].to_numpy() / table["known_sum"].to_numpy()

    numbers = np.unique(period)
    shown = sorted({numbers[round(i * (len(numbers) - 1) / (MAX_PERIODS - 1))] for i in range(MAX_PERIODS)})
    rows = []
    for number in shown:
        label = f"epoch {number + 1}" if by_epoch else _steps_label(steps[group_period == number])
        rows.append(_solve_period(label, rate[period == number]))
    first, last = ((problem[period == number], rate[period == number]) for number in (shown[0], shown[-1]))
    transitions = _count_transitions(first, last) if by_epoch else []
    return SolveRates(rows, by_epoch, transitions, max(max(rows[0].histogram), max(rows[-1].histogram)))


def _step_periods(steps: np.ndarray) -> np.ndarray:
    """Divide the range of steps into at most `PERIODS_PER_EPOCH` equal parts.

    Args:
        steps: (rows,) int, step of each group.

    Returns:
        (rows,) int, number of the part that each step lies in, from 0.
    """
    first, count = steps.min(), steps.max() - steps.min() + 1
    return (steps - first) * min(PERIODS_PER_EPOCH, count) // count


def _steps_label(steps: np.ndarray) -> str:
    return f"steps {steps.min()} to {steps.max()}"


def _solve_period(label: str, rates: np.ndarray) -> SolvePeriod:
    """Count a period's problems by class and bin; `rates` is (problems,) float, 0 to 1."""
    bins = np.select([rates == 0, rates <= 0.25, rates <= 0.5, rates <= 0.75, rates < 1], range(5), 5)
    counts = np.bincount(bins, minlength=len(RATE_BINS))
    never, always = int(counts[0]), int(counts[-1])
    return SolvePeriod(
        label=label,
        problems=len(rates),
        never=never,
        sometimes=len(rates) - never - always,
        always=always,
        histogram=(counts / len(rates)).tolist(),
    )


def _count_transitions(
    first: tuple[np.ndarray, np.ndarray], last: tuple[np.ndarray, np.ndarray]
) -> list[tuple[str, list[int]]]:
    """Count the problems of both periods by their class in the first and in the last one.

    Args:
        first: Problem ids (problems,) and their solve rates (problems,) in the first period.
        last: The same in the last period.
    """
    _, in_first, in_last = np.intersect1d(first[0], last[0], return_indices=True)
    if not len(in_first):
        return []
    old, new = (np.select([rates == 0, rates < 1], [0, 1], 2) for rates in (first[1][in_first], last[1][in_last]))
    return [
        (name, [int(((old == row) & (new == column)).sum()) for column in range(len(SOLVE_CLASSES))])
        for row, name in enumerate(SOLVE_CLASSES)
    ]


@dataclass(frozen=True)
class SampleCompletion:
    """One completion shown on the page."""

    text: str
    reward: str
    correct: bool | None
    """None if there is no verdict."""
    length: str
    truncated: bool
    conversation: ShownConversation | None
    """Turns and messages, shown in place of the text; None in a run without tools."""


@dataclass(frozen=True)
class SampleGroup:
    """One group shown on the page: its prompt, and its best and worst completions."""

    step: int
    problem: str
    prompt: str
    completions: list[SampleCompletion]
    size: int
    """Completions in the group, including those that are not shown."""


def first_and_last_groups(
    run: RunData, max_groups: int = MAX_GROUPS, max_chars: int = MAX_TEXT_CHARS
) -> tuple[list[SampleGroup], list[SampleGroup]]:
    """Choose sample groups of the first and of the last steps; no group is in both lists.

    Args:
        run: The run.
        max_groups: Most groups in each list.
        max_chars: Most characters of each text.
    """
    rows = sorted(run.sample_groups, key=lambda row: to_float(row["step"]))
    last = rows[max(len(rows) // 2, len(rows) - max_groups) :]
    first = rows[: min(max_groups, len(rows) - len(last))]
    return [_sample_group(row, max_chars) for row in first], [_sample_group(row, max_chars) for row in last]


def _sample_group(row: Mapping[str, Any], max_chars: int) -> SampleGroup:
    """Choose the best and the worst completions of a group; `row` is a row of `rollouts/` with texts."""
    texts = row["completions"]
    rewards, lengths, truncated = (_pad(row[name], len(texts)) for name in ("rewards", "lengths", "truncated"))
    correct = _pad(row["correct"], len(texts))

    def rank(index: int) -> tuple[bool, float]:
        """Sort key: highest reward first, completions without a reward last."""
        reward = to_float(rewards[index])
        return math.isnan(reward), -reward if math.isfinite(reward) else 0.0

    ranking = sorted(range(len(texts)), key=rank)
    half = MAX_COMPLETIONS // 2
    shown = ranking if len(texts) <= MAX_COMPLETIONS else [*ranking[:half], *ranking[-half:]]
    return SampleGroup(
        step=int(row["step"]),
        problem=safe_text(row["problem"], 40),
        prompt=safe_text(row["prompt"] or "", max_chars),
        completions=[
            SampleCompletion(
                text=safe_text(texts[index] or "", max_chars),
                reward="?" if math.isnan(to_float(rewards[index])) else f"{rewards[index]:.3g}",
                correct={1.0: True, 0.0: False}.get(to_float(correct[index])),
                length="?" if lengths[index] is None else f"{lengths[index]} tokens",
                truncated=bool(truncated[index]),
                conversation=show_conversation(row, index, max_chars),
            )
            for index in shown
        ],
        size=len(texts),
    )


def _pad(values: list[Any] | None, count: int) -> list[Any]:
    """Return `count` values, None for missing ones."""
    values = list(values or [])[:count]
    return values + [None] * (count - len(values))
