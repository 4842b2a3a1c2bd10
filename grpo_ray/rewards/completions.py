"""Completions as TRL passes them to reward functions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ray.errors import RewardError
from grpo_ray.text.messages import message_text

Completion = str | list[dict[str, Any]]
"""One completion: plain text, or the messages of a conversation."""

TokenIds = Sequence[Sequence[int]]
"""TRL's `completion_ids`: the token ids of each completion, without padding."""


def completion_text(completion: Completion) -> str:
    """Return the text that the model generated.

    Args:
        completion: A plain string, returned as it is, or a list of messages, of which the last one counts.

    Returns:
        The text; "" if the conversation is empty, or if its last message has no text or is not the assistant's (a
        tool's result is not an answer of the policy).

    Raises:
        RewardError: The completion is neither a string nor a list.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list):
        raise RewardError(f"a completion must be a string or a list of messages; got {type(completion).__name__}")
    if not completion or completion[-1].get("role", "assistant") != "assistant":
        return ""
    return message_text(completion[-1])


def select_rows(arguments: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return the keyword arguments of a reward for some of the completions: the same places of each list."""
    return {
        name: [value[place] for place in places] if isinstance(value, list) else value
        for name, value in arguments.items()
    }


def transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """Format a conversation as readable text, with each tool call and each result on its own lines."""
    parts = []
    for message in messages:
        role, text = message.get("role", "assistant"), message_text(message)
        if role != "assistant":
            parts.append(f"[{role}{f' {name}' if (name := message.get('name')) else ''}] {text}")
            continue
        parts += [text] if text else []
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
            parts.append(f"[call] {function.get('name')} {arguments}")
    return "\n".join(parts)
