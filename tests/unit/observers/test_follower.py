"""Tests of the files of a run that its driver writes."""

from pathlib import Path

from grpo_ray.observers.follower import RunFiles
from grpo_ray.storage.jsonl import read_metrics
from grpo_ray.storage.run_folder import RunFolder


def test_measure_of_a_row_that_a_killed_driver_did_not_write_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    files = RunFiles(folder, print)
    files.measured(2, {"heldout/accuracy": 0.5})  # of the checkpoint that the run resumes from
    files.resumed(2, [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.2}])
    files.flush()
    assert list(read_metrics(folder)) == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2, "heldout/accuracy": 0.5},
    ]
