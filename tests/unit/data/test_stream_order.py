"""Tests of the stream order: any plan yields the rest of its epoch once, in an order that the seed determines."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings
from number_shards import NumberShard, number_of, problem

from grpo_ray.data.ledger import ids_to_uint64
from grpo_ray.data.stream import EpochPlan, Split, make_epoch_reader, to_row


@st.composite
def splits(draw: st.DrawFn) -> tuple[Split, list[int]]:
    """Draw a split of up to 20 shards (three windows), and the numbers of its problems."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=20))
    edges = np.cumsum([0, *sizes]).tolist()
    shards = [NumberShard(tuple(range(edge, edge + size))) for edge, size in zip(edges[:-1], sizes, strict=True)]
    return Split("some", shards), [*range(edges[-1])]


def sorted_ids(numbers: Sequence[int]) -> np.ndarray:
    return np.sort(ids_to_uint64(problem(number).id for number in numbers))


def yielded(split: Split, plan: EpochPlan, seed: int, with_preferred: bool = True) -> list[int]:
    """Return the numbers of the problems that a plan yields, in order."""
    reader = make_epoch_reader(split, seed, with_preferred)
    return [number_of(row["id"]) for task in range(reader.num_read_tasks) for row in reader.run_read_task(task, plan)]


NO_IDS = sorted_ids([])


@given(split=splits(), seed=st.integers(0, 9), epoch=st.integers(0, 3), data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_epoch_plan_any_split_yields_the_rest_of_its_epoch_once(
    split: Any, seed: int, epoch: int, data: st.DataObject
) -> None:
    split, numbers = split
    subsets = st.lists(st.sampled_from(numbers), unique=True) if numbers else st.just([])
    excluded, preferred = data.draw(subsets), data.draw(subsets)
    carried_over = data.draw(st.lists(st.integers(100, 109), unique=True, max_size=3))
    whole = yielded(split, EpochPlan(epoch, NO_IDS, NO_IDS), seed)
    assert sorted(whole) == numbers
    # Carried problems come first, then preferred ones, then the rest, in the order of the whole epoch.
    left = [number for number in whole if number not in excluded]
    expected = [*carried_over, *sorted(left, key=lambda number: number not in preferred)]
    rows = tuple(to_row(problem(number), epoch - 1) for number in carried_over)
    assert yielded(split, EpochPlan(epoch, sorted_ids(excluded), sorted_ids(preferred), rows), seed) == expected
    assert yielded(split, EpochPlan(epoch, sorted_ids(excluded), NO_IDS), seed, with_preferred=False) == left


@given(split=splits(), seed=st.integers(0, 9), steps=st.lists(st.integers(1, 6), max_size=6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_epoch_plan_after_any_restarts_continues_the_epoch(split: Any, seed: int, steps: list[int]) -> None:
    """Compare runs that restart after these numbers of problems with a run without restarts."""
    split, _ = split
    whole = yielded(split, EpochPlan(0, NO_IDS, NO_IDS), seed)
    used: list[int] = []
    for step in steps:
        used += yielded(split, EpochPlan(0, sorted_ids(used), NO_IDS), seed)[:step]
    assert used == whole[: sum(steps)]
