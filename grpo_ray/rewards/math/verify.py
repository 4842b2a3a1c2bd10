r"""Is a completion's answer right? The pure core: two strings in, a verdict out. No TRL, Ray or processes.

    correctness(r"... so \boxed{\frac{1}{2}}", r"$0.5$")  # 1.0

Math-Verify's grammar reads formulas; what makes an answer right is decided here, because Math-Verify's own
comparison rewards the question said back, ignores letters and percent, and takes tiny numbers for one
another. An answer must be an evaluated value of the solution's own kind and size:

- a number by its value, exactly; a decimal of six places or more may round a value without a finite one;
- `x=5` or `5` for `x=5`, but `y=5`, `2x=10`, `7=5` not; an equation by the same equation up to a factor;
- sets and bare lists in any order, tuples and intervals in order and with their own brackets; `x>3` is
  `(3,\infty)`;
- words by meaning, choices by letter, units and `\%` by `words`;
- several different boxed answers, `5 \pm 0`, `\text{Not } 5`, integrals and the like: wrong.

Runs without Math-Verify's own alarms: they need the main thread, and the pool's limits do what they cannot.
Call this directly only with text you trust.
"""

import logging
import re
from dataclasses import dataclass
from functools import lru_cache

from grpo_ray.rewards.math.compare import same_answer
from grpo_ray.rewards.math.extract import extract_answers, outer_boxes, solution_text
from grpo_ray.rewards.math.limits import MAX_LENGTH, exceeds_limits
from grpo_ray.rewards.math.normalize import normalize_latex, strip_spacing
from grpo_ray.rewards.math.structure import Items, Structure, parse_structure
from grpo_ray.rewards.math.words import NOTHING, same_choice, solution_word, without_unit, word

_WORDS = re.compile(r"[a-zA-Z]{3,}")
_MAX_PROSE = 6
"""Words of a solution in prose beyond which it states no answer that could be compared."""


def correctness(completion: str, solution: str, *, strict: bool = True) -> float | None:
    """1.0 where the completion's final answer is right, 0.0 where not, None where the solution is not
    understood.

    strict=False gives Math-Verify's plain verdict, as TRL's `accuracy_reward` asks for it, for comparison.
    Raises MemoryError and RecursionError where a process limit is met; never for what is merely malformed.
    """
    if not strict:
        return _plain(completion, solution)
    gold = parse_solution(solution)
    if gold is None:
        return None
    answers = extract_answers(completion)
    if not answers:
        return 0.0
    right = all(_is_right(gold, answer) for answer in answers) or (
        len(answers) > 1 and _is_right(gold, ", ".join(answers))
    )
    return float(right)


@dataclass(frozen=True)
class ParsedSolution:
    """What a solution states, read once."""

    text: str
    """Cleaned."""
    value: str
    """`text` without its unit."""
    unit: str | None
    word: str | None
    shape: Structure


@lru_cache(maxsize=4096)
def parse_solution(solution: str) -> ParsedSolution | None:
    """The solution's answer, or None where it states none: nothing at all, or a paragraph."""
    text = normalize_latex(solution_text(solution))
    if not text:
        return None
    meaning = solution_word(text, in_math="$" in solution)
    if len(_WORDS.findall(re.sub(r"\\[a-zA-Z]+", " ", text))) > _MAX_PROSE:
        return None
    value, unit = without_unit(text)
    return ParsedSolution(text, value, unit, meaning, parse_structure(value))


def _is_right(gold: ParsedSolution, answer: str) -> bool:
    if len(answer) > 10 * MAX_LENGTH + 4 * len(gold.text):
        return False
    # In a list of three-digit numbers the comma separates; alone it groups thousands.
    text = normalize_latex(_unboxed(answer), commas_separate=isinstance(gold.shape, Items))
    if not text:
        return False
    if strip_spacing(text) == strip_spacing(gold.text):
        return True
    if exceeds_limits(text, gold.text):
        return False
    if gold.word is not None:
        return word(text) == gold.word
    if gold.value == r"\emptyset" and word(text) in NOTHING:
        return True
    choice = same_choice(gold.text, text)
    if choice is not None:
        return choice
    value, unit = without_unit(text)
    if unit is not None and gold.unit is not None and unit != gold.unit:
        return False
    if strip_spacing(value) == strip_spacing(gold.value):
        return True
    if same_answer(gold.value, value):
        return True
    if gold.value.endswith(r"\%") and not value.endswith(r"\%"):
        # The question asked for a percentage, so 8 answers 8 %. The reverse is refused: 5 % is not 5.
        return same_answer(gold.value[:-2], value)
    return False


def _unboxed(answer: str) -> str:
    r"""Reads through boxes in boxes; several inner boxes are a list: `\boxed{\boxed{7}\boxed{5}}` hedges."""
    while r"\boxed" in answer or r"\fbox" in answer:
        boxes = outer_boxes(answer)
        if not boxes:
            return ""
        inside = ", ".join(answer[start + opening : end - closing] for start, end, opening, closing in boxes)
        if len(boxes) == 1 and boxes[0][0] > 0:
            inside = answer[: boxes[0][0]] + inside + answer[boxes[0][1] :]
        answer = inside
    return answer


# --- Math-Verify alone


def _plain(completion: str, solution: str) -> float | None:
    """The verdict of TRL's `accuracy_reward`: Math-Verify's own reading and comparison, its alarms off."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        # It warns that its own time limit is off, which is meant.
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
