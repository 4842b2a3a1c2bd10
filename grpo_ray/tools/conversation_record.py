"""Records of conversations for `rollouts/` and `heldout/`: counts and times, and the messages split into parts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ray.storage.records.conversation_columns import ConversationRecord, MessageRecord, bound_messages
from grpo_ray.text.messages import message_text
from grpo_ray.tools.conversation import OK, Conversation

REASONING_FIELDS = ("reasoning_content", "thinking")
"""Fields of a turn in which templates keep the text before its answer."""


def record_conversation(conversation: Conversation, limit: int | None) -> ConversationRecord:
    """Return the record of a conversation.

    Args:
        limit: largest size of its messages in bytes of UTF-8; None: without messages.
    """
    calls = conversation.calls
    first = [MessageRecord("user", "", conversation.observation.strip())] if conversation.observation.strip() else []
    return ConversationRecord(
        turns=conversation.turns,
        calls=len(calls),
        call_errors=sum(call.status != OK for call in calls),
        tool_seconds=sum(call.seconds for call in calls),
        ended=conversation.ended,
        messages=None if limit is None else bound_messages([*first, *split_messages(conversation.messages)], limit),
    )


def split_messages(messages: Sequence[Mapping[str, Any]]) -> list[MessageRecord]:
    """Split messages into parts: the reasoning, the text and each call of a turn; empty reasoning or text has none."""
    parts = []
    for message in messages:
        role, text = message.get("role", "assistant"), message_text(message)
        if role != "assistant":
            parts.append(MessageRecord(str(role), str(message.get("name") or ""), text))
            continue
        reasoning = next((str(message[each]) for each in REASONING_FIELDS if message.get(each)), "")
        parts += [MessageRecord("reasoning", "", reasoning)] if reasoning else []
        parts += [MessageRecord("assistant", "", text)] if text else []
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
            parts.append(MessageRecord("call", str(function.get("name")), arguments))
    return parts
