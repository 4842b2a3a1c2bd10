"""Tests of the held-out results for the viewer: outcomes at two checkpoints, and completions side by side."""

from pathlib import Path

import pytest

from grpo_ray.errors import DataError
from grpo_ray.pages.watch import heldout as heldout_module
from grpo_ray.pages.watch.heldout import HeldoutReader, describe_problem
from grpo_ray.storage.records.heldout_files import (
    HeldoutFile,
    HeldoutRecord,
    Measurement,
    read_measurement,
    write_heldout,
)
from grpo_ray.storage.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


def write(folder: RunFolder, step: int, *correct: float, temperature: float = 0.0, key: str = "heldout") -> None:
    """Write a measurement whose problem p<n> has the n-th verdict; the last problem has no texts."""
    records = []
    for number, verdict in enumerate(correct):
        is_last = number == len(correct) - 1
        records.append(
            HeldoutRecord(
                problem=f"p{number}",
                correct=(verdict,),
                lengths=(5,),
                truncated=(verdict == 0.0,),
                prompt=None if is_last else f"prompt\nof {number}",
                solution=None if is_last else "$4$",
                completions=None if is_last else (f"answer {number} at {step}",),
            )
        )
    conditions = {"sampling": {"temperature": temperature}}
    write_heldout(folder, key, step, records, policy=f"checkpoint-{step:06d}", conditions=conditions)


def reader_of(folder: RunFolder, *keys: str) -> HeldoutReader:
    reader = HeldoutReader(folder)
    assert reader.refresh(keys or ("heldout",))
    return reader


def test_changes_between_two_checkpoints(folder: RunFolder) -> None:
    write(folder, 0, 0.0, 1.0, 1.0, 0.0)
    write(folder, 10, 1.0, 0.0, 1.0, 0.0)
    (heldout,) = reader_of(folder).sets
    before, after = heldout.at(0), heldout.at(10)
    assert before is not None and after is not None and heldout.at(5) is None
    answer = heldout.changes(folder, before, after, "solved", 0, 10)
    assert answer["counts"] == {"solved": 1, "lost": 1, "right": 1, "wrong": 1}
    assert answer["problems"] == [{"problem": "p0", "before": 0.0, "after": 1.0, "prompt": "prompt of 0"}]
    for kind, expected in (("lost", "p1"), ("right", "p2"), ("wrong", "p3")):
        (problem,) = heldout.changes(folder, before, after, kind, 0, 10)["problems"]  # type: ignore[arg-type]
        assert problem["problem"] == expected


def test_changes_of_unknown_verdicts_are_left_out(folder: RunFolder) -> None:
    write(folder, 0, float("nan"), 1.0)
    write(folder, 10, 1.0, 1.0)
    (heldout,) = reader_of(folder).sets
    before, after = heldout.at(0), heldout.at(10)
    assert before is not None and after is not None
    counts = heldout.changes(folder, before, after, "right", 0, 10)["counts"]
    assert counts == {"solved": 0, "lost": 0, "right": 1, "wrong": 0}


def test_describe_problem_has_completions_side_by_side(folder: RunFolder) -> None:
    for step, verdict in ((0, 0.0), (10, 0.0), (20, 1.0)):
        write(folder, step, verdict, 1.0)
    (heldout,) = reader_of(folder).sets
    found = describe_problem(folder, heldout, "p0", [0, 20, 99])
    assert (found["prompt"], found["solution"]) == ("prompt\nof 0", "$4$")
    assert [(each["step"], each["completions"]) for each in found["columns"]] == [
        (0, [{"text": "answer 0 at 0", "correct": False, "length": 5, "truncated": True}]),
        (20, [{"text": "answer 0 at 20", "correct": True, "length": 5, "truncated": False}]),
    ]
    assert found["history"] == [{"step": step, "accuracy": accuracy} for step, accuracy in ((0, 0), (10, 0), (20, 1))]
    without = describe_problem(folder, heldout, "p1", [20])
    assert without["columns"][0]["completions"][0]["text"] is None
    assert describe_problem(folder, heldout, "unknown", [20])["columns"] == []


def test_reader_leaves_out_other_conditions_and_follows_changes(folder: RunFolder) -> None:
    reader = HeldoutReader(folder)
    assert not reader.refresh(["heldout"]) and reader.sets == []
    write(folder, 0, 0.0, 1.0, temperature=0.7)
    write(folder, 10, 0.0, 1.0)
    assert reader.refresh(["heldout"]) and not reader.refresh(["heldout"])
    (heldout,) = reader.sets
    assert [each.file.step for each in heldout.measurements] == [10] and heldout.omitted == 1
    write(folder, 10, 1.0, 1.0, 1.0)
    assert reader.refresh(["heldout"]) and reader.sets[0].describe()["measurements"][0]["accuracy"] == 1.0


def test_reader_damaged_file_is_noted(folder: RunFolder) -> None:
    write(folder, 10, 0.0, 1.0)
    folder.write_text("no parquet", "heldout", "step-00000020.parquet")
    reader = reader_of(folder)
    assert len(reader.sets[0].measurements) == 1 and "step-00000020" in reader.notes[0]


def test_reader_file_is_read_again_after_the_storage_failed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    is_down = True

    def read(folder: RunFolder, file: HeldoutFile) -> Measurement:
        if is_down and file.step == 20:
            raise DataError("no connection") from OSError("no connection")
        return read_measurement(folder, file)

    monkeypatch.setattr(heldout_module, "read_measurement", read)
    write(folder, 10, 0.0, 1.0)
    write(folder, 20, 1.0, 1.0)
    reader = HeldoutReader(folder)
    assert reader.refresh(["heldout"]) and len(reader.notes) == 1 and not reader.refresh(["heldout"])
    assert [each.file.step for each in reader.sets[0].measurements] == [10]
    is_down = False
    assert reader.refresh(["heldout"]) and reader.notes == [] and not reader.refresh(["heldout"])
    assert [each.file.step for each in reader.sets[0].measurements] == [10, 20]


def test_reader_several_sets_have_labels(folder: RunFolder) -> None:
    write(folder, 10, 1.0, 0.0, key="heldout/math")
    write(folder, 10, 1.0, 1.0, key="heldout/gsm8k")
    reader = reader_of(folder, "heldout/gsm8k", "heldout/math")
    assert [(each.key, each.describe()["label"]) for each in reader.sets] == [
        ("heldout/gsm8k", "gsm8k"),
        ("heldout/math", "math"),
    ]
