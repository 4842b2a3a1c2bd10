"""Tests of the limits of an answer's text: at each limit, and one beyond it."""

import pytest

from grpo_ray.rewards.math.limits import MAX_DEPTH, MAX_DIGITS, MAX_LENGTH, MAX_OPERATORS, exceeds_limits


def nested(depth: int) -> str:
    return "(" * depth + "x" + ")" * depth


@pytest.mark.parametrize(
    ("largest", "beyond"),
    [
        ("x" * MAX_LENGTH, "x" * (MAX_LENGTH + 1)),
        ("1" + "+1" * MAX_OPERATORS, "1" + "+1" * (MAX_OPERATORS + 1)),
        (nested(MAX_DEPTH), nested(MAX_DEPTH + 1)),
        ("(x)" * 2 * MAX_DEPTH, nested(MAX_DEPTH + 1)),  # brackets side by side are not nested
        ("x^{99999}", "x^{100000}"),
        ("2^{2^x}", "2^{2^{2^{2^x}}}"),
        ("1e999", "1e9999"),
        ("999!", "1000!"),
        ("999!", "3!!"),
        (r"\binom{9999}{2}", r"\binom{10000}{2}"),
        (r"\pm1\pm2\pm3", r"\pm1\pm2\pm3\pm4"),
    ],
)
def test_exceeds_limits_only_beyond_the_largest(largest: str, beyond: str) -> None:
    assert (exceeds_limits(largest, "5"), exceeds_limits(beyond, "5")) == (False, True)


def test_exceeds_limits_digits_beside_a_long_solution() -> None:
    solution = "x" * MAX_LENGTH  # so that four times as many characters are accepted
    assert not exceeds_limits("1" * MAX_DIGITS, solution)
    assert exceeds_limits("1" * (MAX_DIGITS + 1), solution)


def test_exceeds_limits_takes_a_form_that_the_solution_has() -> None:
    assert not exceeds_limits("x^{100001}", "x^{100000}")
