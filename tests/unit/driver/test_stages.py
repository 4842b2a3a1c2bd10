"""Tests of the driver's stages that need no cluster: excluded problems, warm-up progress, resume point."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from grpo_ray.config.loader import load_config
from grpo_ray.driver.preflight import RunContext
from grpo_ray.driver.progress import ProgressLine
from grpo_ray.driver.stages import (
    UNVERIFIABLE_FILE,
    ResumePoint,
    prepare_policy,
    read_unverifiable,
    warm_up_progress,
)
from grpo_ray.storage.checkpoints import CheckpointInfo
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
