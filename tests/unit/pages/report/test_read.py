"""Tests of reading a run folder that may be incomplete or malformed."""

from pathlib import Path

import pytest
from page_samples import render_folders, write_run

from grpo_ray.pages.report.read import RunReader, read_run
from grpo_ray.storage.run_folder import RunFolder


def test_reading_leaves_run_unchanged(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with open(folder.path("events.jsonl"), "a") as file:
        file.write('{"event": "st')  # the run may be writing it at this moment
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    render_folders(folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_contents_do_not_change_with_later_readings(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    reader = RunReader(folder)
    assert reader.refresh()
    before = reader.contents()
    steps, events = len(before.rows), len(before.events)
    with open(folder.path("metrics.jsonl"), "a") as file:
        file.write('{"step": 41, "checkpoint": "checkpoint-000041"}\n')
    folder.write_text("", "events.jsonl")
    assert reader.refresh() and not reader.refresh()
    assert (len(before.rows), len(before.events)) == (steps, events)
    assert "checkpoint-000041" not in before.checkpoint_steps
    after = reader.contents(notes=["a note"])
    assert len(after.rows) == steps + 1 and after.events == [] and after.notes == ["a note"]


def test_checkpoints_that_cannot_be_listed_are_noted_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path)

    def refuse(self: RunFolder, prefix: str) -> list[str]:
        raise OSError("the storage is overloaded")

    monkeypatch.setattr(RunFolder, "list_folders", refuse)
    run = read_run(str(folder.local))
    assert run.checkpoints == [] and len(run.rows) == 40 and run.checkpoint_steps
    assert [note for note in run.notes if "overloaded" in note] == [
        "a checkpoint cannot be read: OSError: the storage is overloaded"
    ]
    with pytest.raises(OSError, match="overloaded"):  # the live page asks again
        RunReader(folder).refresh()
