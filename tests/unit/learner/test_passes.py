"""Division of rows into forward passes."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.learner.passes import (
    Layout,
    PassLimit,
    count_positions,
    fewest_passes,
    number_of_passes,
    split_rows,
)

quick = settings(max_examples=150, deadline=None, derandomize=True)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)
LAYOUTS: tuple[Layout, ...] = ("shifted", "packed")


def lengths_of(parts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    return [[lengths[row] for row in part] for part in parts]


# split_rows


def test_split_rows_number_of_rows_worked_example() -> None:
    limit = PassLimit(rows=3)
    assert split_rows([3, 9, 4, 9, 1], 2, limit) == [[1, 3, 2], [0, 4]]
    assert split_rows([1, 3], 2, limit) == [[1], [0]]


def test_split_rows_tokens_shifted_long_rows_in_smaller_parts() -> None:
    lengths = [50, 40, 10, 9, 8, 7]
    limit = PassLimit(tokens=100, layout="shifted")
    assert fewest_passes(lengths, limit) == 2  # 2 x 50, then 4 x 10
    assert lengths_of(split_rows(lengths, 2, limit), lengths) == [[50, 40], [10, 9, 8, 7]]
    assert lengths_of(split_rows(lengths, 3, limit), lengths) == [[50, 40], [10, 9], [8, 7]]


def test_split_rows_tokens_packed_fills_to_the_sum() -> None:
    lengths = [50, 40, 10, 9, 8, 7]
    limit = PassLimit(tokens=100, layout="packed")
    assert fewest_passes(lengths, limit) == 2  # 50 + 40 + 10 fit, where 3 x 50 would not
    assert lengths_of(split_rows(lengths, 2, limit), lengths) == [[50, 40, 10], [9, 8, 7]]


def test_split_rows_row_beyond_limit_is_alone() -> None:
    for layout in LAYOUTS:
        assert split_rows([5, 30, 6], 2, PassLimit(tokens=20, layout=layout)) == [[1], [2, 0]]


def test_split_rows_too_few_passes_raises() -> None:
    with pytest.raises(ValueError, match="3 rows of up to 10 tokens do not fill 1 passes"):
        split_rows([10, 10, 10], 1, PassLimit(tokens=20))
    with pytest.raises(ValueError, match="1 rows of up to 10 tokens do not fill 2 passes"):
        split_rows([10], 2, PassLimit(tokens=20))


@given(LENGTHS, st.integers(1, 4))
@quick
def test_split_rows_by_number_parts_are_even_and_ordered(lengths: list[int], passes: int) -> None:
    passes = min(passes, len(lengths))
    parts = split_rows(lengths, passes, PassLimit())
    sizes = [len(part) for part in parts]
    assert len(parts) == passes and max(sizes) - min(sizes) <= 1
    assert [length for part in lengths_of(parts, lengths) for length in part] == sorted(lengths, reverse=True)


@given(LENGTHS, st.integers(60, 200), st.sampled_from(LAYOUTS), st.data())
@quick
def test_split_rows_any_number_of_passes_keeps_limit(
    lengths: list[int], tokens: int, layout: Layout, data: st.DataObject
) -> None:
    limit = PassLimit(tokens=tokens, layout=layout)
    passes = data.draw(st.integers(fewest_passes(lengths, limit), len(lengths)))
    parts = split_rows(lengths, passes, limit)
    assert len(parts) == passes and all(parts)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(count_positions(part, layout) <= tokens for part in lengths_of(parts, lengths))


@given(LENGTHS, st.integers(1, 6), st.sampled_from(LAYOUTS))
@quick
def test_fewest_passes_is_at_most_that_of_longest_rows(lengths: list[int], rows: int, layout: Layout) -> None:
    """TRL's micro-batches, of as many rows as fit at any length, are therefore always enough."""
    limit = PassLimit(tokens=rows * 60, layout=layout)
    assert fewest_passes(lengths, limit) <= -(-len(lengths) // rows)


# number_of_passes


def test_number_of_passes_weighs_padding_against_passes() -> None:
    limit = PassLimit(rows=4)
    assert number_of_passes([[200, 190, 180, 170]], limit, 4, 100) == 1  # padding costs less than a pass
    assert number_of_passes([[400, 390, 20, 10]], limit, 4, 100) == 2  # short rows beside long ones cost more
    assert number_of_passes([[400, 390, 20, 10]], PassLimit(rows=2), 4, 1000) == 2
    assert number_of_passes([[300, 300], [300, 100]], limit, 2, 100) == 1  # the worker with the most tokens decides


def test_number_of_passes_worker_with_long_rows_decides_for_all() -> None:
    limit = PassLimit(tokens=100, layout="packed")
    assert number_of_passes([[10, 10, 10], [90, 60, 50]], limit, 3, 100) == 3
    assert split_rows([10, 10, 10], 3, limit) == [[0], [1], [2]]  # no pass of the other worker is empty


def test_split_rows_of_several_workers_have_as_many_rows_in_each_pass() -> None:
    # TRL gathers a number of each row in the loss: alone, the first worker would read 1, 3 and 2 rows.
    limit = PassLimit(tokens=100, layout="packed")
    long, even = [90, 50, 30, 20, 10, 5], [40, 40, 40, 40, 40, 40]
    assert fewest_passes(long, limit, [even]) == 4
    sizes = [[len(part) for part in split_rows(own, 4, limit, [long, even])] for own in (long, even)]
    assert sizes == [[1, 2, 2, 1]] * 2


@given(st.integers(1, 8), st.sampled_from(LAYOUTS), st.data())
@quick
def test_split_rows_of_any_workers_keeps_limit_with_equal_parts(rows: int, layout: Layout, data: st.DataObject) -> None:
    workers = data.draw(st.lists(st.lists(st.integers(1, 60), min_size=rows, max_size=rows), min_size=1, max_size=4))
    tokens = data.draw(st.integers(60, 200))
    limit = PassLimit(tokens=tokens, layout=layout)
    least = fewest_passes(workers[0], limit, workers)
    passes = data.draw(st.integers(least, rows))
    parts = [split_rows(own, passes, limit, workers) for own in workers]
    assert len({tuple(map(len, each)) for each in parts}) == 1
    for own, each in zip(workers, parts, strict=True):
        assert sorted(row for part in each for row in part) == list(range(rows))
        assert all(count_positions(part, layout) <= tokens for part in lengths_of(each, own))


def test_number_of_passes_packed_without_padding_is_fewest() -> None:
    assert number_of_passes([[90, 60, 30, 10]], PassLimit(tokens=100, layout="packed"), 4, 0) == 2


def test_number_of_passes_beyond_most_raises() -> None:
    with pytest.raises(ValueError, match=r"rows of up to 90 tokens need 3 passes under .*tokens=100.* only 2"):
        number_of_passes([[90, 60, 50]], PassLimit(tokens=100), 2, 0)


@pytest.mark.long
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.sampled_from(LAYOUTS), st.integers(0, 100))
@quick
def test_number_of_passes_is_cheapest_of_all(workers: list[list[int]], layout: Layout, pass_cost: int) -> None:
    rows = min(map(len, workers))
    lengths = [each[:rows] for each in workers]
    limit = PassLimit(tokens=120, layout=layout)

    def cost(passes: int) -> int:
        parts = [lengths_of(split_rows(own, passes, limit, lengths), own) for own in lengths]
        return passes * pass_cost + max(sum(count_positions(part, layout) for part in own) for own in parts)

    possible = range(fewest_passes(lengths[0], limit, lengths), rows + 1)
    assert number_of_passes(lengths, limit, rows, pass_cost) == min(possible, key=cost)
