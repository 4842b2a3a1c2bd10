"""Tests of the run folder that is read again and again: growing, going back, disappearing, damaged files."""

import json
import os
from pathlib import Path

import pytest
from page_samples import EVENTS, STARTED, make_group, metric_rows, write_run

from grpo_ray.errors import DamagedFileError
from grpo_ray.pages.report.page import render_contents
from grpo_ray.pages.report.read import read_run
from grpo_ray.pages.watch.live_run import FolderGoneError, LiveRun, Snapshot
from grpo_ray.storage.records.rollout_files import write_rollouts
from grpo_ray.storage.run_folder import LINES_BYTES, RunFolder


def append(folder: RunFolder, name: str, *rows: object) -> None:
    with open(folder.path(name), "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def refreshed(live: LiveRun) -> Snapshot:
    snapshot = live.refresh()
    assert snapshot is not None
    return snapshot


def test_refresh_finished_run_equals_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    snapshot = refreshed(LiveRun(folder))
    expected = read_run(str(folder.local))
    assert snapshot.run.rows == expected.rows and snapshot.run.events == expected.events
    assert snapshot.run.groups == expected.groups and snapshot.run.notes == expected.notes == []
    assert [each.name for each in snapshot.run.checkpoints] == [each.name for each in expected.checkpoints]
    assert render_contents(snapshot.run, STARTED) == render_contents(expected, STARTED)


def test_refresh_unchanged_run_is_none(tmp_path: Path) -> None:
    live = LiveRun(write_run(tmp_path))
    assert refreshed(live).number == 1 and live.refresh() is None


def test_refresh_growing_run_follows_every_file(tmp_path: Path) -> None:
    rows = metric_rows(40)
    folder = write_run(tmp_path, metrics=rows[:20], events=EVENTS)
    live = LiveRun(folder)
    assert len(refreshed(live).run.rows) == 20
    append(folder, "metrics.jsonl", *rows[20:30])
    append(folder, "events.jsonl", {"event": "hang", "at": STARTED + 90, "what": "again"})
    snapshot = refreshed(live)
    assert [row["step"] for row in snapshot.run.rows] == list(range(1, 31))
    assert snapshot.run.events[-1]["what"] == "again" and snapshot.run.checkpoint_steps["checkpoint-000030"] == 30
    write_rollouts(folder, [make_group(30, "b" * 16, (1.0, 1.0))])
    assert len(refreshed(live).run.groups) == 2
    folder.write_json({"metrics": rows[29], "serial": 2, "files": {}}, "checkpoint-000030", "manifest.json")
    assert [each.step for each in refreshed(live).run.checkpoints] == [30]
    folder.write_json({"stopped": "SIGTERM"}, "summary.json")
    assert refreshed(live).run.summary == {"stopped": "SIGTERM"}
    folder.delete_folder("checkpoint-000030")
    assert refreshed(live).run.checkpoints == []
    assert live.refresh() is None


def test_refresh_run_that_went_back_has_each_step_once(tmp_path: Path) -> None:
    rows = metric_rows(40)
    folder = write_run(tmp_path, metrics=rows[:30])
    live = LiveRun(folder)
    refreshed(live)
    again = [row | {"reward/mean": 0.125} for row in rows[20:35] if "checkpoint" not in row]
    folder.write_text("".join(json.dumps(row) + "\n" for row in (*rows[:20], *again)), "metrics.jsonl")
    snapshot = refreshed(live)
    steps = [int(row["step"]) for row in snapshot.run.rows]
    assert steps == [*range(1, 30), *range(31, 36)] and snapshot.run.latest("reward/mean") == 0.125
    assert "checkpoint-000030" not in snapshot.run.checkpoint_steps


def test_refresh_half_line_is_no_fault(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with open(folder.path("metrics.jsonl"), "a") as file:
        file.write('{"step": 41, "rew')
    assert refreshed(LiveRun(folder)).run.notes == []


def test_refresh_damaged_files_are_noted(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    append(folder, "metrics.jsonl", "no row")
    with open(folder.path("events.jsonl"), "a") as file:
        file.write("{no JSON}\n")
    folder.write_text("- a list", "config.yaml")
    notes = " ".join(refreshed(LiveRun(folder)).run.notes)
    assert "config.yaml cannot be read" in notes and "events.jsonl: 1 invalid line, the first is line 24" in notes
    assert "metrics.jsonl has lines without a step" in notes


def test_refresh_after_an_error_has_what_was_read_before_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    live = LiveRun(folder)
    refreshed(live)
    append(folder, "metrics.jsonl", {"step": 41, "reward/mean": 1.0})
    events = Path(folder.path("events.jsonl"))
    size = events.stat().st_size
    os.truncate(events, LINES_BYTES + 1)  # read after the metrics
    with pytest.raises(DamagedFileError):
        live.refresh()
    os.truncate(events, size)
    assert len(refreshed(live).run.rows) == 41 and live.refresh() is None


def test_refresh_renamed_folder_raises_until_it_is_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    live = LiveRun(folder)
    refreshed(live)
    assert folder.local is not None
    folder.local.rename(tmp_path / "other")
    for _ in range(2):
        with pytest.raises(FolderGoneError, match="is not there any more"):
            live.refresh()
    (tmp_path / "other").rename(folder.local)
    append(folder, "metrics.jsonl", {"step": 41, "reward/mean": 1.0})
    assert len(refreshed(live).run.rows) == 41


def test_refresh_new_run_of_the_same_name_replaces_the_old_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    live = LiveRun(folder)
    refreshed(live)
    folder.set_aside()
    write_run(tmp_path, metrics=metric_rows(3), events=EVENTS[:3], groups=[make_group(1, "c" * 16, (0.0,))])
    snapshot = refreshed(live)
    assert len(snapshot.run.rows) == 3 and len(snapshot.run.events) == 3 and snapshot.rollouts.ids == ["c" * 16]
