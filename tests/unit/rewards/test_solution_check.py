"""Tests of the solution check: kinds of answers, stated answers, and counts of verified solutions."""

import pytest

from grpo_ray.config.schema import RewardsConfig
from grpo_ray.data.problem import Problem, parse_problem
from grpo_ray.rewards.solution_check import (
    KINDS,
    Coverage,
    answer_kind,
    merge_coverage,
    stated_answer,
    verify_solutions,
)

PARAGRAPH = "Every such prime divides the sum of all the others, so there are none"


@pytest.mark.parametrize(
    ("solution", "kind"),
    [
        ("$5$", "number"),
        ("$-3.5$", "number"),
        ("$1,000$", "number"),
        ("$50\\%$", "number"),
        ("$5\\text{ cm}$", "number"),
        ("$90^\\circ$", "number"),
        ("$\\frac{1}{2}$", "fraction"),
        ("$-\\dfrac12$", "fraction"),
        ("$3/4$", "fraction"),
        ("$\\sqrt{2}$", "expression"),
        ("$2^{10}$", "expression"),
        ("$\\frac{n}{2}$", "expression"),
        ("$(1,2)$", "set, interval or tuple"),
        ("$\\{1,2\\}$", "set, interval or tuple"),
        ("$1,2$", "set, interval or tuple"),
        ("$(0,1)\\cup(2,3)$", "set, interval or tuple"),
        ("$x\\in(0,1)$", "set, interval or tuple"),
        ("$\\emptyset$", "set, interval or tuple"),
        ("$x=5$", "equation"),
        ("$x>3$", "equation"),
        ("Yes", "boolean"),
        ("\\text{False}", "boolean"),
        ("Even", "word"),
        ("B", "choice letter"),
        ("(C)", "choice letter"),
        (PARAGRAPH, "text"),
    ],
)
def test_answer_kind_of_solution(solution: str, kind: str) -> None:
    assert answer_kind(solution) == kind and kind in KINDS


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("$\\frac{1}{2}$", "\\frac{1}{2}"),
        ("$2$, $3$", "2, 3"),
        ("So it is \\boxed{7}.", "7"),
        ("Yes", "Yes"),
        ("\\$5", "\\$5"),  # a currency sign
    ],
)
def test_stated_answer_drops_dollars_and_box(solution: str, answer: str) -> None:
    assert stated_answer(solution) == answer


def problem(solution: str, **columns: object) -> Problem:
    return parse_problem({"prompt": "?", "solution": solution, **columns}, where="here")


@pytest.mark.long
def test_verify_solutions_counts_own_and_neighbours() -> None:
    half, same, five, prose, word = (
        problem("$0.5$", topic="a"),
        problem("$\\frac{1}{2}$", topic="a"),
        problem("$5$", topic="b"),
        problem(PARAGRAPH),
        problem("Yes"),
    )
    pairs = [(half, same), (same, five), (five, five), (prose, five), (word, problem("No"))]
    # A generous limit: verdicts must not depend on how busy the machine is.
    counts = verify_solutions(pairs, RewardsConfig(time_limit=60.0))
    assert (counts["verified"], counts["boxed"], counts["formula"]) == (5, 4, 4)
    assert counts["probes"] == 4  # equal solutions ("five" beside "five") are no probe
    assert counts["fooled"] == [{"id": half.id, "solution": "$0.5$", "answer": "$\\frac{1}{2}$"}]
    assert counts["unverifiable"] == [{"id": prose.id, "solution": PARAGRAPH[:60], "reason": "cannot be parsed"}]
    # Two verdicts for each problem and one for each probe, by kind and by topic.
    assert {kind: sums[:3] for kind, sums in counts["kinds"].items()} == {
        "number": [2, 2, 5],
        "fraction": [1, 1, 3],
        "text": [1, 0, 3],
        "boolean": [1, 1, 3],
    }
    assert {topic: sums[:3] for topic, sums in counts["topics"].items()} == {"a": [2, 2, 6], "b": [1, 1, 2]}
    assert all(sums[3] > 0 for sums in counts["kinds"].values())


@pytest.mark.long
def test_verify_solutions_plain_verdicts_and_reasons() -> None:
    # Math-Verify alone cannot parse a word. It parses the nested parentheses for seconds of CPU time, so this
    # problem exceeds its limit on any machine.
    word, nested = problem("Yes"), problem("$" + "(" * 50 + "5" + ")" * 50 + "$")
    counts = verify_solutions([(word, problem("No")), (nested, nested)], RewardsConfig(strict=False, time_limit=1.0))
    assert counts["boxed"] == 0
    assert [(row["id"], row["reason"]) for row in counts["unverifiable"]] == [
        (word.id, "cannot be parsed"),
        (nested.id, "timeout"),
    ]


def test_merge_coverage_adds_sums_by_name() -> None:
    tables = [{"word": [1, 1, 2, 0.5], "number": [2, 1, 4, 1.0]}, {"number": [1, 1, 4, 3.0]}]
    # number: 3 problems, 2 verified, 4.0 s over 8 verdicts
    expected = {"number": Coverage(3, 2, 0.5), "word": Coverage(1, 1, 0.25)}
    assert list(merge_coverage(tables).items()) == list(expected.items())  # the largest first
    assert list(merge_coverage(tables, KINDS)) == ["number", "word"]
    assert list(merge_coverage(tables, ("word", "number"))) == ["word", "number"]
    assert merge_coverage([]) == {}
