"""Tests of the Wilson score interval."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.evaluation.confidence import wilson_interval
from grpo_ray.telemetry.measures import Measure


def interval(values: list[float]) -> tuple[float, float]:
    """Return the rounded bounds."""
    estimate = wilson_interval(values)
    return round(estimate.low, 4), round(estimate.high, 4)


def test_wilson_interval_eight_of_ten_by_hand() -> None:
    # z = 1.96, z^2 = 3.8416: center (0.8 + 0.19208) / 1.38416 = 0.71674,
    # half 1.96 x sqrt(0.016 + 0.009604) / 1.38416 = 0.22658.
    estimate = wilson_interval([1.0] * 8 + [0.0] * 2)
    assert estimate.value == 0.8
    assert estimate.low == pytest.approx(0.71674 - 0.22658, abs=2e-5)
    assert estimate.high == pytest.approx(0.71674 + 0.22658, abs=2e-5)


def test_wilson_interval_none_of_ten_has_high_above_zero() -> None:
    # 3.8416 / 13.8416 = 0.2775
    assert wilson_interval([0.0] * 10).value == 0.0
    assert interval([0.0] * 10) == (0.0, 0.2775)


def test_wilson_interval_all_of_ten_has_low_below_one() -> None:
    assert interval([1.0] * 10) == (0.7225, 1.0)  # 1 - 0.2775


def test_wilson_interval_without_values_is_nan() -> None:
    estimate = wilson_interval([])
    assert all(math.isnan(x) for x in (estimate.value, estimate.low, estimate.high))


def test_wilson_interval_one_problem_is_wide() -> None:
    low, high = interval([1.0])
    assert low < 0.25 and high == 1.0  # 1 - 3.8416 / 4.8416 = 0.2065


def test_wilson_interval_several_completions_count_as_more_trials() -> None:
    # Mean 0.5, variance 0.0625 where a Bernoulli trial has 0.25: effective sample size 2 x 0.25 / 0.0625 = 8.
    assert interval([0.25, 0.75]) == interval([0.0, 1.0] * 4)


def test_wilson_interval_equal_shares_count_as_one_trial_each() -> None:
    # The mean of three times 0.1 is rounded to another number. m = 3: center (0.1 + 1.9208 / 3) / (1 + 3.8416 / 3)
    # = 0.3246, half 1.96 sqrt(0.03 + 0.9604 / 9) / (1 + 3.8416 / 3) = 0.3178.
    assert sum([0.1] * 3) / 3 != 0.1
    assert interval([0.1] * 3) == (0.0068, 0.6424)


@given(values=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_wilson_interval_contains_its_value_within_0_and_1(values: list[float]) -> None:
    estimate = wilson_interval(values)
    assert 0.0 <= estimate.low <= estimate.value + 1e-12 and estimate.value - 1e-12 <= estimate.high <= 1.0


def test_wilson_interval_narrows_with_more_problems() -> None:
    few, many = wilson_interval([1.0, 0.0] * 5), wilson_interval([1.0, 0.0] * 500)
    assert many.high - many.low < (few.high - few.low) / 5


def test_interval_estimate_as_text_has_its_bounds() -> None:
    assert str(Measure(0.8, 0.49012, 0.94349)) == "0.800 [0.490, 0.943]"
