"""Rewards for the format of a completion: its tags and boxes, never the correctness of its answer."""

from collections.abc import Sequence
from typing import Any

from grpo_ray.rewards.completions import Completion, completion_text
from grpo_ray.rewards.math.extract import outer_boxes

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_format(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """Reward one `<think>` block that opens the completion and is closed: 1.0, else 0.0.

    Applies TRL's `think_format_reward`, also to plain text.
    """
    from trl.rewards import think_format_reward

    return list(think_format_reward([[{"content": completion_text(completion)}] for completion in completions]))


def boxed_format(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    r"""Reward closed, non-empty `\boxed{...}` after the reasoning: 1.0 for exactly one, 0.5 for several, else 0.0."""
    return [_boxed_format(completion_text(completion)) for completion in completions]


def _boxed_format(text: str) -> float:
    answer = text.rpartition("</think>")[2]
    filled = [box for box in outer_boxes(answer) if box.is_braced and box.content(answer).strip()]
    return 0.0 if not filled else 1.0 if len(filled) == 1 else 0.5


def tag_format(completions: Sequence[Completion], *, credit: float = 0.25, **kwargs: Any) -> list[float]:
    """Reward each of `<think>`, `</think>`, `<answer>`, `</answer>` in order: 0.0 to 4 * credit.

    A tag counts if it occurs exactly once, after the counted tags before it. Partial credit gives a gradient to a model
    that never wrote the tags; a tag written twice earns nothing, so repeating tags does not pay.

    Args:
        completions: One completion per row.
        credit: Reward for one tag; by default the whole format is worth 1.0.
    """
    return [credit * _tags_in_order(completion_text(completion)) for completion in completions]


def _tags_in_order(text: str) -> int:
    """Count the tags that occur exactly once and after all counted tags before them."""
    position = count = 0
    for tag in TAGS:
        start = text.find(tag)
        if start >= position and text.count(tag) == 1:
            count += 1
            position = start + len(tag)
    return count
