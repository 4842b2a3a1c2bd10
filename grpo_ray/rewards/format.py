"""Rewards for the form of a completion. They look at tags and boxes only, never at whether the answer is
right.
"""

from collections.abc import Sequence
from typing import Any

from grpo_ray.rewards.completion_text import completion_text
from grpo_ray.rewards.math.extract import outer_boxes

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_format(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL's own: 1.0 where the completion opens with one `<think>` block and closes it, else 0.0."""
    from trl.rewards import think_format_reward

    return list(think_format_reward([[{"content": completion_text(completion)}] for completion in completions]))


def boxed_format(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""1.0 for exactly one closed, non-empty `\boxed{...}` after the reasoning, 0.5 for several, else 0.0."""
    return [_boxed(completion_text(completion)) for completion in completions]


def _boxed(text: str) -> float:
    answer = text.rpartition("</think>")[2]
    filled = [box for box in outer_boxes(answer) if box[3] and answer[box[0] + box[2] : box[1] - box[3]].strip()]
    return 0.0 if not filled else 1.0 if len(filled) == 1 else 0.5


def tag_format(completions: Sequence[Any], *, credit: float = 0.25, **kwargs: Any) -> list[float]:
    """Credit for each of `<think>`, `</think>`, `<answer>`, `</answer>` that stands once, after all that
    should precede.

    credit: reward for one tag; four quarters make a whole format worth 1.0. Growing bit by bit it gives a
    model that never wrote the tags a slope to climb; a tag written twice earns nothing, so repeating does not
    pay.
    """
    return [credit * _tags_in_order(completion_text(completion)) for completion in completions]


def _tags_in_order(text: str) -> int:
    position = count = 0
    for tag in TAGS:
        found = text.find(tag)
        if found >= position and text.count(tag) == 1:
            count += 1
            position = found + len(tag)
    return count
