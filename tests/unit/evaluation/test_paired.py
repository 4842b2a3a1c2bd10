"""Tests of the paired comparison of two policies; the p-values are worked by hand."""

import itertools
import math
import random

import pytest

from grpo_ray.evaluation.paired import compare_paired, difference_interval, sign_flip_test

NAN = math.nan


@pytest.mark.parametrize(
    ("differences", "p_value"),
    [
        ([1, 1, 1, 1, 1, -1, 0, 0], 14 / 64),  # 5 of 6 heads or more, or 1 or less: 2 (6 + 1) / 2^6
        ([1, 1, 1], 2 / 8),
        ([1, -1], 1.0),
        ([0, 0, 0], 1.0),
        ([], 1.0),
        ([-1] * 10, 2 / 1024),
        ([2, 1, -1], 6 / 8),  # the sums of +-2 +-1 +-1: 4, 2, 2, 0, 0, -2, -2, -4
        ([3, 1], 2 / 4),  # 4, 2, -2, -4
    ],
)
def test_sign_flip_small_cases_match_the_table(differences: list[int], p_value: float) -> None:
    assert sign_flip_test(differences) == pytest.approx(p_value, rel=1e-12)
    assert sign_flip_test([-difference for difference in differences]) == pytest.approx(p_value, rel=1e-12)


def test_sign_flip_matches_enumeration_of_all_signs() -> None:
    rng = random.Random(3)
    for _ in range(20):
        differences = [rng.randint(-4, 4) for _ in range(rng.randint(1, 11))]
        sums = [sum(signs) for signs in itertools.product(*((d, -d) for d in differences))]
        share = sum(abs(each) >= abs(sum(differences)) for each in sums) / len(sums)
        assert sign_flip_test(differences) == pytest.approx(share, rel=1e-12)


def test_sign_flip_thousands_of_problems_stay_finite() -> None:
    # 3000 problems differ, 1600 to 1400: z = 200 / sqrt(3000) = 3.65, two-sided p about 0.00026.
    assert sign_flip_test([1] * 1600 + [-1] * 1400) == pytest.approx(0.00027, abs=2e-5)
    assert 0 <= sign_flip_test([8] * 3000) < 1e-300


def test_sign_flip_equal_policies_are_rejected_as_often_as_stated() -> None:
    rng = random.Random(5)
    trials = [sign_flip_test([rng.choice((-1, 0, 0, 1)) for _ in range(60)]) for _ in range(1000)]
    assert 0.01 < sum(p <= 0.05 for p in trials) / 1000 < 0.06  # an exact test of discrete data is conservative


def test_difference_interval_matches_bonett_and_price() -> None:
    # b = 12 better, c = 4 worse of 50: shares (13 / 52, 5 / 52), difference 8 / 52,
    # half 1.96 sqrt((18 / 52 - (8 / 52)^2) / 52) = 0.1543
    interval = difference_interval([1.0] * 12 + [-1.0] * 4 + [0.0] * 34)
    assert interval == pytest.approx((8 / 52 - 0.1543, 8 / 52 + 0.1543), abs=1e-4)


def test_difference_interval_without_changes_has_a_width() -> None:
    low, high = difference_interval([0.0] * 98)
    assert low == -high == pytest.approx(-1.96 * math.sqrt(2) / 100)
    assert difference_interval([]) == (-1.0, 1.0)


def test_compare_paired_one_completion_per_problem() -> None:
    before = {"a": [0.0], "b": [0.0], "c": [1.0], "d": [1.0], "only before": [1.0]}
    after = {"a": [1.0], "b": [1.0], "c": [0.0], "d": [1.0], "only after": [0.0]}
    comparison = compare_paired(before, after)
    assert comparison is not None
    assert (comparison.before, comparison.after) == (0.5, 0.75)
    assert (comparison.difference.value, comparison.difference.count) == (0.25, 4)
    assert (comparison.better, comparison.worse, comparison.p_value) == (2, 1, 1.0)  # 2 of 3 heads or 1 of 3


def test_compare_paired_several_completions_use_means() -> None:
    comparison = compare_paired({"a": [0.0, 0.0], "b": [1.0, 0.0]}, {"a": [1.0, 1.0], "b": [0.0, 1.0]})
    assert comparison is not None
    assert (comparison.num_samples, comparison.before, comparison.after) == (2, 0.25, 0.75)
    assert (comparison.better, comparison.worse, comparison.p_value) == (1, 0, 1.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({"a": [1.0]}, {"b": [1.0]}),
        ({"a": [1.0]}, {"a": [1.0, 0.0]}),
        ({"a": [NAN]}, {"a": [1.0]}),
        ({"a": []}, {"a": []}),
        ({"a": [0.4], "b": [1.0]}, {"a": [0.7], "b": [1.0]}),
    ],
    ids=["empty", "other problems", "other sampling", "unknown verdict", "no completions", "environment's scores"],
)
def test_compare_paired_without_pairs_is_none(before: dict[str, list[float]], after: dict[str, list[float]]) -> None:
    assert compare_paired(before, after) is None
