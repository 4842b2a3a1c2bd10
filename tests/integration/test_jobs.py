"""Job submission as users do it: the real `ray` command line against a real cluster with token authentication."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from failing_storage import wait_for
from ray_head import LONG, RAY, head
from small_runs import events_of, rows_of, small_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has no token and no cluster yet."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    (tmp_path / "home").mkdir()
    # `ray` and `python` of a job are those of this environment, as on a node where the project is set up.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return clean | {"HOME": str(tmp_path / "home"), "PATH": path, "PYTHONPATH": ""}


@pytest.fixture
def with_token(clean_environment: dict[str, str]) -> dict[str, str]:
    """The environment of a user who has generated a token."""
    generated = subprocess.run([*RAY, "get-auth-token", "--generate"], env=clean_environment, capture_output=True)
    assert generated.returncode == 0, generated.stderr
    return clean_environment | {"RAY_AUTH_MODE": "token"}


@pytest.mark.main_path
def test_job_is_submitted_and_trains(
    with_token: dict[str, str], short_folder: Path, policy: Path, tmp_path: Path
) -> None:
    with head(short_folder, **with_token) as cluster:
        job = cluster.submitted(*small_settings("job", tmp_path, policy), "cluster.num_workers=1", "grpo.max_steps=2")
        log = cluster.log(job)
        assert cluster.status(job) == "succeeded", log
        assert [row["step"] for row in rows_of(tmp_path / "job")] == [1, 2]


@pytest.mark.slow
def test_job_is_submitted_stopped_and_resumed_from_best(
    with_token: dict[str, str], short_folder: Path, policy: Path, tmp_path: Path
) -> None:
    with head(short_folder, **with_token) as cluster:
        wrong = cluster.submit(RAY_AUTH_TOKEN="0" * 64)
        assert wrong.returncode != 0
        assert "token is invalid or incorrect" in wrong.stdout and "RAY_AUTH_TOKEN" in wrong.stdout
        missing = cluster.submit(HOME=str(tmp_path), RAY_AUTH_MODE="disabled")
        assert missing.returncode != 0
        assert "no authentication token was found" in missing.stdout and "RAY_AUTH_TOKEN" in missing.stdout
        outside = subprocess.run(
            [sys.executable, "jobs/train.py", "--example", "arithmetic", f"run.storage_path={tmp_path}"],
            cwd=ROOT,
            env=with_token | {"RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}", "RAY_AUTH_TOKEN": "0" * 64},
            capture_output=True,
            text=True,
        )
        assert outside.returncode == 2
        assert "RAY_AUTH_TOKEN" in outside.stderr.splitlines()[-1]

        folder = tmp_path / "job"
        settings = [*small_settings("job", tmp_path, policy), "grpo.max_steps=500", "grpo.save_steps=200"]
        job = cluster.submitted(*settings)
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) > 2, "three steps", LONG)
        assert cluster.ray("stop", job).returncode == 0
        log = cluster.log(job)
        assert cluster.status(job) == "stopped", log
        stopped = json.loads((folder / "summary.json").read_text())
        steps = stopped["steps"]
        assert stopped["stopped"] == "SIGTERM" and 2 < steps < 500
        assert stopped["latest_checkpoint"].endswith(f"checkpoint-{steps:06d}")
        assert [f"step {step}/500  " in log for step in (1, steps)] == [True, True]
        assert "step is finished and saved" in log and "run the same command to continue" in log

        last = steps + 4
        job = cluster.submitted(*settings, f"grpo.max_steps={last}", "grpo.save_steps=2")
        log = cluster.log(job)
        assert cluster.status(job) == "succeeded", log
        assert f"resuming from checkpoint-{steps:06d}" in log
        assert [row["step"] for row in rows_of(folder)] == list(range(1, last + 1))

        best = json.loads((folder / "summary.json").read_text())["best_checkpoint"]
        best_step = int(best.rpartition("-")[2])
        job = cluster.submitted(*settings, f"grpo.max_steps={last + 2}", "run.resume=best")
        log = cluster.log(job)
        assert cluster.status(job) == "succeeded", log
        assert f"resuming from {Path(best).name}" in log
        assert events_of(folder, "began")[-1]["step"] == best_step
        assert [row["step"] for row in rows_of(folder)] == list(range(1, last + 3))
