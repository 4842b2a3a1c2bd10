"""Tests of the reward for JSON documents: schemas, what is not JSON, and texts that take exponential time."""

from collections.abc import Iterator
from typing import Any

import pytest

from grpo_ray.errors import RewardError
from grpo_ray.rewards import json_format
from grpo_ray.rewards.registry import load_reward

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^(x+x+)+y$"}, "sides": {"$ref": "#/$defs/count"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1}},
}


@pytest.fixture(autouse=True, scope="module")
def end_process() -> Iterator[None]:
    yield
    json_format._process.close()


def rewards_of(*completions: Any, **settings: Any) -> list[float]:
    rewards: list[float] = load_reward("json_format", **settings)(completions=list(completions))
    return rewards


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        " [1, 2] \n",
        '"x"',
        "null",
        "1e5",
        "```json\n{}\n```",
        "```\n[]\n```",
        "<think>{</think>{}",
        '{"a": {"a": 1}}',
    ],
)
def test_json_format_one_document_earns_one(text: str) -> None:
    assert rewards_of(text) == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{} {}",
        "Here it is: {}",
        "{}\nDone.",
        "{'a': 1}",
        '{"a": 1,}',
        "NaN",
        "[Infinity]",
        "-Infinity",
        '{"a": 1, "a": 2}',
        '[{"a": {"b": 1, "b": 1}}]',
        "<think>{}",
        "```python\n{}\n```",
        "``````",
        "```json\n{}",
        "\ud800",
        "\0",
        "1" * 5_000,
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        "1" + " " * json_format.MAX_CHARACTERS + "1",
    ],
)
def test_json_format_other_text_earns_nothing(text: str) -> None:
    assert rewards_of(text, credit=0.5) == [0.0]


def test_json_format_schema_decides() -> None:
    texts = [
        '{"name": "xxy"}',
        '{"name": "xxy", "sides": 3}',
        '{"name": "xxy", "sides": 0}',
        '{"name": "z"}',
        "[]",
        "{",
    ]
    assert rewards_of(*texts, schema=SCHEMA) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert rewards_of(*texts, schema=SCHEMA, credit=0.25) == [1.0, 1.0, 0.25, 0.25, 0.25, 0.0]


def test_json_format_reads_messages() -> None:
    assert rewards_of([{"role": "assistant", "content": "{}"}]) == [1.0]


@pytest.mark.long
def test_json_format_exponential_text_earns_nothing_and_the_next_is_read() -> None:
    hostile = '{"name": "' + "x" * 300 + '"}'
    assert rewards_of('{"name": "xxy"}', hostile, '{"name": "xxy"}', schema=SCHEMA) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("text", ["1" * 4_000, "1e308", "1e-400", "[" + "1," * 100_000 + "1]"])
def test_json_format_extreme_numbers_end_nothing(text: str) -> None:
    rewards_of(text, schema={"multipleOf": 0.1, "uniqueItems": True})
    pid = json_format._process.pid
    assert rewards_of("1", schema={"multipleOf": 0.1, "uniqueItems": True}) == [1.0]
    assert json_format._process.pid == pid


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "obj"}, "schema, type: 'obj' is not valid"),
        ({"properties": {"a": {"pattern": "("}}}, "schema, properties/a/pattern: '\\(' is not a 'regex'"),
        ({"items": {"$ref": "https://example.org/schema"}}, "refers to 'https://example.org/schema'"),
        ({"enum": {1, 2}}, "is not JSON"),
    ],
)
def test_json_format_bad_schema_raises_before_the_run(schema: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load_reward("json_format", schema=schema)


def test_json_format_reference_to_nothing_raises() -> None:
    with pytest.raises(RewardError, match="'/\\$defs/none' leads to nothing"):
        rewards_of("{}", schema={"$ref": "#/$defs/none"})


def test_json_format_process_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    json_format._process.close()
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RewardError, match="ended while it started"):
        rewards_of("{}")
