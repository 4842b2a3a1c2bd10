"""Tests of the copy of a run as of one of its checkpoints."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from page_samples import make_group

from grpo_ray.errors import CheckpointError
from grpo_ray.experiments import branch
from grpo_ray.experiments.branch import find_start, require_sound, write_branch
from grpo_ray.storage.checkpoints import RETURNS, list_checkpoints
from grpo_ray.storage.jsonl import read_metrics
from grpo_ray.storage.records.heldout_files import HeldoutRecord, write_heldout
from grpo_ray.storage.records.rollout_files import read_rollouts, write_rollouts
from grpo_ray.storage.run_folder import RunFolder

OWN_FILES = ("events.jsonl", "summary.json", "driver/holder.json", "logs/worker-0.log", "fence/token", RETURNS)
"""Files of the original's launches, which a branch does not have."""


def write_checkpoint(folder: RunFolder, step: int, serial: int) -> None:
    name = f"checkpoint-{step:06d}"
    folder.write_text(f"weights {step}", name, "optimizer.bin")
    content = f"weights {step}".encode()
    files = {"optimizer.bin": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    folder.write_json({"metrics": {"step": step}, "serial": serial, "files": files}, name, "manifest.json")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that has taken six steps, with checkpoints of steps 2, 4 and 6."""
    folder = RunFolder(str(tmp_path), "run")
    for name in (*OWN_FILES, "config.yaml", "problems.json", "policy.json", "unverifiable.json", "overlong.json"):
        folder.write_text("[]" if name == RETURNS else "{}", *name.split("/"))
    for name in ("policy/config.json", "policy/uploaded", "verdicts/1.json", "heldout_before.json", "user.txt"):
        folder.write_text(name, *name.split("/"))
    for serial, step in enumerate((2, 4, 6), 1):
        write_checkpoint(folder, step, serial)
        write_rollouts(folder, [make_group(each, "a" * 16, (1.0,)) for each in (step - 1, step)])
        record = HeldoutRecord(problem="b" * 16, correct=(1.0,), lengths=(1,), truncated=(False,))
        write_heldout(folder, "heldout", step, [record], policy="", conditions={})
    folder.write_text("".join(json.dumps({"step": step, "x": 0.5}) + "\n" for step in range(1, 7)), "metrics.jsonl")
    return folder


def test_branch_has_the_records_up_to_its_step(run: RunFolder, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in Path(run.path()).rglob("*") if path.is_file()}
    target = RunFolder(str(tmp_path), "branch")
    write_branch(run, find_start(run, 4), target)
    assert set(target.file_sizes()) == {
        *("config.yaml", "problems.json", "policy.json", "unverifiable.json", "overlong.json", "heldout_before.json"),
        *("policy/config.json", "policy/uploaded", "verdicts/1.json", "metrics.jsonl"),
        *("checkpoint-000004/optimizer.bin", "checkpoint-000004/manifest.json"),
        *(f"rollouts/steps-{first:08d}-{first + 1:08d}.parquet" for first in (1, 3)),
        *(f"heldout/step-{step:08d}.parquet" for step in (2, 4)),
    }
    (copied,), original = list_checkpoints(target), list_checkpoints(run)[1]
    assert (copied.digest, copied.serial, copied.step) == (original.digest, 2, 4)
    assert [row["step"] for row in read_metrics(target)] == [1, 2, 3, 4]
    assert {path: path.read_bytes() for path in Path(run.path()).rglob("*") if path.is_file()} == before


def test_branch_cuts_a_file_that_goes_beyond_its_step(run: RunFolder, tmp_path: Path) -> None:
    write_rollouts(run, [make_group(step, "c" * 16, (0.0,)) for step in (4, 5)])
    target = RunFolder(str(tmp_path), "branch")
    write_branch(run, find_start(run, 4), target)
    assert read_rollouts(target)["step"].to_pylist() == [1, 2, 3, 4, 4]


def test_branch_at_the_start_has_no_checkpoint(run: RunFolder, tmp_path: Path) -> None:
    target = RunFolder(str(tmp_path), "branch")
    assert find_start(run, 0) is None
    write_branch(run, None, target)
    assert set(target.file_sizes()) == {
        *("config.yaml", "problems.json", "policy.json", "unverifiable.json", "overlong.json"),
        *("verdicts/1.json", "heldout_before.json"),
    }


def test_damaged_config_is_not_copied(run: RunFolder, tmp_path: Path) -> None:
    run.write_text("a: [", "config.yaml")
    for step in (0, 4):
        target = RunFolder(str(tmp_path), f"branch-{step}")
        write_branch(run, find_start(run, step), target)
        assert not target.exists("config.yaml") and target.exists("problems.json")


def test_checkpoint_that_the_run_deletes_meanwhile_is_named(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = run.file_sizes()
    monkeypatch.setattr(RunFolder, "file_sizes", lambda self: sizes)  # as they were before
    checkpoint = find_start(run, 4)
    Path(run.path("checkpoint-000004", "optimizer.bin")).unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-000004/optimizer\.bin was deleted while it was copied"):
        write_branch(run, checkpoint, RunFolder(str(tmp_path), "branch"))


@pytest.mark.parametrize("deleted", ["manifest.json", "optimizer.bin"])
def test_checkpoint_that_the_run_deletes_before_the_copy_is_no_branch_at_step_0(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: str
) -> None:
    checkpoint: Any = find_start(run, 4)

    def delete_meanwhile(*arguments: Any) -> list[str]:
        Path(run.path("checkpoint-000004", "manifest.json")).unlink()
        if deleted != "manifest.json":
            raise FileNotFoundError(deleted)
        return []

    monkeypatch.setattr(branch, "find_faults", delete_meanwhile)
    with pytest.raises(CheckpointError, match="checkpoint-000004 was deleted while it was copied"):
        require_sound(checkpoint)
    with pytest.raises(CheckpointError, match="checkpoint-000004 was deleted while it was copied"):
        write_branch(run, checkpoint, RunFolder(str(tmp_path), "branch"))


def test_step_without_a_kept_checkpoint_is_refused(run: RunFolder) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3; steps with a checkpoint: 2, 4, 6"):
        find_start(run, 3)


def test_discarded_checkpoint_is_refused(run: RunFolder) -> None:
    run.write_json([[1, 3]], RETURNS)  # run.resume=best has gone back to step 2
    with pytest.raises(CheckpointError, match="has no checkpoint of step 4; steps with a checkpoint: 2 "):
        find_start(run, 4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("optimizer.bin", "weights 5", "is damaged: optimizer.bin was altered"),
        ("chat_template.jinja", "new", "chat_template.jinja is not in the checkpoint's manifest"),
    ],
)
def test_unsound_checkpoint_is_refused(run: RunFolder, name: str, content: str, message: str) -> None:
    run.write_text(content, "checkpoint-000004", name)
    checkpoint: Any = find_start(run, 4)
    with pytest.raises(CheckpointError, match=message):
        require_sound(checkpoint)
