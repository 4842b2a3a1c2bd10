"""Token positions and passes of a learner's step, by the limit of its micro-batches: python bench_micro_batches.py

Planning only, without a model: seconds on any machine. A step has 512 completions in groups of 8, on one worker or on
eight, of at most 8,192 tokens with prompts of 60 to 400. Their lengths follow QUANTILES, those of 400 real completions
(Qwen2.5-Math on 50 problems of MATH), scaled to a mean of 2,400 tokens, as of a model that reasons at length; a share
of 0.2 of the logarithm's variance is inside of a group, as in that sample. Longer ones are cut off, as in training.

A pass may read 34,368 positions, four rows of the greatest length: rows by number have to fit at any length, so that is
the largest number of them that never runs out of memory.
"""

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_ray.learner.micro_batches import RowFacts, assign_rows
from grpo_ray.learner.passes import PASS_COST, PassLimit, count_positions, fewest_passes, number_of_passes, split_rows

QUANTILES = {
    0.0: 0.35, 0.05: 0.52, 0.1: 0.56, 0.25: 0.71, 0.5: 0.91, 0.75: 1.16, 0.9: 1.49, 0.95: 1.68, 0.99: 2.68, 1.0: 8.9
}  # fmt: skip
"""Share of completions -> greatest length among them, as a multiple of the mean."""
INSIDE_GROUP = 0.2
"""Share of the variance of the logarithm of lengths that is between completions of one problem."""
LONGEST, MEAN, PROMPTS = 8192, 2400, (60, 400)
COMPLETIONS, GROUP = 512, 8
ROWS = 4
TOKENS = ROWS * (LONGEST + PROMPTS[1])


def quantile(share: float) -> float:
    """Return the length below which a share of completions is, as a multiple of the mean."""
    shares = sorted(QUANTILES)
    after = next(at for at in shares[1:] if share <= at)
    before = shares[shares.index(after) - 1]
    part = (share - before) / (after - before)
    return math.exp((1 - part) * math.log(QUANTILES[before]) + part * math.log(QUANTILES[after]))


@dataclass(frozen=True)
class Row:
    """A completion with its prompt."""

    prompt: int
    completion: int
    has_signal: bool

    @property
    def length(self) -> int:
        return self.prompt + self.completion


def draw_step(rng: random.Random, share_with_signal: float) -> list[Row]:
    """Draw the completions of a step, group by group."""
    groups = COMPLETIONS // GROUP
    with_signal = set(rng.sample(range(groups), round(share_with_signal * groups)))
    rows = []
    for group in range(groups):
        prompt, problem = rng.randint(*PROMPTS), rng.gauss(0, math.sqrt(1 - INSIDE_GROUP))
        for _ in range(GROUP):
            # A normal variable of variance 1, brought to the distribution of lengths.
            value = problem + rng.gauss(0, math.sqrt(INSIDE_GROUP))
            length = MEAN * quantile(statistics.NormalDist().cdf(value))
            rows.append(Row(prompt, min(LONGEST, max(1, round(length))), group in with_signal))
    return rows


Plan = list[list[list[Row]]]
"""Rows of each pass of each worker."""


def as_trl(rows: Sequence[Row], workers: int) -> tuple[Plan, int]:
    """All rows in their order, as wide as the longest prompt and the longest completion of the step."""
    share = len(rows) // workers
    width = max(row.prompt for row in rows) + max(row.completion for row in rows)
    own = [rows[rank * share : (rank + 1) * share] for rank in range(workers)]
    return [[list(each[first : first + ROWS]) for first in range(0, share, ROWS)] for each in own], share * width


def planned(limit: PassLimit, fewest: bool = False) -> Callable[[Sequence[Row], int], tuple[Plan, int]]:
    """Return a function that plans rows with signal under a limit: as the learner does, or in the fewest passes."""

    def plan(rows: Sequence[Row], workers: int) -> tuple[Plan, int]:
        share = len(rows) // workers
        own = [rows[rank * share : (rank + 1) * share] for rank in range(workers)]
        facts = [
            RowFacts([row.has_signal for row in each], [row.length for row in each], [row.completion for row in each])
            for each in own
        ]
        read = [[own[rank][row] for rank, row in each] for each in assign_rows(facts, share=True).rows]
        lengths = [[row.length for row in each] for each in read]
        passes = fewest_passes(lengths[0], limit, lengths[1:])
        if not fewest:
            passes = number_of_passes(lengths, limit, share // ROWS, PASS_COST["cuda"])
        plans = [
            [[each[row] for row in part] for part in split_rows([row.length for row in each], passes, limit, lengths)]
            for each in read
        ]
        positions = max(
            sum(count_positions([row.length for row in part], limit.layout) for part in each) for each in plans
        )
        return plans, positions

    return plan


VARIANTS: dict[str, Callable[[Sequence[Row], int], tuple[Plan, int]]] = {
    "stock TRL, 4 rows": as_trl,
    "4 rows, fewest passes": planned(PassLimit(rows=ROWS), fewest=True),
    "tokens, shifted": planned(PassLimit(tokens=TOKENS, layout="shifted")),
    "tokens, packed": planned(PassLimit(tokens=TOKENS, layout="packed")),
}
"""Name -> function that returns the passes of each worker, and the positions of the worker with the most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps to average over")
    steps = parser.parse_args().steps
    print("| workers | groups with signal | micro-batches | passes | positions | padding | cost |")
    print("|---|---|---|---|---|---|---|")
    for workers in (1, 8):
        for share in (1.0, 0.5, 0.14):
            drawn = [draw_step(random.Random(seed), share) for seed in range(steps)]
            for name, plan in VARIANTS.items():
                results = []
                for rows in drawn:
                    plans, positions = plan(rows, workers)
                    tokens = max(sum(row.length for part in each for row in part) for each in plans)
                    passes = len(plans[0])
                    results.append((passes, positions, 1 - tokens / positions, passes * PASS_COST["cuda"] + positions))
                passes, positions, padding, cost = (statistics.mean(column) for column in zip(*results, strict=True))
                print(
                    f"| {workers} | {share:.0%} | {name} | {passes:.0f} | {positions / 1000:.0f}k | {padding:.0%} "
                    f"| {cost / 1000:.0f}k |"
                )


if __name__ == "__main__":
    main()
