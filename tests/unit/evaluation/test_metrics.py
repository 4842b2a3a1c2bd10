"""Scores of held-out completions: pass@k, maj@k, confidence intervals, and their summary."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.evaluation.confidence import Estimate, mean_with_interval
from grpo_ray.evaluation.metrics import majority_score, pass_at_k, summarize_evaluation, vote_key

NAN = float("nan")


def interval(values: list[float]) -> tuple[float, float]:
    result = mean_with_interval(values)
    return round(result.low, 4), round(result.high, 4)


# pass@k


@given(completions=st.lists(st.booleans(), min_size=1, max_size=8), chosen=st.integers(0, 7))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_pass_at_k_equals_share_of_choices_with_a_right_one(completions, chosen):
    n, right = len(completions), sum(completions)
    k = chosen % n + 1
    choices = list(itertools.combinations(completions, k))
    share = sum(map(any, choices)) / len(choices)
    assert pass_at_k(n, right, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_one_right_of_four_two_chosen_is_half():
    # 4 completions, 1 right, 2 chosen: C(3, 2) = 3 of C(4, 2) = 6 choices miss it.
    assert pass_at_k(4, 1, 2) == 0.5


def test_pass_at_k_many_completions_does_not_overflow():
    assert 0.999 < pass_at_k(10_000, 100, 1_000) <= 1.0


# maj@k


@pytest.mark.parametrize(
    ("answers", "scores", "right"),
    [
        (["5", "5", "6"], [1.0, 1.0, 0.0], 1.0),
        (["6", "5", "6"], [0.0, 1.0, 0.0], 0.0),
        (["6", "5"], [0.0, 1.0], 0.0),  # equal votes: the first answer counts
        (["5", "6", "6", "5"], [1.0, 0.0, 0.0, 1.0], 1.0),
        (["", "", "5"], [0.0, 0.0, 1.0], 1.0),  # an empty answer is no vote
        (["", ""], [0.0, 0.0], 0.0),
        (["5"], [1.0], 1.0),
    ],
)
def test_majority_most_frequent_answer_decides(answers, scores, right):
    assert majority_score(answers, scores) == right


def test_vote_different_markup_gives_equal_votes():
    assert vote_key("So it is $\\boxed{5}$.") == vote_key("Thus \\boxed{ 5 }") != vote_key("\\boxed{6}")


def test_vote_text_without_answer_is_empty():
    assert vote_key("I do not know.") == vote_key("") == ""


# Intervals


def test_estimate_eight_of_ten_is_wilsons_interval():
    # z = 1.96, z^2 = 3.8416: centre (0.8 + 0.19208) / 1.38416 = 0.71674,
    # half 1.96 x sqrt(0.016 + 0.009604) / 1.38416 = 0.22658.
    result = mean_with_interval([1.0] * 8 + [0.0] * 2)
    assert result.value == 0.8
    assert result.low == pytest.approx(0.71674 - 0.22658, abs=2e-5)
    assert result.high == pytest.approx(0.71674 + 0.22658, abs=2e-5)


def test_estimate_none_of_ten_has_high_above_zero():
    # 3.8416 / 13.8416 = 0.2775
    assert mean_with_interval([0.0] * 10).value == 0.0
    assert interval([0.0] * 10) == (0.0, 0.2775)


def test_estimate_all_of_ten_has_low_below_one():
    assert interval([1.0] * 10) == (0.7225, 1.0)  # 1 - 0.2775


def test_estimate_no_problems_is_nan():
    result = mean_with_interval([])
    assert all(math.isnan(x) for x in (result.value, result.low, result.high))


def test_estimate_one_problem_has_a_wide_interval():
    low, high = interval([1.0])
    assert low < 0.25 and high == 1.0  # 1 - 3.8416 / 4.8416 = 0.2065


def test_estimate_several_completions_count_as_more_tosses():
    # Mean 0.5, variance 0.0625, of a coin 0.25: two such problems count as 2 x 0.25 / 0.0625 = 8 tosses.
    assert interval([0.25, 0.75]) == interval([0.0, 1.0] * 4)


@given(values=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_estimate_interval_holds_its_value_within_0_and_1(values):
    result = mean_with_interval(values)
    assert 0.0 <= result.low <= result.value + 1e-12 and result.value - 1e-12 <= result.high <= 1.0


def test_estimate_more_problems_narrow_the_interval():
    few, many = mean_with_interval([1.0, 0.0] * 5), mean_with_interval([1.0, 0.0] * 500)
    assert many.high - many.low < (few.high - few.low) / 5


def test_estimate_as_text_has_its_interval():
    assert str(Estimate(0.8, 0.49012, 0.94349)) == "0.800 [0.490, 0.943]"


# Summary


def row(scores: list[float], answers: list[str], truncated: int = 0, seconds: float = 0.5) -> dict:
    return {"scores": scores, "answers": answers, "truncated": truncated, "seconds": seconds}


def test_summarise_two_problems_by_hand():
    result = summarize_evaluation(
        [
            row([1.0, 0.0, 0.0, 0.0], ["5", "6", "6", "7"], truncated=1),
            row([1.0, 1.0, 1.0, 0.0], ["5", "5", "5", "6"], truncated=2, seconds=1.5),
        ],
        num_samples=4,
    )
    assert (result.problems, result.unscorable, result.num_samples) == (2, 0, 4)
    assert result.pass_at_1.value == 0.5  # 1/4 and 3/4
    assert result.pass_at_k.value == 1.0  # each has a right one
    assert result.maj_at_k.value == 0.5  # "6" is wrong, "5" is right
    assert result.truncated_share == 3 / 8
    assert result.completions_per_second == 4.0  # 8 completions in 2 s


def test_summarise_unscorable_problem_is_only_counted():
    rows = [row([1.0], ["5"]), row([NAN], ["5"], truncated=1), row([0.0], ["6"])]
    result = summarize_evaluation(rows, num_samples=1)
    assert (result.problems, result.unscorable) == (2, 1)
    assert result.pass_at_1.value == result.pass_at_k.value == result.maj_at_k.value == 0.5
    assert result.truncated_share == 1 / 3  # it was generated too


def test_summarise_nothing_scorable_is_nan():
    result = summarize_evaluation([row([NAN], [""])], num_samples=1)
    assert (result.problems, result.unscorable) == (0, 1)
    assert math.isnan(result.pass_at_1.value) and math.isnan(result.maj_at_k.value)


def test_summarise_no_rows_gives_zero_shares():
    result = summarize_evaluation([], num_samples=2)
    assert (result.problems, result.truncated_share, result.completions_per_second) == (0, 0.0, 0.0)


def test_evaluation_can_be_written_as_json():
    plain = json.loads(json.dumps(summarize_evaluation([row([1.0], ["5"])], num_samples=1).to_dict()))
    assert plain["pass_at_1"]["value"] == 1.0 and plain["problems"] == 1
