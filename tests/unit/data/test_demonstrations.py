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
        ({"completion": "4 \ud83d"}, "row 1: 'completion' contains an unpaired surrogate, which is no text"),
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
    message = (
        "row 1: no column 'solution', which a reward or heldout.score reads; the row has completion, prompt; "
        "a part of data.train is held out: name other problems in data.heldout"
    )
    for heldout in ("auto", "null"):
        with pytest.raises(DataError, match=message):
            read(tmp_path, {"prompt": "2 + 2", "completion": "= 4"}, f"data.heldout={heldout}")


@pytest.mark.parametrize("of_source", [False, True], ids=["single", "mixture"])
@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ("{}", {"prompt": "2 + 2", "completion": "= 4", "solution": "4"}),
        ("{prompt: question, completion: response}", {"question": "2 + 2", "solution": "4"}),
        (
            "{prompt: question, completion: response}",
            {"question": "2 + 2", "response": "= 4", "completion": "= 4", "solution": "4"},
        ),
        ("{prompt: question, completion: answer, solution: answer}", {"question": "2 + 2", "answer": "4"}),
    ],
    ids=["own names", "no completion", "both", "one column for both"],
)
def test_held_out_file_needs_no_completion(tmp_path: Path, columns: str, row: dict[str, Any], of_source: bool) -> None:
    train, heldout = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text(json.dumps({"response": "= 4", "completion": "= 4", **row}) + "\n")
    heldout.write_text(json.dumps(row) + "\n")
    sources = [f"data.train={{a: {{path: {train}}}}}", f"data.heldout={{a: {heldout}}}"]
    if not of_source:
        sources = [f"data.train={train}", f"data.heldout={heldout}"]
    training, sets = open_splits(load_config(None, ["run.kind=sft", *sources, f"data.columns={columns}"]))
    [taught] = [problem for split in training.values() for problem in split.read()]
    assert demonstrated_text(taught) in ("= 4", "4")
    [[measured]] = [list(split.read()) for split in sets.values()]
    assert (measured.prompt[0]["content"], measured.solution) == ("2 + 2", "4")
    assert "completion" not in measured.columns


def test_held_out_file_beside_problems_still_needs_plain_columns(tmp_path: Path) -> None:
    """Rewards of GRPO would receive the column."""
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"prompt": "2 + 2", "completion": "= 4", "solution": "4"}) + "\n")
    _, sets = open_splits(load_config(None, ["data.train=arithmetic", f"data.heldout={path}"]))
    with pytest.raises(DataError, match="column 'completion' cannot be passed to rewards"):
        list(sets["heldout"].read())
