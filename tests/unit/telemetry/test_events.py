"""Tests of the texts of events: every kind that is recorded has a row, and any contents have a text."""

import ast
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo_ray
from grpo_ray.telemetry.events import EVENTS, View, event_line, event_text

FAILED = {"event": "failed", "at": 1.0, "rank": 1, "what": "killed"}
WARNING = {"event": "warning", "at": 1.0, "step": 7, "name": "no_signal", "what": "no group has signal"}
MEASURED = {"event": "measured", "at": 1.0, "step": 8, "metrics": {"heldout/accuracy": 0.5, "heldout/low": 0.4}}


def recorded_kinds() -> set[str]:
    """Return the kinds that the package records: first arguments of `record_event`, and values of "event" in dicts."""
    found: set[str] = set()
    for path in Path(grpo_ray.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("event.remote"):
                found |= {str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant)}
            if isinstance(node, ast.Dict):
                keys = [each.value if isinstance(each, ast.Constant) else None for each in node.keys]
                values = [value for key, value in zip(keys, node.values, strict=True) if key == "event"]
                found |= {str(each.value) for each in values if isinstance(each, ast.Constant)}
    return found


def test_events_every_recorded_kind_has_a_row() -> None:
    assert {"began", "failed", "warning", "step", "memory"} <= recorded_kinds() <= set(EVENTS)


@pytest.mark.parametrize(
    ("entry", "text", "line"),
    [
        (FAILED, "worker 1: killed", "worker 1 failed: killed"),
        (WARNING, "step 7: no group has signal (no_signal)", "warning at step 7: no group has signal (no_signal)"),
        ({"event": "hang", "what": "a step hangs"}, "a step hangs", "a step hangs"),
        ({"event": "notice"}, "", None),
        ({"event": "memory", "device": "X"}, "", None),
        (MEASURED, "step 8: held-out 0.500", None),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)
def test_event_text_is_beside_the_kind_and_line_alone(entry: dict[str, Any], text: str, line: str | None) -> None:
    assert event_text(entry) == text and event_line(entry, "terminal") == line


def test_event_attempt_begins_with_a_policy() -> None:
    entry = {"event": "began", "step": 10, "workers": 2, "checkpoint": "checkpoint-000010"}
    assert event_text(entry) == "2 workers, from checkpoint-000010"
    assert event_text(entry | {"checkpoint": None}) == "2 workers, from the initial policy"
    assert event_line(entry, "trackers") == "training from step 10 with 2 workers"


def test_event_accuracy_is_of_the_given_sets_in_their_order() -> None:
    metrics = {"heldout/accuracy": 0.5, "heldout/a/accuracy": 0.25, "heldout/b/accuracy": 0.5}
    entry = {"event": "baseline", "metrics": metrics}
    assert event_text(entry) == "initial policy: held-out a 0.250, b 0.500"
    assert event_text(entry, ["heldout/b", "heldout/c"]) == "initial policy: held-out b 0.500"


def test_event_unknown_kind_is_listed_with_its_text() -> None:
    assert event_line({"event": "of a later version", "what": "x"}, "trackers") == "of a later version: x"
    assert event_line({"event": "of a later version"}, "trackers") is None


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just({"a": [1]})
FIELDS = ("what", "step", "rank", "name", "workers", "checkpoint", "metrics", "text", "accuracy", "{what}", "device")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(kind=st.sampled_from([*EVENTS, "other"]), fields=st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_event_any_fields_have_a_text(kind: str, fields: dict[str, Any]) -> None:
    entry = {"event": kind, "at": 1.0, **fields}
    assert isinstance(event_text(entry), str)
    assert all(isinstance(event_line(entry, view), str | None) for view in get_args(View))
