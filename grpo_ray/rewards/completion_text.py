"""The text of a completion, in either of the shapes in which TRL hands it over."""

from typing import Any

from grpo_ray.errors import RewardError


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """What the model wrote: a plain string as it is, of a conversation the last message's text ("" for none).

    Raises RewardError where it is neither.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list):
        raise RewardError(f"a completion must be a string or a list of messages, not {type(completion).__name__}")
    if not completion:
        return ""
    content = completion[-1].get("content")
    if isinstance(content, list):
        # Multimodal messages hold parts; only text can be an answer.
        return "".join(part.get("text", "") for part in content if part.get("type") == "text")
    return content or ""
