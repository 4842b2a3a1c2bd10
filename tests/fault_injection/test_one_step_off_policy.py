"""Tests of real one-step-off-policy runs: killed, stopped between checkpoints, and without weight sync."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from faulty_runs import SETTINGS, outcome, same, start
from small_runs import count_uses, events_of, groups_of, rows_of, small_settings

from grpo_ray.errors import TrainingError
from grpo_ray.resilience.chaos import Fault

OFF_POLICY = [*SETTINGS, "grpo.generate_ahead=true", "cluster.num_workers=2"]


@pytest.mark.slow
def test_one_step_off_policy_run_killed_equals_run_without_faults(small_run: Callable[..., Any]) -> None:
    # Checkpoints at steps 3, 6 and 9. In step 4 the engine is killed while its thread generates for step 5.
    faults = [Fault("kill-backward", 2, 1), Fault("kill-generation", 4, 0), Fault("exception", 8, 1)]
    # A reward with signal in every group, and a trust region so narrow that weights one step newer are outside.
    settings = [
        *OFF_POLICY,
        "rewards.functions=['reward_spies:vary']",
        "heldout.score=correctness",
        "grpo.epsilon=0.001",
    ]
    whole, killed = (
        outcome(small_run, name, struck, *settings) for name, struck in (("whole", []), ("killed", faults))
    )
    assert len(events_of(killed["folder"], "training")) == 4
    same(killed, whole)
    rows = whole["rows"]
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 1e-4
    # Only the first step and those after a checkpoint are on-policy.
    on_policy = [row["step"] for row in rows if row["policy/clipped_share"] == 0]
    assert on_policy == [1, 4, 7, 10]
    groups = whole["groups"]
    assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, 11), 4)
    epochs = count_uses(groups)
    assert [len(epochs[epoch]) for epoch in (0, 1, 2)] == [18, 18, 4]
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())


@pytest.mark.slow
def test_one_step_off_policy_run_resumed_uses_problems_once(policy: Path, tmp_path: Path) -> None:
    # 6 problems in steps of 4: after any step, an epoch has just ended or ends in the next step.
    overrides = [
        *small_settings("stopped", tmp_path, policy), *OFF_POLICY, "data.limit=6", "grpo.save_steps=10",
        "rewards.functions=['correctness', 'reward_spies:wait']",
        "rewards.settings={'reward_spies:wait': {seconds: 1}}",
    ]  # fmt: skip
    folder = tmp_path / "stopped"
    path = os.environ["PYTHONPATH"]
    run = start(overrides, PYTHONPATH=path)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) >= 3, "three steps", 600)
    os.kill(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=600)
    stopped = len(rows_of(folder))
    assert 3 <= stopped < 10, output
    run = start(overrides, PYTHONPATH=path)
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    assert [event["step"] for event in events_of(folder, "began")] == [0, stopped]
    groups = groups_of(folder)
    assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, 11), 4)
    epochs = count_uses(groups)
    assert [len(epochs[epoch]) for epoch in range(7)] == [6] * 6 + [4]
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())


@pytest.mark.slow
def test_one_step_off_policy_run_without_sync_raises(small_run: Callable[..., Any]) -> None:
    settings = [
        *OFF_POLICY,
        "rewards.functions=['reward_spies:freeze_a_layer']",
        "heldout.score=correctness",
        "run.max_failures=0",
    ]
    with pytest.raises(TrainingError, match="SyncError"):
        small_run("frozen", *settings)
