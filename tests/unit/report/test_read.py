"""Tests of reading a run folder that may be incomplete or malformed."""

from pathlib import Path

from page_samples import render_folders, write_run

from grpo_ray.report.read import MetricsLines


def test_metrics_of_a_repeated_step_are_the_latest() -> None:
    lines = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 1, "a": 3.0, "checkpoint": "c"}]
    metrics = MetricsLines()
    for line in lines:
        metrics.add(line)
    assert metrics.rows == [{"step": 1.0, "a": 3.0}, {"step": 2.0, "a": 2.0}] and metrics.checkpoint_steps == {"c": 1}


def test_reading_leaves_run_unchanged(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with open(folder.path("events.jsonl"), "a") as file:
        file.write('{"event": "st')  # the run may be writing it at this moment
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    render_folders(folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
