r"""Answers that are words (Yes, True, Even, does not exist), choice letters, and units after a number.

About 18 % of DeepMath's solutions are Yes, No, True or False, which Math-Verify cannot parse. They are compared as
words: case, fonts, articles and `\text{}` do not matter, and `Yes` means the same as `True`. An answer with anything
besides the word (`Yes and No`, `Yes, or perhaps No`) is another answer.
"""

import re
from fractions import Fraction

from grpo_ray.rewards.math.linear import rational
from grpo_ray.rewards.math.notation import fraction_text

_YES = frozenset({"yes", "true", "correct"})
_NO = frozenset({"no", "false", "incorrect"})
BOOLEANS = _YES | _NO

EMPTY_SET_WORDS = frozenset({"no solution", "no real solution", "empty set", "none"})
"""Words for the empty set."""
NO_SOLUTION_WORDS = frozenset({"no solution", "none", "empty set"})
"""Words for an equation without solutions."""

_FILLERS = frozenset({"the", "a", "an", "it", "its", "is", "are", "this", "that", "answer", "statement", "there"})
_SYNONYMS = {
    **dict.fromkeys(_YES, "yes"),
    **dict.fromkeys(_NO, "no"),
    "not true": "no",
    "dne": "does not exist",
    "d n e": "does not exist",
    "doesn't exist": "does not exist",
    "not exist": "does not exist",
    "limit does not exist": "does not exist",
    "limit doesn't exist": "does not exist",
    "do not exist": "does not exist",
    "nonexistent": "does not exist",
    "exist": "exists",
    "limit exists": "exists",
    "diverges": "divergent",
    "diverge": "divergent",
    "series diverges": "divergent",
    "integral diverges": "divergent",
    "series divergent": "divergent",
    "does not converge": "divergent",
    "not convergent": "divergent",
    "converges": "convergent",
    "converge": "convergent",
    "series converges": "convergent",
    "series convergent": "convergent",
    "converges absolutely": "absolutely convergent",
    "converges conditionally": "conditionally convergent",
    "no solutions": "no solution",
    "no real solutions": "no real solution",
    "none": "none",
    "inf": "infinity",
    "infinite": "infinite",
    "infinitely many solutions": "infinitely many",
    "infinite number of solutions": "infinitely many",
    "infinite solutions": "infinitely many",
    "even function": "even",
    "odd function": "odd",
    "function even": "even",
    "function odd": "odd",
    "linearly independent": "independent",
    "linearly dependent": "dependent",
}
_VOCABULARY = frozenset(_SYNONYMS) | frozenset(_SYNONYMS.values()) | {"even", "odd", "neither", "both", "undefined"}
_WRAPPER = re.compile(r"\\text\{([^{}]*)\}")
_PROSE = re.compile(r"[a-zA-Z' ,.;:!?()*\"-]+")

_UNIT_NAMES = (
    "m|meter|meters|metre|metres", "cm|centimeter|centimeters|centimetre|centimetres",
    "mm|millimeter|millimeters|millimetre|millimetres", "km|kilometer|kilometers|kilometre|kilometres",
    "in|inch|inches", "ft|foot|feet", "yd|yard|yards", "mi|mile|miles", "g|gram|grams|gm",
    "kg|kilogram|kilograms|kgs", "mg|milligram|milligrams", "lb|lbs|pound|pounds", "oz|ounce|ounces",
    "l|liter|liters|litre|litres", "ml|milliliter|milliliters", "s|sec|secs|second|seconds",
    "min|mins|minute|minutes", "h|hr|hrs|hour|hours", "day|days", "week|weeks", "month|months",
    "year|years|yr|yrs", "mph|miles per hour|mi/h", "km/h|kmh|kph|kilometers per hour",
    "m/s|meters per second", "degree|degrees|deg", "radian|radians|rad", "dollar|dollars|usd",
    "cent|cents", "unit|units", "unit^2|square unit|square units|sq units",
    "unit^3|cubic unit|cubic units", "cm^2|square centimeters|sq cm", "m^2|square meters|sq m",
    "ft^2|square feet|sq ft", "in^2|square inches|sq in", "cm^3|cubic centimeters|cc", "point|points",
    "way|ways", "hz|hertz", "n|newton|newtons", "j|joule|joules", "w|watt|watts", "v|volt|volts",
)  # fmt: skip
_UNITS = {form: forms.split("|")[0] for forms in _UNIT_NAMES for form in forms.split("|")}
# fmt: off
_NOT_UNITS = frozenset({
    "not", "no", "yes", "or", "and", "but", "wait", "maybe", "perhaps", "possibly", "actually", "i", "e",
    "pi", "if", "is", "to", "than", "then", "else", "mod", "modulo", "base", "plus", "minus", "times",
    "over", "divided", "half", "third", "quarter", "squared", "cubed", "factorial", "hundred", "thousand",
    "million", "billion", "trillion", "dozen", "score", "pair", "percent", "percentage", "zero", "one",
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "where",
    "for", "when", "with", "about", "approximately", "roughly", "around", "at", "most", "least", "more",
    "less", "true", "false", "none", "infinity", "any", "all", "some", "either", "neither", "only",
    "otherwise", "except", "without", "root", "of", "power", "remainder", "choose", "below", "under", "above",
    "negative", "positive", "almost", "nearly", "approx", "ish", "fold", "short", "wrong", "incorrect",
    "ordinal", "mille", "permille", "basis", "cubic", "fewer", "ago", "permute", "per", "gross", "myriad",
    "dozens", "hundreds", "thousands", "millions", "billions", "trillions", "lakh", "lakhs", "crore", "crores",
    "halves", "thirds", "quarters", "fourth", "fourths", "fifth", "fifths", "sixth", "sixths", "seventh", "sevenths",
    "eighth", "eighths", "ninth", "ninths", "tenth", "tenths", "twelfth", "twelfths", "hundredth", "hundredths",
    "thousandth", "thousandths", "millionth", "millionths", "googol", "quadrillion", "double", "triple", "twice",
    "tens", "ones", "bn", "mn", "mil", "mio", "grand", "many", "too", "few", "off", "greater", "bigger", "larger",
    "smaller", "higher", "lower", "reciprocal", "inverse", "inverted", "opposite", "conjugate", "transposed", "negated",
    "imaginary", "complex", "log", "ln", "sqrt", "sin", "cos", "tan", "exponent", "digit", "digits",
})
_NUMERAL = re.compile(
    r"(?:[a-z]|eleven|thirteen|\w+teen|\w+tie|hundred|thousand|\w+illion)ths?|\w*illions?|\w+teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty(?:\w+)?|\w+fold|\w+tuple"
)
"""A word that is a number or part of one: `elevenths`, `quintillion`, `twenty`."""
# fmt: on
_SCALES = {
    **dict.fromkeys(("hundred", "hundreds"), Fraction(100)),
    **dict.fromkeys(("thousand", "thousands"), Fraction(10**3)),
    **dict.fromkeys(("million", "millions"), Fraction(10**6)),
    **dict.fromkeys(("billion", "billions"), Fraction(10**9)),
    **dict.fromkeys(("trillion", "trillions"), Fraction(10**12)),
    **dict.fromkeys(("lakh", "lakhs"), Fraction(10**5)),
    **dict.fromkeys(("crore", "crores"), Fraction(10**7)),
    **dict.fromkeys(("dozen", "dozens"), Fraction(12)),
    **dict.fromkeys(("half", "halves"), Fraction(1, 2)),
    **dict.fromkeys(("third", "thirds"), Fraction(1, 3)),
    **dict.fromkeys(("quarter", "quarters", "fourth", "fourths"), Fraction(1, 4)),
    **dict.fromkeys(("fifth", "fifths"), Fraction(1, 5)),
    **dict.fromkeys(("sixth", "sixths"), Fraction(1, 6)),
    **dict.fromkeys(("seventh", "sevenths"), Fraction(1, 7)),
    **dict.fromkeys(("eighth", "eighths"), Fraction(1, 8)),
    **dict.fromkeys(("ninth", "ninths"), Fraction(1, 9)),
    **dict.fromkeys(("tenth", "tenths"), Fraction(1, 10)),
    **dict.fromkeys(("hundredth", "hundredths"), Fraction(1, 100)),
    **dict.fromkeys(("thousandth", "thousandths"), Fraction(1, 1000)),
}
"""Words after a number that multiply it."""
_SCALED = re.compile(
    r"([-+]?(?:\d{1,30}(?:,\d{3})*(?:\.\d{1,30})?|\\frac\s*\{\d{1,30}\}\s*\{\d{1,30}\}))\s*"
    r"(?:\\text\{\s*([a-z]+)(?![a-z])\s*([^{}]*)\}|([a-z]+)(?![a-z])\s*([a-z ]*))(.*)",
    re.DOTALL | re.IGNORECASE,
)
_CLOCK = re.compile(r"0?(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*([ap])?\.?\s*m?\.?", re.IGNORECASE)
_UNIT_POWERS = re.compile(
    r"[a-zA-Z]+(?:\s*\^\s*\{?\s*-?\d\s*\}?)?(?:\s*(?:/|\\cdot|\*|\.|~|\s)\s*[a-zA-Z]+(?:\s*\^\s*\{?\s*-?\d\s*\}?)?){0,4}"
)
_UNIT_FACTOR = re.compile(r"(/?)[\s*.~]*(?:\\cdot)?\s*([a-zA-Z]+)(?:\s*\^\s*\{?\s*(-?\d)\s*\}?)?")
_POWERS_TAIL = re.compile(
    r"^(.*[\d})])\s*\\(?:text|mathrm)\s*\{((?:[^{}]|\{[^{}]*\}){1,60})\}\s*(\^\s*\{?-?\d\}?)?$", re.DOTALL
)
_TEXT_TAIL = re.compile(r"^(.*[^\s\\])\s*\\text\{\s*([^{}]*?)\s*\}\s*(\^\s*\{?\d\}?)?$", re.DOTALL)
_BARE_TAIL = re.compile(r"^(.*[\d})])\s*(?<!\\)\b([a-zA-Z]{2,}(?:[ /][a-zA-Z]+){0,2})(\s*\^\s*\{?\d\}?)?$", re.DOTALL)
_DEGREES = re.compile(r"^(.*\S)\s*\^\\circ\s*(C|F|\\text\{[CF]\})?$", re.DOTALL)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
"""Functions of an angle, whose degree sign belongs to their argument."""
_UNIT_TEXT = re.compile(r"[a-zA-Z]+(?:[ /.*-]+[a-zA-Z]+){0,3}\.?")

_CHOICE = re.compile(
    r"^\s*(?:option|choice|answer)?\s*\(?\s*([A-J])\s*(?:\)|(?=[.:)]|$))[.:)]?\s*(.*)$",
    re.DOTALL | re.IGNORECASE,
)


def canonical_word(text: str) -> str | None:
    """Return the canonical form of a normalized answer in words, None if it has anything but words."""
    bare = _WRAPPER.sub(r" \1 ", text)
    if not _PROSE.fullmatch(bare):
        return None
    tokens = [token for token in re.findall(r"[a-z']+", bare.lower()) if token not in _FILLERS]
    phrase = " ".join(tokens)
    return _SYNONYMS.get(phrase, phrase) or None


def same_mixed_words(solution: str, answer: str) -> bool:
    r"""Return True if two normalized texts have the same words and numbers: `\text{March }15`, `\text{March 15}`."""
    texts = [_WRAPPER.sub(r" \1 ", text) if r"\text{" in text else "" for text in (solution, answer)]
    if not all(re.search(r"[a-zA-Z]{3}", text) and re.search(r"\d", text) for text in texts):
        return False
    # 2 hours and 30 minutes are 2 hours 30 minutes.
    one, other = (" ".join(re.sub(r"(?<=[a-z]) +and +(?=\d)", " ", text).split()).lower() for text in texts)
    return one == other


def solution_word(text: str, in_math: bool) -> str | None:
    r"""Return the canonical word of a solution that is a word, None if it is a formula.

    A solution is a word if it is a known one, stands in `\text{}`, or is a plain word outside formulas.

    Args:
        text: The normalized solution.
        in_math: The solution was between dollar signs, where plain letters are symbols.
    """
    word = canonical_word(text)
    if word is None or re.fullmatch(r"\(?[a-zA-Z]\)?", _WRAPPER.sub(r"\1", text).strip()):
        return None
    if word in _VOCABULARY or text.startswith(r"\text{"):
        return word
    return None if in_math or not re.search(r"[a-z]{3}", text) else word


def is_boolean(solution: str) -> bool:
    """Return True if a raw solution is Yes, No, True or False, so that a guess is right half of the time."""
    letters = re.sub(r"\\(?:text|mathrm|textbf|mathbf|boxed)|[\s${}.*]", "", solution)
    return letters.lower() in BOOLEANS


def same_choice(solution: str, answer: str) -> bool | None:
    r"""Return True if two normalized texts name the same choice; None if the solution is not a choice letter.

    `B`, `(B)`, `B.`, `\text{B. } 17` and `(b)` answer `B`; a bare `b` is a variable, and `B or C` names two choices.
    """
    letter = re.fullmatch(r"\(?([A-J])\)?\.?", _WRAPPER.sub(r"\1", solution).strip())
    if letter is None:
        return None
    bare = _WRAPPER.sub(r"\1 ", answer).strip()
    match = _CHOICE.match(bare)
    if match is None or match[1].upper() != letter[1]:
        return False
    if match[1].islower() and not bare.startswith("("):
        return False
    return re.search(r"(?<![a-zA-Z\\])[A-J](?![a-zA-Z])|\b(?:or|not|wait)\b|=", match[2]) is None


def split_unit(text: str) -> tuple[str, str | None]:
    r"""Split a normalized answer into its value and the canonical name of the unit after it, None without a unit.

    `5\text{ cm}` and `5 meters` have units. In `5t` the letter is a factor, and `5\text{ or so}` and
    `5\text{ million}` are other values than 5, so these are not split.
    """
    powers = _POWERS_TAIL.match(text) if "^" in text and (r"\mathrm" in text or r"\text" in text) else None
    if powers is not None and (unit := _unit_with_powers(powers[2] + (powers[3] or ""))) is not None:
        return powers[1].strip(), unit
    degrees = _DEGREES.match(text)
    if degrees is not None and _TRIGONOMETRIC.search(degrees[1]) is None:
        return degrees[1], "degree" if degrees[2] is None else degrees[2]
    for pattern, known_only in ((_TEXT_TAIL, False), (_BARE_TAIL, True)):
        match = pattern.match(text)
        if match is None:
            continue
        unit = _canonical_unit(match[2].lower(), known_only)
        if unit is not None:
            power = re.sub(r"[^\d]", "", match[3] or "")
            return match[1].strip(), f"{unit}^{power}" if power else unit
    return text, None


def _unit_with_powers(text: str) -> str | None:
    r"""Return the canonical name of `m s^{-1}` or `kg m/s^2`; None unless it has several units and all are known."""
    if _UNIT_POWERS.fullmatch(text.strip()) is None:
        return None
    powers: dict[str, int] = {}
    for slash, name, exponent in _UNIT_FACTOR.findall(text.strip()):
        if name not in _UNITS or name in powers:
            return None
        powers[_UNITS[name]] = int(exponent or 1) * (-1 if slash else 1)
    above = [name if power == 1 else f"{name}^{power}" for name, power in powers.items() if power > 0]
    below = [name if power == -1 else f"{name}^{-power}" for name, power in powers.items() if power < 0]
    return "/".join((" ".join(above), *below)) if above and len(powers) > 1 else None


def multiply_out_scale(text: str) -> str:
    r"""Return `5\text{ million}` as `5000000` and `5\text{ sevenths}` as `\frac{5}{7}`; a unit after it stays."""
    match = _SCALED.fullmatch(text)
    factor = None if match is None else _SCALES.get((match[2] or match[4]).lower())
    number = None if match is None or factor is None else rational(match[1].replace(",", ""))
    if match is None or factor is None or number is None:
        return text
    unit, rest = (match[3] or match[5] or "").strip(), match[6].strip()
    return fraction_text(number * factor) + (rf"\text{{ {unit}}}" if unit else "") + rest


def clock_time(text: str) -> tuple[int, int, int, str] | None:
    """Return hour, minute, second and `a`, `p` or "" of a time of day such as `3:30` or `12:30 p.m.`, else None."""
    match = _CLOCK.fullmatch(_WRAPPER.sub(r" \1 ", text).strip())
    if match is None or int(match[1]) > 24:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0), (match[4] or "").lower()


def _canonical_unit(name: str, known_only: bool) -> str | None:
    """Return the canonical name of a unit; with known_only, only of the units in `_UNIT_NAMES`."""
    name = name.strip(" .")
    if name in _UNITS:
        return _UNITS[name]
    quotient = re.split(r"\s*/\s*|\s+per\s+", name)
    if len(quotient) == 2 and all(part in _UNITS for part in quotient):
        return "/".join(_UNITS[part] for part in quotient)
    if known_only or not _UNIT_TEXT.fullmatch(name):
        return None
    tokens = re.findall(r"[a-z]+", name)
    if any(token in _NOT_UNITS or _NUMERAL.fullmatch(token) for token in tokens) or (
        len(tokens) == 1 and len(tokens[0]) == 1
    ):
        return None
    return " ".join(token.rstrip("s") for token in tokens)
