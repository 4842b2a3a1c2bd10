"""Tests of an elastic run on a real cluster whose nodes fail, are drained and are added."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.train import CheckpointUploadMode
from ray.train.backend import BackendConfig
from ray.train.collective import broadcast_from_rank_zero
from several_nodes import several_nodes

from grpo_ray.resilience.elastic import PreemptibleTrainer, PreemptionNotice

pytestmark = pytest.mark.slow


class NoProcessGroup(BackendConfig):
    """Backend without torch.distributed, so that workers start fast."""

    backend = "gloo"


def count_up(settings: dict[str, Any]) -> None:
    """Train function without a model: count steps, save every n-th, and log events."""
    context = ray.train.get_context()
    workers, rank, step = context.get_world_size(), context.get_world_rank(), 0
    events = Path(settings["folder"]) / "events.jsonl"

    def log(what: str) -> None:
        if rank == 0:
            with events.open("a") as file:
                file.write(json.dumps({"what": what, "step": step, "workers": workers}) + "\n")

    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as local:
            step = int(Path(local, "step").read_text())
    log("began")
    preemption_notice = PreemptionNotice()
    # Rank 0 decides for all: a worker that stopped one step earlier would leave the others at the next barrier.
    while not broadcast_from_rank_zero((events.parent / "stop").exists()):
        time.sleep(0.1)
        step += 1
        leaving = preemption_notice()
        saves = leaving or step % settings["save_steps"] == 0
        if saves:
            local = tempfile.mkdtemp()
            Path(local, "step").write_text(str(step))
            ray.train.report(
                {"step": step},
                ray.train.Checkpoint.from_directory(local),
                checkpoint_dir_name=f"{step}-{workers}",
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=True,
            )
        else:
            ray.train.report({"step": step}, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        log("announced" if leaving else "saved" if saves else "step")
        if leaving:
            preemption_notice.leave()


def drive(folder: str, save_steps: int) -> None:
    """Run the driver of a real run; called in a separate process."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}
    # Longer than all time limits of the tests, so that they fail if the policy uses a node that is gone.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "900"
    ray.init()
    PreemptibleTrainer(
        count_up,
        worker_counts=[2, 4],
        train_loop_config={"folder": folder, "save_steps": save_steps},
        torch_config=NoProcessGroup(),
        scaling_config=ray.train.ScalingConfig(num_workers=(2, 4), elastic_resize_monitor_interval_s=1.0),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=1),  # a drained node must not count as a failure
        ),
    ).fit()


class Events:
    """Events logged by the run in a folder."""

    def __init__(self, folder: Path):
        self.file = folder / "events.jsonl"
        self.file.touch()

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def wait(self, what: str, workers: int, after: int = 0, seconds: float = 300.0) -> int:
        """Wait for an event beyond position `after`; return the position behind it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for position, event in enumerate(self.all()[after:], start=after):
                if (event["what"], event["workers"]) == (what, workers):
                    return position + 1
            time.sleep(0.05)
        raise AssertionError(f"no {what!r} with {workers} workers in {seconds} s after {self.all()[:after][-3:]}")


def attempts(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split the events by worker group."""
    parts: list[list[dict[str, Any]]] = []
    for event in events:
        if event["what"] == "began":
            parts.append([])
        parts[-1].append(event)
    return parts


def test_elastic_killed_node_shrinks_then_regrows(tmp_path: Path) -> None:
    events = Events(tmp_path)
    with several_nodes(2, 2) as nodes:
        driver = nodes.drive(drive, folder=str(tmp_path), save_steps=5)
        seen = events.wait("saved", workers=4)
        nodes.kill_node(nodes.workers[1])
        seen = events.wait("began", workers=2, after=seen)
        nodes.add_node(2)
        seen = events.wait("began", workers=4, after=seen)
        events.wait("saved", workers=4, after=seen)
        (tmp_path / "stop").touch()
        assert driver.wait(120) == 0
    first, fewer, again = attempts(events.all())
    saved = [event["step"] for event in first if event["what"] == "saved"]
    assert fewer[0]["step"] in (saved[-1], saved[-1] + 5)  # the last save, or one saved but not logged
    # Growing loses only the steps taken while the checkpoint was being committed.
    saved = [event["step"] for event in fewer if event["what"] == "saved"]
    assert again[0]["step"] in (saved[-1], saved[-1] + 5)
    assert fewer[-1]["step"] - again[0]["step"] <= 3


def test_elastic_drained_node_loses_no_step(tmp_path: Path) -> None:
    events = Events(tmp_path)
    with several_nodes(2, 2) as nodes:
        driver = nodes.drive(drive, folder=str(tmp_path), save_steps=100)
        seen = events.wait("step", workers=4)
        nodes.drain_node(nodes.workers[1], deadline_s=900)  # longer than all time limits together
        seen = events.wait("announced", workers=4, after=seen)
        seen = events.wait("began", workers=2, after=seen)
        events.wait("step", workers=2, after=seen)
        (tmp_path / "stop").touch()
        assert driver.wait(120) == 0
    first, fewer = attempts(events.all())
    assert first[-1]["what"] == "announced"
    assert fewer[0]["step"] == first[-1]["step"]
