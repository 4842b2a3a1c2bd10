"""Tests of runs with injected faults: they end with the same result as a run without faults."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import outcome, same, undisturbed
from small_runs import events_of, rows_of, small_settings

from grpo_ray.cli import main
from grpo_ray.errors import ConfigError, TrainingError
from grpo_ray.resilience.chaos import FAULT_KINDS, Fault, plan_faults


@pytest.mark.slow
def test_killed_worker_in_any_phase_loses_nothing(small_run: Callable[..., Any]) -> None:
    faults = [
        Fault("kill-generation", step=2, rank=1),  # before the first checkpoint
        Fault("kill-backward", step=5, rank=0),  # in the step in which an epoch ends
        Fault("kill-upload", step=6, rank=1),
        Fault("kill-commit", step=9, rank=0),
        Fault("kill-commit", step=10, rank=0),  # the last step: the next attempt has no step left
    ]
    killed = outcome(small_run, "killed", faults)
    same(killed, undisturbed(small_run))
    assert len(events_of(killed["folder"], "failed")) == 5
    starts = [event["step"] for event in events_of(killed["folder"], "began")]
    # The checkpoint of step 9 was complete, although it was not reported to Ray Train.
    assert starts == [0, 0, 3, 3, 9, 10]
    assert not list(killed["folder"].glob("*.part"))


@pytest.mark.slow
def test_damaged_checkpoints_errors_and_hangs_lose_nothing(small_run: Callable[..., Any]) -> None:
    faults = [
        Fault("exception", step=2, rank=1),
        Fault("storage-error", step=3, rank=0),
        Fault("hang", step=5, rank=0),
        Fault("torn-checkpoint", step=7, rank=0),
        Fault("flipped-byte", step=10, rank=0),
    ]
    broken = outcome(small_run, "broken", faults)
    same(broken, undisturbed(small_run))
    folder = broken["folder"]
    assert [event["step"] for event in events_of(folder, "began")] == [0, 0, 3, 3, 6]
    lines = [events_of(folder, kind) for kind in ("notice", "damaged_checkpoint")]
    notices = "\n".join(event["what"] for events in lines for event in events)
    assert "storage cannot be reached" in notices and "storage is back" in notices
    truncated = r"checkpoint-000006 is damaged: \S+ has \d+ of \d+ bytes; resuming from checkpoint-000003"
    assert re.search(truncated, notices)
    assert re.search(r"checkpoint-000009 is damaged: \S+ was altered; resuming from checkpoint-000006", notices)
    assert not any((path / "manifest.json").exists() for path in folder.glob("*/damaged.json"))
    # A new name, because Ray may still delete a checkpoint of the old name.
    names = {row["step"]: row["checkpoint"] for row in rows_of(folder) if "checkpoint" in row}
    assert names == {
        3: "checkpoint-000003", 6: "checkpoint-000006.2", 9: "checkpoint-000009.2", 10: "checkpoint-000010"
    }  # fmt: skip
    assert (folder / "checkpoint-000006.2" / "manifest.json").exists()
    # Stacks of the worker that hung and of the one that waited for it.
    hangs = [event["what"] for event in events_of(folder, "hang")]
    assert hangs and all(re.search(r"hangs: no worker made progress.*raise run\.hang_seconds", text) for text in hangs)
    assert "_sleep_forever" in (folder / "logs" / "stacks-worker-0.txt").read_text()
    assert (folder / "logs" / "stacks-worker-1.txt").exists()


@pytest.mark.slow
def test_non_finite_steps_are_skipped_and_too_many_stop_the_run(small_run: Callable[..., Any]) -> None:
    summary, folder = small_run("skipped", faults=[Fault("non-finite", step=2)])
    assert [row.get("learner/skipped_steps", 0) for row in rows_of(folder)] == [0, 1, 1, 1]
    assert summary.steps == 4
    faults = [Fault("non-finite", step) for step in (1, 2, 3)]
    message = r"NonFiniteError: step 3: loss.* not finite in 3 consecutive steps"
    with pytest.raises(TrainingError, match=message) as caught:
        small_run("stopped", "run.max_bad_steps=2", "run.max_failures=5", faults=faults)
    (saved,) = (folder.parent / "stopped" / "bad_numbers").glob("step-000003-worker-0.json")
    assert str(saved) in str(caught.value)
    group = json.loads(saved.read_text())[0]
    assert len(group["completions"]) == len(group["rewards"]) == 4 and len(group["problem"]) == 16


@pytest.mark.slow
def test_same_error_at_the_same_step_ends_the_run(small_run: Callable[..., Any]) -> None:
    settings = [
        "rewards.functions=['reward_spies:fail_always']",
        "heldout.score=correctness",
        "rewards.settings={'reward_spies:fail_always': {step: 2}}",
    ]
    with pytest.raises(TrainingError, match=r"same error at step 2") as caught:
        small_run("bug", *settings, "run.max_failures=50")
    assert "in fail_always" in str(caught.value) and "KeyError: 'a bug'" in str(caught.value)


def test_chaos_command_unknown_fault_is_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", f"run.storage_path={tmp_path}", "--faults", "earthquake"]) == 2
    assert capsys.readouterr().err.startswith("grpo-ray: unknown fault: earthquake; choose from kill-generation, ")
    arguments = ["grpo.max_steps=9", "grpo.save_steps=5", "--faults", "torn-checkpoint"]
    assert main(["chaos", f"run.storage_path={tmp_path}", *arguments]) == 2
    assert "torn-checkpoint needs two earlier checkpoints" in capsys.readouterr().err


def test_chaos_command_lists_outcome_of_each_fault(
    cluster: None, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*small_settings("try", tmp_path, policy), "grpo.max_steps=7", "grpo.save_steps=3"]
    command = ["chaos", *settings, "--seed", "3", "--faults", "kill-backward,storage-error,non-finite"]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "nothing was lost; no problems were used twice in an epoch" in output
    assert output.count("training again after") == 1 and output.count("training continued") == 2
    assert main(command) == 2
    assert "a run gets its faults only once; set another --seed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["kill-generation", "hang"])
def test_plan_faults_of_generation_are_in_the_first_step_on_a_batch(kind: str) -> None:
    steps = {plan_faults(seed, [kind], 30, 10, 2, steps_per_batch=5)[0].step for seed in range(50)}
    assert steps == {1, 6, 11, 16, 21, 26}


def test_plan_faults_is_determined_by_seed() -> None:
    first = plan_faults(7, list(FAULT_KINDS), max_steps=30, save_steps=10, workers=2)
    assert first == plan_faults(7, list(FAULT_KINDS), max_steps=30, save_steps=10, workers=2)
    assert first != plan_faults(8, list(FAULT_KINDS), max_steps=30, save_steps=10, workers=2)
    assert {fault.kind for fault in first} == set(FAULT_KINDS)
    for fault in first:
        assert 1 <= fault.step <= 30 and fault.rank in (0, 1)
    with pytest.raises(ConfigError, match="unknown fault: earthquake"):
        plan_faults(0, ["earthquake"], 10, 5, 2)
