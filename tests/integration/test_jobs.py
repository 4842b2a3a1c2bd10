"""As users use it: the real `ray` command line against a real cluster with token authentication."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from failing_storage import free_port, wait_for
from small_runs import events_of, rows_of, small_settings

ROOT = Path(__file__).parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
LONG = 600.0
"""Seconds that a test waits for what a busy machine may take long for."""


class Head:
    """A cluster of one node as the README says to start it, and the `ray` command line towards it."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self.folder = folder
        self.gcs, self.dashboard, self.client = free_port(), free_port(), free_port()
        self.environment = environment
        self.process = subprocess.Popen(
            [
                *RAY, "start", "--head", "--block", "--num-cpus=4", f"--port={self.gcs}", "--dashboard-host=127.0.0.1",
                f"--dashboard-port={self.dashboard}", f"--ray-client-server-port={self.client}",
                "--dashboard-agent-listen-port=0", f"--temp-dir={folder}", "--disable-usage-stats",
            ],
            env=environment,
            stdout=(folder / "head.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def ray(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A `ray job` command, to its end."""
        verb, *rest = command
        return subprocess.run(
            [*RAY, "job", verb, "--address", f"http://127.0.0.1:{self.dashboard}", *rest],
            cwd=ROOT,
            env=self.environment | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LONG,
        )

    def submit(self, *job: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The README's command, but that it does not wait for the job's end."""
        return self.ray(
            "submit", "--no-wait", "--working-dir", ".", "--runtime-env", "jobs/runtime_env.yaml", "--", "python",
            "jobs/train.py", "jobs/configs/arithmetic.yaml", *job, **environment,
        )  # fmt: skip

    def submitted(self, *job: str) -> str:
        """Submit a job; gives its id."""
        said = self.submit(*job)
        assert said.returncode == 0, said.stdout
        return re.findall(r"raysubmit_\w+", said.stdout)[0]

    def status(self, job: str) -> str:
        """succeeded, stopped, failed or running."""
        said = self.ray("status", job).stdout
        return next((end for end in ("succeeded", "stopped", "failed") if end in said.replace(job, "")), "running")

    def log(self, job: str) -> str:
        """Follow a job's log to its end and return it."""
        return self.ray("logs", "--follow", job).stdout


@contextmanager
def head(folder: Path, **environment: str) -> Iterator[Head]:
    started = Head(folder, environment)
    try:
        said = folder / "head.log"
        wait_for(lambda: "Ray runtime started" in said.read_text() or started.process.poll() is not None, "Ray", LONG)
        assert started.process.poll() is None, said.read_text()
        yield started
    finally:
        started.process.send_signal(signal.SIGTERM)  # `--block` takes its node's processes along
        started.process.wait(60)


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has no token and no cluster yet."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    (tmp_path / "home").mkdir()
    # `ray` and `python` of a job are those of this environment, as on a node where the project is set up.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return clean | {"HOME": str(tmp_path / "home"), "PATH": path, "PYTHONPATH": ""}


@pytest.mark.slow
def test_job_is_submitted_stopped_and_resumed_from_best(
    clean_environment: dict[str, str], policy: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    generated = subprocess.run([*RAY, "get-auth-token", "--generate"], env=clean_environment, capture_output=True)
    assert generated.returncode == 0, generated.stderr
    with_token = clean_environment | {"RAY_AUTH_MODE": "token"}
    ray_folder = Path(os.path.realpath(tmp_path_factory.mktemp("r")))  # sockets need a short path
    with head(ray_folder, **with_token) as cluster:
        wrong = cluster.submit(RAY_AUTH_TOKEN="0" * 64)
        assert wrong.returncode != 0
        assert "token is invalid or incorrect" in wrong.stdout and "RAY_AUTH_TOKEN" in wrong.stdout
        missing = cluster.submit(HOME=str(tmp_path), RAY_AUTH_MODE="disabled")
        assert missing.returncode != 0
        assert "no authentication token was found" in missing.stdout and "RAY_AUTH_TOKEN" in missing.stdout
        outside = subprocess.run(
            [sys.executable, "jobs/train.py", "jobs/configs/arithmetic.yaml", f"run.storage_path={tmp_path}"],
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
