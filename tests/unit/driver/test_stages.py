"""Tests of the driver's stages that need no cluster: excluded problems, warm-up progress, resume point."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.driver.preflight.checks import RunContext
from grpo_ray.driver.stages import (
    UNVERIFIABLE_FILE,
    DatasetIndexes,
    ResumePoint,
    begin_launch,
    find_resume_point,
    prepare_policy,
    read_unverifiable,
    warm_up_progress,
)
from grpo_ray.driver.terminal.progress import ProgressLine
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.metrics import measurement_conditions
from grpo_ray.storage.checkpoints import CheckpointInfo, list_checkpoints, resume_candidates
from grpo_ray.storage.lease import RunLease
from grpo_ray.storage.run_folder import RunFolder


def test_read_unverifiable_returns_ids_unless_kept(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    assert read_unverifiable(load_config(), folder) == frozenset()  # `grpo-ray check` was not run
    folder.write_text(json.dumps(["a", "b"]), UNVERIFIABLE_FILE)
    assert read_unverifiable(load_config(), folder) == {"a", "b"}
    assert read_unverifiable(load_config(None, ["data.keep_unverifiable=true"]), folder) == frozenset()


def test_warm_up_progress_reports_first_and_every_20th_step() -> None:
    reported: list[tuple[int, int]] = []
    on_progress = warm_up_progress(lambda text, step, steps: reported.append((step, steps)))
    for step in range(1, 42):
        on_progress(step, 41)
    assert reported == [(1, 41), (20, 41), (40, 41)]


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-0.5B", "s3://bucket/policy", "/models/policy"])
def test_prepare_policy_other_than_embedded_is_left_where_it_is(tmp_path: Path, path: str) -> None:
    progress = ProgressLine(1, Console(file=io.StringIO()))
    context = RunContext(load_config(None, [f"model.path={path}"]), RunFolder(str(tmp_path), "run"), progress)
    assert prepare_policy(context) == path
    assert list(tmp_path.iterdir()) == []


def test_resume_point_step_is_the_checkpoints(tmp_path: Path) -> None:
    checkpoint = CheckpointInfo(RunFolder(str(tmp_path), "run"), "checkpoint-000004", {"step": 4}, serial=2, files={})
    assert (ResumePoint(None).step, ResumePoint(checkpoint).step) == (0, 4)


def checkpoint_in(folder: RunFolder, step: int, accuracy: float, measured_on: Any = None) -> str:
    """Write a complete checkpoint without files; return its name."""
    name = f"checkpoint-{step:06d}"
    metrics = {"step": step, "heldout/accuracy": accuracy}
    manifest = {"metrics": metrics, "serial": step, "files": {}, "measured_on": measured_on}
    folder.write_json(manifest, name, "manifest.json")
    return name


def launch(tmp_path: Path, *overrides: str) -> tuple[RunContext, RunLease]:
    """Return context and lease of a launch of the run `run`."""
    config = load_config(None, ["run.name=run", f"run.storage_path={tmp_path}", *overrides])
    context = RunContext(
        config, RunFolder(str(tmp_path), "run"), ProgressLine(1, Console(file=io.StringIO(), width=300))
    )
    return context, RunLease.acquire(context.folder, None, context.progress.notice)


def indexes_of(*ids: str) -> DatasetIndexes:
    index: Any = SimpleNamespace(fingerprint=DatasetFingerprint.of(ids))
    return DatasetIndexes(index, {"heldout": index})


def test_find_resume_point_deletes_nothing_and_names_surplus(tmp_path: Path) -> None:
    context, lease = launch(tmp_path, "run.keep_checkpoints=1")
    names = [checkpoint_in(context.folder, step, value) for step, value in ((2, 0.7), (4, 0.9), (6, 0.2), (8, 0.4))]
    point = find_resume_point(context, indexes_of("a"))
    lease.release()
    assert point.checkpoint is not None and point.checkpoint.name == "checkpoint-000008"
    assert [each.name for each in list_checkpoints(context.folder)] == names
    assert "the next checkpoint will replace checkpoint-000002, checkpoint-000006: " in printed(context)


@pytest.mark.parametrize(("resume", "name"), [("latest", "checkpoint-000008"), ("best", "checkpoint-000004")])
def test_find_resume_point_best_is_the_one_that_the_workers_take(tmp_path: Path, resume: str, name: str) -> None:
    context, lease = launch(tmp_path, f"run.resume={resume}")
    for step, value in ((2, 0.7), (4, 0.9), (6, 0.2), (8, 0.4)):
        checkpoint_in(context.folder, step, value)
    point = find_resume_point(context, indexes_of("a"))
    lease.release()
    assert point.checkpoint is not None and point.checkpoint.name == name
    stored = list_checkpoints(context.folder)
    metric = context.config.ranking_metric
    assert resume_candidates(context.folder, resume, metric, after=stored[-1].serial)[0].name == name


@pytest.mark.parametrize(("metric", "announced"), [("heldout/accuracy", True), ("reward/mean", False)])
def test_find_resume_point_announces_checkpoints_measured_otherwise(
    tmp_path: Path, metric: str, announced: bool
) -> None:
    context, lease = launch(tmp_path, f"run.best_metric={metric}")
    indexes = indexes_of("a")
    same = measurement_conditions(indexes.heldout_fingerprints, context.config)
    longer = {"heldout": same["heldout"] | {"sampling": {"temperature": 0.0, "max_tokens": 7}}}
    for step, measured_on in ((2, longer), (4, same), (6, None)):
        checkpoint_in(context.folder, step, 0.5, measured_on)
    find_resume_point(context, indexes)
    lease.release()
    assert ("checkpoint-000002: measured on other problems or with other sampling" in printed(context)) == announced
    assert "checkpoint-000004: measured" not in printed(context)


def test_begin_launch_starting_over_keeps_old_run_and_unverifiable_ids(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    name = checkpoint_in(folder, 2, 0.5)
    folder.write_text("old", "config.yaml")
    folder.write_text('["a"]', UNVERIFIABLE_FILE)
    context, lease = launch(tmp_path, "run.resume=never")
    with lease:
        assert find_resume_point(context, indexes_of("b")) == ResumePoint(None)
        assert list_checkpoints(folder)  # nothing happened before everything was accepted
        begin_launch(context, lease, indexes_of("b"))
        lease.confirm()  # the lease has moved with the name
    old = RunFolder(str(tmp_path), "run.1")
    assert [each.name for each in list_checkpoints(old)] == [name] and old.read_text("config.yaml") == "old"
    assert f"the old run is now {tmp_path}/run.1" in printed(context)
    assert list_checkpoints(folder) == [] and read_unverifiable(context.config, folder) == {"a"}
    assert not old.exists("driver")


def test_find_resume_point_from_checkpoint_of_run_set_aside_raises(tmp_path: Path) -> None:
    path = tmp_path / "run" / checkpoint_in(RunFolder(str(tmp_path), "run"), 2, 0.5)
    context, lease = launch(tmp_path, "run.resume=never", f"run.from_checkpoint={path}")
    with lease, pytest.raises(ConfigError, match=r"is in the run that run\.resume=never sets aside"):
        find_resume_point(context, indexes_of("a"))


def printed(context: RunContext) -> str:
    file = context.progress.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()
