r"""Reward for multiple-choice questions, whose solution is a letter: `B`, `(B)` or `\boxed{B}`."""

import re
from collections.abc import Sequence
from typing import Any

from grpo_ray.errors import RewardError
from grpo_ray.rewards.completions import Completion, completion_text
from grpo_ray.rewards.math.extract import extract_answers, solution_text
from grpo_ray.rewards.math.normalize import normalize_latex
from grpo_ray.rewards.math.words import same_choice

MAX_CHARACTERS = 1 << 20
"""Characters of a completion, from its end, that are searched."""
MAX_ANSWER = 400
"""Characters of a box or a formula that can be a choice with its text."""
_STATEMENT = re.compile(
    r"\b(?i:answer|choice|option)\*{0,2}(?i:\s{1,3}is)?\s{0,3}:?\*{0,2}\s{0,3}[*(]{0,3}(?P<letter>[A-Z])(?![\w'\u2019])"
)
"""A statement of the answer in prose: `The answer is (B)`, `**Answer:** B`."""
_SENTENCE = re.compile(r"[^.\n]{0,200}")
_LETTER = re.compile(r"(?<![\w'\u2019])[A-Z](?![\w'\u2019])")


def choice(
    completions: Sequence[Completion], solution: Sequence[str | None], *, choices: str = "ABCD", **kwargs: Any
) -> list[float | None]:
    r"""Reward the right letter as the only answer of a completion: 1.0, else 0.0.

    The answer is found as for `correctness`: a box, an `<answer>` tag, a formula after `answer`. Without one of
    them, statements in prose count (`The answer is (B)`, `**Answer:** B`), or a completion that is the choice itself.
    Two different letters, in two boxes, in two statements or in the sentence of a statement, earn nothing.

    Args:
        completions: One completion per row.
        solution: Letter of each row's right choice; a row whose solution is not one of `choices` has no reward.
        choices: Letters of the choices, in capitals, from A to J.

    Raises:
        RewardError: `choices` has fewer than two letters, or other characters.
    """
    if len(set(choices)) < 2 or not set(choices) <= set("ABCDEFGHIJ"):
        raise RewardError(f"choices must be at least two capital letters from A to J; got {choices!r}")
    return [
        None if (right := right_letter(each, choices)) is None else float(chosen_letters(text, right) == {right})
        for text, each in zip(map(completion_text, completions), solution, strict=True)
    ]


def right_letter(solution: str | None, choices: str) -> str | None:
    """Return the letter of a solution; None unless it is one of the choices."""
    text = normalize_latex(solution_text(solution or "")[:MAX_ANSWER])
    return next((letter for letter in choices if same_choice(letter, text)), None)


def chosen_letters(completion: str, right: str) -> set[str]:
    """Return the letters that a completion states as its answer; "?" for an answer that is neither the right letter nor
    a statement in prose."""
    text = completion[-MAX_CHARACTERS:]
    if answers := extract_answers(text):
        return {_letter(answer, right) for answer in answers}
    answer = text.rpartition("</think>")[2]
    if "<think>" in answer or r"\boxed" in answer:
        return set()
    letters = set()
    for statement in _STATEMENT.finditer(answer):
        sentence = _SENTENCE.match(answer, statement.end())
        letters |= {statement["letter"], *_LETTER.findall(sentence[0] if sentence else "")}
    return letters or {_letter(answer.strip("* \n"), right)}


def _letter(answer: str, right: str) -> str:
    if len(answer) > MAX_ANSWER:
        return "?"
    return right if same_choice(right, normalize_latex(answer)) else "?"
