"""Tests of the records of conversations."""

from grpo_ray.storage.records.conversation_columns import MessageRecord
from grpo_ray.tools.conversation import CallRecord, Conversation
from grpo_ray.tools.conversation_record import record_conversation
from grpo_ray.tools.template import Message

MESSAGES: list[Message] = [
    {
        "role": "assistant",
        "reasoning_content": "The middle.",
        "content": "I guess",
        "tool_calls": [{"type": "function", "function": {"name": "guess", "arguments": {"number": 16}}}],
    },
    {"role": "tool", "name": "guess", "content": "higher"},
    {"role": "assistant", "content": "I give up."},
]


def conversation(observation: str = "") -> Conversation:
    calls = [CallRecord("guess", "ok", 0.25, 1), CallRecord("guess", "error", 0.5, 1)]
    return Conversation([1], [2, 3], [0.0, 0.0], None, [1, 0], MESSAGES, None, "stop", 2, calls, observation)


def test_record_has_a_part_for_reasoning_text_call_and_result() -> None:
    record = record_conversation(conversation(), 1000)
    assert record.messages == (
        MessageRecord("reasoning", "", "The middle."),
        MessageRecord("assistant", "", "I guess"),
        MessageRecord("call", "guess", '{"number": 16}'),
        MessageRecord("tool", "guess", "higher"),
        MessageRecord("assistant", "", "I give up."),
    )
    assert (record.turns, record.calls, record.call_errors, record.tool_seconds, record.ended) == (
        2,
        2,
        1,
        0.75,
        "stop",
    )


def test_record_begins_with_the_observation_of_the_reset() -> None:
    record = record_conversation(conversation(" It is from 1 to 31."), 1000)
    assert record.messages is not None
    assert record.messages[0] == MessageRecord("user", "", "It is from 1 to 31.") and len(record.messages) == 6


def test_record_without_limit_has_no_messages() -> None:
    assert record_conversation(conversation("It begins."), None).messages is None
