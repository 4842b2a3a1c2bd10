"""Tests of the choice of a cluster, with one that a user has started on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from failing_storage import wait_for
from ray_head import LONG, head
from small_runs import rows_of, small_settings

from grpo_ray.driver.cluster.connection import choose_cluster

CONFIG = Path(__file__).parents[4] / "jobs" / "configs" / "arithmetic.yaml"


WORKER = "ray::RayTrainWorker"

REWARD = """
def short_answer(completions, solution, **columns):
    return [float(len(str(text)) <= 400) for text in completions]
"""


def grpo_ray(command: str, settings: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, whose modules can be imported."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [".", inherited.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "grpo_ray.cli", command, str(CONFIG), *settings],
        cwd=folder,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG,
    )


@contextmanager
def started_cluster(folder: Path) -> Iterator[str]:
    """Run a cluster of `ray start` and yield its address; commands find its record if RAY_TMPDIR is the folder."""
    own = folder / "ray"  # Ray's default below RAY_TMPDIR, so that it records the cluster where a driver looks
    own.mkdir()
    with head(own, **os.environ | {"RAY_TMPDIR": str(folder)}) as cluster:
        recorded = own / "ray_current_cluster"  # which Ray writes after it has said that it runs
        wait_for(recorded.exists, "the cluster's address", LONG)
        address = recorded.read_text()
        assert address.endswith(f":{cluster.gcs}")
        yield address
    assert recorded.read_text() == address  # the record of a cluster that is dead


def test_cluster_of_ray_start_is_chosen_while_it_lives(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with started_cluster(short_folder) as address:
        assert choose_cluster().address == address
    chosen = choose_cluster()
    assert chosen.address is None
    assert chosen.notice is not None and chosen.notice.startswith(f"starting a Ray cluster: the one at {address}")


@pytest.mark.slow
def test_commands_use_the_cluster_of_ray_start_while_it_lives(policy: Path, tmp_path: Path, short_folder: Path) -> None:
    # All paths are relative: neither the cluster's processes nor the workers have the command's working folder.
    shutil.copytree(policy, tmp_path / "policy")
    rows = [{"question": f"What is {a} + 11?", "answer": f"${a + 11}$"} for a in range(10, 99)]
    (tmp_path / "problems.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, rows))))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    settings = [
        *small_settings("joins", "runs", Path("policy")), "cluster.num_workers=1", "grpo.max_steps=1",
        "data.train=problems.jsonl", "data.heldout=problems.jsonl", "data.heldout_limit=4",
        "data.columns={prompt: question, solution: answer}",
        "rewards.functions=[correctness, 'my_rewards:short_answer']",
    ]  # fmt: skip
    with started_cluster(short_folder) as address:
        joined = f"using the Ray cluster at {address}, which `ray start` started on this machine"
        trained = grpo_ray("train", settings, tmp_path, RAY_TMPDIR=str(short_folder))
        assert trained.returncode == 0, trained.stdout
        assert trained.stdout.count(joined) == 1
        run = tmp_path / "runs" / "joins"
        assert [row["reward/short_answer_mean"] for row in rows_of(run)] == [1.0]
        recorded = yaml.safe_load((run / "config.yaml").read_text())
        assert recorded["run"]["storage_path"] == str(run.parent)
        assert recorded["model"]["path"] == str(tmp_path / "policy")
        assert recorded["data"]["train"] == str(tmp_path / "problems.jsonl")
        checked = grpo_ray("check", [*settings, "--sample", "2"], tmp_path, RAY_TMPDIR=str(short_folder))
        assert checked.returncode == 0, checked.stdout
        assert checked.stdout.count(joined) == 1
