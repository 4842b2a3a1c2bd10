r"""Answers that are words (Yes, True, Even, does not exist), choice letters, and units after a number.

About 18 % of DeepMath's solutions are Yes, No, True or False, which Math-Verify cannot parse. They are compared as
words: case, fonts, articles and `\text{}` do not matter, and `Yes` means the same as `True`. An answer with anything
besides the word (`Yes and No`, `Yes, or perhaps No`) is another answer.
"""

import re
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

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
_QUOTIENT_TAIL = re.compile(
    r"^(.*[\d})])\s*\\frac\s*\{\s*(\\text\{\s*[a-zA-Z]{1,12}\s*\}|[a-zA-Z]{1,3})\s*\}"
    r"\s*\{\s*((?:\\text\{\s*[a-zA-Z]{1,12}\s*\}|[a-zA-Z]{1,3})\s*(?:\^\s*\{?\d\}?)?)\s*\}$",
    re.DOTALL,
)
"""A unit as a fraction, `5\\frac{m}{s}`."""
_BARE_QUOTIENTS = frozenset(
    f"{length}/{time}" for length in ("m", "cm", "km", "ft", "mi") for time in ("s", "s^2", "h", "hr", "min")
) | {"g/cm^3", "kg/m^3", "g/L", "g/mL"}
"""Quotients that are units without a wrapper around their letters."""
_TEXT_TAIL = re.compile(r"^(.*[^\s\\])\s*\\text\{\s*([^{}]*?)\s*\}\s*(\^\s*\{?\d\}?)?$", re.DOTALL)
_BARE_TAIL = re.compile(r"^(.*[\d})])\s*(?<!\\)\b([a-zA-Z]{2,}(?:[ /][a-zA-Z]+){0,2})(\s*\^\s*\{?\d\}?)?$", re.DOTALL)
_DEGREES = re.compile(r"^(.*\S)\s*\^\\circ\s*(C|F|\\text\{[CF]\})?$", re.DOTALL)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
"""Functions of an angle: a degree sign after one belongs to its argument, not to the value."""
_UNIT_TEXT = re.compile(r"[a-zA-Z]+(?:[ /.*-]+[a-zA-Z]+){0,3}\.?")

_DIGIT = re.compile(r"\d")
_CHOICE_LETTER = r"(?:\((?:[A-J]|I{1,3}|IV)\)|(?:[A-J]|I{1,3}|IV))"
_CHOICES = re.compile(rf"{_CHOICE_LETTER}(?:(?: ?, ?(?:and )?| and | ?& ?){_CHOICE_LETTER}){{1,9}}\.?")
_MAX_CHOICES = 200
"""Characters of a list of choices."""
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH_NAME = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    "|nov(?:ember)?|dec(?:ember)?"
)
_MONTH = re.compile(rf"(?<![a-zA-Z])(?:{_MONTH_NAME})(?![a-zA-Z])", re.IGNORECASE)
_DAY = r"(\d{1,2})(?: ?(?:st|nd|rd|th))?"
_DATE = re.compile(rf"(?:({_MONTH_NAME}) {_DAY}|{_DAY}(?: of)? ({_MONTH_NAME}))(?: (\d{{4}}))?")
_DIGIT_WORDS = {
    word: value
    for value, word in enumerate(
        (
            *(
                "zero",
                "one",
                "two",
                "three",
                "four",
                "five",
                "six",
                "seven",
                "eight",
                "nine",
                "ten",
                "eleven",
                "twelve",
            ),
            *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
        )
    )
} | {
    word: 10 * value
    for value, word in enumerate(("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), 2)
}
_PARTS = {word: value for word, value in _SCALES.items() if value < 1}
"""Words for a part of one: half, thirds."""
_NUMBER_WORDS = frozenset(_DIGIT_WORDS) | frozenset(_PARTS) | {"a", "and", "hundred", "thousand", "million"}
_MAX_NUMBER_WORDS = 120
"""Characters of a number in words."""
_SIZES = {
    "s": ("time", 1), "min": ("time", 60), "h": ("time", 3_600), "day": ("time", 86_400), "week": ("time", 604_800),
    "in": ("length", 1), "ft": ("length", 12), "yd": ("length", 36), "mi": ("length", 63_360),
    "mm": ("metric length", 1), "cm": ("metric length", 10), "m": ("metric length", 1_000),
    "km": ("metric length", 1_000_000), "mg": ("mass", 1), "g": ("mass", 1_000), "kg": ("mass", 1_000_000),
    "oz": ("weight", 1), "lb": ("weight", 16), "cent": ("money", 1), "dollar": ("money", 100),
}  # fmt: skip
"""Kind of quantity, and size in its smallest unit, of the units that may be combined (`4 hours 30 minutes`)."""
_MEASURE_NUMBER = r"(?:\d{1,30} ?)?\\frac\{\d{1,30}\}\{\d{1,30}\}|\d{1,30}(?:,\d{3})*(?:\.\d{1,30})?"
_MEASURE_PART = re.compile(rf"({_MEASURE_NUMBER}) ?([a-zA-Z]{{1,12}})\.?(?![a-zA-Z])")
_MEASURES = re.compile(rf"(?:(?:{_MEASURE_NUMBER}) ?[a-zA-Z]{{1,12}}\.?(?![a-zA-Z]) ?){{1,4}}")
_MAX_MEASURE = 200
"""Characters of a quantity with its units."""
_ANNOUNCED = re.compile(
    r"\\text\{\s*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+|my\s+)?(?:final\s+|correct\s+)?answer(?:\s+is)?\s*:?\s*"
    r"(?:\}|(?=[^\s{}a-zA-Z])([^{}]*)\}\Z)",
    re.IGNORECASE,
)
"""Words in front of the answer, such as `The answer is`."""

_CHOICE = re.compile(
    r"^\s*(?:option|choice|answer)?\s*\(?\s*([A-J])\s*(?:\)|(?=[.:)]|$))[.:)]?\s*(.*)$",
    re.DOTALL | re.IGNORECASE,
)


def choice_letters(text: str) -> frozenset[str] | None:
    r"""Return the letters of several choices, `\text{A and C}`, `A, C`; None for other texts and for one letter."""
    if len(text) > _MAX_CHOICES:
        return None
    bare = " ".join(_WRAPPER.sub(r" \1 ", text).split())
    if _CHOICES.fullmatch(bare) is None:
        return None
    return frozenset(re.findall(r"[A-Z]+", bare))


def calendar_date(text: str) -> tuple[int, int, str] | None:
    r"""Return month (from 0), day and year or "" of a date, `\text{March 5}` or `\text{5th May, 1990}`, else None."""
    if not _MONTH.search(text):
        return None
    bare = " ".join(re.sub(r"[{}^~,.]", " ", _WRAPPER.sub(r" \1 ", text).replace(r"\text", " ")).lower().split())
    match = _DATE.fullmatch(bare)
    if match is None:
        return None
    month, day = match[1] or match[4], match[2] or match[3]
    return _MONTHS.index(month[:3]), int(day), match[5] or ""


def number_in_words(text: str) -> str:
    r"""Return `\text{five}` as `5`, `\text{one half}` as `\frac{1}{2}`, `\text{minus }9` as `-9`; leave other texts."""
    if len(text) > _MAX_NUMBER_WORDS or not (text[:1].isalpha() or text.startswith(r"\text{")):
        return text
    bare = _WRAPPER.sub(r" \1 ", text).strip()
    lower = bare.lower()
    negative = re.match(r"(?:minus|negative)\s+", lower)
    rest = bare[negative.end() :] if negative is not None else bare
    if negative is not None and rational(rest) is not None and not rest.startswith("-"):
        return f"-{rest}"
    value = _word_value(rest.lower().replace("-", " ").split())
    return text if value is None else fraction_text(-value if negative is not None else value)


def _word_value(words: list[str]) -> Fraction | None:
    """Return the value of `two thirds`, `one and a half` or `two hundred and five`; None for other words."""
    if not words or not all(word in _NUMBER_WORDS for word in words):
        return None
    if "and" in words and words[-1] in _PARTS:
        split = words.index("and")
        whole, part = _cardinal(words[:split]), _word_value(words[split + 1 :])
        return None if whole is None or part is None or part >= 1 else whole + part
    if words[-1] in _PARTS:
        count = Fraction(1) if words in (["half"], ["a", words[-1]]) else _cardinal(words[:-1])
        # `third` and `twenty fifth` are ordinals; more than one part needs the plural (`two thirds`).
        return None if count is None or (count != 1 and not words[-1].endswith("s")) else count * _PARTS[words[-1]]
    return _cardinal(words)


def _cardinal(words: list[str]) -> Fraction | None:
    """Return the value of a cardinal number below a billion in words, None for other words."""
    total, group, last = 0, 0, 1_000
    scale = 10**9
    previous = ""
    for word in words:
        if word == "and":
            if previous not in ("hundred", "thousand", "million"):
                return None
        elif word in _DIGIT_WORDS:
            value = _DIGIT_WORDS[word]
            size = 1 if value < 10 else 2 if value < 20 else 10
            if value == 0:
                return Fraction(0) if len(words) == 1 else None
            # Only a digit may follow a ten (twenty-five), any smaller number a hundred.
            if last <= 2 or (last == 10 and size != 1):
                return None
            group, last = group + value, size
        elif word == "hundred":
            if not 0 < group < 10:
                return None
            group, last = group * 100, 100
        elif word in ("thousand", "million"):
            factor = 10**3 if word == "thousand" else 10**6
            if group == 0 or factor >= scale:
                return None
            total, group, last, scale = total + group * factor, 0, 1_000, factor
        else:
            return None
        previous = word
    return None if not words or previous == "and" or total + group == 0 else Fraction(total + group)


class Measure(NamedTuple):
    """A quantity in one or several units of one kind, `4 hours 30 minutes`."""

    value: Fraction
    """Value in the smallest unit of the kind."""
    kind: str
    num_parts: int


def measure(text: str) -> Measure | None:
    r"""Return the quantity of `4\text{ hours }30\text{ minutes}` or `4.5\text{ hours}`; None for other texts."""
    if len(text) > _MAX_MEASURE or not _DIGIT.search(text):
        return None
    bare = " ".join(_WRAPPER.sub(r" \1 ", text).split())
    bare = " ".join(re.sub(r",(?!\d)|(?<=[a-z.]) and (?=\d)", " ", bare).split())
    if _MEASURES.fullmatch(bare) is None:
        return None
    total, kinds, sizes = Fraction(0), set(), []
    for number, name in _MEASURE_PART.findall(bare):
        unit = _SIZES.get(_UNITS.get(name.lower(), ""))
        value = _mixed(number)
        if unit is None or value is None:
            return None
        kinds.add(unit[0])
        sizes.append(unit[1])
        total += value * unit[1]
    is_descending = all(above > below for above, below in pairwise(sizes))
    return Measure(total, kinds.pop(), len(sizes)) if len(kinds) == 1 and is_descending else None


def _mixed(text: str) -> Fraction | None:
    """Return the value of a number, a fraction or a mixed number."""
    match = re.fullmatch(r"(\d{1,30}) ?(\\frac\{\d{1,30}\}\{\d{1,30}\})", text)
    if match is None:
        return rational(text.replace(",", ""))
    part = rational(match[2])
    return None if part is None else int(match[1]) + part


def without_announcement(text: str) -> str:
    r"""Return `5` for `\text{The answer is } 5` and `\text{The answer is 5}`; other texts as they are."""
    match = _ANNOUNCED.match(text) if "nswer" in text else None
    if match is None:
        return text
    if match[1] is None:
        return text[match.end() :].lstrip(" :=") or text
    return match[1].strip() if re.search(r"\d", match[1]) else text


def canonical_word(text: str) -> str | None:
    """Return the canonical form of a normalized answer in words, None if it contains anything else."""
    bare = _WRAPPER.sub(r" \1 ", text)
    if not _PROSE.fullmatch(bare):
        return None
    tokens = [token for token in re.findall(r"[a-z']+", bare.lower()) if token not in _FILLERS]
    phrase = " ".join(tokens)
    return _SYNONYMS.get(phrase, phrase) or None


def same_mixed_words(solution: str, answer: str) -> bool:
    r"""Return True if two normalized texts have the same words and numbers: `\text{March }15`, `\text{March 15}`."""
    if not _DIGIT.search(solution):
        return False
    texts = [_WRAPPER.sub(r" \1 ", text) for text in (solution, answer)]
    # Letters without spaces are factors, whose case counts.
    are_words = r"\text{" in solution or len(re.findall(r"(?<![a-zA-Z])[a-zA-Z]{3,}(?![a-zA-Z])", solution)) > 1
    if not are_words or not all("\\" not in text and re.search(r"[a-zA-Z]{3}", text) for text in texts):
        return False
    # 2 hours and 30 minutes are 2 hours 30 minutes.
    one, other = (" ".join(re.sub(r"(?<=[a-z]) +and +(?=\d)", " ", text).split()).lower() for text in texts)
    return one == other or _counted(one) == _counted(other) is not None


def _counted(text: str) -> list[str] | None:
    """Return the sorted parts of `3 apples and 2 pears`, which may stand in any order; None for other texts."""
    parts = [part.strip(" ,.") for part in re.sub(r"\band\b|,(?= |$)", " ", text).split(" ") if part.strip(" ,.")]
    grouped = [" ".join(pair) for pair in zip(parts[::2], parts[1::2], strict=False)]
    is_counted = len(parts) % 2 == 0 and all(
        number.isdigit() and noun.isalpha() for number, noun in zip(parts[::2], parts[1::2], strict=False)
    )
    return sorted(grouped) if is_counted and len(grouped) > 1 else None


def solution_word(text: str, in_math: bool) -> str | None:
    r"""Return the canonical word of a solution that is a word, None if it is a formula.

    A solution is a word if it is in the vocabulary, starts with `\text{`, or is a plain word outside formulas.

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
    if r"\frac" in text and (quotient := _QUOTIENT_TAIL.match(text)) is not None:
        above, below = (re.sub(r"\s|\\text|[{}]", "", part) for part in quotient.groups()[1:])
        is_unit = r"\text" in quotient[2] or rf"{above}/{below}" in _BARE_QUOTIENTS
        if is_unit and (unit := _unit_with_powers(f"{above}/{below}")) is not None:
            return quotient[1].strip(), unit
    powers = _POWERS_TAIL.match(text) if "^" in text and (r"\mathrm" in text or r"\text" in text) else None
    if powers is not None and (unit := _unit_with_powers(powers[2] + (powers[3] or ""))) is not None:
        return powers[1].strip(), unit
    degrees = _DEGREES.match(text)
    if degrees is not None and _TRIGONOMETRIC.search(degrees[1]) is None:
        scale = degrees[2]  # normalization keeps the wrapper of `5^{\circ}\text{C}`, and not that of `5^\circ\text{C}`
        return degrees[1], "degree" if scale is None else scale.removeprefix(r"\text{").removesuffix("}")
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
        if name not in _UNITS or _UNITS[name] in powers:
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
