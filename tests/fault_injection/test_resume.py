"""Tests of resume after faults of driver, storage and signals, and with other worker counts and datasets."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_storage import CREDENTIALS, Proxy, S3Server, small_disk, wait_for
from faulty_runs import SETTINGS, outcome_of, same, start, undisturbed
from small_runs import count_uses, events_of, groups_of, rows_of, small_settings

from grpo_ray.errors import ConfigError
from grpo_ray.resilience.chaos import Fault
from grpo_ray.storage.records.heldout_files import read_measurements
from grpo_ray.storage.run_folder import RunFolder

LONG = 600.0
"""Time limit for an event on a busy machine, seconds."""


def output_at_end(run: subprocess.Popen[str], status: int) -> str:
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == status, output
    return output


def reached_hang(folder: Path, step: int) -> Callable[[], bool]:
    """Return the condition that a run has reached its fault `hang`."""
    return (folder / "chaos" / Fault("hang", step).marker).exists


@pytest.mark.slow
def test_killed_driver_same_command_resumes(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    whole = undisturbed(small_run)
    overrides = [*small_settings("killed", tmp_path, policy), *SETTINGS]
    folder = tmp_path / "killed"
    run = start(overrides, [Fault("hang", step=5)])  # stops the run in the middle on any machine
    wait_for(reached_hang(folder, 5), "step 5", LONG)
    wait_for((folder / "checkpoint-000003" / "manifest.json").exists, "the checkpoint of step 3", LONG)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    output = output_at_end(start(overrides), 0)
    assert "resuming from checkpoint-000003" in output
    same(outcome_of(folder), whole)
    assert [event["step"] for event in events_of(folder, "began")] == [0, 3]


@pytest.mark.slow
def test_full_disk_stops_run_and_loses_nothing(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    whole = undisturbed(small_run)
    files = [path for path in Path(whole["folder"], "checkpoint-000010").rglob("*") if path.is_file()]
    checkpoint_bytes = sum(file.stat().st_size for file in files)
    # Enough for one checkpoint, not for two.
    with small_disk(tmp_path / "disk", f"{checkpoint_bytes * 3 // 2 // 1024 + 200}k") as disk:
        overrides = [*small_settings("full", disk, policy), *SETTINGS, "run.storage_retry_seconds=3"]
        output = output_at_end(start(overrides), 1)
        assert "storage cannot be written (No space left on device); trying again for 3 s" in output
        assert "checkpoint-000006 could not be written" in output and "the same command goes on from there" in output
        assert "Traceback" not in output
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert "resuming from checkpoint-000003" in output_at_end(start(overrides), 0)
        same(outcome_of(disk / "full"), whole)


@pytest.mark.slow
def test_storage_outage_of_30_seconds_is_survived(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = undisturbed(small_run)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with S3Server() as s3, Proxy(s3.port) as proxy:
        direct = RunFolder(s3.storage_path, "far")
        overrides = [*small_settings("far", proxy.storage_path, policy), *SETTINGS]
        # The hang leaves time to disconnect the storage after the first checkpoint.
        run = start(overrides, [Fault("hang", step=5)])
        wait_for(lambda: direct.exists("checkpoint-000003", "manifest.json"), "the checkpoint of step 3", LONG)
        wait_for(lambda: direct.exists("chaos", Fault("hang", 5).marker), "step 5", LONG)
        proxy.disconnect()
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(timeout=30)
        proxy.restore()
        output_at_end(run, 0)
        fetched = Path(direct.fetch())
        same(outcome_of(fetched), whole)
        assert [event["step"] for event in events_of(fetched, "began")] == [0, 3]


@pytest.mark.slow
def test_worker_count_may_change_between_launches(small_run: Callable[..., Any]) -> None:
    whole = undisturbed(small_run)
    for workers, steps in ((1, 3), (4, 7), (2, 10)):
        _, folder = small_run("counts", *SETTINGS, f"cluster.num_workers={workers}", f"grpo.max_steps={steps}")
    assert [event["workers"] for event in events_of(folder, "began")] == [1, 4, 2]
    groups = groups_of(folder)
    # The same problems in the same steps; completions may differ through rounding of the weights.
    assert [(g["step"], g["epoch"], g["problem"]) for g in groups] == [
        (g["step"], g["epoch"], g["problem"]) for g in whole["groups"]
    ]
    assert all(count == 1 for epoch in count_uses(groups).values() for count in epoch.values())


@pytest.mark.slow
def test_dataset_reordered_resumes_and_changed_is_refused(small_run: Callable[..., Any], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"prompt": f"What is {n} + 5?", "solution": f"${n + 5}$"}) for n in range(10)]
    (data / "a.jsonl").write_text("\n".join([*lines, lines[3], lines[3]]))  # one problem occurs three times
    settings = [f"data.train={data}", "data.heldout=arithmetic", "grpo.save_steps=2"]
    small_run("moved", *settings, "grpo.max_steps=2")
    (data / "a.jsonl").write_text("\n".join(lines[7:]))
    (data / "b.jsonl").write_text("\n".join(reversed(lines[:7])))
    _, folder = small_run("moved", *settings, "grpo.max_steps=4")
    first, second = (count_uses(groups_of(folder))[epoch] for epoch in (0, 1))
    assert len(first) == 10 and set(first.values()) == {1}
    assert len(second) == 6 and set(second.values()) == {1}  # 4 steps of 4 are 16

    (data / "a.jsonl").write_text("\n".join([*lines[7:9], json.dumps({"prompt": "What is 1 + 1?", "solution": "$2$"})]))
    with pytest.raises(ConfigError, match=r"data\.train=.* has changed .*10 problems as before, but not the same ones"):
        small_run("moved", *settings, "grpo.max_steps=6")
    small_run("moved", *settings, "grpo.max_steps=6", "data.accept_changes=true")
    second = count_uses(groups_of(folder))[1]
    assert set(second.values()) == {1} and len(second) >= 10


@pytest.mark.slow
def test_curriculum_after_resume_is_unchanged(small_run: Callable[..., Any]) -> None:
    settings = [*SETTINGS, "data.limit=12", "data.skip_solved=1", "data.prefer_mixed=true"]
    _, whole = small_run("curriculum", *settings)
    faults = [Fault("kill-backward", step=5), Fault("kill-generation", step=8)]
    _, killed = small_run("curriculum-killed", *settings, faults=faults)
    same(outcome_of(killed), outcome_of(whole))
    groups, num_preferred = groups_of(whole), 0
    for epoch in (1, 2):
        verdicts: dict[str, list[float]] = {}
        for group in groups:
            if group["epoch"] < epoch:
                verdicts.setdefault(group["problem"], []).extend(group["correct"])
        mixed = {problem for problem, correct in verdicts.items() if 0 < sum(correct) < len(correct)}
        step_of = {group["problem"]: group["step"] for group in groups if group["epoch"] == epoch}
        steps = [step_of[problem] for problem in mixed if problem in step_of]
        num_preferred += len(steps)
        # The first steps of the epoch, 4 problems each; one step more if the epoch begins within a step.
        assert not steps or max(steps) <= min(step_of.values()) + -(-len(steps) // 4)
    assert num_preferred, "no problem has mixed verdicts, so the test shows nothing"


@pytest.mark.slow
def test_second_ctrl_c_ends_at_once_and_run_resumes(policy: Path, tmp_path: Path) -> None:
    overrides = small_settings("stopped", tmp_path, policy)
    folder = tmp_path / "stopped"
    run = start(overrides, [Fault("hang", step=3)])  # this step never finishes
    wait_for(reached_hang(folder, 3), "step 3", LONG)
    os.kill(run.pid, signal.SIGINT)
    assert run.stdout is not None
    assert any("send the signal again to stop immediately" in line for line in run.stdout)
    os.kill(run.pid, signal.SIGINT)
    run.communicate(timeout=LONG)
    output = output_at_end(start(overrides), 0)
    assert "resuming from checkpoint-000002" in output
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_background_evaluation_ranks_checkpoints(small_run: Callable[..., Any]) -> None:
    summary, folder = small_run("beside", "run.measure=background", "data.heldout_limit=200")
    rows = {row["step"]: row for row in rows_of(folder)}
    for step in (2, 4):
        name = rows[step]["checkpoint"]
        measured = json.loads((folder / name / "measured.json").read_text())
        assert measured["measured_on"]["heldout"]["count"] == 200
        metrics = measured["metrics"]
        assert metrics["heldout/low"] <= metrics["heldout/accuracy"] <= metrics["heldout/high"]
        assert rows[step]["heldout/accuracy"] == metrics["heldout/accuracy"]
    records = read_measurements(RunFolder(str(folder.parent), folder.name), "heldout")
    assert [(each.file.step, each.policy) for each in records] == [
        (0, ""), (2, rows[2]["checkpoint"]), (4, rows[4]["checkpoint"]),
    ]  # fmt: skip
    assert float(records[2].accuracy.mean()) == pytest.approx(rows[4]["heldout/accuracy"])
    best = max((2, 4), key=lambda step: (rows[step]["heldout/accuracy"], -step))
    assert Path(summary.best_checkpoint).name == rows[best]["checkpoint"]
    assert summary.heldout_after == rows[best]["heldout/accuracy"]
