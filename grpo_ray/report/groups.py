"""What the page says of groups: solve rates of problems, and what the policy wrote."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_ray.report.read import Run, number
from grpo_ray.report.text import plain
from grpo_ray.storage.rollouts import solve_counts

MOST_PERIODS = 10
PARTS = 4
"""Parts that the steps of a single epoch are looked at in."""
GROUPS, COMPLETIONS = 3, 4
"""Groups shown of the first and of the last steps, and completions of each."""
TEXT = 4200
"""Characters of a text: all that is kept of one, where most are single bytes."""
BINS = ("0", "to ¼", "to ½", "to ¾", "below 1", "1")


@dataclass(frozen=True)
class Period:
    """How the problems of an epoch, or of some steps, were solved."""

    label: str
    problems: int
    never: int
    sometimes: int
    always: int
    histogram: list[float]
    """Share of its problems for each of `BINS`."""


@dataclass(frozen=True)
class SolveRates:
    """Solve rates over the run."""

    periods: list[Period]
    by_epoch: bool
    """Whether the periods are epochs, so that the same problems come in each."""
    moves: list[tuple[str, list[int]]]
    """Of the problems of the first and last period: how they were solved first, and counts of how they were last."""
    highest: float
    """The largest share in the histograms of the first and last period."""


CLASSES = ("never", "sometimes", "always")


def solve_rates(run: Run) -> SolveRates | None:
    """None where no verdict is known: the run has no correctness reward, or no groups yet."""
    import pyarrow as pa

    table = run.groups
    if not len(table):
        return None
    known, right, _ = solve_counts(table)
    epochs, steps = table["epoch"].to_numpy(), table["step"].to_numpy()
    by_epoch = len(np.unique(epochs)) > 1
    if by_epoch:
        period = epochs
    else:
        first, count = steps.min(), steps.max() - steps.min() + 1
        period = (steps - first) * min(PARTS, count) // count
    table = pa.table({"period": period, "problem": table["problem"], "known": known, "right": right})
    table = table.group_by(["period", "problem"]).aggregate([("known", "sum"), ("right", "sum")])
    table = table.filter(pa.compute.field("known_sum") > 0)
    if not len(table):
        return None
    period, problem = table["period"].to_numpy(), table["problem"].to_numpy(zero_copy_only=False)
    rate = table["right_sum"].to_numpy() / table["known_sum"].to_numpy()

    found = []
    numbers = np.unique(period)
    chosen = sorted({numbers[round(i * (len(numbers) - 1) / (MOST_PERIODS - 1))] for i in range(MOST_PERIODS)})
    for each in chosen:
        label = f"epoch {each + 1}" if by_epoch else _steps_label(steps, each)
        found.append(_period(label, rate[period == each]))
    ends = (chosen[0], chosen[-1])
    moves = _moves(*((problem[period == each], rate[period == each]) for each in ends)) if by_epoch else []
    return SolveRates(found, by_epoch, moves, max(max(found[0].histogram), max(found[-1].histogram)))


def _steps_label(steps: np.ndarray, part: int) -> str:
    first, count = steps.min(), steps.max() - steps.min() + 1
    mine = steps[(steps - first) * min(PARTS, count) // count == part]
    return f"steps {mine.min()} to {mine.max()}"


def _period(label: str, rate: np.ndarray) -> Period:
    bins = np.select([rate == 0, rate <= 0.25, rate <= 0.5, rate <= 0.75, rate < 1], range(5), 5)
    counts = np.bincount(bins, minlength=len(BINS))
    never, always = int(counts[0]), int(counts[-1])
    return Period(label, len(rate), never, len(rate) - never - always, always, (counts / len(rate)).tolist())


def _moves(first: tuple[np.ndarray, np.ndarray], last: tuple[np.ndarray, np.ndarray]) -> list[tuple[str, list[int]]]:
    _, here, there = np.intersect1d(first[0], last[0], return_indices=True)
    was, now = (np.select([rate == 0, rate < 1], [0, 1], 2) for rate in (first[1][here], last[1][there]))
    if not len(was):
        return []
    return [(name, [int(((was == a) & (now == b)).sum()) for b in range(3)]) for a, name in enumerate(CLASSES)]


@dataclass(frozen=True)
class Written:
    """One completion."""

    text: str
    reward: str
    right: bool | None
    length: str
    truncated: bool


@dataclass(frozen=True)
class WrittenGroup:
    """A group whose texts are shown: some of its completions, best and worst."""

    step: int
    problem: str
    prompt: str
    completions: list[Written]
    of: int
    """Completions that it has."""


def early_and_late(run: Run, most: int = GROUPS, text: int = TEXT) -> tuple[list[WrittenGroup], list[WrittenGroup]]:
    """Groups of the first and of the last steps; none stands on both sides.

    most: groups of each side; text: characters of each text.
    """
    rows = sorted(run.texts, key=lambda row: number(row["step"]))
    late = rows[max(len(rows) // 2, len(rows) - most) :]
    early = rows[: min(most, len(rows) - len(late))]
    return [_group(row, text) for row in early], [_group(row, text) for row in late]


def _group(row: Mapping[str, Any], limit: int) -> WrittenGroup:
    texts = row["completions"]
    rewards, lengths, truncated = (_each(row[name], len(texts)) for name in ("rewards", "lengths", "truncated"))
    correct = _each(row["correct"], len(texts))

    def order(index: int) -> tuple[bool, float]:
        reward = number(rewards[index])
        return math.isnan(reward), -reward if math.isfinite(reward) else 0.0

    best_first = sorted(range(len(texts)), key=order)
    half = COMPLETIONS // 2
    chosen = best_first if len(texts) <= COMPLETIONS else [*best_first[:half], *best_first[-half:]]
    return WrittenGroup(
        step=int(row["step"]),
        problem=plain(row["problem"], 40),
        prompt=plain(row["prompt"] or "", limit),
        completions=[
            Written(
                text=plain(texts[index] or "", limit),
                reward="?" if math.isnan(number(rewards[index])) else f"{rewards[index]:.3g}",
                right={1.0: True, 0.0: False}.get(number(correct[index])),
                length="?" if lengths[index] is None else f"{lengths[index]} tokens",
                truncated=bool(truncated[index]),
            )
            for index in chosen
        ],
        of=len(texts),
    )


def _each(values: Any, count: int) -> list[Any]:
    """One value for each completion, None where there is none."""
    found = list(values or [])[:count]
    return found + [None] * (count - len(found))
