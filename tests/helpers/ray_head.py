"""A Ray cluster that `ray start --head` starts, as a user does it."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from failing_storage import free_port, wait_for

ROOT = Path(__file__).parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
LONG = 600.0
"""Seconds that a test waits for an action that may take long on a busy machine."""


class Head:
    """A cluster of one node, started as in the README, and the `ray` command line for it."""

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
            "jobs/train.py", "--example", "arithmetic", *job, **environment,
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
