"""Tests of the Slurm script with bash alone: small programs stand for Slurm's, Ray's and the driver.

With Ray's own `symmetric-run` it is run in tests/integration/test_slurm.py.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from failing_storage import wait_for

SCRIPT = Path(__file__).parents[2] / "jobs" / "slurm.sh"
PROGRAMS = {
    "ray": "exit 0",
    # Ray starts: the command after the separator runs.
    "srun": 'until [[ $1 == -- ]]; do shift; done; shift; exec "$@"',
    "scontrol": 'if [[ $1 == show ]]; then echo node-1; else echo "$*" >>"$LOG"; fi',
    "getent": "echo 127.0.1.1 STREAM node-1; echo 10.0.0.7 STREAM node-1",
    "hostname": "echo 10.0.0.9",
    "grpo-ray": 'echo "$RAY_ADDRESS $*" >>"$LOG"',
}
"""Program -> its lines in bash."""
WAITING = """\
trap 'echo TERM >>"$LOG"' TERM
echo waiting >>"$LOG"
for _ in {1..2400}; do [[ -e $LOG.end ]] && break; sleep 0.05; done
exit 143"""
"""Driver that waits for a file, two minutes at most, and writes down each signal."""
LIMIT = 120.0
"""Seconds for a line on a busy machine."""


class Job:
    """A start of the script, with the lines that its programs have written."""

    def __init__(
        self, folder: Path, arguments: Sequence[str] = (), *, restarts: int = 0, seconds: int = 0, **programs: str
    ):
        """
        Args:
            restarts: earlier starts of the job.
            seconds: time limit of the job; 0: unknown.
            **programs: program -> its lines, in place of those of `PROGRAMS`.
        """
        self.log, self.output = folder / "log", folder / "output"
        (folder / "bin").mkdir()
        for name, lines in (PROGRAMS | {name.replace("_", "-"): lines for name, lines in programs.items()}).items():
            program = folder / "bin" / name
            program.write_text(f"#!/bin/bash\n{lines}\n")
            program.chmod(0o755)
        token = folder / "token"
        token.write_text("t" * 32)
        environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "LOG": str(self.log),
            "RAY_AUTH_TOKEN_PATH": str(token),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node-1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_CPUS_ON_NODE": "2",
            "SLURM_RESTART_COUNT": str(restarts),
            "RAY_ADDRESS": "http://127.0.0.1:8265",  # of the shell that has submitted the job
        }
        if seconds:
            environment |= {"SLURM_JOB_START_TIME": "1800000000", "SLURM_JOB_END_TIME": str(1_800_000_000 + seconds)}
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), *arguments], env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait(self) -> int:
        return self.process.wait(LIMIT)


def test_status_is_that_of_the_driver(tmp_path: Path) -> None:
    job = Job(tmp_path, ["my run.yaml", "grpo.max_steps=2"])
    assert job.wait() == 0, job.output.read_text()
    assert job.lines() == ["10.0.0.7:24711 train my run.yaml grpo.max_steps=2"]


@pytest.mark.parametrize(("seconds", "is_warned"), [(0, False), (600, True), (601, False)])
def test_time_limit_that_ends_before_the_signal_is_warned_of(tmp_path: Path, seconds: int, is_warned: bool) -> None:
    job = Job(tmp_path, seconds=seconds)
    assert job.wait() == 0 and len(job.lines()) == 1
    assert ("the time limit is 600 s" in job.output.read_text()) is is_warned


def test_address_of_another_cluster_is_not_passed_on(tmp_path: Path) -> None:
    job = Job(tmp_path, srun='echo "srun: ${RAY_ADDRESS-none}" >>"$LOG"')
    job.wait()
    assert job.lines() == ["srun: none"]


def test_job_fails_if_ray_does_not_start(tmp_path: Path) -> None:
    job = Job(tmp_path, srun="echo Failed to start Ray >&2")  # `ray symmetric-run` then returns 0
    assert job.wait() == 1 and job.lines() == []
    assert "slurm.sh: nothing was trained: Ray did not start" in job.output.read_text()


def test_name_that_no_resolver_knows_falls_back_to_the_nodes_first_address(tmp_path: Path) -> None:
    job = Job(tmp_path, getent="exit 2")
    assert job.wait() == 0, job.output.read_text()
    assert job.lines() == ["10.0.0.9:24711 train"]


def test_second_signal_before_the_time_limit_does_not_reach_the_driver(tmp_path: Path) -> None:
    job = Job(tmp_path, grpo_ray=WAITING)
    wait_for(lambda: job.lines() == ["waiting"], "the driver", LIMIT)
    job.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: job.lines() == ["waiting", "TERM"], "the driver's signal", LIMIT)
    job.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "USR1 again" in job.output.read_text(), "the script's answer", LIMIT)
    Path(f"{job.log}.end").touch()
    assert job.wait() == 143
    assert job.lines() == ["waiting", "TERM", "requeue 4711"]


@pytest.mark.parametrize(
    ("given", "restarts", "taken"),
    [
        (["a.yaml", "run.resume=never"], 0, ["a.yaml", "run.resume=never"]),
        (["a.yaml", "run.resume=never"], 1, ["a.yaml", "run.resume=never", "run.resume=latest"]),
        (["run.resume=best", "a.yaml"], 2, ["run.resume=best", "a.yaml", "run.resume=latest"]),
        (["stages.b.run.resume=never"], 1, ["stages.b.run.resume=never", "stages.b.run.resume=latest"]),
        (["a.yaml"], 1, ["a.yaml"]),
    ],
)
def test_requeued_job_continues_its_run(tmp_path: Path, given: list[str], restarts: int, taken: list[str]) -> None:
    job = Job(tmp_path, given, restarts=restarts)
    assert job.wait() == 0, job.output.read_text()
    assert job.lines() == [f"10.0.0.7:24711 train {' '.join(taken)}"]
