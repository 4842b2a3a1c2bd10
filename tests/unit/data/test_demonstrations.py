"""Tests of demonstrations: their forms, and rows that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.data.demonstrations import demonstrated_text
from grpo_ray.data.stream import open_splits
from grpo_ray.errors import DataError


def read(tmp_path: Path, row: dict[str, Any], *overrides: str) -> Any:
    """Return the only demonstration of a file."""
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = load_config(None, ["run.kind=sft", f"data.train={path}", "data.heldout=arithmetic", *overrides])
    training, _ = open_splits(config)
    [problem] = [problem for shard in training[""].shards for problem in shard.read()]
    return problem


@pytest.mark.parametrize("completion", ["= 4", [{"role": "assistant", "content": "= 4"}]], ids=["text", "message"])
def test_completion_is_text_or_one_message_and_needs_no_solution(tmp_path: Path, completion: Any) -> None:
    problem = read(tmp_path, {"prompt": "2 + 2", "completion": completion})
    assert demonstrated_text(problem) == "= 4" and problem.solution == ""


def test_column_of_another_name_is_renamed(tmp_path: Path) -> None:
    row = {"question": "2 + 2", "response": "= 4"}
    renamed = read(tmp_path, row, "data.columns={prompt: question, completion: response}")
    assert demonstrated_text(renamed) == "= 4"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"row 1: no column 'completion', which run.kind=sft trains on; the row has prompt; name the file's"),
        ({"completion": " "}, "row 1: 'completion' must be a text that is not empty"),
        ({"completion": 4}, "one chat message of the assistant, not 4"),
        ({"completion": [{"role": "user", "content": "= 4"}]}, "one chat message of the assistant, not"),
        ({"completion": []}, "one chat message of the assistant, not"),
    ],
)
def test_row_without_a_usable_completion_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, {"prompt": "2 + 2", **row})


def test_problems_without_demonstrations_are_refused() -> None:
    config = load_config(None, ["run.kind=sft", "data.train=arithmetic"])
    with pytest.raises(DataError, match=r"data.train=arithmetic has no demonstrations, which run.kind=sft trains on"):
        open_splits(config)


def test_held_out_part_of_demonstrations_needs_solutions(tmp_path: Path) -> None:
    """Accuracy on a part of the demonstrations is measured by their solutions."""
    with pytest.raises(DataError, match=r"row 1: no column 'solution', which a reward or heldout.score reads"):
        read(tmp_path, {"prompt": "2 + 2", "completion": "= 4"}, "data.heldout=null")
