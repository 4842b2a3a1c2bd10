"""Draws of a mixture: shares at every length, plans of whole steps, and the rows of a plan."""

import itertools
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from number_shards import NumberShard

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import ids_to_uint64
from grpo_ray.data.mixture import Draws, MixturePlan, read_mixture
from grpo_ray.data.registry import SourceShard
from grpo_ray.data.stream import EpochPlan, EpochReader, Split, build_index, open_splits

THIRDS = {"a": Fraction(1, 3), "b": Fraction(2, 3)}


def shares_of(weights: dict[str, int]) -> dict[str, Fraction]:
    return {name: Fraction(weight, sum(weights.values())) for name, weight in weights.items()}


weights = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000), min_size=1)


@given(weights=weights, length=st.integers(0, 300))
def test_draws_have_the_shares_at_every_length(weights: dict[str, int], length: int) -> None:
    shares = shares_of(weights)
    drawn = Counter(itertools.islice(Draws(shares).order(), length))
    for name, share in shares.items():
        assert abs(drawn[name] - share * length) < max(1, len(shares) - 1)


@given(weights=weights, first=st.integers(0, 200), length=st.integers(0, 100))
def test_draws_continue_from_the_counts_alone(weights: dict[str, int], first: int, length: int) -> None:
    """A checkpoint holds the counts, so a resumed run draws what the undisturbed one draws."""
    draws = Draws(shares_of(weights))
    whole = list(itertools.islice(draws.order(), first + length))
    resumed = Draws(draws.shares, Counter(whole[:first]))
    assert whole[first:] == list(itertools.islice(resumed.order(), length))


def test_draws_order_does_not_depend_on_the_order_of_the_sources() -> None:
    reverse = Draws(dict(reversed(THIRDS.items()))).order()
    assert list(itertools.islice(reverse, 6)) == list(itertools.islice(Draws(THIRDS).order(), 6))
    assert list(itertools.islice(Draws(THIRDS).order(), 6)) == ["b", "a", "b", "b", "a", "b"]


@pytest.mark.parametrize(
    ("available", "most", "expected"),
    [
        ({"a": 10, "b": 10}, 100, (5, ["b"])),
        ({"a": 1, "b": 10}, 100, (1, ["a"])),
        ({"a": 0, "b": 1}, 100, (0, ["a", "b"])),
        ({"a": 10, "b": 10}, 2, (2, [])),
    ],
)
def test_whole_steps_ends_before_the_first_source_that_runs_out(
    available: dict[str, int], most: int, expected: tuple[int, list[str]]
) -> None:
    assert Draws(THIRDS).whole_steps(available, problems=3, most=most) == expected


def reader_of(source: str, numbers: range) -> EpochReader:
    shards = [SourceShard(NumberShard(tuple(numbers)), source, None)]
    return EpochReader(build_index(Split(source, shards)).split, seed=0, with_preferred=False)


def test_read_mixture_reads_each_source_in_its_own_order_and_epochs() -> None:
    readers = {"a": reader_of("a", range(3)), "b": reader_of("b", range(9))}
    nothing = np.empty(0, dtype=np.uint64)
    order_of_a = [row["id"] for row in readers["a"].read_epoch(EpochPlan(0, nothing, nothing))]
    rest = EpochPlan(0, np.sort(ids_to_uint64(order_of_a[:2])), nothing)
    epochs = {"a": (rest, EpochPlan(1, nothing, nothing)), "b": (EpochPlan(0, nothing, nothing),)}
    rows = list(read_mixture(readers, MixturePlan(Draws(THIRDS), epochs, problems=9)))
    assert [row["source"] for row in rows] == list(itertools.islice(Draws(THIRDS).order(), 9))
    of_a = [(row["epoch"], row["id"]) for row in rows if row["source"] == "a"]
    assert of_a[0] == (0, order_of_a[2]) and [epoch for epoch, _ in of_a] == [0, 1, 1]
    of_b = [row["id"] for row in rows if row["source"] == "b"]
    assert of_b == [row["id"] for row in readers["b"].read_epoch(EpochPlan(0, nothing, nothing))][:6]


def test_read_mixture_ends_where_a_source_lacks_a_row() -> None:
    nothing = np.empty(0, dtype=np.uint64)
    epochs = {name: (EpochPlan(0, nothing, nothing),) for name in THIRDS}
    readers = {"a": reader_of("a", range(9)), "b": reader_of("b", range(3))}
    assert len(list(read_mixture(readers, MixturePlan(Draws(THIRDS), epochs, problems=9)))) == 5


def test_equal_problems_of_two_sources_count_separately_and_are_held_out_together(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}?", "solution": "{n}"}}\n' for n in range(50)))
    train = f"data.train={{one: {{path: {path}}}, two: {{path: {path}, system_prompt: Be brief., limit: 7}}}}"
    training, heldout = open_splits(load_config(None, [train, "data.heldout_share=0.3"]))
    assert list(heldout) == ["heldout/one", "heldout/two"]
    assert training["one"].name == f"one ({path})"
    problems = {name: list(split.read()) for name, split in training.items()}
    assert len(problems["two"]) == 7 and {each.source for each in problems["two"]} == {"two"}
    assert problems["two"][0].prompt[0]["content"] == "Be brief." and len(problems["one"][0].prompt) == 1
    ids = [{each.id for each in each_split.read()} for each_split in (*training.values(), *heldout.values())]
    assert sum(map(len, ids)) == len(set().union(*ids))
    held = {each.question_id for each in heldout["heldout/two"].read()}
    assert held == {each.question_id for each in heldout["heldout/one"].read()}
    assert not held & {each.question_id for each in problems["one"]}
