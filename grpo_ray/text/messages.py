"""Texts of chat messages."""

from collections.abc import Mapping
from typing import Any


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        # Multimodal messages have parts; only text can hold an answer.
        return "".join(part.get("text", "") for part in content if part.get("type") == "text")
    return content or ""
