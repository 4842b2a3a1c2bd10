"""Completions as TRL passes them to reward functions."""

from collections.abc import Sequence
from typing import Any

from grpo_ray.errors import RewardError

Completion = str | list[dict[str, Any]]
"""One completion: plain text, or the messages of a conversation."""

TokenIds = Sequence[Sequence[int]]
"""TRL's `completion_ids`: the token ids of each completion, without padding."""


def completion_text(completion: Completion) -> str:
    """Return the text that the model generated.

    Args:
        completion: A plain string, returned as it is, or a list of messages, of which the last one counts.

    Returns:
        The text; "" for an empty conversation or a message without text.

    Raises:
        RewardError: The completion is neither a string nor a list.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list):
        raise RewardError(f"a completion must be a string or a list of messages; got {type(completion).__name__}")
    if not completion:
        return ""
    content = completion[-1].get("content")
    if isinstance(content, list):
        # Multimodal messages have parts; only text can hold an answer.
        return "".join(part.get("text", "") for part in content if part.get("type") == "text")
    return content or ""
