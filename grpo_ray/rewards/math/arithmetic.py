"""Bounded arithmetic on unevaluated sympy formulas: exact where rational, 100 digits elsewhere.

Not sympy's `evalf`: there `9^{9^9}` or `e^{e^{e^e}}` take memory and time without bound before any limit is
asked. Here each number is bounded before it is computed, and a sum that cancels is exactly zero, so that zero
and `e^{-500}` differ.
"""

import math
import zlib
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef

DIGITS = 100
TOLERANCE = 80
"""Digits of the hundred that must agree: sums may lose a few to cancellation."""
MAX_BITS = 20_000
"""Bits of an exact integer; beyond it floating point goes on, with its unbounded exponent."""
MAX_POWER = 1_000_000
"""Binary exponent of the largest number that is computed at all."""
POSITIVE_POINTS = 5
POINTS = 8
"""Fixed points for symbols: the first five positive, the others negative."""

_CONTEXT = mpmath.mp.clone()
_CONTEXT.dps = DIGITS
_SNAP = _CONTEXT.mpf(10) ** -(DIGITS - 15)

Number = Any  # Fraction, or a real or complex number of _CONTEXT; mpmath ships no types.


class NoValueError(Exception):
    """The formula has no value here: division by zero, infinity, or a number past all bounds."""


class UnknownError(Exception):
    """The formula holds something that this module does not compute."""


def evaluate(expression: Any, point: int = 0) -> Number:
    """The formula's value, symbols taken from the fixed `point`: a Fraction where it is rational, else 100
    digits.

    Raises NoValueError and UnknownError.
    """
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    if expression.is_Float:
        if abs(Decimal(str(expression)).adjusted()) > 5_000:
            raise NoValueError
        return Fraction(str(expression))
    if expression.is_Symbol:
        return (
            _CONTEXT.j if expression.name == "i" else _CONTEXT.e if expression.name == "e" else _at(expression, point)
        )
    if isinstance(expression, AppliedUndef):
        return _at(expression, point)
    if expression.is_NumberSymbol:
        return _constant(expression)
    if expression is sympy.I:
        return _CONTEXT.j
    kind = type(expression).__name__
    if kind == "Add":
        return _add(expression.args, point)
    if kind not in _FUNCTIONS:
        raise NoValueError if expression in (sympy.zoo, sympy.nan, sympy.oo, -sympy.oo) else UnknownError
    arguments = [evaluate(argument, point) for argument in expression.args]
    try:
        return _FUNCTIONS[kind](*arguments)
    except (ZeroDivisionError, ValueError, OverflowError):
        # A pole or a domain left: mathematics without a value, not a broken program.
        raise NoValueError from None


def _at(expression: Any, point: int) -> Fraction:
    """A symbol's value at a point: the same for the same name, different for different ones."""
    seed = zlib.crc32(f"{expression}".encode(errors="replace"))
    fraction = Fraction(seed % 97 + 1, 101)
    positive = (fraction + 1, fraction, Fraction(seed % 11 + 2), Fraction(seed % 13 + 3), 3 + 5 * fraction)
    return positive[point] if point < POSITIVE_POINTS else -positive[point - POSITIVE_POINTS] * Fraction(13, 7)


def _constant(expression: Any) -> Number:
    constants = {
        "Pi": _CONTEXT.pi,
        "Exp1": _CONTEXT.e,
        "EulerGamma": _CONTEXT.euler,
        "GoldenRatio": _CONTEXT.phi,
    }
    name = type(expression).__name__
    if name not in constants:
        raise UnknownError
    return +constants[name]


def _add(terms: tuple[Any, ...], point: int) -> Number:
    rest = list(terms)
    for term in terms:
        # A difference of equal terms is zero however large they are, so they need not be computed.
        if term in rest and (opposite := sympy.Mul(-1, term, evaluate=False)) in rest and term != opposite:
            rest.remove(term)
            rest.remove(opposite)
    values = [evaluate(term, point) for term in rest]
    if all(isinstance(value, Fraction) for value in values):
        return _bounded(sum(values, Fraction(0)))
    total = _CONTEXT.fsum(inexact(value) for value in values)
    largest = max(abs(inexact(value)) for value in values)
    # What is left of a full cancellation is rounding error; a true zero must compare as one.
    return Fraction(0) if abs(total) <= largest * _SNAP else total


def _multiply(*factors: Number) -> Number:
    exact = [factor for factor in factors if isinstance(factor, Fraction)]
    product = _bounded(math.prod(exact, start=Fraction(1)))
    if product == 0 or len(exact) == len(factors):
        return product
    result = inexact(product)
    for factor in factors:
        if not isinstance(factor, Fraction):
            result = result * factor
    return result


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        if base == 0 and exponent < 0:
            raise NoValueError
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1 and abs(exponent) * bits <= MAX_BITS:
            return base**exponent.numerator
        if base < 0 and exponent.denominator % 2 == 1 and exponent.denominator > 1:
            # Answers mean the real root: the cube root of -8 is -2.
            root = _power(-base, exponent)
            return -root if exponent.numerator % 2 else root
    base, exponent = inexact(base), inexact(exponent)
    if base != 0 and abs(exponent) * max(1, abs(_CONTEXT.mag(base))) > MAX_POWER:
        raise NoValueError
    return _CONTEXT.power(base, exponent)


def _exponential(exponent: Number) -> Number:
    return Fraction(1) if exponent == 0 else _power(+_CONTEXT.e, exponent)


def _logarithm(value: Number, base: Number | None = None) -> Number:
    if value == 1:
        return Fraction(0)
    result = _CONTEXT.log(inexact(value))
    return result if base is None else result / _CONTEXT.log(inexact(base))


def _factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 2_000:
        return Fraction(math.factorial(value.numerator))
    if abs(inexact(value)) > 10_000:
        raise NoValueError
    return _CONTEXT.factorial(inexact(value))


def _binomial(upper: Number, lower: Number) -> Number:
    whole = all(isinstance(number, Fraction) and number.denominator == 1 for number in (upper, lower))
    if whole and 0 <= upper <= 5_000 and lower >= 0:
        return Fraction(math.comb(upper.numerator, lower.numerator))
    if abs(inexact(upper)) > 10_000 or abs(inexact(lower)) > 10_000:
        raise NoValueError
    return _CONTEXT.binomial(inexact(upper), inexact(lower))


def _rounded(round_exact: Callable[[Fraction], int], round_inexact: Callable[[Any], Any]) -> Callable[[Number], Number]:
    def rounded(value: Number) -> Number:
        if isinstance(value, Fraction):
            return Fraction(round_exact(value))
        return Fraction(int(round_inexact(_real(value))))

    return rounded


def _periodic(function: Callable[[Any], Any]) -> Callable[[Number], Number]:
    def periodic(value: Number) -> Number:
        value = inexact(value)
        if _CONTEXT.mag(value) > DIGITS:
            raise NoValueError
        result = function(value)
        # sin(pi) is rounding error, not a small number.
        return Fraction(0) if abs(result) <= _SNAP * max(1, abs(value)) else result

    return periodic


def _plain(function: Callable[..., Any]) -> Callable[..., Number]:
    return lambda *values: function(*(inexact(value) for value in values))


def _quotient(function: Callable[[Any], Any], over: Callable[[Any], Any]) -> Callable[[Number], Number]:
    above, below = _periodic(function), _periodic(over)
    return lambda value: _multiply(above(value), _power(below(value), Fraction(-1)))


def _one(_: Any) -> Any:
    return _CONTEXT.mpf(1)


_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "Mul": _multiply,
    "Pow": _power,
    "exp": _exponential,
    "log": _logarithm,
    "UnevaluatedExpr": lambda value: value,
    "factorial": _factorial,
    "binomial": _binomial,
    "gamma": lambda value: _factorial(value - 1),
    "Abs": abs,
    "sign": lambda value: Fraction((_real(value) > 0) - (_real(value) < 0)),
    "floor": _rounded(math.floor, _CONTEXT.floor),
    "ceiling": _rounded(math.ceil, _CONTEXT.ceil),
    "Max": lambda *values: max(values, key=_real),
    "Min": lambda *values: min(values, key=_real),
    "Mod": lambda value, modulus: _real(value) % _real(modulus),
    "re": lambda value: inexact(value).real,
    "im": lambda value: inexact(value).imag,
    "conjugate": lambda value: inexact(value).conjugate(),
    "arg": _plain(_CONTEXT.arg),
    "sin": _periodic(_CONTEXT.sin),
    "cos": _periodic(_CONTEXT.cos),
    "tan": _quotient(_CONTEXT.sin, _CONTEXT.cos),
    "cot": _quotient(_CONTEXT.cos, _CONTEXT.sin),
    "sec": _quotient(_one, _CONTEXT.cos),
    "csc": _quotient(_one, _CONTEXT.sin),
    "sinh": lambda value: _multiply(Fraction(1, 2), _exponential(value) - _exponential(-value)),
    "cosh": lambda value: _multiply(Fraction(1, 2), _exponential(value) + _exponential(-value)),
    **{
        name: _plain(getattr(_CONTEXT, name))
        for name in (
            "asin",
            "acos",
            "atan",
            "acot",
            "asec",
            "acsc",
            "asinh",
            "acosh",
            "atanh",
            "tanh",
            "coth",
        )
    },
}


def inexact(value: Number) -> Number:
    """The number as one of 100 digits."""
    return _CONTEXT.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def is_real(value: Number) -> bool:
    """Whether the number lies on the real line."""
    return isinstance(value, Fraction) or _CONTEXT.im(value) == 0


def _real(value: Number) -> Number:
    if not is_real(value):
        raise NoValueError
    return value if isinstance(value, Fraction) else _CONTEXT.re(value)


def _bounded(value: Fraction) -> Number:
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    return value if bits <= 4 * MAX_BITS else inexact(value)


def equal(one: Number, other: Number) -> bool:
    """Rationals exactly, others to 80 digits of their own size."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = inexact(one), inexact(other)
    return bool(abs(one - other) <= max(abs(one), abs(other)) * _CONTEXT.mpf(10) ** -TOLERANCE)


def power_of_ten(exponent: int) -> Number:
    """10^exponent as a number of 100 digits."""
    return _CONTEXT.mpf(10) ** exponent
