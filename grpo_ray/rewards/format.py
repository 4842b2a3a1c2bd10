"""Rewards for the format of a completion: its tags and boxes, never the correctness of its answer."""

from collections.abc import Sequence
from typing import Any

from grpo_ray.errors import RewardError
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


def tag_format(
    completions: Sequence[Completion],
    *,
    credit: float = 0.25,
    tags: Sequence[str] = TAGS,
    trailing_cost: float = 0.0,
    **kwargs: Any,
) -> list[float]:
    """Reward each of `<think>`, `</think>`, `<answer>`, `</answer>` in order: 0.0 to 4 * credit.

    A tag counts if it occurs exactly once, after the counted tags before it. Partial credit gives a gradient to a model
    that never wrote the tags; a tag written twice earns nothing, so repeating tags gains nothing.

    Args:
        completions: One completion per row.
        credit: Reward for one tag; by default the whole format is worth 1.0.
        tags: Tags in their order.
        trailing_cost: Cost of each character after the last tag, spacing at the end aside; the reward falls to 0.0 at
            most. The recipe of Unsloth that counts XML tags uses 0.001.

    Raises:
        RewardError: `tags` is empty or has an empty or a repeated tag, or `trailing_cost` is negative.
    """
    if not tags or not all(tags) or len(set(tags)) < len(tags):
        raise RewardError(f"tags must be different texts, at least one; got {list(tags)}")
    if trailing_cost < 0:
        raise RewardError(f"trailing_cost must be at least 0; got {trailing_cost}")
    paid = []
    for text in map(completion_text, completions):
        reward = credit * _tags_in_order(text, tags)
        paid.append(reward - min(max(reward, 0.0), trailing_cost * _characters_after(text, tags[-1])))
    return paid


def _characters_after(text: str, tag: str) -> int:
    """Return the number of characters after the last occurrence of a tag; 0 without one."""
    _, found, rest = text.rpartition(tag)
    return len(rest.rstrip()) if found else 0


def _tags_in_order(text: str, tags: Sequence[str]) -> int:
    """Count the tags that occur exactly once and after all counted tags before them."""
    position = count = 0
    for tag in tags:
        start = text.find(tag)
        if start >= position and text.count(tag) == 1:
            count += 1
            position = start + len(tag)
    return count
