"""Tests of the dealing order: any round deals what is left of its epoch, once, in an order that the seed decides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from grpo_ray.data.ledger import to_numbers
from grpo_ray.data.problem import Problem, parse_problem
from grpo_ray.data.stream import EpochPlan, Split, epoch_reader, to_row


@cache
def problem(number: int) -> Problem:
    return parse_problem({"prompt": f"Question {number}?", "solution": f"{number}"}, where="here")


@dataclass(frozen=True)
class NumberShard:
    """A shard of the problems with these numbers."""

    numbers: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def read(self) -> Iterator[Problem]:
        return map(problem, self.numbers)


@st.composite
def splits(draw: st.DrawFn) -> tuple[Split, list[int]]:
    """A split of up to 20 shards (three windows), and the numbers of its problems."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=20))
    edges = np.cumsum([0, *sizes]).tolist()
    shards = [NumberShard(tuple(range(edge, edge + size))) for edge, size in zip(edges[:-1], sizes, strict=True)]
    return Split("some", shards), [*range(edges[-1])]


def sorted_ids(numbers: Sequence[int]) -> np.ndarray:
    return np.sort(to_numbers(problem(number).id for number in numbers))


def dealt(split: Split, round: EpochPlan, seed: int, prefers: bool = True) -> list[int]:
    """The numbers of the problems that a round deals, in order."""
    order = epoch_reader(split, seed, prefers)
    return [int(row["solution"]) for piece in range(order.pieces) for row in order.read(piece, round)]


NOBODY = sorted_ids([])


@given(split=splits(), seed=st.integers(0, 9), epoch=st.integers(0, 3), data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_round_any_split_deals_the_rest_of_its_epoch_once(split, seed, epoch, data):
    split, numbers = split
    subsets = st.lists(st.sampled_from(numbers), unique=True) if numbers else st.just([])
    left_out, preferred = data.draw(subsets), data.draw(subsets)
    carried = data.draw(st.lists(st.integers(100, 109), unique=True, max_size=3))
    whole = dealt(split, EpochPlan(epoch, NOBODY, NOBODY), seed)
    assert sorted(whole) == numbers
    # Carried problems come first, then preferred ones, then the rest, in the order of the whole epoch.
    left = [number for number in whole if number not in left_out]
    expected = [*carried, *sorted(left, key=lambda number: number not in preferred)]
    rows = tuple(to_row(problem(number), epoch - 1) for number in carried)
    assert dealt(split, EpochPlan(epoch, sorted_ids(left_out), sorted_ids(preferred), rows), seed) == expected
    assert dealt(split, EpochPlan(epoch, sorted_ids(left_out), NOBODY), seed, prefers=False) == left


@given(split=splits(), seed=st.integers(0, 9), steps=st.lists(st.integers(1, 6), max_size=6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_round_after_any_restarts_continues_the_epoch(split, seed, steps):
    """Compare runs that restart after these numbers of problems with a run without restarts."""
    split, _ = split
    whole = dealt(split, EpochPlan(0, NOBODY, NOBODY), seed)
    used: list[int] = []
    for step in steps:
        used += dealt(split, EpochPlan(0, sorted_ids(used), NOBODY), seed)[:step]
    assert used == whole[: sum(steps)]
