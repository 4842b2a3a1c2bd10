"""Tests of pass@k, maj@k, and the summary of an evaluation."""

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.metrics import (
    EvaluationResult,
    heldout_metrics,
    majority_score,
    pass_at_k,
    recorded_measures,
    score_completions,
    summarize_evaluation,
    summarize_sets,
    unique_problems,
    vote_key,
)
from grpo_ray.evaluation.scores import Answer, HeldoutScore

NAN = float("nan")


# pass@k


@given(completions=st.lists(st.booleans(), min_size=1, max_size=8), chosen=st.integers(0, 7))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_pass_at_k_equals_share_of_subsets_with_a_correct_one(completions: list[bool], chosen: int) -> None:
    n, correct = len(completions), sum(completions)
    k = chosen % n + 1
    subsets = list(itertools.combinations(completions, k))
    share = sum(map(any, subsets)) / len(subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_one_correct_of_four_two_chosen_is_half() -> None:
    # 4 completions, 1 correct, 2 chosen: C(3, 2) = 3 of C(4, 2) = 6 subsets miss it.
    assert pass_at_k(4, 1, 2) == 0.5


def test_pass_at_k_many_completions_does_not_overflow() -> None:
    assert 0.999 < pass_at_k(10_000, 100, 1_000) <= 1.0


# maj@k


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
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
def test_majority_score_most_frequent_answer_decides(answers: list[str], scores: list[float], expected: float) -> None:
    assert majority_score(answers, scores) == expected


def test_vote_key_ignores_markup() -> None:
    assert vote_key("So it is $\\boxed{5}$.") == vote_key("Thus \\boxed{ 5 }") != vote_key("\\boxed{6}")


def test_vote_key_long_answer_is_not_normalized() -> None:
    long = r"\text{cm}/" * 20_000  # would take minutes
    assert vote_key(rf"\boxed{{{long}}}") == long
    short = "1" * 998 + "{}"
    assert vote_key(rf"\boxed{{{short} }}") == vote_key(rf"\boxed{{ {short}}}")


def test_vote_key_without_answer_is_empty() -> None:
    assert vote_key("I do not know.") == vote_key("") == ""


# Summary


def row(scores: list[float], answers: list[str], truncated: int = 0, seconds: float = 0.5) -> dict[str, Any]:
    flags = [number < truncated for number in range(len(scores))]
    return {"scores": scores, "answers": answers, "truncated": flags, "seconds": seconds}


def test_summarize_two_problems_by_hand() -> None:
    result = summarize_evaluation(
        [
            row([1.0, 0.0, 0.0, 0.0], ["5", "6", "6", "7"], truncated=1),
            row([1.0, 1.0, 1.0, 0.0], ["5", "5", "5", "6"], truncated=2, seconds=1.5),
        ],
        num_samples=4,
    )
    assert (result.problems, result.unscorable, result.num_samples) == (2, 0, 4)
    assert result.maj_at_k is not None
    assert result.pass_at_1.value == 0.5  # 1/4 and 3/4
    assert result.pass_at_k.value == 1.0  # each has a correct one
    assert result.maj_at_k.value == 0.5  # "6" is wrong, "5" is right
    assert result.truncated_share == 3 / 8
    assert result.completions_per_second == 4.0  # 8 completions in 2 s


def test_summarize_unscorable_problem_is_only_counted() -> None:
    rows = [row([1.0], ["5"]), row([NAN], ["5"], truncated=1), row([0.0], ["6"])]
    result = summarize_evaluation(rows, num_samples=1)
    assert (result.problems, result.unscorable) == (2, 1)
    assert result.maj_at_k is not None
    assert result.pass_at_1.value == result.pass_at_k.value == result.maj_at_k.value == 0.5
    assert result.truncated_share == 1 / 3  # its completion was generated too


def test_summarize_without_scorable_problems_is_nan() -> None:
    result = summarize_evaluation([row([NAN], [""])], num_samples=1)
    assert (result.problems, result.unscorable) == (0, 1)
    assert result.maj_at_k is not None
    assert math.isnan(result.pass_at_1.value) and math.isnan(result.maj_at_k.value)


def test_summarize_without_rows_has_zero_shares() -> None:
    result = summarize_evaluation([], num_samples=2)
    assert (result.problems, result.truncated_share, result.completions_per_second) == (0, 0.0, 0.0)


def test_evaluation_result_can_be_written_as_json() -> None:
    plain = json.loads(json.dumps(summarize_evaluation([row([1.0], ["5"])], num_samples=1).to_dict()))
    assert plain["pass_at_1"]["value"] == 1.0 and plain["problems"] == 1


# Several held-out sets


A, B, C = (Problem(id=name, prompt=[{"role": "user", "content": name}], solution="$1$") for name in "abc")


def solved(problem: Problem, *scores: float, truncated: int = 0) -> dict[str, Any]:
    """Return the row of a problem with the scores of its completions."""
    answers = ["1" if score else "2" for score in scores]
    flags = [number < truncated for number in range(len(scores))]
    texts = {"lengths": [5] * len(scores), "texts": [f"{score}" for score in scores]}
    return {"id": problem.id, "scores": list(scores), "answers": answers, "truncated": flags, "seconds": 1.0} | texts


def test_summarize_sets_shared_problem_counts_in_each() -> None:
    sets = {"heldout/x": [A, B], "heldout/y": [B, C]}
    assert unique_problems(sets) == [A, B, C]
    rows = [solved(C, 0.0, truncated=1), solved(B, 1.0), solved(A, 1.0)]  # in any order
    results = summarize_sets(rows, sets, num_samples=1)
    assert {key: (each.pass_at_1.value, each.truncated_share) for key, each in results.items()} == {
        "heldout/x": (1.0, 0.0),
        "heldout/y": (0.5, 0.5),
    }


def test_heldout_metrics_primary_set_is_also_reported_without_name() -> None:
    results = summarize_sets([solved(A, 1.0), solved(B, 0.0)], {"heldout/x": [A], "heldout/y": [A, B]}, 1)
    metrics = heldout_metrics(results, "heldout/y")
    assert {name: value for name, value in metrics.items() if name.endswith("/accuracy")} == {
        "heldout/accuracy": 0.5,
        "heldout/x/accuracy": 1.0,
        "heldout/y/accuracy": 0.5,
    }
    assert {name.rpartition("/")[2] for name in metrics} == {"accuracy", "low", "high", "truncated_share"}
    assert recorded_measures(metrics, "heldout/x") == results["heldout/x"].measures()


def test_heldout_metrics_only_set_is_reported_once() -> None:
    metrics = heldout_metrics(summarize_sets([solved(A, 1.0)], {"heldout": [A]}, 1), "heldout")
    assert list(metrics) == ["heldout/accuracy", "heldout/low", "heldout/high", "heldout/truncated_share"]


def test_heldout_metrics_several_samples_add_pass_and_maj() -> None:
    metrics = heldout_metrics(summarize_sets([solved(A, 1.0, 0.0, 0.0)], {"heldout": [A]}, 3), "heldout")
    assert metrics["heldout/accuracy"] == pytest.approx(1 / 3)
    assert (metrics["heldout/pass_at_k"], metrics["heldout/maj_at_k"]) == (1.0, 0.0)


def test_heldout_metrics_set_without_scorable_problem_has_none() -> None:
    results = summarize_sets([solved(A, NAN), solved(B, 1.0)], {"heldout/x": [A], "heldout/y": [B]}, 1)
    metrics = heldout_metrics(results, "heldout/x")
    assert all(name.startswith("heldout/y/") for name in metrics) and metrics["heldout/y/accuracy"] == 1.0


def test_evaluation_result_survives_json() -> None:
    (result,) = summarize_sets([solved(A, 1.0, 0.0)], {"heldout": [A]}, 2).values()
    stored = json.loads(json.dumps(result.to_dict() | {"measured_on": {}}))
    assert EvaluationResult.from_dict(stored) == result


@pytest.mark.parametrize("has_correctness", [True, False])
def test_completion_whose_environment_failed_has_no_verdict(has_correctness: bool) -> None:
    """The last text of an interrupted conversation is no evidence about the policy."""

    wrong = HeldoutScore(lambda problems, answers: [0.0 for _ in answers], is_verdict=True, is_share=True)
    environment = HeldoutScore(lambda problems, answers: [each.reward for each in answers], is_share=True)
    answers = [Answer("x", "x", 1, False, reward=0.5), Answer("x", "x", 1, False, reward=None, is_unscorable=True)]
    problem = Problem(id="0" * 16, prompt=[{"role": "user", "content": "Q"}], solution="")
    columns = score_completions([problem], answers, wrong if has_correctness else environment, started=0.0)
    ((first, second),) = columns["scores"]
    assert first == (0.0 if has_correctness else 0.5) and math.isnan(second)
