r"""Sets of reals in any notation: `(0,1]`, `0 < x \le 1`, `x \in (0,1]`, `\{0,1\}`, `\mathbb{R} \setminus \{0\}`.

All are converted to one form, a union of intervals, so that `compare` can compare across notations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_ray.rewards.math.normalize import strip_spacing
from grpo_ray.rewards.math.structure import (
    INEQUALITIES,
    MIRRORED,
    NAME,
    Collection,
    Leaf,
    Relation,
    SetBuilder,
    SetOperation,
    Structure,
    Union,
    is_name,
)

_MAX_INTERVALS = 64
"""Maximum intervals of a set in canonical form, and pairs of intervals in an intersection."""


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
    """Return the set of reals that a structure denotes, None for any other structure.

    Intervals with constant ends are in canonical form: sorted, and united where they touch.
    """
    found = _real_set(structure)
    return None if found is None else _canonical(found)


def with_open_infinity(found: RealSet) -> RealSet:
    r"""Return the set with infinite ends open, `[3,\infty)` for `[3,\infty]`: infinity is not a real number."""
    intervals = [
        replace(
            interval,
            low_open=interval.low_open or interval.low == r"-\infty",
            high_open=interval.high_open or interval.high == r"\infty",
        )
        for interval in found.intervals
    ]
    return replace(found, intervals=tuple(intervals))


def _real_set(structure: Structure) -> RealSet | None:
    if isinstance(structure, Leaf):
        return RealSet(None, ()) if structure.text == r"\emptyset" else None
    if isinstance(structure, Relation):
        return _solution_set(structure)
    if isinstance(structure, Union):
        return _union([_real_set(item) or _bare_point(item) for item in structure.items])
    if isinstance(structure, SetOperation):
        return _difference(structure)
    if isinstance(structure, SetBuilder):
        found = real_set(structure.condition)
        return None if found is None or found.variable != structure.variable else RealSet(None, found.intervals)
    if not isinstance(structure, Collection):
        return None
    if structure.opening == "{":
        return _finite_set(structure)
    if structure.opening:
        return _bracketed_interval(structure)
    # A bare list is a set only if its items are conditions (`x<1 or x>3`); `1,2` is a list of values.
    return _conditions(structure) if all(isinstance(item, Relation) for item in structure.items) else None


def _bare_point(item: Structure) -> RealSet | None:
    r"""Return the point of a union written without braces, `(1,2)\cup 3`."""
    from grpo_ray.rewards.math.values import is_constant

    if not isinstance(item, Leaf) or not is_constant(item.text):
        return None
    return RealSet(None, (Interval(item.text, item.text, False, False),))


def _union(sets: Sequence[RealSet | None]) -> RealSet | None:
    """Unite sets of reals; None if one is not a set of reals or they restrict different variables."""
    known = [each for each in sets if each is not None]
    variables = {each.variable for each in known if each.variable is not None}
    if len(known) < len(sets) or len(variables) > 1:
        return None
    return RealSet(next(iter(variables), None), tuple(interval for each in known for interval in each.intervals))


def _conditions(conditions: Collection) -> RealSet | None:
    """Return the reals that satisfy conditions on one variable.

    Conditions joined by `or` are alternatives; those joined by `and` must all hold. With commas, all must hold if that
    is possible (`x>-1, x<1`), else they are alternatives (`x<1, x>2`).
    """
    sets = [_point(item) or _real_set(item) for item in conditions.items]
    union = _union(sets)
    if all(isinstance(item, Relation) and item.operators == ("=",) for item in conditions.items):
        return None
    if union is None or conditions.joiner == "or":
        return union
    common = RealSet(union.variable, _everything())
    for each in sets:
        intersection = None if each is None else _intersection(common, each)
        if intersection is None:
            return union if conditions.joiner == "," else None
        common = RealSet(union.variable, intersection)
    return common if common.intervals or conditions.joiner == "and" else union


def _point(condition: Structure) -> RealSet | None:
    """Return the one-point set of `x=0`, one of several conditions; None for other conditions."""
    if not isinstance(condition, Relation) or condition.operators != ("=",):
        return None
    sides = _leaf_texts(condition.operands)
    if sides is None or not _is_solved(*sides):
        return None
    return RealSet(strip_spacing(sides[0]), (Interval(sides[1], sides[1], False, False),))


def _difference(operation: SetOperation) -> RealSet | None:
    r"""Return the reals in the first set but in none of the others; None for `\cap`, which is not evaluated."""
    if operation.operator != r"\setminus":
        return None
    sets = [_real_set(item) for item in operation.items]
    if _union(sets) is None:
        return None
    rest, *removed = [each for each in sets if each is not None]
    for each in removed:
        for interval in each.intervals:
            intersection = _intersection(rest, RealSet(None, _complement(interval)))
            if intersection is None:
                return None
            rest = replace(rest, intervals=intersection)
    return rest


def _finite_set(braces: Collection) -> RealSet | None:
    points = _leaf_texts(braces.items)
    return None if points is None else RealSet(None, tuple(Interval(point, point, False, False) for point in points))


def _bracketed_interval(brackets: Collection) -> RealSet | None:
    ends = _leaf_texts(brackets.items)
    if ends is None or any(r"\pm" in end or r"\mp" in end for end in ends):
        return None
    if len(ends) != 2 or (brackets.opening, brackets.closing) not in _INTERVAL_BRACKETS:
        return None
    return RealSet(None, (_interval(*ends, low_open=brackets.opening == "(", high_open=brackets.closing == ")"),))


def _solution_set(relation: Relation) -> RealSet | None:
    r"""Return the set of a solved inequality (`3<x`, `-1<x\le 1`, `x\ne 0`) or of a membership `x\in ...`.

    None for an inequality that is not solved.
    """
    first, *rest = relation.operands
    if relation.operators == (r"\in",) and is_name(first):
        members = _real_set(rest[0])
        return None if members is None else RealSet(strip_spacing(first.text), members.intervals)
    sides = _leaf_texts(relation.operands)
    if sides is None or not INEQUALITIES.issuperset(relation.operators):
        return None
    if len(sides) == 2:
        (operator,) = relation.operators
        variable, bound = sides
        if not _is_variable(variable.lstrip("-|")):
            variable, operator, bound = bound, MIRRORED[operator], variable
        if variable.startswith("-") and (opposite := _opposite(bound)) is not None:
            variable, operator, bound = variable[1:].strip(), MIRRORED[operator], opposite
        return _one_inequality(variable, operator, bound)
    if len(sides) == 3:
        low, variable, high = sides
        lower, upper = relation.operators
        if lower in (">", r"\ge"):
            low, lower, upper, high = high, MIRRORED[upper], MIRRORED[lower], low
        return _two_inequalities(low, lower, variable, upper, high)
    return None


def _one_inequality(variable: str, operator: str, bound: str) -> RealSet | None:
    """Return the set of `variable operator bound`: a half-line, or two for an excluded point.

    `|x|<a` is the interval from -a to a, and `|x|>a` the reals outside it.
    """
    if variable.startswith("|") and variable.endswith("|"):
        return _one_absolute(variable[1:-1], operator, bound)
    if not _is_solved(variable, bound):
        return None
    below = _interval(r"-\infty", bound, low_open=True, high_open=operator != r"\le")
    above = _interval(bound, r"\infty", low_open=operator != r"\ge", high_open=True)
    intervals = {"<": (below,), r"\le": (below,), ">": (above,), r"\ge": (above,), r"\ne": (below, above)}[operator]
    return RealSet(strip_spacing(variable), intervals)


def _one_absolute(variable: str, operator: str, bound: str) -> RealSet | None:
    """Return the set of `|variable| operator bound` with a positive bound."""
    opposite = _opposite(bound)
    if opposite is None or not _is_solved(variable, bound) or operator == r"\ne" or not _is_below("0", bound):
        return None
    if operator in ("<", r"\le"):
        return _two_inequalities(opposite, operator, variable, operator, bound)
    return _union([_one_inequality(variable, MIRRORED[operator], opposite), _one_inequality(variable, operator, bound)])


def _two_inequalities(low: str, lower: str, variable: str, upper: str, high: str) -> RealSet | None:
    r"""Return the set of `low lower variable upper high`, such as `-1 < x \le 1`."""
    if not {lower, upper} <= {"<", r"\le"} or not _is_solved(variable, low, high):
        return None
    return RealSet(strip_spacing(variable), (_interval(low, high, low_open=lower == "<", high_open=upper == "<"),))


def _is_solved(variable: str, *bounds: str) -> bool:
    """Return True if a variable stands alone against constant bounds."""
    from grpo_ray.rewards.math.values import is_constant

    return _is_variable(variable) and all(is_constant(bound) for bound in bounds)


def _is_variable(text: str) -> bool:
    r"""Return True for the name of a variable; `e`, `\pi` and `\infty` are not variables."""
    return NAME.fullmatch(text.rstrip("|")) is not None and text not in ("e", r"\pi", r"\infty")


def _opposite(bound: str) -> str | None:
    """Return the text of the negative of a bound that is one term, None for a sum."""
    positive = bound.removeprefix("-").strip()
    if "+" in positive or "-" in positive:
        return None
    return positive if bound.startswith("-") else f"-{bound}"


def _interval(low: str, high: str, *, low_open: bool, high_open: bool) -> Interval:
    return Interval(low.strip(), high.strip(), low_open, high_open)


def _leaf_texts(structures: tuple[Structure, ...]) -> list[str] | None:
    """Return the texts of structures that are all leaves, else None."""
    texts = [structure.text for structure in structures if isinstance(structure, Leaf)]
    return texts if len(texts) == len(structures) else None


# --- canonical form: intervals with constant ends in ascending order, none touching another

_INTERVAL_BRACKETS = frozenset({("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")})


def _canonical(found: RealSet) -> RealSet:
    """Sort the intervals and unite those that touch; the set stays as it is if an end is not constant."""
    placed = _placed(found.intervals)
    if placed is None or len(placed) > _MAX_INTERVALS:
        return found
    united: list[_Placed] = []
    for each in sorted(placed, key=lambda one: (one.low, one.interval.low_open)):
        last = united[-1] if united else None
        if last is None or not last.touches(each):
            united.append(each)
        elif (each.high, not each.interval.high_open) > (last.high, not last.interval.high_open):
            interval = replace(last.interval, high=each.interval.high, high_open=each.interval.high_open)
            united[-1] = _Placed(interval, last.low, each.high)
    return RealSet(found.variable, tuple(each.interval for each in united))


@dataclass(frozen=True)
class _Placed:
    """An interval with the values of its ends."""

    interval: Interval
    low: Any
    high: Any

    def touches(self, following: "_Placed") -> bool:
        """Return True if this interval and one that starts no earlier leave no gap."""
        gap_point_missing = self.interval.high_open and following.interval.low_open
        return bool(following.low < self.high or (following.low == self.high and not gap_point_missing))


def _placed(intervals: Iterable[Interval]) -> list[_Placed] | None:
    """Compute the ends of intervals; None if an end is not constant, or an interval is empty or reversed."""
    from grpo_ray.rewards.math.values import real_position

    placed = []
    for interval in intervals:
        low = real_position(interval.low)
        high = low if interval.high == interval.low else real_position(interval.high)
        if low is None or high is None or low > high:
            return None
        if low == high and (interval.low_open or interval.high_open):
            return None
        placed.append(_Placed(interval, low, high))
    return placed


def _intersection(one: RealSet, other: RealSet) -> tuple[Interval, ...] | None:
    """Return the intervals that two sets have in common; None if an end is not constant or there are too many."""
    left, right = _placed(one.intervals), _placed(other.intervals)
    if left is None or right is None or len(left) * len(right) > _MAX_INTERVALS:
        return None
    common = []
    for first in left:
        for second in right:
            low = max(first, second, key=lambda each: (each.low, each.interval.low_open))
            high = min(first, second, key=lambda each: (each.high, not each.interval.high_open))
            closed = not low.interval.low_open and not high.interval.high_open
            if low.low < high.high or (low.low == high.high and closed):
                common.append(
                    Interval(low.interval.low, high.interval.high, low.interval.low_open, high.interval.high_open)
                )
    return tuple(common)


def _everything() -> tuple[Interval, ...]:
    return (Interval(r"-\infty", r"\infty", True, True),)


def _complement(interval: Interval) -> tuple[Interval, ...]:
    """Return the reals outside an interval."""
    below = Interval(r"-\infty", interval.low, True, not interval.low_open)
    above = Interval(interval.high, r"\infty", not interval.high_open, True)
    return tuple(
        side for side, end in ((below, interval.low), (above, interval.high)) if end not in (r"-\infty", r"\infty")
    )


def _is_below(one: str, other: str) -> bool:
    from grpo_ray.rewards.math.values import real_position

    low, high = real_position(one), real_position(other)
    return low is not None and high is not None and bool(low < high)
