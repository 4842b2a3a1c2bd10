r"""Comparison of two answers: structure by structure, down to the values inside.

The first argument of every comparison is the solution's side (`gold`). It determines the kind of answer that is asked
for: an answer of another kind, or one that leaves a computation undone that the solution does not leave, is wrong.
`values`, and with it sympy, is imported only where two values are compared, so that importing this module stays cheap.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from grpo_ray.rewards.math.limits import has_unevaluated_operator
from grpo_ray.rewards.math.normalize import strip_spacing
from grpo_ray.rewards.math.real_sets import Interval, real_set
from grpo_ray.rewards.math.structure import (
    INEQUALITIES,
    MIRRORED,
    NAME,
    Collection,
    Leaf,
    Relation,
    Structure,
    is_name,
    parse_structure,
)
from grpo_ray.rewards.math.words import split_unit

_BARE_LOG = re.compile(r"\\log(?![_a-zA-Z]|\s*_)")
_PLUS_MINUS = re.compile(r"\\[pm][mp](?![a-zA-Z])")
_DIGITS_IN_BASE = re.compile(r"(\d+)_\{?\d+\}?")

T = TypeVar("T")


def same_answer(gold: str, answer: str) -> bool:
    """Return True if two normalized texts state the same answer."""
    if _same_structure(parse_structure(gold), parse_structure(answer)):
        return True
    if _BARE_LOG.search(gold) or _BARE_LOG.search(answer):
        # A bare log is natural in analysis and decimal at school; one reading must hold for both sides.
        gold, answer = _BARE_LOG.sub(r"\\ln ", gold), _BARE_LOG.sub(r"\\ln ", answer)
        return _same_structure(parse_structure(gold), parse_structure(answer))
    return False


def _same_structure(gold: Structure, answer: Structure) -> bool:
    gold, answer = _expanded(gold), _expanded(answer)
    if isinstance(gold, Relation) and r"\approx" in gold.operators:
        return any(_same_structure(value, answer) for value in _approximated_values(gold))
    if isinstance(answer, Relation) and r"\approx" in answer.operators:
        return any(_same_structure(gold, value) for value in _approximated_values(answer))
    if isinstance(gold, Relation):
        return _matches_relation(gold, answer)
    if isinstance(answer, Relation) and INEQUALITIES.isdisjoint(answer.operators):
        statement = _statement(answer)
        return statement is not None and _same_structure(gold, statement.value)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _same_formula(gold.text, answer.text) or _same_real_set(gold, answer)
    if isinstance(gold, Collection) and isinstance(answer, Collection):
        return _same_collection(gold, answer) or _same_real_set(gold, answer)
    if _is_singleton(gold) and isinstance(answer, Leaf):
        return _same_structure(gold.items[0], answer)
    if _is_singleton(answer) and isinstance(gold, Leaf):
        return _same_structure(gold, answer.items[0])
    return _same_real_set(gold, answer)


def _is_singleton(structure: Structure) -> TypeGuard[Collection]:
    r"""Return True if the structure is a set of one value, `\{5\}`."""
    return isinstance(structure, Collection) and structure.opening == "{" and len(structure.items) == 1


def _expanded(structure: Structure) -> Structure:
    r"""Expand `a \pm b` into its two values, and `n=2,3,4` into a relation between n and a list of values."""
    if isinstance(structure, Leaf) and _PLUS_MINUS.search(structure.text):
        upper = structure.text.replace(r"\pm", "+").replace(r"\mp", "-")
        lower = structure.text.replace(r"\pm", "-").replace(r"\mp", "+")
        return Collection("", "", (Leaf(upper.strip().removeprefix("+").strip()), Leaf(lower.strip())))
    if isinstance(structure, Collection) and not structure.opening and len(structure.items) > 1:
        first, *rest = structure.items
        are_values = not any(isinstance(item, Relation) for item in rest)
        if isinstance(first, Relation) and first.operators == ("=",) and are_values:
            name, value = first.operands
            return Relation((name, Collection("", "", (value, *rest))), ("=",))
    return structure


# --- values


def _same_formula(gold: str, answer: str) -> bool:
    """Return True if two single values are the same, each with or without its unit."""
    if strip_spacing(gold) == strip_spacing(answer):
        return True
    if has_unevaluated_operator(answer, gold):
        return False
    gold_value, gold_unit = split_unit(gold)
    value, unit = split_unit(answer)
    if gold_unit is not None and unit is not None and unit != gold_unit:
        return False
    if _DIGITS_IN_BASE.fullmatch(strip_spacing(value)) or ":" in value:
        # The grammar would misread digits in another base (`101_2`) and times of day (`3:30`).
        return False
    if (digits := _DIGITS_IN_BASE.fullmatch(strip_spacing(gold_value))) is not None:
        return strip_spacing(value) == digits[1]
    from grpo_ray.rewards.math.values import same_value

    return same_value(gold_value, value)


def _is_constant(text: str) -> bool:
    from grpo_ray.rewards.math.values import is_constant

    return is_constant(text)


# --- lists, tuples and sets


def _same_collection(gold: Collection, answer: Collection) -> bool:
    if gold.opening in ("", "{"):
        # A bare list may be answered in any brackets but an interval's; braces only by braces or none.
        if answer.opening not in ("", "{", *(() if gold.opening else ("(",))):
            return False
        # A value listed twice is one value of a set.
        return _match_one_to_one(dict.fromkeys(gold.items), dict.fromkeys(answer.items), _same_structure)
    if len(gold.items) != len(answer.items):
        return False
    as_vector = len(gold.items) > 2 and answer.opening in ("(", "[")
    if answer.opening and not as_vector and (answer.opening, answer.closing) != (gold.opening, gold.closing):
        return False
    if not answer.opening and gold.opening != "(":
        return False
    return all(_same_structure(one, other) for one, other in zip(gold.items, answer.items, strict=True))


def _same_real_set(gold: Structure, answer: Structure) -> bool:
    """Return True if both are sets of reals, of the same intervals in any order, for the same variable."""
    gold_set, answer_set = real_set(gold), real_set(answer)
    if gold_set is None or answer_set is None or len(gold_set.intervals) != len(answer_set.intervals):
        return False
    if None not in (gold_set.variable, answer_set.variable) and gold_set.variable != answer_set.variable:
        return False
    return _match_one_to_one(gold_set.intervals, answer_set.intervals, _same_interval)


def _same_interval(gold: Interval, answer: Interval) -> bool:
    return (
        (gold.low_open, gold.high_open) == (answer.low_open, answer.high_open)
        and _same_formula(gold.low, answer.low)
        and _same_formula(gold.high, answer.high)
    )


def _match_one_to_one(gold: Iterable[T], answer: Iterable[T], same: Callable[[T, T], bool]) -> bool:
    """Return True if each answer matches a gold item of its own and no gold item is left."""
    unmatched = list(gold)
    for item in answer:
        match = next((index for index, candidate in enumerate(unmatched) if same(candidate, item)), None)
        if match is None:
            return False
        del unmatched[match]
    return not unmatched


# --- relations


def _matches_relation(gold: Relation, answer: Structure) -> bool:
    """Compare with an equation or inequality as the solution."""
    if not INEQUALITIES.isdisjoint(gold.operators):
        if _same_real_set(gold, answer):
            return True
        return isinstance(answer, Relation) and real_set(gold) is None and _same_relation(gold, answer)
    statement = _statement(gold)
    if statement is None or statement.name is None or isinstance(statement.value, Relation):
        return isinstance(answer, Relation) and _same_relation(gold, answer)
    name, value = statement.name, statement.value
    if not isinstance(answer, Relation):
        return _same_structure(value, answer)
    if not INEQUALITIES.isdisjoint(answer.operators):
        return _same_real_set(value, answer)
    given = _statement(answer)
    if given is not None and _same_name(name, given.name) and _same_structure(value, given.value):
        return True
    # y=x+1 may be written x-y+1=0, but x=5 not 2x=10: that is still to be solved.
    return isinstance(value, Leaf) and not _is_constant(value.text) and _same_relation(gold, answer)


@dataclass(frozen=True)
class Statement:
    """The value that an equation states."""

    name: str | None
    """Name of the quantity, None if the equation names none (`2+3=5`)."""
    value: Structure


def _statement(relation: Relation) -> Statement | None:
    r"""Return the value that an equation states, None if it states none.

    `x=5`, `f(2)=5`, `m+n=5`, `2+3=5`, `x=\frac{10}{2}=5` and `\int ... = 5` state 5. A number that differs from the
    value (`7=5`), an identity (`5=5`) and an unsolved equation (`2x=10`) state none.
    """
    if any(operator not in ("=", r"\in") for operator in relation.operators):
        return None
    operands = relation.operands
    last = operands[-1]
    if isinstance(last, Leaf) and NAME.fullmatch(last.text) and not is_name(operands[0]):
        operands = operands[::-1]
    *left_sides, value = operands
    if not all(_may_equal(side, value) for side in left_sides):
        return None
    first = left_sides[0]
    return Statement(strip_spacing(first.text) if is_name(first) else None, value)


def _may_equal(side: Structure, value: Structure) -> bool:
    """Return True if a side of an equation may stand before the value that it states."""
    if not isinstance(side, Leaf):
        # (x,y)=(1,2) names a tuple of symbols.
        return isinstance(side, Collection) and all(is_name(item) for item in side.items)
    if NAME.fullmatch(side.text) or has_unevaluated_operator(side.text, ""):
        return True
    from grpo_ray.rewards.math.values import free_names, parse_formula, same_value

    if _is_constant(side.text):
        # The side may be unevaluated arithmetic (2+3=5), so it is compared as if it were the solution.
        return (
            isinstance(value, Leaf)
            and strip_spacing(side.text) != strip_spacing(value.text)
            and same_value(side.text, value.text)
        )
    expression = parse_formula(side.text)
    # An expression of one unknown (2x, x^2) is an equation still to be solved; m+n is a named quantity.
    return expression is None or len(free_names(expression)) != 1 or side.text.startswith("|")


def _approximated_values(relation: Relation) -> tuple[Structure, ...]:
    r"""Return the exact and the rounded value of `x = 10\sqrt{3} \approx 17.3`.

    Nothing where the exact value does not round to the other: `100 \approx 101` would be two guesses.
    """
    *exact, rounded = relation.operands
    if relation.operators.index(r"\approx") != len(relation.operators) - 1 or not isinstance(rounded, Leaf):
        return ()
    head = exact[0] if len(exact) == 1 else Relation(tuple(exact), relation.operators[:-1])
    if is_name(head):
        return (Relation((head, rounded), ("=",)),)
    from grpo_ray.rewards.math.values import rounds_to

    last = exact[-1]
    if not isinstance(last, Leaf) or not rounds_to(last.text, rounded.text):
        return ()
    return (head, Relation((exact[0], rounded), ("=",)) if len(exact) > 1 else rounded)


def _same_name(gold: str, answer: str | None) -> bool:
    """Return True if two names are equal, case included; `f(x)` may be called `f`."""
    return answer is not None and (answer in (gold, gold.split("(")[0]) or gold == answer.split("(")[0])


def _same_relation(gold: Relation, answer: Relation) -> bool:
    """Return True if two relations of two values each are the same up to a factor and an exchange of sides."""
    gold_sides, answer_sides = _two_formulas(gold), _two_formulas(answer)
    if gold_sides is None or answer_sides is None:
        return False
    (gold_operator,), (operator,) = gold.operators, answer.operators
    if operator != gold_operator:
        if MIRRORED.get(operator) != gold_operator:
            return False
        answer_sides = answer_sides[::-1]
    from grpo_ray.rewards.math.values import proportional_relations

    return proportional_relations(gold_sides, answer_sides, directed=operator not in ("=", r"\ne"))


def _two_formulas(relation: Relation) -> tuple[str, str] | None:
    """Return both sides of a relation of two values, None for any other."""
    if len(relation.operands) != 2:
        return None
    left, right = relation.operands
    return (left.text, right.text) if isinstance(left, Leaf) and isinstance(right, Leaf) else None
