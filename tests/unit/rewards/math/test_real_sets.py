"""Tests of sets of reals: each notation, worked by hand, and structures that are no set of reals."""

import pytest

from grpo_ray.rewards.math.real_sets import Interval, RealSet, _intersection, real_set, with_open_infinity
from grpo_ray.rewards.math.structure import parse_structure

LOW, HIGH = r"-\infty", r"\infty"


@pytest.mark.parametrize(
    ("text", "variable", "intervals"),
    [
        (r"\emptyset", None, []),
        (r"\{0,1\}", None, [("0", "0", False, False), ("1", "1", False, False)]),
        ("(0,1]", None, [("0", "1", True, False)]),
        (r"[3,\infty]", None, [("3", HIGH, False, False)]),  # as written
        (r"(0,1)\cup\{5\}", None, [("0", "1", True, True), ("5", "5", False, False)]),
        (r"\mathbb{R}", None, [(LOW, HIGH, True, True)]),
        (
            r"\mathbb{R}\setminus\{1,0\}",
            None,
            [(LOW, "0", True, True), ("0", "1", True, True), ("1", HIGH, True, True)],
        ),
        ("x<3", "x", [(LOW, "3", True, True)]),
        (r"3\le x", "x", [("3", HIGH, False, True)]),
        (r"x\ne 0", "x", [(LOW, "0", True, True), ("0", HIGH, True, True)]),
        (r"0<x\le 1", "x", [("0", "1", True, False)]),
        (r"1>x\ge 0", "x", [("0", "1", False, True)]),
        (r"x\in[0,1)", "x", [("0", "1", False, True)]),
        ("x<0 or x>1", "x", [(LOW, "0", True, True), ("1", HIGH, True, True)]),
    ],
)
def test_real_set_of_each_notation(
    text: str, variable: str | None, intervals: list[tuple[str, str, bool, bool]]
) -> None:
    expected = RealSet(variable, tuple(Interval(*interval) for interval in intervals))
    assert real_set(parse_structure(text)) == expected


def test_with_open_infinity_opens_infinite_ends_alone() -> None:
    found = RealSet("x", (Interval(LOW, "2", False, False), Interval("3", HIGH, False, False)))
    assert with_open_infinity(found) == RealSet(
        "x", (Interval(LOW, "2", True, False), Interval("3", HIGH, False, True))
    )


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "0,1",  # a list of values
        "(1,2,3)",
        "x=5",
        "2x<4",  # still to be solved
        "a<x<b",  # bounds are not constant
        "0>x<1",  # two directions
        "0<x>1",
        "0<x<y<1",
        "x<0, y>0",  # two variables
        r"\mathbb{R}\setminus\{a\}",
    ],
)
def test_real_set_of_other_structures_is_none(text: str) -> None:
    assert real_set(parse_structure(text)) is None


@pytest.mark.parametrize(("count", "is_computed"), [(8, True), (9, False)])  # 8 * 8 pairs of intervals; 9 * 8
def test_intersection_of_at_most_64_pairs_is_computed(count: int, is_computed: bool) -> None:
    one, other = (
        RealSet(None, tuple(Interval(str(low), str(low), False, False) for low in range(size))) for size in (count, 8)
    )
    assert (_intersection(one, other) is not None) == is_computed
