r"""Sets of reals in any notation: `(0,1]`, `0 < x \le 1`, `x \in (0,1]`, `\{0,1\}`, `\mathbb{R} \setminus \{0\}`.

All are brought to one form, a union of intervals, so that `compare` can compare across notations.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from grpo_ray.rewards.math.normalize import strip_spacing
from grpo_ray.rewards.math.structure import (
    INEQUALITIES,
    MIRRORED,
    NAME,
    Collection,
    Leaf,
    Relation,
    Structure,
    Union,
    is_name,
)

_REALS_WITHOUT = re.compile(r"\\mathbb\{R\}\s*(?:\\setminus|\\backslash|-|\\)\s*\\\{(.*)\\\}")
r"""`\mathbb{R} \setminus \{...\}`."""


@dataclass(frozen=True)
class Interval:
    """An interval of reals; a single point has equal, closed ends."""

    low: str
    high: str
    low_open: bool
    high_open: bool


@dataclass(frozen=True)
class RealSet:
    """A union of intervals and points."""

    variable: str | None
    """Name of the variable that the set restricts, None if the notation names none."""
    intervals: tuple[Interval, ...]


def real_set(structure: Structure) -> RealSet | None:
    """Return the set of reals that a structure denotes, None for any other structure."""
    if isinstance(structure, Leaf):
        return _named_set(structure.text)
    if isinstance(structure, Relation):
        return _solution_set(structure)
    if isinstance(structure, Union):
        return _union(structure.items)
    if structure.opening == "{":
        return _finite_set(structure)
    if structure.opening:
        return _bracketed_interval(structure)
    # A bare list is a set only as alternatives (`x<1 or x>3`); `1,2` is a list of values.
    return _union(structure.items) if all(isinstance(item, Relation) for item in structure.items) else None


def _union(structures: Iterable[Structure]) -> RealSet | None:
    """Unite sets of reals; None if one is no set of reals or they restrict different variables."""
    sets = [real_set(structure) for structure in structures]
    known = [each for each in sets if each is not None]
    variables = {each.variable for each in known if each.variable is not None}
    if len(known) < len(sets) or len(variables) > 1:
        return None
    return RealSet(next(iter(variables), None), tuple(interval for each in known for interval in each.intervals))


def _named_set(text: str) -> RealSet | None:
    r"""Return `\emptyset`, or the reals without some points."""
    if text == r"\emptyset":
        return RealSet(None, ())
    without = _REALS_WITHOUT.fullmatch(text)
    if without is None:
        return None
    from grpo_ray.rewards.math.values import sorted_constants

    points = sorted_constants(tuple(point.strip() for point in without[1].split(",")))
    if points is None:
        return None
    ends = (r"-\infty", *points, r"\infty")
    return RealSet(None, tuple(Interval(low, high, True, True) for low, high in pairwise(ends)))


def _finite_set(braces: Collection) -> RealSet | None:
    points = _leaf_texts(braces.items)
    return None if points is None else RealSet(None, tuple(Interval(point, point, False, False) for point in points))


def _bracketed_interval(brackets: Collection) -> RealSet | None:
    ends = _leaf_texts(brackets.items)
    if ends is None or len(ends) != 2:
        return None
    return RealSet(None, (_interval(*ends, low_open=brackets.opening == "(", high_open=brackets.closing == ")"),))


def _solution_set(relation: Relation) -> RealSet | None:
    r"""Return the set of a solved inequality (`3<x`, `-1<x\le 1`, `x\ne 0`) or of a membership `x\in ...`.

    None for an inequality that is still to be solved.
    """
    first, *rest = relation.operands
    if relation.operators == (r"\in",) and is_name(first):
        members = real_set(rest[0])
        return None if members is None else RealSet(strip_spacing(first.text), members.intervals)
    sides = _leaf_texts(relation.operands)
    if sides is None or not INEQUALITIES.issuperset(relation.operators):
        return None
    if len(sides) == 2:
        (operator,) = relation.operators
        if is_name(first):
            return _one_inequality(sides[0], operator, sides[1])
        return _one_inequality(sides[1], MIRRORED[operator], sides[0])
    if len(sides) == 3:
        low, variable, high = sides
        lower, upper = relation.operators
        if lower in (">", r"\ge"):
            low, lower, upper, high = high, MIRRORED[upper], MIRRORED[lower], low
        return _two_inequalities(low, lower, variable, upper, high)
    return None


def _one_inequality(variable: str, operator: str, bound: str) -> RealSet | None:
    """Return the set of `variable operator bound`: a half-line, or two for an excluded point."""
    if not _is_solved(variable, bound):
        return None
    below = _interval(r"-\infty", bound, low_open=True, high_open=operator != r"\le")
    above = _interval(bound, r"\infty", low_open=operator != r"\ge", high_open=True)
    intervals = {"<": (below,), r"\le": (below,), ">": (above,), r"\ge": (above,), r"\ne": (below, above)}[operator]
    return RealSet(strip_spacing(variable), intervals)


def _two_inequalities(low: str, lower: str, variable: str, upper: str, high: str) -> RealSet | None:
    r"""Return the set of `low lower variable upper high`, such as `-1 < x \le 1`."""
    if not {lower, upper} <= {"<", r"\le"} or not _is_solved(variable, low, high):
        return None
    return RealSet(strip_spacing(variable), (_interval(low, high, low_open=lower == "<", high_open=upper == "<"),))


def _is_solved(variable: str, *bounds: str) -> bool:
    """Return True if a variable stands alone against constant bounds."""
    from grpo_ray.rewards.math.values import is_constant

    return NAME.fullmatch(variable) is not None and all(is_constant(bound) for bound in bounds)


def _interval(low: str, high: str, *, low_open: bool, high_open: bool) -> Interval:
    r"""Return an interval whose infinite ends are open, so that `[3,\infty]` is `[3,\infty)`."""
    low, high = low.strip(), high.strip()
    return Interval(low, high, low_open or low == r"-\infty", high_open or high == r"\infty")


def _leaf_texts(structures: tuple[Structure, ...]) -> list[str] | None:
    """Return the texts of structures that are all leaves, else None."""
    texts = [structure.text for structure in structures if isinstance(structure, Leaf)]
    return texts if len(texts) == len(structures) else None
