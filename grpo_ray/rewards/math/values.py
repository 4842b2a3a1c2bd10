"""Are two formulas the same value? Parsed by Math-Verify's grammar, compared by exact and 100-digit
arithmetic.

Math-Verify compares with `simplify` and with tolerances that are absolute (`e^{-50}` equals `e^{-60}`). Here
closed rational expressions are compared exactly, others at 100 digits relative to their size, and formulas
with symbols at
fixed points: faster, never in need of `simplify`, and blind neither to tiny nor to huge numbers. Every number
is bounded before it is computed. What cannot be computed so (an unknown function, say) is left to
`math_verify.verify`.
"""

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.function import AppliedUndef

from grpo_ray.rewards.math.arithmetic import (
    POINTS,
    POSITIVE_POINTS,
    NoValueError,
    Number,
    UnknownError,
    equal,
    evaluate,
    inexact,
    is_real,
    power_of_ten,
)

_MIN_DECIMALS = 6
"""Decimals from which a decimal may stand for a value that has no finite one (Math-Verify's own bound)."""

_NORMAL = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
# Case matters: `n` is not `N`. Math-Verify's default folds them.
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
_INTEGER = re.compile(r"[-+]?\d{1,1500}")
_FRACTION = re.compile(
    r"([-+]?)(?:\\frac\s*\{\s*(-?\d{1,300})\s*\}\s*\{\s*(\d{1,300})\s*\}|(\d{1,300})\s*/\s*(\d{1,300}))"
)


@lru_cache(maxsize=8192)
def parse(text: str) -> Any:
    """The formula as an unevaluated sympy object, or None where Math-Verify's grammar does not read it."""
    if _INTEGER.fullmatch(text):
        return sympy.Integer(int(text))
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None and int(fraction[3] or fraction[5]):
        value = sympy.Rational(int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5]))
        return -value if fraction[1] == "-" else value
    # Two numbers side by side are no product; the grammar would add them as a mixed number.
    if not text or re.search(
        r"(?:^|[^_^\d])\d+\s+\d|\\(?:to|neg|lnot|cancel|phantom|not|implies|Rightarrow|iff)(?![a-zA-Z])", text
    ):
        return None
    try:
        return latex2sympy(
            text,
            is_real=True,
            convert_degrees=False,
            normalization_config=_NORMAL,
            conversion_config=_CONVERSION,
        )
    except MemoryError:
        raise
    except Exception:  # untrusted text, and latex2sympy signals a syntax error with a bare Exception: none narrower
        return None


def same_value(solution: str, answer: str) -> bool:
    """Whether two cleaned formulas name the same value, the answer in evaluated form."""
    gold, given = parse(solution), parse(answer)
    if gold is None or given is None:
        return False
    if isinstance(gold, sympy.MatrixBase) or isinstance(given, sympy.MatrixBase):
        return (
            isinstance(gold, sympy.MatrixBase)
            and isinstance(given, sympy.MatrixBase)
            and gold.shape == given.shape
            and all(_same(one, other) for one, other in zip(gold, given, strict=True))
        )
    if isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr):
        return _same(gold, given)
    return bool(gold == given)


def is_constant(text: str) -> bool:
    """Whether a cleaned formula is read, and holds no symbols: a number, or an infinity."""
    expression = parse(text)
    return isinstance(expression, sympy.Expr) and not names(expression)


def names(expression: Any) -> frozenset[str]:
    """The symbols and unknown functions of a formula, by name; the imaginary unit is none."""
    found = {symbol.name for symbol in expression.atoms(sympy.Symbol)} - {"i", "e"}
    return frozenset(found | {str(call.func) for call in expression.atoms(AppliedUndef)})


def _same(gold: Any, given: Any) -> bool:
    if gold in (sympy.oo, -sympy.oo) or given in (sympy.oo, -sympy.oo):
        return bool(gold == given)
    if isinstance(gold, sympy.Symbol) and isinstance(given, sympy.Symbol):
        return bool(gold.name == given.name)
    gold_names, given_names = names(gold), names(given)
    if not given_names <= gold_names or (_is_literal(gold) and _is_undone(given)):
        return False
    try:
        if not gold_names:
            return _same_number(gold, given)
        return _same_function(gold, given)
    except NoValueError:
        return False
    except UnknownError:
        return _math_verify(gold, given)


def _same_number(gold: Any, given: Any) -> bool:
    expected, value = evaluate(gold), evaluate(given)
    if equal(expected, value):
        return True
    return _rounds_to(expected, given, value) or _rounds_to(value, gold, expected)


def _same_function(gold: Any, given: Any) -> bool:
    """Equal at fixed points. Points where a side has no value say nothing, nor do negative ones off the real
    line.
    """
    agreed = 0
    for point in range(POINTS):
        try:
            expected, value = evaluate(gold, point), evaluate(given, point)
        except NoValueError:
            continue
        if equal(expected, value):
            agreed += 1
        elif point < POSITIVE_POINTS or (is_real(expected) and is_real(value)):
            return False
    return agreed >= 3


def _math_verify(gold: Any, given: Any) -> bool:
    from math_verify import verify

    return bool(verify([gold], [given], timeout_seconds=None))


def _is_literal(expression: Any) -> bool:
    return bool(expression.is_Number)


def _is_undone(expression: Any) -> bool:
    """Whether arithmetic between written numbers was left undone (`12+34`, `17*23`): the question said back.

    Fractions, percent, signs and powers of ten are how numbers are written; other powers, roots, factorials
    and binomials name a number as well.
    """
    return any(
        sum(1 for part in node.args if part.is_Number and part not in (-1, 1)) >= 2
        for node in sympy.preorder_traversal(expression)
        if isinstance(node, sympy.Add | sympy.Mul)
    )


def _rounds_to(exact: Number, written: Any, value: Number) -> bool:
    """Whether `written` is a decimal that rounds (or cuts off) `exact` at its last digit, at least the sixth
    decimal.

    Values that a short decimal states exactly must be stated exactly.
    """
    digits = _decimal_digits(written)
    if digits is None or not isinstance(value, Fraction) or not is_real(exact) or value == 0:
        return False
    significant, last_place = digits
    if isinstance(exact, Fraction) and _is_short_decimal(exact):
        return significant >= 15 and abs(value - exact) <= abs(exact) / 10**12
    if last_place > -_MIN_DECIMALS or significant < _MIN_DECIMALS - 1:
        return False
    difference = abs(inexact(value) - inexact(exact))
    return bool(difference <= max(power_of_ten(last_place), abs(inexact(exact)) * power_of_ten(-9)))


def _decimal_digits(expression: Any) -> tuple[int, int] | None:
    """Significant digits of a written decimal and the power of ten of its last place; None for others."""
    shift = 0
    if expression.is_Mul and _PERCENT in expression.args:
        shift = -2
        expression = sympy.Mul(*(part for part in expression.args if part != _PERCENT), evaluate=False)
    if expression.is_Mul:
        decimals = [part for part in expression.args if part.is_Float]
        tens = [part for part in expression.args if part.is_Pow and part.args[0] == 10 and part.args[1].is_Integer]
        if len(decimals) != 1 or any(part != -1 for part in expression.args if part not in (*decimals, *tens)):
            return None
        shift += sum(int(part.args[1]) for part in tens)
        expression = decimals[0]
    if not expression.is_Float:
        return None
    written = Decimal(str(expression)).normalize()
    return len(written.as_tuple().digits), int(written.as_tuple().exponent) + shift


def _is_short_decimal(value: Fraction) -> bool:
    """Whether a decimal of at most twelve digits states the value exactly."""
    for _ in range(12):
        if value.denominator == 1:
            return len(str(value.numerator).strip("-0")) <= 12
        value *= 10
    return False


def same_relation(solution: tuple[str, str], answer: tuple[str, str], directed: bool) -> bool:
    """Whether `left - right` of both relations differ by a constant factor, positive where direction matters.

    The sides are cleaned formulas. Solving is not done: `2x=10` states less than `x=5`, and two equations
    without solutions are not the same equation.
    """
    sides = [parse(side) for side in (*solution, *answer)]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    gold = sympy.Add(sides[0], sympy.Mul(-1, sides[1], evaluate=False), evaluate=False)
    given = sympy.Add(sides[2], sympy.Mul(-1, sides[3], evaluate=False), evaluate=False)
    if not names(gold) or names(gold) != names(given):
        return False
    ratio: Number | None = None
    agreed = 0
    for point in range(POINTS):
        try:
            expected, value = evaluate(gold, point), evaluate(given, point)
            if value == 0 or expected == 0:
                if value != expected:
                    return False
                continue
            quotient = (
                expected / value
                if isinstance(expected, Fraction) == isinstance(value, Fraction)
                else (inexact(expected) / inexact(value))
            )
        except NoValueError:
            continue
        except UnknownError:
            return False
        if ratio is None:
            ratio = quotient
        if not equal(ratio, quotient):
            return False
        agreed += 1
    return agreed >= 3 and ratio is not None and not (directed and not (is_real(ratio) and inexact(ratio) > 0))


def rounds(exact: str, rounded: str) -> bool:
    """Whether the second constant, a decimal, is the first one rounded or cut off at its last digit."""
    value, written = parse(exact), parse(rounded)
    if not is_constant(exact) or not is_constant(rounded):
        return False
    digits = (0, 0) if written.is_Integer else _decimal_digits(written)
    try:
        return digits is not None and bool(
            abs(inexact(evaluate(value)) - inexact(evaluate(written))) < power_of_ten(digits[1])
        )
    except (NoValueError, UnknownError):
        return False


def ascending(texts: tuple[str, ...]) -> tuple[str, ...] | None:
    """Constant real formulas in order of size; None where one is no such number."""
    try:
        values = [(evaluate(parse(text)), text) for text in texts if is_constant(text)]
    except (NoValueError, UnknownError):
        return None
    if len(values) < len(texts) or not all(is_real(value) for value, _ in values):
        return None
    return tuple(text for _, text in sorted(values, key=lambda pair: inexact(pair[0])))
