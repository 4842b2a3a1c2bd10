"""Tests of the decision which stages have ended, and of the policy that a stage begins with; no run is started."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from grpo_ray.config.loader import load_config
from grpo_ray.driver import stage_runs
from grpo_ray.driver.stage_config import Stages, load_stages
from grpo_ray.driver.stage_runs import (
    _has_same_cluster,
    _overlaps,
    finished_stages,
    policy_after,
    run_folder,
    train_stages,
    unfinished_stages,
)
from grpo_ray.errors import CheckpointError, ConfigError, TakenRunError
from grpo_ray.storage.checkpoint_integrity import file_checksum
from grpo_ray.storage.lease import Driver, RunLease, _process_start
from grpo_ray.storage.run_folder import RunFolder


def stages_of(tmp_path: Path, *overrides: str, names: str = "abc") -> Stages:
    """Return stages of ten steps each, whose folder is `tmp_path/math`."""
    path = tmp_path / "stages.yaml"
    shared = {"run": {"name": "math", "storage_path": str(tmp_path)}, "grpo": {"max_steps": 10}}
    path.write_text(yaml.safe_dump(shared | {"stages": [{"name": name} for name in names]}))
    return load_stages(path, overrides)


def write_run(stages: Stages, number: int, *steps: int, ended: bool = True, accuracies: Any = ()) -> RunFolder:
    """Write the run folder of a stage as far as its end is concerned: config, checkpoints and summary."""
    stage = stages.stages[number]
    folder = run_folder(stage)
    folder.write_text(yaml.safe_dump(stage.config.to_dict()), "config.yaml")
    for serial, (step, accuracy) in enumerate(zip(steps, accuracies or [0.5] * len(steps), strict=True)):
        name = f"checkpoint-{step:06}"
        folder.write_text("weights", name, "model.safetensors")
        folder.write_text("moments", name, "optimizer.pt")
        files = {
            file: {"bytes": 7, "sha256": file_checksum(folder, name, file)}
            for file in ("model.safetensors", "optimizer.pt")
        }
        metrics = {"step": step, "heldout/accuracy": accuracy}
        folder.write_json({"metrics": metrics, "serial": serial, "files": files}, name, "manifest.json")
    if ended:
        latest = folder.uri_of(f"checkpoint-{steps[-1]:06}")
        folder.write_json({"stopped": None, "latest_checkpoint": latest}, "summary.json")
    return folder


def finished(stages: Stages) -> str:
    """Return the names of the stages that have ended."""
    return "".join(stage.name for stage in finished_stages(stages))


def test_stage_has_ended_with_its_last_step_and_summary(tmp_path: Path) -> None:
    stages = stages_of(tmp_path)
    assert finished(stages) == ""
    write_run(stages, 0, 5)
    assert finished(stages) == ""  # stopped after step 5 of 10
    write_run(stages, 0, 5, 10, ended=False)
    (tmp_path / "math" / "01-a" / "summary.json").unlink()
    assert finished(stages) == ""  # a kill before the summary
    write_run(stages, 0, 5)
    write_run(stages, 0, 5, 10, ended=False)
    assert finished(stages) == ""  # the summary is that of the launch before
    write_run(stages, 0, 5, 10)
    write_run(stages, 1, 5)
    assert finished(stages) == "a"
    write_run(stages, 1, 5, 10)
    assert finished(stages) == "ab"


@pytest.mark.parametrize("summary", [[], {}, {"latest_checkpoint": None}])
def test_stage_with_an_unknown_summary_has_not_ended(tmp_path: Path, summary: Any) -> None:
    stages = stages_of(tmp_path)
    write_run(stages, 0, 10).write_json(summary, "summary.json")
    assert finished(stages) == ""


def test_stage_whose_last_row_of_metrics_is_lost_has_ended(tmp_path: Path) -> None:
    """A kill between the last checkpoint and its row: no later launch writes the row, and rows give the `steps`."""
    stages = stages_of(tmp_path)
    folder = write_run(stages, 0, 5, 10)
    folder.write_json(folder.read_json("summary.json") | {"steps": 9}, "summary.json")
    write_run(stages, 1, 5)
    assert finished(stages) == "a"


def test_folder_that_cannot_be_written_is_refused_before_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = stages_of(tmp_path)
    (tmp_path / "math").write_text("no folder")
    monkeypatch.setattr(stage_runs, "check_stages", lambda *args: pytest.fail("the stages were checked"))
    with pytest.raises(ConfigError, match=r"run.storage_path=.* cannot be written"):
        train_stages(stages)


def test_changed_setting_of_an_ended_stage_is_refused(tmp_path: Path) -> None:
    write_run(stages_of(tmp_path), 0, 10)
    for override, change in {
        "grpo.max_steps=20": "grpo.max_steps=10, and it is now 20",
        "stages.a.grpo.beta=0.1": "grpo.beta=0.0, and it is now 0.1",
        "stages.a.rewards.functions=[correctness,length]": r"rewards.functions=\['correctness'\], and it is now",
    }.items():
        with pytest.raises(ConfigError, match=f"stage a has ended with {change}.*; restore it, or set another"):
            finished(stages_of(tmp_path, override))
    # Neither another stage's settings nor those of processes and warnings change the result.
    for override in ("stages.b.grpo.max_steps=20", "cluster.num_workers=4", "health.window=5", "run.trace=true"):
        assert finished(stages_of(tmp_path, override)) == "a"


def test_stage_is_started_over_only_if_none_after_it_has_begun(tmp_path: Path) -> None:
    stages = stages_of(tmp_path)
    write_run(stages, 0, 10)
    again = stages_of(tmp_path, "stages.a.run.resume=never")
    assert finished(again) == ""
    write_run(stages, 1, 5)
    with pytest.raises(ConfigError, match=r"stage a: run.resume=never would start it over, but a stage after it"):
        finished(again)


def test_stage_that_begins_before_the_one_before_it_ends_is_refused(tmp_path: Path) -> None:
    stages = stages_of(tmp_path)
    write_run(stages, 0, 5)
    write_run(stages, 1, 5)
    with pytest.raises(ConfigError, match="stage a has not ended, but b after it has begun"):
        finished(stages)


def test_folder_of_a_plain_run_is_refused(tmp_path: Path) -> None:
    RunFolder(str(tmp_path), "math").write_text("{}", "config.yaml")
    with pytest.raises(ConfigError, match="is the run folder of a plain run"):
        finished(stages_of(tmp_path))


def test_next_stage_begins_with_the_best_checkpoint(tmp_path: Path) -> None:
    stages = stages_of(tmp_path)
    write_run(stages, 0, 5, 10, accuracies=(0.7, 0.6))
    first, last = unfinished_stages(stages)
    assert first.config.model.path == str(tmp_path / "math" / "01-a" / "checkpoint-000005")
    assert last.config.model.path == "tiny-arithmetic"  # not known yet


def test_damaged_weights_of_the_best_checkpoint_are_refused(tmp_path: Path) -> None:
    stages = stages_of(tmp_path)
    folder = write_run(stages, 0, 10)
    folder.write_text("moment?", "checkpoint-000010", "optimizer.pt")  # not taken over
    parent = RunFolder(str(tmp_path), "math")
    assert policy_after(stages.stages[0], parent).endswith("checkpoint-000010")
    folder.write_text("weight?", "checkpoint-000010", "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"stage a: .*checkpoint-000010 is damaged: model.safetensors was altered"
    ):
        policy_after(stages.stages[0], parent)


def held_by_other_process(folder: RunFolder) -> None:
    """Let the process that has started this one hold the lease of a folder."""
    pid = os.getppid()
    driver = replace(Driver.of_this_process(), pid=pid, process_start=str(_process_start(pid)))
    RunLease(folder, driver, is_new=False)._take()


def test_deleted_policy_of_an_adapter_is_exported_again_by_one_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = stages_of(tmp_path)
    folder = write_run(stages, 0, 10)
    folder.write_text("{}", "checkpoint-000010", "adapter_config.json")
    manifest = folder.read_json("checkpoint-000010", "manifest.json")
    checksum = file_checksum(folder, "checkpoint-000010", "adapter_config.json")
    files = manifest["files"] | {"adapter_config.json": {"bytes": 2, "sha256": checksum}}
    folder.write_json(manifest | {"files": files}, "checkpoint-000010", "manifest.json")
    exported: list[str] = []

    def export(path: str, target: Path, **options: Any) -> None:
        exported.append(path)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(stage_runs, "export", export)
    parent = RunFolder(str(tmp_path), "math")
    policy = Path(policy_after(stages.stages[0], parent))
    assert policy == tmp_path / "math" / "policies" / "01-a" and (policy / "config.json").exists()
    policy_after(stages.stages[0], parent)
    assert len(exported) == 1
    shutil.rmtree(policy)
    policy_after(stages.stages[0], parent)
    assert len(exported) == 2 and (policy / "config.json").exists()
    shutil.rmtree(policy)
    held_by_other_process(parent)
    with pytest.raises(TakenRunError, match=r"another driver exports the policy .*policies/01-a for the next stage"):
        policy_after(stages.stages[0], parent)
    assert len(exported) == 2


@pytest.mark.parametrize(
    ("override", "is_same"),
    [
        ("grpo.max_steps=7", True),
        ("run.measure=background", False),  # its engine takes the cores of a worker, Ray Data takes one
        ("cluster.num_workers=1", False),
        ("engine.max_model_len=512", False),
    ],
)
def test_stages_that_need_as_many_cores_share_a_cluster(override: str, is_same: bool) -> None:
    base = ["cluster.cpus_per_worker=2", "cluster.num_workers=2"]
    one, other = load_config(None, base), load_config(None, [*base, override])
    assert _has_same_cluster(one, other) == _has_same_cluster(other, one) == is_same


def test_held_out_problems_that_an_earlier_stage_trains_on_are_named(tmp_path: Path) -> None:
    _, stage, _ = stages_of(tmp_path)
    heldout = {"heldout": np.array([2, 3, 5], np.uint64)}
    trained = {"a": np.array([1, 2, 5], np.uint64), "z": np.array([7], np.uint64)}
    (notice,) = _overlaps(stage, heldout, trained)
    assert notice.startswith("stage a trains on 2 of the 3 held-out problems (heldout) of stage b,")
