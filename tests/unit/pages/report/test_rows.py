"""Tests of the files of a run that grow by lines: their contents, faults and ends."""

from pathlib import Path

import pytest

from grpo_ray.pages.report.rows import EventLines, GrowingFile, MetricsLines
from grpo_ray.storage.run_folder import RunFolder

NAME = "metrics.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


def test_metrics_of_a_repeated_step_are_the_latest() -> None:
    lines = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 1, "a": 3.0, "checkpoint": "c"}]
    metrics = MetricsLines()
    for line in lines:
        metrics.add(line)
    assert metrics.rows == [{"step": 1.0, "a": 3.0}, {"step": 2.0, "a": 2.0}] and metrics.checkpoint_steps == {"c": 1}


@pytest.mark.parametrize(
    ("content", "ending"),
    [
        (None, ["metrics.jsonl does not exist yet"]),
        ("", ["metrics.jsonl is empty"]),
        ("\n \n", ["metrics.jsonl is empty"]),
        ('{"step": 1}\n', []),
        ('{"step": 1}\n{"st', ["the last line of metrics.jsonl is incomplete"]),
    ],
)
def test_growing_file_names_a_missing_end(folder: RunFolder, content: str | None, ending: list[str]) -> None:
    if content is not None:
        folder.write_text(content, NAME)
    file = GrowingFile(folder, NAME, MetricsLines)
    file.refresh()
    assert file.ending() == ending and file.notes() == []


def test_growing_file_half_line_is_a_row_once_it_is_complete(folder: RunFolder) -> None:
    folder.write_text('{"step": 1}\n{"st', NAME)
    file = GrowingFile(folder, NAME, MetricsLines)
    assert file.refresh() and [row["step"] for row in file.lines.rows] == [1.0]
    folder.write_text('{"step": 1}\n{"step": 2}\n', NAME)
    assert file.refresh() and [row["step"] for row in file.lines.rows] == [1.0, 2.0]
    assert not file.refresh() and file.ending() == []


def test_growing_file_that_is_replaced_begins_anew(folder: RunFolder) -> None:
    folder.write_text('no JSON\n{"step": 1}\n', NAME)
    file = GrowingFile(folder, NAME, MetricsLines)
    file.refresh()
    assert file.notes() == ["metrics.jsonl: 1 invalid line, the first is line 1"]
    folder.write_text('{"step": 3}\n', NAME)
    assert file.refresh() and [row["step"] for row in file.lines.rows] == [3.0] and file.notes() == []


def test_growing_file_counts_lines_that_are_no_events(folder: RunFolder) -> None:
    lines = ['{"event": "began", "at": 1.0, "step": -1, "workers": 2}', "{", "[", '{"event": "ended", "at": 2.0}']
    folder.write_text("".join(line + "\n" for line in lines), "events.jsonl")
    file = GrowingFile(folder, "events.jsonl", EventLines)
    file.refresh()
    assert [event["event"] for event in file.lines.events] == ["ended"]
    assert file.notes() == [
        "events.jsonl: 2 invalid lines, the first is line 2",
        "events.jsonl: 1 line without a valid event",
    ]
