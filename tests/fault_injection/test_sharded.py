"""A sharded run from the command line that is killed, and continued with another number of workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from failing_storage import wait_for
from faulty_runs import start
from small_runs import assert_near, rows_of, same_weights, small_settings, weights_of

LONG = 900.0
"""Time limit for an event on a busy machine, seconds."""
SETTINGS = [
    "rewards.functions=['reward_spies:vary']", "heldout.score=correctness",
    "grpo.learning_rate=1e-4", "grpo.lr_scheduler_type=constant",
    "grpo.max_steps=5", "grpo.save_steps=1", "run.keep_checkpoints=9",
]  # fmt: skip


HELPERS = Path(__file__).parents[1] / "helpers"


def call(*arguments: str) -> str:
    """Run a command of `grpo-ray` to its end, on a cluster of its own; return its output."""
    inherited = os.environ | {"RAY_ADDRESS": "local"}
    command = [sys.executable, "-m", "grpo_ray.cli", *arguments]
    path = os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")]))  # for the reward function
    ended = subprocess.run(
        command, env=inherited | {"PYTHONPATH": path}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.slow
def test_sharded_run_killed_continues_with_fewer_workers(policy: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    settings = [*small_settings("sharded", tmp_path, policy), *SETTINGS, "cluster.shard_learner=true"]
    folder = tmp_path / "sharded"
    run = start([*settings, "cluster.num_workers=4"], PYTHONPATH=os.pathsep.join([str(HELPERS), *sys.path]))
    wait_for((folder / "checkpoint-000002" / "manifest.json").exists, "the checkpoint of step 2", LONG)
    run.kill()
    run.communicate()
    taken = max(int(path.parent.name[-6:]) for path in folder.glob("checkpoint-??????/manifest.json"))
    assert taken < 5, "the run was not killed in time"
    output = call("train", *settings, "cluster.num_workers=2")
    assert f"resuming from checkpoint-{taken:06d}" in output
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4, 5]

    files = json.loads((folder / f"checkpoint-{taken:06d}" / "manifest.json").read_text())["files"]
    assert {name for name in files if name.startswith("shards/policy/")} == {
        f"shards/policy/shard-{number:05}-model-00001-of-00001.safetensors" for number in (1, 2, 3, 4)
    }
    call("train", *small_settings("whole", tmp_path, policy), *SETTINGS, "cluster.num_workers=2")
    latest = folder / "checkpoint-000005"
    assert_near(weights_of(latest), weights_of(tmp_path / "whole" / "checkpoint-000005"))

    plain = tmp_path / "plain"
    call("export", str(latest), str(plain))
    assert same_weights(load_file(plain / "model.safetensors"), weights_of(latest))
    accuracies = []
    for path in (latest, plain):
        measured = tmp_path / "measured.json"
        call("eval", str(path), "--config", str(folder / "config.yaml"), "--json", str(measured))
        accuracies.append(json.loads(measured.read_text())["pass_at_1"]["value"])
        measured.unlink()
    assert accuracies[0] == accuracies[1]
