"""Conversations as the page and the viewer show them: a line of numbers, and a block for each message."""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

from grpo_ray.storage.records.conversation_columns import GAP, MessageRecord, bound_messages, read_conversation
from grpo_ray.text.display import pluralize, safe_text

MAX_NAME_CHARS = 64
FOLDED_CHARS, FOLDED_LINES = 300, 6
"""Calls, results and reasoning with more characters or lines are folded."""
PREVIEW_CHARS = 80
"""Characters of a folded text that are shown."""
ENDED = {
    "stop": "answered",
    "done": "environment done",
    "turns": "turn limit",
    "length": "token limit",
    "tool": "environment or service failed",
    "reset": "reset failed",
}
"""Reason for the end of a conversation -> description on the page."""
TITLES = {
    "assistant": "assistant",
    "reasoning": "reasoning",
    "call": "call",
    "tool": "result",
    "user": "environment",
}
"""Role of a message -> its title, to which a tool's name is added; also the kinds that have a colour."""


@dataclass(frozen=True)
class ShownMessage:
    """One block."""

    kind: str
    """A role of `TITLES`, `gap` or `other`."""
    title: str
    name: str
    """Name of the tool; "" without one."""
    text: str
    """Empty for a gap."""
    preview: str
    """Beginning of a folded text; "" if the text is not folded."""
    final: bool
    """True for the answer with which the policy ended the conversation; never folded."""


@dataclass(frozen=True)
class ShownConversation:
    """One completion of several turns."""

    facts: str
    """Turns, calls and seconds."""
    errors: str
    """Number of failed calls; "" without any."""
    ended: str
    messages: list[ShownMessage] | None
    """None if no messages were recorded."""


def show_conversation(row: Mapping[str, Any], index: int, max_chars: int) -> ShownConversation | None:
    """Prepare the conversation of one completion for display; all texts are safe.

    Args:
        row: Row of `rollouts/` or `heldout/`.
        index: Index of the completion in its group.
        max_chars: Most characters of its messages in all.

    Returns:
        None for a completion of a run without tools.
    """
    conversation = read_conversation(row, index)
    if conversation is None:
        return None
    facts = f"{pluralize(conversation.turns, 'turn')}, {pluralize(conversation.calls, 'call')}"
    if conversation.calls:
        facts += f", {conversation.tool_seconds:.3g} s in tools"
    messages = None
    if conversation.messages is not None:
        # Masked before they are shortened: a secret that is cut off in the middle would not be recognized.
        safe = [[safe_text(value, max_chars) for value in astuple(each)] for each in conversation.messages]
        messages = bound_messages([MessageRecord(*values) for values in safe], max_chars)
    last = len(messages or ()) - 1 if conversation.ended == "stop" else None
    return ShownConversation(
        facts,
        f"{pluralize(conversation.call_errors, 'call')} failed" if conversation.call_errors else "",
        ENDED.get(conversation.ended) or safe_text(conversation.ended, MAX_NAME_CHARS),
        None
        if messages is None
        else [_show_message(message, is_last=place == last) for place, message in enumerate(messages)],
    )


def show_in_json(row: Mapping[str, Any], index: int, max_chars: int) -> dict[str, Any]:
    """Return the result of `show_conversation` as `conversation` in JSON's types; empty in a run without tools."""
    shown = show_conversation(row, index, max_chars)
    return {} if shown is None else {"conversation": asdict(shown)}


def _show_message(message: MessageRecord, is_last: bool) -> ShownMessage:
    """Prepare a message whose texts are safe."""
    if message.role == GAP:
        return ShownMessage("gap", f"{message.content[:20]} messages left out", "", "", "", False)
    kind = message.role if message.role in TITLES else "other"
    is_final = is_last and kind == "assistant"
    title = "final answer" if is_final else TITLES.get(kind) or message.role[:MAX_NAME_CHARS]
    text = message.content
    is_long = len(text) > FOLDED_CHARS or text.count("\n") >= FOLDED_LINES
    # The ellipsis keeps the preview of a text of line breaks non-empty, so that it is folded too.
    preview = (" ".join(text.split())[:PREVIEW_CHARS] + "…") if is_long and kind != "assistant" else ""
    return ShownMessage(kind, title, message.name[:MAX_NAME_CHARS], text, preview, is_final)
