"""Start of an attempt: the driver is notified, and leftovers of earlier attempts are removed after the first step."""

from pathlib import Path

import ray

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.storage.checkpoints import CheckpointInfo
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.heldout_files import write_heldout
from grpo_ray.storage.records.rollout_files import read_rollouts, write_rollouts
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.coordinator import RunCoordinator
from grpo_ray.training.attempt import Attempt, WorkerSpec, announce_start, remove_leftovers
from grpo_ray.training.start_point import StartPoint


def group(step: int) -> GroupRecord:
    return GroupRecord(
        step=step, epoch=0, problem=f"{step:016x}", rewards=(1.0,), correct=(1.0,), lengths=(5,), truncated=(False,)
    )


def test_remove_leftovers_deletes_and_names_what_announce_start_left(cluster: None, tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    for steps in ((1, 2), (3, 4), (5,)):
        write_rollouts(folder, [group(step) for step in steps])
    for step in (0, 2, 4):
        write_heldout(folder, "heldout", step, [], policy="", conditions={})
    coordinator = ray.remote(RunCoordinator).options(num_cpus=0).remote()
    spec = WorkerSpec(
        config=load_config(None, []),
        model_path="policy",
        training_fingerprints={"": DatasetFingerprint(0, "0")},
        heldout_conditions={},
        training_ids=None,
        last_serial=0,
        coordinator=coordinator,
    )
    attempt = Attempt(spec, spec.config, rank=0, workers=1, folder=folder, scratch=str(tmp_path))
    folder.write_text("half", "checkpoint-000004.part", "weights")
    start = StartPoint(CheckpointInfo(folder, "checkpoint-000002", {"step": 2}, serial=1, files={}), last_serial=1)
    announce_start(attempt, start, history=[])
    assert len(read_rollouts(folder)) == 5 and folder.exists("checkpoint-000004.part")  # no step was taken yet
    remove_leftovers(attempt, start)
    assert read_rollouts(folder)["step"].to_pylist() == [1, 2] and not folder.exists("checkpoint-000004.part")
    _, (event, *notices) = ray.get(coordinator.read.remote(0))
    assert (event["event"], event["step"], event["checkpoint"]) == ("began", 2, "checkpoint-000002")
    assert [notice["what"] for notice in notices] == [
        "deleted unfinished checkpoints of an earlier attempt: checkpoint-000004.part",
        "deleted rollouts of steps after 2, which are taken again: "
        "steps-00000003-00000004.parquet, steps-00000005-00000005.parquet",
        "deleted held-out completions of steps after 2: heldout/step-00000004.parquet",
    ]
    ray.kill(coordinator)
