"""Tests of drivers: two of one run, one whose process group is signalled, and one that loses its cluster."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from faulty_runs import same, start, undisturbed
from gated_runs import Gates, gated_settings, outcome_without_gates
from process_watch import descendants, is_running
from small_runs import rows_of, small_settings

LONG = 600.0
"""Time limit for an event on a busy machine, seconds."""
ENDLESS = ["grpo.max_steps=5000", "grpo.save_steps=5000"]
"""Settings of a run that trains until it is stopped, and saves nothing before."""


def has_taken(folder: Path, step: int) -> Callable[[], bool]:
    """Return the condition that a run has logged a step."""
    return lambda: (folder / "metrics.jsonl").exists() and rows_of(folder)[-1]["step"] >= step


def output_of(run: subprocess.Popen[str], status: int) -> str:
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == status, output
    return output


@pytest.mark.slow
def test_group_sigterm_step_is_saved_and_run_resumes(policy: Path, tmp_path: Path) -> None:
    overrides = small_settings("stopped", tmp_path, policy)
    run = start([*overrides, *ENDLESS], own_group=True)
    wait_for(has_taken(tmp_path / "stopped", 2), "step 2", LONG)
    processes = [process for process, _ in descendants(run.pid)]
    os.killpg(run.pid, signal.SIGTERM)
    output = output_of(run, 128 + signal.SIGTERM)
    stopped = re.search(r"stopped after step (\d+) by SIGTERM; run the same command to continue", output)
    assert stopped and "the run stops once the current step is finished and saved" in output, output
    step = int(stopped[1])
    assert (tmp_path / "stopped" / f"checkpoint-{step:06d}" / "manifest.json").exists()
    assert "lost" not in output and "GCS" not in output
    wait_for(lambda: not any(map(is_running, processes)), "the end of the cluster's processes")
    again = output_of(start([*overrides, f"grpo.max_steps={step + 1}"]), 0)
    assert f"resuming from checkpoint-{step:06d}" in again


@pytest.mark.slow
@pytest.mark.parametrize(("held", "status"), [(3, 128 + signal.SIGINT), (10, 0)], ids=["regular", "last"])
def test_stop_at_a_measured_step_leaves_no_checkpoint_unmeasured(
    held: int, status: int, small_run: Callable[..., Any], policy: Path, tmp_path: Path
) -> None:
    """The stopped run saves its step without measuring it. It is measured at the next start, or at the end."""
    folder, gates = tmp_path / "stopped", Gates(tmp_path / "gates", [held])
    overrides = gated_settings("stopped", tmp_path, policy, gates)
    run = start(overrides)
    assert run.stdout is not None
    wait_for(lambda: gates.reached(held, workers=2), "the gate", LONG)
    os.kill(run.pid, signal.SIGINT)
    for line in run.stdout:
        if "the run stops once the current step is finished and saved" in line:
            break
    gates.open(held)
    output_of(run, status)
    if status:
        output_of(start(overrides), 0)
    same(outcome_without_gates(folder), undisturbed(small_run))


@pytest.mark.slow
def test_second_driver_is_refused_and_takeover_stops_first(policy: Path, tmp_path: Path) -> None:
    overrides = small_settings("shared", tmp_path, policy)
    folder = tmp_path / "shared"
    first = start([*overrides, *ENDLESS])
    wait_for(has_taken(folder, 1), "step 1", LONG)
    config, rows = (folder / "config.yaml").read_bytes(), len(rows_of(folder))
    refused = output_of(start([*overrides, "run.resume=never", "grpo.max_steps=6"]), 2)
    print(refused)
    assert f"pid {first.pid}, since " in refused and "(its process is alive)" in refused
    assert (folder / "config.yaml").read_bytes() == config and not (tmp_path / "shared.1").exists()
    assert first.poll() is None and len(rows_of(folder)) >= rows
    takeover = re.search(r"run\.takeover=(driver-\w+)", refused)
    assert takeover
    second = start([*overrides, takeover[0], "grpo.max_steps=3"])
    ended = output_of(first, 2)
    print(ended[-400:])
    assert f"another driver has taken the run over: host {os.uname().nodename}, pid {second.pid}, since" in ended
    assert "taking the run over from its driver" in output_of(second, 0)
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3]


@pytest.mark.slow
def test_lost_cluster_is_reported_at_once(policy: Path, tmp_path: Path) -> None:
    overrides = small_settings("lost", tmp_path, policy)
    run = start([*overrides, *ENDLESS])
    wait_for(has_taken(tmp_path / "lost", 2), "step 2", LONG)
    processes = dict(descendants(run.pid))
    (raylet,) = [process for process, name in processes.items() if "raylet/raylet" in name]
    os.kill(raylet, signal.SIGKILL)
    killed_at = time.monotonic()
    output = output_of(run, 1)
    print(f"ended after {time.monotonic() - killed_at:.1f} s", output[-400:])
    assert "the Ray cluster was lost: its process raylet has ended; steps since the last checkpoint are lost" in output
    assert "run the same command again to resume from the start" in output
    wait_for(lambda: not any(map(is_running, processes)), "the end of the cluster's processes")
