import itertools
import json
import math

import pytest

from grpo_ray.estimate import Estimate, estimate
from grpo_ray.scores import majority, pass_at_k, summarise, vote

NAN = float("nan")


def interval(values: list[float]) -> tuple[float, float]:
    result = estimate(values)
    return round(result.low, 4), round(result.high, 4)


# pass@k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_one(n):
    for right in range(n + 1):
        completions = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            choices = list(itertools.combinations(completions, k))
            share = sum(map(any, choices)) / len(choices)
            assert pass_at_k(n, right, k) == pytest.approx(share, abs=1e-12), (n, right, k)


def test_pass_at_k_worked_by_hand():
    # 4 completions, 1 right, 2 chosen: C(3, 2) = 3 of C(4, 2) = 6 choices miss it.
    assert pass_at_k(4, 1, 2) == 0.5


def test_pass_at_k_of_many_completions_does_not_overflow():
    assert 0.999 < pass_at_k(10_000, 100, 1_000) <= 1.0


# maj@k


@pytest.mark.parametrize(
    ("answers", "scores", "right"),
    [
        (["5", "5", "6"], [1.0, 1.0, 0.0], 1.0),
        (["6", "5", "6"], [0.0, 1.0, 0.0], 0.0),
        (["6", "5"], [0.0, 1.0], 0.0),  # as many votes for each: the first said counts
        (["5", "6", "6", "5"], [1.0, 0.0, 0.0, 1.0], 1.0),
        (["", "", "5"], [0.0, 0.0, 1.0], 1.0),  # no answer is no vote
        (["", ""], [0.0, 0.0], 0.0),
        (["5"], [1.0], 1.0),
    ],
)
def test_the_most_frequent_answer_decides(answers, scores, right):
    assert majority(answers, scores) == right


def test_equal_answers_are_equal_votes_however_they_are_set():
    assert vote("So it is $\\boxed{5}$.") == vote("Thus \\boxed{ 5 }") != vote("\\boxed{6}")


def test_what_answers_nothing_is_no_vote():
    assert vote("I do not know.") == vote("") == ""


# Intervals


def test_wilsons_interval_of_eight_of_ten_by_hand():
    # z = 1.96, z^2 = 3.8416: centre (0.8 + 0.19208) / 1.38416 = 0.71674,
    # half 1.96 x sqrt(0.016 + 0.009604) / 1.38416 = 0.22658.
    result = estimate([1.0] * 8 + [0.0] * 2)
    assert result.value == 0.8
    assert result.low == pytest.approx(0.71674 - 0.22658, abs=2e-5)
    assert result.high == pytest.approx(0.71674 + 0.22658, abs=2e-5)


def test_none_of_ten_right_does_not_mean_never_right():
    # 3.8416 / 13.8416 = 0.2775
    assert estimate([0.0] * 10).value == 0.0
    assert interval([0.0] * 10) == (0.0, 0.2775)


def test_all_of_ten_right_does_not_mean_always_right():
    assert interval([1.0] * 10) == (0.7225, 1.0)  # 1 - 0.2775


def test_without_problems_nothing_is_known():
    result = estimate([])
    assert all(math.isnan(x) for x in (result.value, result.low, result.high))


def test_one_problem_says_little():
    low, high = interval([1.0])
    assert low < 0.25 and high == 1.0  # 1 - 3.8416 / 4.8416 = 0.2065


def test_problems_with_several_completions_count_as_more_tosses():
    # Mean 0.5, variance 0.0625, of a coin 0.25: two such problems tell as much as 2 x 0.25 / 0.0625 = 8 tosses.
    assert interval([0.25, 0.75]) == interval([0.0, 1.0] * 4)


def test_an_interval_holds_its_value_and_stays_between_0_and_1():
    for n in range(1, 30):
        for right in range(n + 1):
            result = estimate([1.0] * right + [0.0] * (n - right))
            assert 0.0 <= result.low <= result.value + 1e-12 and result.value - 1e-12 <= result.high <= 1.0


def test_more_problems_give_a_narrower_interval():
    few, many = estimate([1.0, 0.0] * 5), estimate([1.0, 0.0] * 500)
    assert many.high - many.low < (few.high - few.low) / 5


def test_an_estimate_is_said_with_its_interval():
    assert str(Estimate(0.8, 0.49012, 0.94349)) == "0.800 [0.490, 0.943]"


# The whole of it


def row(scores: list[float], answers: list[str], truncated: int = 0, seconds: float = 0.5) -> dict:
    return {"scores": scores, "answers": answers, "truncated": truncated, "seconds": seconds}


def test_the_measures_of_two_problems_by_hand():
    result = summarise(
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


def test_a_problem_that_cannot_be_scored_counts_for_nothing_but_is_counted():
    rows = [row([1.0], ["5"]), row([NAN], ["5"], truncated=1), row([0.0], ["6"])]
    result = summarise(rows, num_samples=1)
    assert (result.problems, result.unscorable) == (2, 1)
    assert result.pass_at_1.value == result.pass_at_k.value == result.maj_at_k.value == 0.5
    assert result.truncated_share == 1 / 3  # it was generated all the same


def test_where_nothing_can_be_scored_the_result_is_unknown_and_not_zero():
    result = summarise([row([NAN], [""])], num_samples=1)
    assert (result.problems, result.unscorable) == (0, 1)
    assert math.isnan(result.pass_at_1.value) and math.isnan(result.maj_at_k.value)


def test_without_rows_there_is_no_division_by_zero():
    result = summarise([], num_samples=2)
    assert (result.problems, result.truncated_share, result.completions_per_second) == (0, 0.0, 0.0)


def test_an_evaluation_can_be_written_as_json():
    plain = json.loads(json.dumps(summarise([row([1.0], ["5"])], num_samples=1).to_dict()))
    assert plain["pass_at_1"]["value"] == 1.0 and plain["problems"] == 1
