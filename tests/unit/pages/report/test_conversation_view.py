"""Tests of conversations as the page shows them: words, folding, bounds, secrets, hostile texts."""

from dataclasses import replace
from pathlib import Path

import pytest
from page_samples import Page, assert_harmless, make_group, render_folders, write_run

from grpo_ray.pages.report.conversation_view import ShownConversation, show_conversation
from grpo_ray.storage.records.conversation_columns import ConversationRecord, MessageRecord, conversation_values

LONG = "\n".join(f"line {number}" for number in range(40))
SECRET = "hf_" + "Ab1" * 12


def record(*messages: MessageRecord, ended: str = "stop", errors: int = 0) -> ConversationRecord:
    return ConversationRecord(
        turns=2, calls=1, call_errors=errors, tool_seconds=0.125, ended=ended, messages=tuple(messages)
    )


def show(conversation: ConversationRecord, max_chars: int = 4096) -> ShownConversation:
    shown = show_conversation(conversation_values([conversation]), 0, max_chars)
    assert shown is not None
    return shown


def test_show_conversation_numbers_in_words() -> None:
    shown = show(record(errors=1))
    assert (shown.facts, shown.errors, shown.ended) == (
        "2 turns, 1 call, 0.125 s in tools",
        "1 call failed",
        "answered",
    )
    shown = show(replace(record(ended="turns"), calls=0, turns=1))
    assert (shown.facts, shown.errors, shown.ended) == ("1 turn, 0 calls", "", "turn limit")
    assert show_conversation({}, 0, 100) is None
    assert show(replace(record(), messages=None)).messages is None


def test_show_conversation_only_long_results_and_calls_are_folded() -> None:
    roles = ("assistant", "call", "tool", "user", "reasoning", "assistant")
    shown = show(record(*(MessageRecord(role, "", LONG) for role in roles))).messages or []
    assert [bool(each.preview) for each in shown] == [False, True, True, True, True, False]
    assert [each.title for each in shown] == ["assistant", "call", "result", "environment", "reasoning", "final answer"]
    assert shown[1].preview.startswith("line 0 line 1") and len(shown[1].preview) == 81
    (short,) = show(record(MessageRecord("tool", "add", "4"))).messages or []
    assert (short.kind, short.name, short.text, short.preview, short.final) == ("tool", "add", "4", "", False)


@pytest.mark.parametrize("ended", ["turns", "length", "tool", "reset", "done"])
def test_show_conversation_that_was_cut_off_has_no_final_answer(ended: str) -> None:
    (message,) = show(record(MessageRecord("assistant", "", "4"), ended=ended)).messages or []
    assert (message.final, message.title) == (False, "assistant")


def test_show_conversation_is_bounded_and_masked() -> None:
    parts = [MessageRecord("tool", "t" * 500, "x" * 30 + SECRET + "y" * 5000) for _ in range(300)]
    messages = show(record(*parts), 1000).messages or []
    assert sum(len(each.text) for each in messages) <= 1000 and len(messages) == 16  # 15 and the gap
    assert [each.title for each in messages if each.kind == "gap"] == ["285 messages left out"]
    assert not any("Ab1" in each.text for each in messages)
    (other,) = show(record(MessageRecord("\u202e<b>", "\u202e", "\x1b"))).messages or []
    assert (other.kind, other.title, other.name, other.text) == ("other", "⟨U+202E⟩<b>", "⟨U+202E⟩", "⟨U+001B⟩")


def conversation_page(tmp_path: Path, text: str) -> Page:
    parts = [MessageRecord(role, text[:60], text) for role in ("assistant", "call", "tool", "assistant")]
    group = make_group(1, "a" * 16, (1.0, 0.0), texts=("one text", "other text"))
    group = replace(group, conversations=(record(*parts), record()))
    return Page(render_folders(write_run(tmp_path, groups=[group])))


def test_page_shows_messages_in_place_of_the_text(tmp_path: Path) -> None:
    page = conversation_page(tmp_path, "message 7")
    assert page.text.count("message 7") == 8 and "final answer" in page.text and "one text" not in page.text
    assert "2 turns, 1 call, 0.125 s in tools" in page.text


@pytest.mark.parametrize(
    "text",
    ["</pre><script>alert(1)</script>", '"]}</details></div><img src=x>', "{{7919*7907}}{% raw %}", "\u202e&lt;"],
)
def test_page_hostile_messages_add_no_element(tmp_path: Path, text: str) -> None:
    page = conversation_page(tmp_path / "hostile", text)
    assert_harmless(page)
    assert page.tags == conversation_page(tmp_path / "harmless", "x").tags
    assert "62615533" not in page.text
