r"""Correctness of a completion's final answer: a pure function of two strings, without TRL, Ray or processes.

    correctness(r"... so \boxed{\frac{1}{2}}", r"$0.5$")  # 1.0

Formulas are parsed by Math-Verify's grammar but not compared by Math-Verify: its comparison rewards the restated
problem, ignores letters and percent signs, and treats tiny numbers as equal. Here an answer must be an evaluated value
of the solution's own kind:

- a number must have the exact value; a decimal of six places or more may round a value without a finite decimal;
- for `x=5`, `x=5` and `5` are right and `y=5`, `2x=10`, `7=5` wrong; an equation must be the same up to a factor;
- sets and bare lists match in any order, tuples and intervals in order and with their own brackets; `x>3` is
  `(3,\infty)`;
- words match by meaning and choices by letter; units and `\%` must agree where both have one (see `words`);
- several different boxed answers, `5 \pm 0`, `\text{Not } 5`, integrals and the like are wrong.

Math-Verify's own time limits are off: they need the main thread and cannot interrupt C code. The verifier pool enforces
limits instead. Call this module directly only with trusted text.
"""

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from math import pi

from grpo_ray.rewards.math.compare import is_readable, same_answer
from grpo_ray.rewards.math.extract import extract_answers, is_blank, outer_boxes, solution_text
from grpo_ray.rewards.math.limits import MAX_LENGTH, exceeds_limits
from grpo_ray.rewards.math.linear import rational
from grpo_ray.rewards.math.normalize import normalize_latex, strip_spacing
from grpo_ray.rewards.math.notation import decimal_degrees
from grpo_ray.rewards.math.structure import Collection, Structure, parse_structure
from grpo_ray.rewards.math.words import (
    EMPTY_SET_WORDS,
    NO_SOLUTION_WORDS,
    Measure,
    calendar_date,
    canonical_word,
    choice_letters,
    clock_time,
    measure,
    multiply_out_scale,
    number_in_words,
    same_choice,
    same_mixed_words,
    solution_word,
    split_unit,
    without_announcement,
)

_LETTERS = re.compile(r"[a-zA-Z]{2}")
_WORD = re.compile(r"[a-zA-Z]{3,}")
_MAX_WORDS = 6
"""Maximum words of a solution; a longer text is prose, without an answer that could be compared."""


@dataclass(frozen=True)
class Grade:
    """Verdict on a completion."""

    reward: float | None
    """1.0 if the answer is right, 0.0 if it is wrong, None if the solution cannot be parsed."""
    is_undecided: bool = False
    """The answer counts as wrong because its form could not be compared with the solution."""


def correctness(completion: str, solution: str, *, strict: bool = True) -> float | None:
    """Return the reward of a completion's final answer; see `grade`."""
    return grade(completion, solution, strict=strict).reward


def grade(completion: str, solution: str, *, strict: bool = True) -> Grade:
    """Grade a completion's final answer. Malformed text never raises.

    Args:
        completion: The whole completion; `extract` describes where its final answer is found.
        solution: The dataset's reference answer.
        strict: False for the verdict of Math-Verify's own comparison, as in TRL's `accuracy_reward`, which is never
            undecided.

    Raises:
        MemoryError: The process hit its memory limit.
        RecursionError: The process hit its recursion limit.
    """
    if not strict:
        return Grade(_math_verify_verdict(completion, solution))
    gold = parse_solution(solution)
    if gold is None:
        return Grade(None)
    answers = extract_answers(completion)
    if not answers:
        return Grade(0.0)
    right = all(_is_right(gold, answer) for answer in answers) or (
        len(answers) > 1 and _is_right(gold, ", ".join(answers))
    )
    return Grade(float(right), not right and not all(_is_comparable(gold, answer) for answer in answers))


@dataclass(frozen=True)
class ParsedSolution:
    """The answer that a solution states."""

    text: str
    """Normalized."""
    value: str
    """`text` without its unit."""
    unit: str | None
    """Canonical name of the unit."""
    word: str | None
    """Canonical word, if the solution is a word."""
    structure: Structure
    """Structure of `value`."""
    choices: frozenset[str] | None
    """Letters of a solution of several choices; None for others."""
    date: tuple[int, int, str] | None
    """Month from 0, day, and year or ""; None if the solution is not a date."""
    measure: Measure | None
    """The quantity with its units, if they are of one kind."""


@lru_cache(maxsize=4096)
def parse_solution(solution: str) -> ParsedSolution | None:
    """Parse the answer in a raw solution; None for an empty text or prose."""
    raw = solution_text(solution)
    text = _normalized(raw)
    if not text:
        return None
    if len(_WORD.findall(re.sub(r"\\[a-zA-Z]+", " ", text))) > _MAX_WORDS:
        return None
    value, unit = _value_and_unit(text, raw)
    return ParsedSolution(
        text=text,
        value=value,
        unit=unit,
        word=solution_word(text, in_math="$" in solution),
        structure=parse_structure(value),
        choices=choice_letters(text),
        date=calendar_date(text),
        measure=measure(text),
    )


def _normalized(raw: str, *, commas_separate: bool = False) -> str:
    """Normalize a raw answer; `5 million` becomes a number, and degrees with minutes become degrees."""
    text = normalize_latex(raw, commas_separate=commas_separate)
    if _LETTERS.search(text) is None:
        return text if "'" not in text else decimal_degrees(text)
    return decimal_degrees(multiply_out_scale(number_in_words(without_announcement(text))))


def _value_and_unit(text: str, raw: str) -> tuple[str, str | None]:
    r"""Split an answer's unit from its value; normalizing has removed the currency sign of `\$5`."""
    value, unit = split_unit(text)
    return value, "dollar" if unit is None and r"\$" in raw else unit


def _is_right(gold: ParsedSolution, answer: str) -> bool:
    """Return True if one extracted answer is right. The cheap comparisons come first."""
    if len(answer) > 10 * MAX_LENGTH + 4 * len(gold.text):
        return False
    # In a list of three-digit numbers the comma separates; alone it groups thousands.
    raw = _without_boxes(answer)
    text = _normalized(raw, commas_separate=isinstance(gold.structure, Collection))
    if not text:
        return False
    if strip_spacing(text) == strip_spacing(gold.text):
        return True
    if exceeds_limits(text, gold.text):
        return False
    if gold.choices is not None and (letters := choice_letters(text)) is not None:
        return letters == gold.choices
    if gold.date is not None:
        return calendar_date(text) == gold.date
    if (
        gold.measure is not None
        and (stated := measure(text)) is not None
        and gold.measure.num_parts + stated.num_parts > 2
    ):
        # Quantities in several units are converted: 4 hours 30 minutes are 4.5 hours.
        return stated[:2] == gold.measure[:2]
    if gold.measure is not None and gold.measure.num_parts > 1:
        return False
    value, unit = _value_and_unit(text, raw)
    if unit is not None and gold.unit is not None and unit != gold.unit:
        # Only degrees and radians are converted: `\frac{\pi}{2}` radians are 90 degrees.
        gold_angle = gold.value if gold.unit == "radian" else gold.text
        angle = value if unit == "radian" else text
        return {unit, gold.unit} == {"degree", "radian"} and same_answer(gold_angle, angle)
    if gold.unit is None and (
        (unit == "radian" and _exceeds_full_turn(gold.value)) or (unit == "degree" and r"\pi" in value)
    ):
        # If the solution has no unit, a number above 2 pi is not in radians, and a multiple of pi is not in degrees.
        return False
    if gold.word is not None:
        word = canonical_word(text)
        return word == gold.word or (
            (gold.word in NO_SOLUTION_WORDS and (word in NO_SOLUTION_WORDS or text == r"\emptyset"))
            or (gold.word == "infinitely many" and text == r"\infty")
        )
    time = clock_time(gold.text) if ":" in gold.text else None
    if time is not None:
        # 3:30 may be a ratio or a time of day; an answer must have the same digits.
        hour = clock_time(text)
        return hour is not None and hour[:3] == time[:3] and time[3] in ("", hour[3])
    if gold.value == r"\emptyset" and canonical_word(text) in EMPTY_SET_WORDS:
        return True
    if same_mixed_words(gold.text, text):
        return True
    choice = same_choice(gold.text, text)
    if choice is not None:
        return choice
    if strip_spacing(value) == strip_spacing(gold.value):
        return True
    if (unit == "degree") != (gold.unit == "degree") and same_answer(gold.text, text):
        return True
    if same_answer(gold.value, value):
        return True
    if gold.value.endswith(r"\%") and not value.endswith(r"\%"):
        # The problem asks for a percentage, so 8 answers 8 %. The reverse is wrong: 5 % is not 5.
        return same_answer(gold.value[:-2], value)
    return False


def _exceeds_full_turn(value: str) -> bool:
    """Return True if a solution is a rational number of magnitude above 2 pi, so not an angle in radians."""
    number = rational(value)
    return number is not None and abs(number) > 2 * pi


def _is_comparable(gold: ParsedSolution, answer: str) -> bool:
    """Return True if a wrong answer could be compared: its text is within the limits and can be parsed."""
    if len(answer) > 10 * MAX_LENGTH + 4 * len(gold.text):
        return False
    text = _normalized(_without_boxes(answer))
    is_prose = canonical_word(text) is not None and _WORD.search(text) is not None
    if not text or gold.word is not None or is_prose:
        return True
    return not exceeds_limits(text, gold.text) and is_readable(text)


def _without_boxes(answer: str) -> str:
    r"""Replace boxes inside an answer by their contents; several, as in `\boxed{\boxed{7}\boxed{5}}`, are a list."""
    while r"\boxed" in answer or r"\fbox" in answer:
        boxes = outer_boxes(answer)
        if not boxes or is_blank(boxes[-1].content(answer)):
            return ""
        content = ", ".join(box.content(answer) for box in boxes)
        if len(boxes) == 1 and boxes[0].start > 0:
            content = answer[: boxes[0].start] + content + answer[boxes[0].end :]
        answer = content
    return answer


# --- Math-Verify alone


def _math_verify_verdict(completion: str, solution: str) -> float | None:
    """Return the verdict of TRL's `accuracy_reward`: Math-Verify's extraction and comparison, its time limits off."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        # Silences the warning that its own time limit is off, which is intended here.
        logging.getLogger(name).setLevel(logging.ERROR)
    gold = parse(solution, parsing_timeout=None)
    if not gold:
        return None
    config = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(units=True),
    )
    answer = parse(completion, [config], extraction_mode="first_match", parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
