"""Comparison of two formulas by value: parsed by Math-Verify's grammar, compared in exact and 100-digit arithmetic.

Math-Verify compares with `simplify` and absolute tolerances (`e^{-50}` equals `e^{-60}`). Here rational constants are
compared exactly, other constants at 100 digits relative to their size, and formulas with symbols at fixed points. That
is faster, needs no `simplify`, and distinguishes tiny and huge numbers. Every number is bounded before it is computed.
Formulas that cannot be computed this way (an unknown function, say) are left to `math_verify.verify`.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.function import AppliedUndef

from grpo_ray.rewards.math.arithmetic import (
    INFINITY,
    NAMED_FUNCTIONS,
    NUM_EXTRA_POINTS,
    NUM_POINTS,
    Number,
    Point,
    UndefinedValueError,
    UnsupportedFormulaError,
    equal,
    evaluate,
    is_real,
    power_of_ten,
    to_mpmath,
)
from grpo_ray.rewards.math.notation import rewrite_notation

_MIN_DECIMALS = 6
"""Decimal places from which a decimal may stand for a value without a finite decimal (Math-Verify's own bound)."""

_QUOTIENT_SCALE = 5_040
"""Common denominator of accepted quotients; divisible by 1 to 10, among others."""

_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
# Case matters: `n` is not `N`. Math-Verify's default converts symbols to lower case.
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
_TRIGONOMETRIC = (sympy.sin, sympy.cos, sympy.tan, sympy.cot, sympy.sec, sympy.csc, sympy.sinh, sympy.cosh)
_INTEGER = re.compile(r"[-+]?\d{1,1500}")
# The grammar adds a number and a following number in brackets, as in a mixed number: `2(3)` would be 5.
_FACTOR_AFTER = re.compile(r"(?<![\w.^}\])\\])(\d{1,300}(?:\.\d{1,300})?|\(\s?-?[\d.]{1,300}\s?\)) ?(?=\()")
_FACTOR_BEFORE = re.compile(r"(?<![\w.^}\])\\])(\(\s?-?[\d.]{1,300}\s?\)) ?(?=\d)")
_NUMBERS_IN_A_ROW = re.compile(
    r"(?:^|[^_^\d])\d+\s+\d|(?:^|[-+=(,*/ ])(?:\{\d+\}|\d+) ?\{\d+\}|(?:^|[^\w\]}])\d+ ?\[ ?-?\d+ ?\]"
    r"|(?:^|[^\w\]}])\[ ?-?\d+ ?\] ?[\d(]"
)
_UNREADABLE = re.compile(r"\\(?:to|neg|lnot|cancel|phantom|not|implies|Rightarrow|iff)(?![a-zA-Z])")
"""Commands that the grammar ignores."""
_MIXED_NUMBER = re.compile(r"(?<![\w.}^])\d{1,300} ?\\frac\{(\d{1,300})\}\{(\d{1,300})\}")
_FRACTION = re.compile(
    r"([-+]?)(?:\\frac\s*\{\s*(-?\d{1,300})\s*\}\s*\{\s*(\d{1,300})\s*\}|(\d{1,300})\s*/\s*(\d{1,300}))"
)


@lru_cache(maxsize=8192)
def parse_formula(text: str) -> Any:
    """Parse a normalized formula into an unevaluated sympy object, None if Math-Verify's grammar rejects it."""
    if _INTEGER.fullmatch(text):
        return sympy.Integer(int(text))
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None and int(fraction[3] or fraction[5]):
        value = sympy.Rational(int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5]))
        return -value if fraction[1] == "-" else value
    rewritten = rewrite_notation(text)
    if rewritten is None:
        return None
    text = rewritten
    # Two numbers side by side are not a product; the grammar would add them as a mixed number.
    if not text or _NUMBERS_IN_A_ROW.search(text) or _UNREADABLE.search(text):
        return None
    if "(" in text:
        text = _FACTOR_BEFORE.sub(r"\1\\cdot ", _FACTOR_AFTER.sub(r"\1\\cdot ", text))
    if any(int(mixed[1]) >= int(mixed[2]) for mixed in _MIXED_NUMBER.finditer(text)):
        return None  # 3 4/2 may be a sum or a product
    try:
        return latex2sympy(
            text,
            is_real=True,
            convert_degrees=False,
            normalization_config=_NORMALIZATION,
            conversion_config=_CONVERSION,
        )
    except MemoryError:
        raise
    except Exception:  # untrusted text: latex2sympy raises a bare Exception for a syntax error, so nothing narrower
        return None


def same_value(solution: str, answer: str) -> bool:
    """Return True if two normalized formulas have the same value and the answer is evaluated.

    Matrices are compared entry by entry.
    """
    gold, given = parse_formula(solution), parse_formula(answer)
    if gold is None or given is None:
        return False
    if isinstance(gold, sympy.MatrixBase) or isinstance(given, sympy.MatrixBase):
        return (
            isinstance(gold, sympy.MatrixBase)
            and isinstance(given, sympy.MatrixBase)
            and gold.shape == given.shape
            and all(_same_expression(one, other) for one, other in zip(gold, given, strict=True))
        )
    if isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr):
        return _same_expression(gold, given)
    return bool(gold == given)


def is_constant(text: str) -> bool:
    """Return True if a normalized formula can be parsed and has no symbols: a number or an infinity."""
    expression = parse_formula(text)
    return isinstance(expression, sympy.Expr) and not free_names(expression)


def free_names(expression: Any) -> frozenset[str]:
    """Return the names of a formula's symbols and unknown functions, without `i` and `e`."""
    found = {symbol.name for symbol in expression.atoms(sympy.Symbol)} - {"i", "e"}
    return frozenset(found | {str(call.func) for call in expression.atoms(AppliedUndef)} - set(NAMED_FUNCTIONS))


def _same_expression(gold: Any, given: Any) -> bool:
    if gold in (sympy.oo, -sympy.oo) or given in (sympy.oo, -sympy.oo):
        return bool(gold == given)
    if isinstance(gold, sympy.Symbol) and isinstance(given, sympy.Symbol):
        return bool(gold.name == given.name)
    gold_names, given_names = free_names(gold), free_names(given)
    if not given_names <= gold_names or (not gold_names and _has_unevaluated_arithmetic(gold, given)):
        return False
    try:
        if not gold_names:
            return _same_constant(gold, given)
        return _same_function(gold, given)
    except UndefinedValueError:
        return False
    except UnsupportedFormulaError:
        return _same_by_math_verify(gold, given)


def _same_constant(gold: Any, given: Any) -> bool:
    expected, value = evaluate(gold), evaluate(given)
    if equal(expected, value):
        return True
    return _is_rounded(expected, given, value) or _is_rounded(value, gold, expected)


def _same_function(gold: Any, given: Any) -> bool:
    """Return True if two formulas with symbols are equal at the fixed points, of which at least three must count.

    A point does not count if a side has no value there, or if different values may come from different branches:
    neither is real (at a positive point only in formulas without the imaginary unit), or one is not real at a negative
    point. If the solution has absolute values (`ln|x|`), the answer must be equal wherever the solution is real. If
    fewer than three points count, points near zero are tried too.
    """
    integers = _integer_names(gold) | _integer_names(given)
    is_complex = _has_imaginary_unit(gold) or _has_imaginary_unit(given)
    is_absolute = gold.has(sympy.Abs)
    agreed = 0
    for index in range(NUM_POINTS + NUM_EXTRA_POINTS):
        if index >= NUM_POINTS and agreed >= 3:
            break
        point = Point(index, integers)
        try:
            expected, value = evaluate(gold, point), evaluate(given, point)
        except UndefinedValueError:
            continue
        if equal(expected, value):
            agreed += 1
            continue
        both_real = is_real(expected) and is_real(value)
        both_complex = not is_real(expected) and not is_real(value)
        if both_real or (is_absolute and is_real(expected)):
            return False
        if point.is_positive and (is_complex or not both_complex):
            return False
    return agreed >= 3


def _integer_names(expression: Any) -> frozenset[str]:
    """Return the symbols in exponents of negative numbers: in `(-1)^n`, n must be an integer."""
    return frozenset(
        symbol.name
        for power in expression.atoms(sympy.Pow)
        if power.base.is_Number and power.base < 0
        for symbol in power.exp.atoms(sympy.Symbol)
    )


def _has_imaginary_unit(expression: Any) -> bool:
    return bool(expression.has(sympy.I)) or any(symbol.name == "i" for symbol in expression.atoms(sympy.Symbol))


def _same_by_math_verify(gold: Any, given: Any) -> bool:
    from math_verify import verify

    return bool(verify([gold], [given], timeout_seconds=None))


def _has_unevaluated_arithmetic(gold: Any, given: Any) -> bool:
    r"""Return True if a constant has unevaluated arithmetic that its solution lacks, such as a restated problem.

    If the solution is rational, sums (`46+1`, `\sin^2 1+\cos^2 1`), products of numbers (`17\cdot 23`, `5\cdot 1`) and
    products of irrational numbers (`\sqrt5\sqrt5`) are unevaluated. Notations of one number are not: fractions,
    percent, signs, powers of ten; a power, root, factorial, binomial or function of a number; and `3\cdot\frac25`, if
    the solution is not an integer.
    """
    nodes = [node for node in sympy.preorder_traversal(given) if isinstance(node, sympy.Add | sympy.Mul)]
    if not gold.is_Number:
        # sqrt(2) (sin^2 1 + cos^2 1): every term of the sum has a trigonometric function.
        if gold.has(sympy.Add, *_TRIGONOMETRIC) or _has_imaginary_unit(given):
            return False
        return any(
            isinstance(node, sympy.Add) and all(term.has(*_TRIGONOMETRIC) for term in node.args) for node in nodes
        )
    return any(isinstance(node, sympy.Add) or _is_undone_product(node, gold) for node in nodes)


def _is_undone_product(product: Any, gold: Any) -> bool:
    numbers = [factor for factor in product.args if factor.is_Number]
    if len(numbers) == 2 and not gold.is_Integer and product.args == tuple(numbers):
        # 3 * 2/5 is another way to write 6/5.
        whole = [number for number in numbers if number.is_Integer]
        return not (len(whole) == 1 and whole[0] not in (-1, 1) and all(number.is_Rational for number in numbers))
    return len(numbers) >= 2 or sum(map(_is_irrational_factor, _factors(product))) >= 2


def _factors(product: Any) -> list[Any]:
    """Return a product's factors, including those of products inside it and inside its powers and reciprocals."""
    found: list[Any] = []
    for factor in product.args:
        inner = factor.args[0] if factor.is_Pow else factor
        found.extend(_factors(inner) if inner.is_Mul else [factor])
    return found


def _is_irrational_factor(factor: Any) -> bool:
    """Return True for a root, a function's value, pi, e or a power of one: a product of two is unevaluated."""
    base = factor.args[0] if factor.is_Pow else factor
    return bool(
        base.is_NumberSymbol
        or isinstance(base, sympy.Function)
        or (factor.is_Pow and (base.is_Pow or (factor.args[1].is_Rational and not factor.args[1].is_Integer)))
    ) and not isinstance(base, sympy.factorial | sympy.binomial)


def _is_rounded(exact: Number, written: Any, value: Number) -> bool:
    """Return True if a formula is a decimal that rounds (or truncates) another value at its sixth place or later.

    If the other value is exactly a decimal of at most twelve digits, the formula must have at least 15 significant
    digits and a relative difference of at most 1e-12.

    Args:
        exact: The other value.
        written: The formula, as parsed.
        value: The formula's value.
    """
    digits = _decimal_digits(written)
    if digits is None or not isinstance(value, Fraction) or not is_real(exact) or value == 0:
        return False
    significant, last_place = digits
    if isinstance(exact, Fraction) and _is_short_decimal(exact):
        return significant >= 15 and abs(value - exact) <= abs(exact) / 10**12
    if last_place > -_MIN_DECIMALS or significant < _MIN_DECIMALS - 1:
        return False
    difference = abs(to_mpmath(value) - to_mpmath(exact))
    return bool(difference <= max(power_of_ten(last_place), abs(to_mpmath(exact)) * power_of_ten(-9)))


def _decimal_digits(expression: Any) -> tuple[int, int] | None:
    """Return a decimal's number of significant digits and its last place as a power of ten; None for other formulas.

    `1.20 \\cdot 10^3` gives (2, 2): trailing zeros do not count.
    """
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
    """Return True if the value is exactly a decimal of at most twelve digits."""
    for _ in range(12):
        if value.denominator == 1:
            return len(str(value.numerator).strip("-0")) <= 12
        value *= 10
    return False


def proportional_relations(solution: tuple[str, str], answer: tuple[str, str], directed: bool) -> bool:
    """Return True if `left - right` of two relations differ by a constant factor, at the fixed points.

    Nothing is solved: `x^2=1` and `x^4=1` are different relations, and so are two different equations without
    solutions.

    Args:
        solution: Left and right side, as normalized formulas.
        answer: The same of the other relation.
        directed: The relations are inequalities, so the factor must be positive.
    """
    sides = [parse_formula(side) for side in (*solution, *answer)]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    gold = sympy.Add(sides[0], sympy.Mul(-1, sides[1], evaluate=False), evaluate=False)
    given = sympy.Add(sides[2], sympy.Mul(-1, sides[3], evaluate=False), evaluate=False)
    if not free_names(gold) or free_names(gold) != free_names(given):
        return False
    ratio: Number | None = None
    agreed = 0
    for point in range(NUM_POINTS):
        try:
            expected, value = evaluate(gold, Point(point)), evaluate(given, Point(point))
            if value == 0 or expected == 0:
                if value != expected:
                    return False
                continue
            quotient = (
                expected / value
                if isinstance(expected, Fraction) == isinstance(value, Fraction)
                else (to_mpmath(expected) / to_mpmath(value))
            )
        except UndefinedValueError:
            continue
        except UnsupportedFormulaError:
            return False
        if ratio is None:
            ratio = quotient
        if not equal(ratio, quotient):
            return False
        agreed += 1
    return agreed >= 3 and ratio is not None and not (directed and not (is_real(ratio) and to_mpmath(ratio) > 0))


def rounds_to(exact: str, rounded: str) -> bool:
    """Return True if the second constant, a decimal, is the first one rounded or truncated at its last digit."""
    value, written = parse_formula(exact), parse_formula(rounded)
    if not is_constant(exact) or not is_constant(rounded):
        return False
    digits = (0, 0) if written.is_Integer else _decimal_digits(written)
    try:
        return digits is not None and bool(
            abs(to_mpmath(evaluate(value)) - to_mpmath(evaluate(written))) < power_of_ten(digits[1])
        )
    except (UndefinedValueError, UnsupportedFormulaError):
        return False


def real_position(text: str, values: Mapping[str, int] = MappingProxyType({})) -> Number | None:
    """Return the value of a real constant or infinity as an mpmath number; None for other formulas.

    Args:
        text: A normalized formula.
        values: Values of its symbols.
    """
    expression = parse_formula(text)
    if not isinstance(expression, sympy.Expr) or not free_names(expression) <= values.keys():
        return None
    if expression in (sympy.oo, -sympy.oo):
        return INFINITY if expression == sympy.oo else -INFINITY
    try:
        value = evaluate(expression, Point(values=values))
    except (UndefinedValueError, UnsupportedFormulaError):
        return None
    return to_mpmath(value).real if is_real(value) else None


def values_agree(one: Number, other: Number) -> bool:
    """Return True if two computed numbers are equal up to rounding."""
    return equal(one, other)


def rational_quotient(numerator: Number, denominator: Number) -> Fraction | None:
    """Return the quotient of two real mpmath numbers as a fraction if its denominator divides 5,040, else None."""
    quotient = numerator / denominator
    candidate = Fraction(int((quotient * _QUOTIENT_SCALE).__round__()), _QUOTIENT_SCALE)
    return candidate if abs(quotient - to_mpmath(candidate)) < power_of_ten(-60) else None
