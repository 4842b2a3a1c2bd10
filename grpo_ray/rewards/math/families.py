r"""Answers with an integer parameter: `\frac{\pi}{4}+n\pi, n\in\mathbb{Z}` and its other spellings.

Such an answer is a set of values, one for each integer. The parameter's name does not matter, nor does where the count
starts: `\frac{5\pi}{4}+k\pi` is the same set. Each formula is reduced to an offset and a period, which are compared
exactly as multiples of the first period.
"""

import re
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

from grpo_ray.rewards.math.notation import rename_symbols, symbols

Number = Any  # A real mpmath number; mpmath ships no types, and importing it here would make this module heavy.

_PARAMETERS = ("n", "k", "m", "l", "j", "t", "s")
"""Usual names of a parameter without a quantifier."""
_MAX_CLASSES = 60
"""Maximum residue classes into which one formula is split if periods differ."""

_QUANTIFIER = re.compile(
    r"(?:\s|[,;:(]|\\(?:text|mbox)\{[^{}]{0,40}\}|\\q?quad|\\mid|\||where|for|with|all|any|\\forall)*"
    r"(?<![a-zA-Z\\])([a-zA-Z])\s*(?:\\in\s*(?:\\mathbb\s*\{?([ZNR])\}?|\\text\{(?:Z|integers)\}|Z)(\s*[_^]\S{1,8})?"
    r"|\\text\{\s*(?:is )?(?:an |any )?(?:integers?|arbitrary integer)\s*\}|(?:is )?(?:an |any )?integers?)"
    r"(?:\s|[).,;]|\\text\{[^{}]{0,20}\})*\Z"
)
_INTEGER_WORDS = re.compile(
    r"(?:\s|[,;:(])*\\text\{\s*[,(]?\s*(?:where|for|with)?\s*(?:all|any|an|some|every)?\s*"
    r"(?:integers?|integer values of)?\s*"
    r"([a-zA-Z])\s*(?:is an (?:arbitrary )?integer|an integer|integer)?\s*\)?\s*\}(?:\s|[).,;])*\Z"
)


_CONGRUENCE = re.compile(
    r"(?:([a-zA-Z])\s*(?:\\equiv(?![a-zA-Z])|=)\s*)?"
    r"(-? ?\d{1,9}(?:\s*(?:,|or|and|,\s*or)\s*-? ?\d{1,9}){0,20})[\s,]*\\pmod\{(\d{1,9})\}"
)
_FREE_PARAMETER = "q"
"""Name of the parameter when a congruence is written as a family."""


class Quantified(NamedTuple):
    """An answer and the parameter that it quantifies, usually an integer."""

    text: str
    """The answer without its quantifier."""
    parameter: str | None
    domain: str
    """`Z`, or the set to which the quantifier restricts the parameter; "" without a quantifier."""


def split_quantifier(text: str) -> Quantified:
    r"""Split `n\in\mathbb{Z}`, `(k \text{ integer})` and the like from the end of a normalized answer."""
    if r"\in" in text or "integer" in text:
        match = _QUANTIFIER.search(text)
        if match is not None and text[: match.start()].strip() and match[1] in symbols(text[: match.start()]):
            domain = (match[2] or "Z") + (match[3] or "").strip()
            return Quantified(text[: match.start()].rstrip(" ,;("), match[1], domain)
        words = _INTEGER_WORDS.search(text) if "integer" in text else None
        if words is not None and words[1] in symbols(text[: words.start()]):
            return Quantified(text[: words.start()].rstrip(" ,;("), words[1], "Z")
    return Quantified(text, None, "")


class Congruence(NamedTuple):
    r"""Residue classes of integers, `n\equiv 1,2 \pmod{3}`."""

    name: str | None
    residues: frozenset[int]
    """Residues, each from 0 to modulus - 1."""
    modulus: int

    def agrees_with(self, answer: "Congruence") -> bool:
        """Return True if an answer states the same classes; if both have a name, the names must agree."""
        return (self.name is None or answer.name in (None, self.name)) and answer[1:] == self[1:]

    def as_family(self) -> Quantified:
        """Return the same integers as a list of formulas with an integer parameter."""
        values = ", ".join(f"{self.modulus}{_FREE_PARAMETER}+{residue}" for residue in sorted(self.residues))
        return Quantified(f"{self.name}={values}" if self.name else values, _FREE_PARAMETER, "Z")


def parse_congruence(text: str) -> Congruence | None:
    r"""Parse a normalized congruence with numbers as residues and modulus; None for other texts."""
    match = _CONGRUENCE.fullmatch(text) if r"\pmod" in text else None
    if match is None or int(match[3]) < 2:
        return None
    modulus = int(match[3])
    residues = re.findall(r"-?\d+", match[2].replace("- ", "-"))
    return Congruence(match[1], frozenset(int(number) % modulus for number in residues), modulus)


def with_same_parameter(gold: Quantified, answer: Quantified) -> tuple[str, str, str] | None:
    """Return both texts with the solution's parameter, and the parameter; None if they have no parameter in common."""
    if gold.domain and answer.domain and gold.domain != answer.domain:
        return None
    gold_names, answer_names = symbols(gold.text), symbols(answer.text)
    parameter = gold.parameter or _unquantified(gold_names, answer.parameter)
    other = answer.parameter or _unquantified(answer_names, parameter)
    if parameter is None or other is None:
        return None
    if other == parameter:
        return gold.text, answer.text, parameter
    if parameter in answer_names or other in gold_names:
        return None
    return gold.text, rename_symbols(answer.text, {other: parameter}), parameter


def _unquantified(names: frozenset[str], preferred: str | None) -> str | None:
    """Return the name of a parameter among a text's symbols: the preferred one, or the only usual one."""
    if preferred is not None and preferred in names:
        return preferred
    usual = [name for name in _PARAMETERS if name in names]
    return usual[0] if len(usual) == 1 else None


def same_classes(gold: tuple[str, ...], answer: tuple[str, ...], parameter: str, *, of_angles: bool) -> bool:
    """Return True if two lists of formulas, each affine in the parameter, have the same values over all integers.

    Args:
        gold: Formulas of the solution.
        answer: Formulas of the answer.
        parameter: Name of the parameter in both.
        of_angles: Neither side has a quantifier, so the period must be a rational multiple of pi.
    """
    gold_classes = [_offset_and_period(text, parameter) for text in gold]
    answer_classes = [_offset_and_period(text, parameter) for text in answer]
    known = [each for each in (*gold_classes, *answer_classes) if each is not None]
    if len(known) < len(gold) + len(answer) or not known:
        return False
    from grpo_ray.rewards.math.values import rational_quotient, real_position

    pi = real_position(r"\pi")
    unit = known[0][1]
    if of_angles and rational_quotient(unit, pi) is None:
        return False
    # Offsets are taken relative to the solution's first one, so that an irrational common offset drops out.
    origin = known[0][0]
    classes = [(rational_quotient(offset - origin, unit), rational_quotient(period, unit)) for offset, period in known]
    exact = [(offset, abs(period)) for offset, period in classes if offset is not None and period is not None]
    if len(exact) < len(classes):
        return False
    common = Fraction(
        lcm(*(period.numerator for _, period in exact)), 1
    )  # a multiple of every period: each is numerator / denominator
    split = [_split(offset, period, common) for offset, period in exact]
    if any(each is None for each in split):
        return False
    first = [residue for each in split[: len(gold)] for residue in each or ()]
    second = [residue for each in split[len(gold) :] for residue in each or ()]
    return set(first) == set(second)


def _offset_and_period(text: str, parameter: str) -> tuple[Number, Number] | None:
    """Return the value at 0 and the increment of a formula that is affine in the parameter; None for another one."""
    from grpo_ray.rewards.math.values import real_position, values_agree

    values = [real_position(text, {parameter: integer}) for integer in (0, 1, 2, 5)]
    zero, one, two, five = values
    if zero is None or one is None or two is None or five is None:
        return None
    period = one - zero
    if period == 0 or not values_agree(two - one, period) or not values_agree(five - zero, 5 * period):
        return None
    return zero, period


def _split(offset: Fraction, period: Fraction, common: Fraction) -> list[Fraction] | None:
    """Return the residues modulo the common period of the values offset + n * period."""
    count = common / period
    if count > _MAX_CLASSES:
        return None
    return [(offset + number * period) % common for number in range(int(count))]
