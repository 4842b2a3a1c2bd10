r"""Notations that Math-Verify's grammar rejects or misreads, rewritten in notations that it reads.

The grammar drops primes (`f'(2)` becomes `f(2)`) and degree signs (`\cos 60^\circ` becomes the cosine of 60 radians),
reads `1.5e3` as a product with e, and rejects repeating decimals, `{}_5C_2` and `\lg`. Each rewriting is one row of a
table with a cheap test in front, so that most formulas pass untouched. All patterns are linear in the text or bounded.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction

_MAX_REPEATED = 60
"""Digits of a repeating decimal; a longer period is not an answer."""

_PRIMED = re.compile(r"(\\[a-zA-Z]+|[a-zA-Z])(?:_(?:\{(\w*)\}|(\w)))?('{1,9})(?!')")
_PRIMED_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|ln|log|exp)h?\s*'")
"""A derivative of a known function, which is an unevaluated operation and not a name."""
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\\circ(?![a-zA-Z])")
_DEGREE_SIGN = re.compile(r"\^\\circ(?![a-zA-Z])")
_DEGREES_MINUTES = re.compile(
    r"(\d{1,6})\s*\^\\circ\s*(?:(\d{1,2}(?:\.\d{1,9})?)\s*')?\s*(?:(\d{1,2}(?:\.\d{1,9})?)\s*'')?"
)
_OVERLINED = re.compile(
    rf"(\d{{1,{_MAX_REPEATED}}})\.(\d{{0,{_MAX_REPEATED}}})\\(?:overline|bar)\s*(?:\{{\s*(\d{{1,{_MAX_REPEATED}}})\s*\}}|(\d))"
)
_DOTTED = re.compile(
    rf"(\d{{1,{_MAX_REPEATED}}})\.(\d{{0,{_MAX_REPEATED}}})"
    rf"(\\dot\s*\{{?\d\}}?(?:\d{{0,{_MAX_REPEATED}}}\\dot\s*\{{?\d\}}?)?)"
)
_PARENTHESIZED = re.compile(
    rf"([-+]?)(\d{{1,{_MAX_REPEATED}}})\.(\d{{0,{_MAX_REPEATED}}})\((\d{{1,{_MAX_REPEATED}}})\)"
)
_ELLIPSIS = re.compile(r"([-+]?)(\d{1,9})\.(\d{3,30})\s*\\dots")
_REPEATS_TO_THE_END = re.compile(r"(\d{0,6}?)(\d{1,6}?)\2{2,}")
_SCIENTIFIC = re.compile(
    r"(?<![\w.}\\])(?:(\d+\.\d+|1)(?:[eE]|\\text\{[eE]\})([-+]?\d{1,3})|(\d+)(?:e(\d{1,3})|E([-+]?\d{1,3})))(?![\d.\w^])"
)
_DECIMAL_LOG = re.compile(r"\\lg(?![a-zA-Z])(?!\s*_)")
_NATURAL_LOG = re.compile(r"\\log\s*_\s*(?:e(?![a-zA-Z])|\{\s*e\s*\})")
_CIS = re.compile(
    r"([^=]*?)(?:\\text\{cis\}|\\operatorname\s*\{cis\}|\\cis(?![a-zA-Z])|(?<![a-zA-Z\\])cis)\s*([^+=-]+)"
)
_INDEX = r"(?:\{([^{}]{1,20})\}|(\w))"
_CHOOSE_BEFORE = re.compile(rf"(?:\{{\}})?\s*[_^]\s*{_INDEX}\s*([CP])\s*_\s*{_INDEX}")
_CHOOSE_CALL = re.compile(r"(?<![a-zA-Z\\_])C\(\s*(\w{1,9})\s*,\s*(\w{1,9})\s*\)")
_CHOOSE_PLAIN = re.compile(r"(?<![\w.\\^{])(\d{1,4})C(\d{1,4})(?!\w)")
_CHOOSE_INDICES = re.compile(rf"(?<![a-zA-Z\\])C(?:_\s*{_INDEX}\s*\^\s*{_INDEX}|\^\s*{_INDEX}\s*_\s*{_INDEX})")
_MIXED_PERCENT = re.compile(r"([-+]?)(\d{0,300})\s*\\frac\s*\{\s*(\d{1,300})\s*\}\s*\{\s*(\d{1,300})\s*\}\s*\\%")
_NAMED_FUNCTION = re.compile(r"\\operatorname\s*\*?\{\s*(erf|erfc)\s*\}")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\\[a-zA-Z]+)(?![a-zA-Z\s]*[{(])")
_TRANSPOSED = re.compile(r"[A-Z})\]]\s*\^\s*\{?\s*(?:T(?![a-zA-Z])|\\(?:top|intercal)(?![a-zA-Z]))")

_SYMBOL = re.compile(r"\\\\|\\(?:begin|end)\{[^{}]*\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z](?:_(?:\{\w+\}|\w))?")


def rewrite_notation(text: str) -> str | None:
    r"""Rewrite a normalized formula for the grammar; None if the grammar would silently drop a part of it.

    `5'`, `(fg)'` and `A^T` are such formulas: the grammar reads 5, fg and A.
    """
    for mark, rewrite in _REWRITINGS:
        if mark in text:
            text = rewrite(text)
    if "'" in text or (("T" in text or r"\top" in text) and _TRANSPOSED.search(text) is not None):
        return None
    return text


def decimal_degrees(text: str) -> str:
    r"""Rewrite an angle in degrees, minutes and seconds, `30^\circ 15'`, as degrees, `\frac{121}{4}^\circ`."""
    if "'" not in text:
        return text
    match = _DEGREES_MINUTES.fullmatch(text)
    if match is None:
        return text
    degrees = Fraction(match[1]) + Fraction(match[2] or 0) / 60 + Fraction(match[3] or 0) / 3600
    return rf"{fraction_text(degrees)}^\circ"


def without_degrees(text: str) -> str:
    """Remove the degree signs."""
    return _DEGREE_SIGN.sub("", text)


def fraction_text(value: Fraction) -> str:
    r"""Return an integer or `\frac{p}{q}` with its sign in front."""
    sign = "-" if value < 0 else ""
    numerator, denominator = abs(value.numerator), value.denominator
    return f"{sign}{numerator}" if denominator == 1 else rf"{sign}\frac{{{numerator}}}{{{denominator}}}"


def symbols(text: str) -> frozenset[str]:
    """Return the single-letter symbols of a normalized formula, with their indices as in `C_1`."""
    found = {_plain_index(match[0]) for match in _SYMBOL.finditer(text) if not match[0].startswith("\\")}
    return frozenset(found)


def rename_symbols(text: str, names: Mapping[str, str]) -> str:
    """Replace symbols by other texts, all at once, so that names can be exchanged."""
    return _SYMBOL.sub(lambda match: names.get(_plain_index(match[0]), match[0]), text)


def _plain_index(name: str) -> str:
    """Return `C_1` for `C_{1}`."""
    return name.replace("{", "").replace("}", "") if not name.startswith("\\") else name


# --- rewritings


def _name_primes(text: str) -> str:
    """Make the primes part of the name, as an index: `f'` and `f` are different names."""
    if _PRIMED_FUNCTION.search(text) is not None:
        return text
    return _PRIMED.sub(lambda match: f"{match[1]}_{{{match[2] or match[3] or ''}prime{len(match[4])}}}", text)


def _to_radians(text: str) -> str:
    text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    return _DEGREE_SIGN.sub(r"\\cdot\\frac{\\pi}{180}", text)


def _repeating(integer: str, prefix: str, period: str) -> str:
    """Return the fraction of a decimal with a repeating end, `0.1(6)` = (16 - 1) / 90."""
    scale = 10 ** len(prefix)
    whole = Fraction(int(integer + prefix), scale)
    return fraction_text(whole + Fraction(int(period), scale * (10 ** len(period) - 1)))


def _dotted(match: re.Match[str]) -> str:
    return _repeating(match[1], match[2], re.sub(r"\D", "", match[3]))


def _parenthesized(text: str) -> str:
    match = _PARENTHESIZED.fullmatch(text)
    return text if match is None else match[1] + _repeating(match[2], match[3], match[4])


def _ellipsis(text: str) -> str:
    r"""Read `0.272727\dots` as a repeating decimal if a period occurs at least three times, up to the end."""
    match = _ELLIPSIS.fullmatch(text)
    digits = None if match is None else _REPEATS_TO_THE_END.fullmatch(match[3])
    return text if match is None or digits is None else match[1] + _repeating(match[2], digits[1], digits[2])


def _scientific(match: re.Match[str]) -> str:
    return rf"{match[1] or match[3]}\cdot 10^{{{int(match[2] or match[4] or match[5])}}}"


def _choose_before(match: re.Match[str]) -> str:
    upper, lower = match[1] or match[2], match[4] or match[5]
    if match[3] == "C":
        return rf"\binom{{{upper}}}{{{lower}}}"
    are_numbers = upper.isdigit() and lower.isdigit() and int(upper) >= int(lower)
    rest = str(int(upper) - int(lower)) if are_numbers else f"({upper}-{lower})"
    return rf"\frac{{({upper})!}}{{{rest}!}}"


def _choose_indices(match: re.Match[str]) -> str:
    r"""Read `C_n^2` and `C_5^2` as binomials; `C_1^2` is the square of a constant."""
    lower, upper = match[1] or match[2] or match[7] or match[8], match[3] or match[4] or match[5] or match[6]
    if lower.isdigit() and not (upper.isdigit() and int(lower) > int(upper)):
        return match[0]
    return rf"\binom{{{lower}}}{{{upper}}}"


def _binomials(text: str) -> str:
    text = _CHOOSE_BEFORE.sub(_choose_before, text)
    text = _CHOOSE_CALL.sub(r"\\binom{\1}{\2}", text)
    text = _CHOOSE_PLAIN.sub(r"\\binom{\1}{\2}", text)
    return _CHOOSE_INDICES.sub(_choose_indices, text)


def _mixed_percent(text: str) -> str:
    match = _MIXED_PERCENT.fullmatch(text)
    if match is None or int(match[4]) == 0:
        return text
    return match[1] + fraction_text((int(match[2] or 0) + Fraction(int(match[3]), int(match[4]))) / 100)


_REWRITINGS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("'", _name_primes),
    ("cis", lambda text: text if (m := _CIS.fullmatch(text)) is None else f"{m[1]} e^{{i({m[2]})}}"),
    (r"\circ", _to_radians),
    (r"\log", lambda text: _NATURAL_LOG.sub(r"\\ln ", text)),
    (
        r"\overline",
        lambda text: _OVERLINED.sub(lambda match: _repeating(match[1], match[2], match[3] or match[4]), text),
    ),
    (r"\bar", lambda text: _OVERLINED.sub(lambda match: _repeating(match[1], match[2], match[3] or match[4]), text)),
    (r"\dot", lambda text: _DOTTED.sub(_dotted, text)),
    (r"\dots", _ellipsis),
    (")", _parenthesized),
    ("e", lambda text: _SCIENTIFIC.sub(_scientific, text)),
    ("E", lambda text: _SCIENTIFIC.sub(_scientific, text)),
    (r"\lg", lambda text: _DECIMAL_LOG.sub(r"\\log_{10}", text)),
    ("C", _binomials),
    ("P_", lambda text: _CHOOSE_BEFORE.sub(_choose_before, text)),
    (r"\%", _mixed_percent),
    (r"\operatorname", lambda text: _NAMED_FUNCTION.sub(r"\\text{\1}", text)),
    (r"\sqrt", lambda text: _BARE_ROOT.sub(r"\\sqrt{\1}", text)),
)
"""Pairs of a substring that every formula of one notation contains, and the function that rewrites the formula."""
