"""Tests of the choice of a cluster, with one that a user has started on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_head import LONG, head
from small_runs import rows_of, small_settings

CONFIG = Path(__file__).parents[4] / "jobs" / "configs" / "arithmetic.yaml"


def grpo_ray(command: str, settings: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-m", "grpo_ray.cli", command, str(CONFIG), *settings],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG,
    )


def test_commands_use_the_cluster_of_ray_start_while_it_lives(
    policy: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = Path(os.path.realpath(tmp_path_factory.mktemp("r")))  # sockets need a short path
    folder = temporary / "ray"  # Ray's default below RAY_TMPDIR, so that it records the cluster where a driver looks
    folder.mkdir()
    settings = [
        *small_settings("joins", tmp_path, policy), "cluster.num_workers=1", "grpo.max_steps=1", "data.limit=8",
        "data.heldout_limit=4",
    ]  # fmt: skip
    with head(folder, **os.environ | {"RAY_TMPDIR": str(temporary)}) as cluster:
        address = (folder / "ray_current_cluster").read_text()
        assert address.endswith(f":{cluster.gcs}")
        joined = f"using the Ray cluster at {address}, which `ray start` started on this machine"
        trained = grpo_ray("train", settings, RAY_TMPDIR=str(temporary))
        assert trained.returncode == 0, trained.stdout
        assert trained.stdout.count(joined) == 1
        assert len(rows_of(tmp_path / "joins")) == 1
    assert (folder / "ray_current_cluster").read_text() == address  # the record of a cluster that is dead
    checked = grpo_ray("check", settings, RAY_TMPDIR=str(temporary))
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count(f"starting a Ray cluster: the one at {address}") == 1
    assert joined not in checked.stdout
