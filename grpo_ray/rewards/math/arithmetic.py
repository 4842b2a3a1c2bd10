"""Bounded arithmetic on unevaluated sympy formulas: exact for rationals, 100 digits for other numbers.

sympy's `evalf` is not used: it takes unbounded memory and time for `9^{9^9}` or `e^{e^{e^e}}` before any limit applies.
Here each number is bounded before it is computed. A sum that cancels is exactly zero, so zero and `e^{-500}` differ.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import mpmath
import sympy
from sympy.core.function import AppliedUndef

DIGITS = 100
"""Decimal digits of floating-point numbers."""
EQUAL_DIGITS = 80
"""Leading digits that must agree: sums may lose a few of the hundred to cancellation."""
MAX_BITS = 20_000
"""Bits of an exact power; sums and products may have four times as many.

Larger numbers are computed in floating point, whose exponent is unbounded.
"""
MAX_POWER = 1_000_000
"""Binary exponent of the largest number that is computed at all."""
NUM_POSITIVE_POINTS = 5
NUM_POINTS = 8
NUM_EXTRA_POINTS = 6
"""Fixed points for symbols: the first `NUM_POSITIVE_POINTS` of `NUM_POINTS` are positive, the others negative.

The extra points after them lie between -1 and 1, in the domain of functions such as the inverse hyperbolic tangent.
"""

_CONTEXT = mpmath.mp.clone()
_CONTEXT.dps = DIGITS
INFINITY = _CONTEXT.inf
_ZERO_TOLERANCE = _CONTEXT.mpf(10) ** -(DIGITS - 15)

Number = Any  # Fraction, or a real or complex number of _CONTEXT; mpmath ships no types.


class Point(NamedTuple):
    """Fixed point at which formulas with symbols are compared."""

    number: int = 0
    integers: frozenset[str] = frozenset()
    """Names of the symbols whose value is an integer."""
    values: Mapping[str, int] = MappingProxyType({})
    """Symbols with a value of their own."""

    @property
    def is_positive(self) -> bool:
        return self.number < NUM_POSITIVE_POINTS or (self.number >= NUM_POINTS and self.number % 2 == 0)


class UndefinedValueError(Exception):
    """Error for a formula without a value at this point: division by zero, infinity, or a number beyond the bounds."""


class UnsupportedFormulaError(Exception):
    """Error for a formula with an operation that this module does not compute."""


def evaluate(expression: Any, point: Point = Point()) -> Number:  # noqa: B008 (immutable)
    """Compute a formula's value with its symbols at a fixed point.

    Args:
        expression: An unevaluated sympy expression.
        point: The fixed point.

    Returns:
        A Fraction if the computation is rational, else a number of 100 digits.

    Raises:
        UndefinedValueError: The formula has no value at the point, or one beyond the bounds.
        UnsupportedFormulaError: The formula has an unknown operation.
    """
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    if expression.is_Float:
        if abs(Decimal(str(expression)).adjusted()) > 5_000:
            raise UndefinedValueError
        return Fraction(str(expression))
    if expression.is_Symbol:
        if expression.name == "i":
            return _CONTEXT.j
        return _CONTEXT.e if expression.name == "e" else _symbol_value(expression, point)
    if isinstance(expression, AppliedUndef):
        return _named_function(expression, point)
    if expression.is_NumberSymbol:
        return _constant(expression)
    if expression is sympy.I:
        return _CONTEXT.j
    kind = type(expression).__name__
    if kind == "Add":
        return _add(expression.args, point)
    if kind not in _FUNCTIONS:
        is_infinite = expression in (sympy.zoo, sympy.nan, sympy.oo, -sympy.oo)
        raise UndefinedValueError if is_infinite else UnsupportedFormulaError
    arguments = [evaluate(argument, point) for argument in expression.args]
    try:
        return _finite(_FUNCTIONS[kind](*arguments))
    except (ZeroDivisionError, ValueError, OverflowError):
        # A pole, or an argument outside the domain: the formula has no value, the program is not broken.
        raise UndefinedValueError from None


def _finite(value: Number) -> Number:
    r"""Return a computed number. Raises UndefinedValueError for infinity, mpmath's value of `\ln 0`."""
    if not isinstance(value, Fraction) and not _CONTEXT.isfinite(value):
        raise UndefinedValueError
    return value


def _symbol_value(expression: Any, point: Point) -> Fraction:
    """Return a symbol's value at a fixed point, derived from a hash of its name, so that different names differ."""
    name = f"{expression}"
    seed = zlib.crc32(name.encode(errors="replace"))
    if name in point.values:
        return Fraction(point.values[name])
    if name in point.integers:
        return Fraction(seed % 7 + 1 + point.number)
    fraction = Fraction(seed % 97 + 1, 101)
    if point.number >= NUM_POINTS:
        small = fraction / (point.number - NUM_POINTS + 2)
        return small if point.is_positive else -small
    positive = (fraction + 1, fraction, Fraction(seed % 11 + 2), Fraction(seed % 13 + 3), 3 + 5 * fraction)
    if point.number < NUM_POSITIVE_POINTS:
        return positive[point.number]
    return -positive[point.number - NUM_POSITIVE_POINTS] * Fraction(13, 7)


def _named_function(expression: Any, point: Point) -> Number:
    """Return the value of a function that the grammar leaves as a name: `f(x)` of an unknown f is like a symbol."""
    function = NAMED_FUNCTIONS.get(str(expression.func))
    if function is None or len(expression.args) != 1:
        return _symbol_value(expression, point)
    argument = to_mpmath(evaluate(expression.args[0], point))
    if abs(argument) > _MAX_ARGUMENT:
        raise UndefinedValueError
    try:
        return _finite(function(argument))
    except (ZeroDivisionError, ValueError, OverflowError):
        raise UndefinedValueError from None


def _constant(expression: Any) -> Number:
    """Return the value of a named constant."""
    constants = {
        "Pi": _CONTEXT.pi,
        "Exp1": _CONTEXT.e,
        "EulerGamma": _CONTEXT.euler,
        "GoldenRatio": _CONTEXT.phi,
    }
    name = type(expression).__name__
    if name not in constants:
        raise UnsupportedFormulaError
    return +constants[name]


def _add(terms: tuple[Any, ...], point: Point) -> Number:
    """Add terms; a sum that cancels is exactly zero."""
    rest = list(terms)
    for term in terms:
        # A difference of equal terms is zero however large they are, so they need not be computed.
        if term in rest and (opposite := sympy.Mul(-1, term, evaluate=False)) in rest and term != opposite:
            rest.remove(term)
            rest.remove(opposite)
    values = [evaluate(term, point) for term in rest]
    if all(isinstance(value, Fraction) for value in values):
        return _bounded(sum(values, Fraction(0)))
    total = _CONTEXT.fsum(to_mpmath(value) for value in values)
    largest = max(abs(to_mpmath(value)) for value in values)
    # A full cancellation leaves rounding error; it must compare as an exact zero.
    return Fraction(0) if abs(total) <= largest * _ZERO_TOLERANCE else total


def _multiply(*factors: Number) -> Number:
    """Multiply factors; a product with an exact zero is exactly zero."""
    exact = [factor for factor in factors if isinstance(factor, Fraction)]
    product = _bounded(math.prod(exact, start=Fraction(1)))
    if product == 0 or len(exact) == len(factors):
        return product
    result = to_mpmath(product)
    for factor in factors:
        if not isinstance(factor, Fraction):
            result = result * factor
    return result


def _power(base: Number, exponent: Number) -> Number:
    """Raise to a power: exactly for small integer exponents, and within `MAX_POWER` otherwise."""
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        if base == 0 and exponent < 0:
            raise UndefinedValueError
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1 and abs(exponent) * bits <= MAX_BITS:
            return base**exponent.numerator
        if base < 0 and exponent.denominator % 2 == 1 and exponent.denominator > 1:
            # In answers the real root is meant: the cube root of -8 is -2.
            root = _power(-base, exponent)
            return -root if exponent.numerator % 2 else root
    base, exponent = to_mpmath(base), to_mpmath(exponent)
    if base != 0 and abs(exponent) * max(1, abs(_CONTEXT.mag(base))) > MAX_POWER:
        raise UndefinedValueError
    return _CONTEXT.power(base, exponent)


def _exponential(exponent: Number) -> Number:
    return Fraction(1) if exponent == 0 else _power(+_CONTEXT.e, exponent)


def _logarithm(value: Number, base: Number | None = None) -> Number:
    if value == 1:
        return Fraction(0)
    result = _CONTEXT.log(to_mpmath(value))
    return result if base is None else result / _CONTEXT.log(to_mpmath(base))


def _factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 2_000:
        return Fraction(math.factorial(value.numerator))
    if abs(to_mpmath(value)) > 10_000:
        raise UndefinedValueError
    return _CONTEXT.factorial(to_mpmath(value))


def _binomial(upper: Number, lower: Number) -> Number:
    whole = all(isinstance(number, Fraction) and number.denominator == 1 for number in (upper, lower))
    if whole and 0 <= upper <= 5_000 and lower >= 0:
        return Fraction(math.comb(upper.numerator, lower.numerator))
    if abs(to_mpmath(upper)) > 10_000 or abs(to_mpmath(lower)) > 10_000:
        raise UndefinedValueError
    result = _CONTEXT.binomial(to_mpmath(upper), to_mpmath(lower))
    # Next to a pole of the gamma function, a zero is computed as a rounding error.
    return Fraction(0) if abs(result) <= _ZERO_TOLERANCE else result


def _rounded(round_exact: Callable[[Fraction], int], round_mpmath: Callable[[Any], Any]) -> Callable[[Number], Number]:
    """Make a rounding function of reals from one of fractions and one of mpmath numbers."""

    def rounded(value: Number) -> Number:
        if isinstance(value, Fraction):
            return Fraction(round_exact(value))
        return Fraction(int(round_mpmath(_real(value))))

    return rounded


def _periodic(function: Callable[[Any], Any]) -> Callable[[Number], Number]:
    """Make a trigonometric function, exactly zero at its zeros and undefined for arguments too large to be accurate."""

    def periodic(value: Number) -> Number:
        value = to_mpmath(value)
        if _CONTEXT.mag(value) > DIGITS:
            raise UndefinedValueError
        result = function(value)
        # The computed sin(pi) is a rounding error, not a small number.
        return Fraction(0) if abs(result) <= _ZERO_TOLERANCE * max(1, abs(value)) else result

    return periodic


def _in_mpmath(function: Callable[..., Any]) -> Callable[..., Number]:
    """Make a function that converts its arguments to mpmath numbers."""
    return lambda *values: function(*(to_mpmath(value) for value in values))


def _quotient(numerator: Callable[[Any], Any], denominator: Callable[[Any], Any]) -> Callable[[Number], Number]:
    """Make the quotient of two periodic functions; undefined where the denominator is zero."""
    above, below = _periodic(numerator), _periodic(denominator)
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
    "re": lambda value: to_mpmath(value).real,
    "im": lambda value: to_mpmath(value).imag,
    "conjugate": lambda value: to_mpmath(value).conjugate(),
    "arg": _in_mpmath(_CONTEXT.arg),
    "sin": _periodic(_CONTEXT.sin),
    "cos": _periodic(_CONTEXT.cos),
    "tan": _quotient(_CONTEXT.sin, _CONTEXT.cos),
    "cot": _quotient(_CONTEXT.cos, _CONTEXT.sin),
    "sec": _quotient(_one, _CONTEXT.cos),
    "csc": _quotient(_one, _CONTEXT.sin),
    "sinh": lambda value: _multiply(Fraction(1, 2), _exponential(value) - _exponential(-value)),
    "cosh": lambda value: _multiply(Fraction(1, 2), _exponential(value) + _exponential(-value)),
    **{
        name: _in_mpmath(getattr(_CONTEXT, name))
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


NAMED_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    r"\zeta": _CONTEXT.zeta,
    r"\text{erf}": _CONTEXT.erf,
    r"\text{erfc}": _CONTEXT.erfc,
}
"""Functions of one argument that the grammar leaves as names."""
_MAX_ARGUMENT = 100
"""Largest argument of a named function; the computing time grows with it."""


def to_mpmath(value: Number) -> Number:
    """Convert a number to an mpmath number of 100 digits."""
    return _CONTEXT.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def is_real(value: Number) -> bool:
    """Return True if a number has no imaginary part."""
    return isinstance(value, Fraction) or _CONTEXT.im(value) == 0


def _real(value: Number) -> Number:
    """Return a real number without its zero imaginary part. Raises UndefinedValueError for a complex one."""
    if not is_real(value):
        raise UndefinedValueError
    return value if isinstance(value, Fraction) else _CONTEXT.re(value)


def _bounded(value: Fraction) -> Number:
    """Return a fraction, converted to floating point if its integers are too long for exact arithmetic."""
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    return value if bits <= 4 * MAX_BITS else to_mpmath(value)


def equal(one: Number, other: Number) -> bool:
    """Compare rationals exactly, other numbers to `EQUAL_DIGITS` digits relative to their size."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = to_mpmath(one), to_mpmath(other)
    return bool(abs(one - other) <= max(abs(one), abs(other)) * _CONTEXT.mpf(10) ** -EQUAL_DIGITS)


def power_of_ten(exponent: int) -> Number:
    """Return 10^exponent as an mpmath number of 100 digits."""
    return _CONTEXT.mpf(10) ** exponent
