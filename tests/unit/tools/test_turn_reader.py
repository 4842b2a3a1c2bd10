"""Tests of reading turns under limits, with the grammars that TRL has for chat templates."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_tools import HOSTILE_CALL
from transformers.utils.chat_parsing import parse_response
from trl import chat_template_utils as trl_templates

from grpo_ray.errors import ToolError
from grpo_ray.processes import request_client
from grpo_ray.processes.child import Child, start_child
from grpo_ray.tools.turn_reader import MAX_MARKS, TurnReader, UnreadTurnError, count_marks

GRAMMARS: dict[str, dict[str, Any]] = {
    name: getattr(trl_templates, name)
    for name in dir(trl_templates)
    if name.endswith("_template") and isinstance(getattr(trl_templates, name), dict)
}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def reader() -> Iterator[TurnReader]:
    reader = TurnReader()
    reader.start()
    yield reader
    reader.close()


def test_grammars_of_trl_are_found() -> None:
    assert {"qwen3_template", "qwen3_5_template", "lfm2_2_5_template"} <= set(GRAMMARS)


@pytest.mark.long
def test_reader_reads_as_transformers_does(reader: TurnReader) -> None:
    text = '<think>6 * 7</think>\n\n<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call><|im_end|>'
    grammar = GRAMMARS["qwen3_template"]
    assert reader.read(text, grammar, "", SCHEMAS) == parse_response(text, grammar, prefix="", tools=SCHEMAS)
    prefix = "<|im_start|>assistant\n<think>\n"
    assert reader.read("yes</think>no", grammar, prefix, None) == {
        "role": "assistant",
        "reasoning_content": "yes",
        "content": "no",
    }


def test_reader_malformed_call_is_an_ordinary_error(reader: TurnReader) -> None:
    with pytest.raises(ValueError) as raised:
        reader.read("<tool_call>{</tool_call>", GRAMMARS["qwen3_template"], "", None)
    assert not isinstance(raised.value, UnreadTurnError)


@pytest.mark.parametrize("name", GRAMMARS)
def test_reader_thousands_of_thoughts_are_not_read(name: str) -> None:
    """LFM's grammar takes the parser over 20 s. No process is started, since the text alone decides."""
    reader = TurnReader()
    opens = [each["open"] for each in GRAMMARS[name]["fields"].values() if "open" in each]
    for mark in opens:
        with pytest.raises(UnreadTurnError, match=r"the turn has 2000 opening marks; at most 128 are read"):
            reader.read(f"{mark}</think>" * 2000, GRAMMARS[name], "", None)
    assert reader.pid is None


def test_count_marks_counts_each_once() -> None:
    grammar = {"fields": {"a": {"open": "<a>"}, "b": {"open": ["<b>", "<c>"]}, "c": {"open_pattern": "c"}, "d": {}}}
    assert count_marks("<a><b>c<a> <c>", grammar) == 4
    assert count_marks("<a>", {}) == 0


def test_reader_as_many_marks_as_allowed_are_read(reader: TurnReader) -> None:
    text = '<tool_call>{"name": "multiply", "arguments": {}}</tool_call>\n' * MAX_MARKS
    assert len(reader.read(text, GRAMMARS["qwen3_template"], "", None)["tool_calls"]) == MAX_MARKS


@pytest.mark.long
def test_reader_text_of_cubic_time_is_not_read_and_the_next_is(reader: TurnReader) -> None:
    with pytest.raises(UnreadTurnError, match="takes too long to read"):
        reader.read(HOSTILE_CALL, GRAMMARS["qwen3_5_template"], "", None)
    assert reader.pid is None  # its process was ended
    assert reader.read("yes", GRAMMARS["qwen3_5_template"], "", None)["content"] == "yes"


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """Return the list of processes that readers have started since."""
    started: list[Child] = []

    def start(module: str, passes: Callable[[str], bool]) -> Child:
        started.append(start_child(module, passes))
        return started[-1]

    monkeypatch.setattr(request_client, "start_child", start)
    return started


@pytest.fixture
def counted(starts: list[Child]) -> Iterator[TurnReader]:
    """Return a reader whose processes are in `starts`."""
    reader = TurnReader()
    yield reader
    reader.close()


@pytest.mark.long
def test_reader_process_killed_by_another_costs_no_turn(counted: TurnReader, starts: list[Child]) -> None:
    grammar = GRAMMARS["qwen3_template"]
    for _ in range(2):
        assert counted.read("yes", grammar, "", None)["content"] == "yes"
        assert counted.pid is not None
        os.kill(counted.pid, signal.SIGKILL)
    assert len(starts) == 2


@pytest.mark.long
def test_reader_text_beyond_its_time_is_not_tried_again(counted: TurnReader, starts: list[Child]) -> None:
    with pytest.raises(UnreadTurnError, match="takes too long to read"):
        counted.read(HOSTILE_CALL, GRAMMARS["qwen3_5_template"], "", None)
    assert len(starts) == 1


def test_reader_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    reader = TurnReader()
    with pytest.raises(ToolError, match="ended while it started"):
        reader.read("yes", GRAMMARS["qwen3_template"], "", None)
    assert reader.pid is None


def test_reader_nested_brackets_are_no_crash(reader: TurnReader) -> None:
    text = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    with pytest.raises(ValueError):
        reader.read(text, GRAMMARS["qwen3_template"], "", None)
    assert reader.read("yes", GRAMMARS["qwen3_template"], "", None)["content"] == "yes"
