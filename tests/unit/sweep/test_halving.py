"""Tests of the choice of trials at a rung: shares, ties, unknown values."""

import math

import pytest

from grpo_ray.sweep.halving import choose, rank


@pytest.mark.parametrize(
    ("keep", "count", "kept"),
    [(0.5, 8, 4), (0.5, 5, 3), (0.5, 1, 1), (0.1, 3, 1), (0.34, 3, 2), (1 / 3, 3, 1), (0.07, 100, 7), (0.9, 10, 9)],
)
def test_share_is_rounded_up_to_whole_trials(keep: float, count: int, kept: int) -> None:
    values: dict[str, float | None] = {f"t{number}": float(number) for number in range(count)}
    assert choose(values, keep) == [f"t{number}" for number in range(count - kept, count)]


def test_equal_trials_stay_in_the_order_of_the_sweep() -> None:
    assert choose({"a": 0.5, "b": 0.7, "c": 0.5, "d": 0.5}, 0.5) == ["a", "b"]
    assert choose({"d": 0.5, "c": 0.5, "a": 0.5}, 0.34) == ["d", "c"]  # 1.02 trials, so two


def test_trial_without_a_value_is_dropped_first() -> None:
    values = {"a": None, "b": -3.0, "c": math.nan, "d": -2.0}
    assert rank(values) == ["d", "b", "a", "c"]
    assert choose(values, 0.5) == ["b", "d"]
    assert choose(values, 0.6) == ["a", "b", "d"]  # 2.4 trials, so three: an unknown one stays where there is room


def test_one_trial_stays_even_if_no_value_is_known() -> None:
    assert choose({"a": None, "b": math.nan}, 0.5) == ["a"]
