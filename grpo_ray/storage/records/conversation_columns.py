"""Records of multi-turn completions: their counts and times, and their messages with roles.

Files of runs without tools have none of these columns. Each column has one value per completion of a group, or
of a held-out problem:

| column | value |
|---|---|
| `turns` | turns of the policy |
| `calls`, `call_errors` | calls of tools and steps of the environment, and those of them that failed |
| `tool_seconds` | seconds in tools and environments |
| `ended` | reason for the end, `tools.conversation.Ended` |
| `messages` | structs of `role`, `name` and `content`, truncated to a bounded size; null where texts are not recorded |

A message is one struct, so no text of a tool or of the policy can look like the beginning of another message.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo_ray.text.redaction import redact_record
from grpo_ray.text.truncation import recorded_text, truncate_middle

if TYPE_CHECKING:
    import pyarrow as pa

NAME_BYTES = 64
"""Largest size of a tool's name, bytes: the policy can call a tool that does not exist."""
MESSAGE_BYTES = 64
"""Least share of a completion's limit for each message, bytes; if there are more messages than that allows, the middle
ones are left out."""
MIN_MESSAGES = 4
"""Messages that are kept under any limit."""
GAP = "gap"
"""Role of the entry in place of messages that are left out; its content is their number."""
NUMBERS = ("turns", "calls", "call_errors", "tool_seconds", "ended")
COLUMNS = (*NUMBERS, "messages")
"""Columns of conversations, of groups and of held-out problems."""


@dataclass(frozen=True)
class MessageRecord:
    """One message, or a part of it that is shown on its own."""

    role: str
    """`assistant`, `reasoning`, `call` (arguments as JSON), `tool`, `user`, or `GAP`."""
    name: str
    """Name of the tool; "" without one."""
    content: str


@dataclass(frozen=True, kw_only=True)
class ConversationRecord:
    """Numbers and messages of one completion."""

    turns: int
    calls: int
    call_errors: int
    """Calls whose status is not "ok"."""
    tool_seconds: float
    ended: str
    messages: tuple[MessageRecord, ...] | None = None
    """Observation with which an environment begins, and messages after the prompt; None if the texts are not
    recorded."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "ConversationRecord":
        values = json.loads(text)
        messages = values.pop("messages")
        return ConversationRecord(
            **values, messages=None if messages is None else tuple(MessageRecord(**each) for each in messages)
        )


def bound_messages(messages: Sequence[MessageRecord], limit: int) -> tuple[MessageRecord, ...]:
    """Redact the messages of a completion, and shorten them to at most `limit` bytes of content, longest ones first.

    At most one message per `MESSAGE_BYTES` of the limit is kept. If there are more, the middle ones are left out.
    """
    most = max(MIN_MESSAGES, limit // MESSAGE_BYTES)
    if len(messages) > most:
        tail = most // 3
        gap = MessageRecord(GAP, "", str(len(messages) - most))
        messages = [*messages[: most - tail], gap, *messages[len(messages) - tail :]]
    messages = [replace(each, content=redact_record(each.content)) for each in messages]
    # In order of size: a message that needs less than its share leaves the rest to the longer ones.
    sizes = sorted(len(each.content.encode("utf-8", "replace")) for each in messages)
    left = share = limit
    for place, size in enumerate(sizes):
        share = left // (len(sizes) - place)
        if size > share:
            break
        left -= size
    return tuple(
        replace(
            each,
            name=recorded_text(each.name, NAME_BYTES),
            # The content of a gap is a number, which must not be cut.
            content=each.content if each.role == GAP else truncate_middle(each.content, share),
        )
        for each in messages
    )


def conversation_types(with_messages: bool) -> "dict[str, pa.DataType]":
    """Return the types of the columns, those of the numbers first."""
    import pyarrow as pa

    message = pa.struct([(name, pa.string()) for name in ("role", "name", "content")])
    types = {
        "turns": pa.list_(pa.int32()),
        "calls": pa.list_(pa.int32()),
        "call_errors": pa.list_(pa.int32()),
        "tool_seconds": pa.list_(pa.float32()),
        "ended": pa.list_(pa.string()),
    }
    return types | ({"messages": pa.list_(pa.list_(message))} if with_messages else {})


def conversation_values(conversations: Sequence[ConversationRecord] | None) -> dict[str, Any]:
    """Return the values of a row's columns; all are None without conversations."""
    if conversations is None:
        return dict.fromkeys(COLUMNS)
    values: dict[str, Any] = {name: [getattr(each, name) for each in conversations] for name in NUMBERS}
    has_messages = all(each.messages is not None for each in conversations)
    values["messages"] = (
        [[asdict(message) for message in each.messages or ()] for each in conversations] if has_messages else None
    )
    return values


def read_conversation(row: Mapping[str, Any], index: int) -> ConversationRecord | None:
    """Return the conversation of one completion from the columns of a row; None if it has none.

    Unknown values, as of a damaged file, become 0 or "".
    """

    def value(name: str) -> Any:
        values = row.get(name) or ()
        return values[index] if index < len(values) else None

    if value("turns") is None:
        return None
    messages = value("messages")
    return ConversationRecord(
        turns=value("turns"),
        calls=value("calls") or 0,
        call_errors=value("call_errors") or 0,
        tool_seconds=value("tool_seconds") or 0.0,
        ended=value("ended") or "",
        messages=None
        if messages is None
        else tuple(
            MessageRecord(*((message or {}).get(name) or "" for name in ("role", "name", "content")))
            for message in messages
        ),
    )


def without_messages(conversations: Sequence[ConversationRecord] | None) -> tuple[ConversationRecord, ...] | None:
    """Return the conversations without messages, which take most of their memory."""
    return None if conversations is None else tuple(replace(each, messages=None) for each in conversations)
