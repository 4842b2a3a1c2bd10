"""Tests of real runs with tokens of older weights: killed, stopped, resumed with other workers, and without a sync."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from faulty_runs import SETTINGS, outcome, same, start
from small_runs import REFERENCE, count_uses, events_of, groups_of, rows_of, small_settings, sorted_groups

from grpo_ray.errors import TrainingError
from grpo_ray.resilience.chaos import Fault
from grpo_ray.storage.records.open_rollouts import load_open_rollouts

VARIED = ["rewards.functions=['reward_spies:vary']", "heldout.score=correctness"]
"""A reward that depends on every token, so that every group has signal."""


def stale(staleness: int, workers: int = 2) -> list[str]:
    return [*SETTINGS, f"rollout.max_staleness={staleness}", f"cluster.num_workers={workers}", *VARIED]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_stale_run_killed_equals_run_without_faults(small_run: Callable[..., Any], staleness: int) -> None:
    # Checkpoints at steps 3, 6 and 9. In step 4 the engine is killed in the middle of a round.
    faults = [Fault("kill-backward", 2, 1), Fault("kill-generation", 4, 0), Fault("exception", 8, 1)]
    whole, killed = (
        outcome(small_run, name, struck, *stale(staleness)) for name, struck in (("whole", []), ("killed", faults))
    )
    assert len(events_of(killed["folder"], "training")) == 4
    same(killed, whole)
    rows = whole["rows"]
    assert max(row["engine/logprob_gap_mean"] for row in rows[:-1]) < 1e-4  # the last step samples nothing
    assert [row["rollout/staleness_0"] for row in rows] == [1.0] + [0.0] * 9  # no fence at checkpoints
    for age in range(1, staleness + 1):
        assert all(row[f"rollout/staleness_{age}"] > 0 for row in rows[staleness:])
    groups = whole["groups"]
    assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, 11), 4)
    epochs = count_uses(groups)
    assert [len(epochs[epoch]) for epoch in (0, 1, 2)] == [18, 18, 4]
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())


@pytest.mark.slow
def test_stale_run_of_one_and_of_two_workers_sample_the_same(small_run: Callable[..., Any]) -> None:
    one, two = (
        small_run(f"of-{workers}", *REFERENCE, "rollout.max_staleness=2", f"cluster.num_workers={workers}")[1]
        for workers in (1, 2)
    )
    assert max(row["rollout/segments_mean"] for row in rows_of(two)) > 1
    assert sorted_groups(one) == sorted_groups(two)


@pytest.mark.slow
def test_stale_run_stopped_and_resumed_with_two_workers_samples_the_same(
    policy: Path, tmp_path: Path, small_run: Callable[..., Any]
) -> None:
    # 6 problems in steps of 4: after any step, an epoch has just ended or ends in the next step.
    settings = [
        *stale(2, workers=1), "data.limit=6", "grpo.save_steps=10",
        "rewards.functions=['reward_spies:vary', 'reward_spies:wait']",
        "rewards.settings={'reward_spies:wait': {seconds: 1}}", "grpo.learning_rate=1e-5",
    ]  # fmt: skip
    _, whole = small_run("whole", *settings)
    overrides, folder = [*small_settings("stopped", tmp_path, policy), *settings], tmp_path / "stopped"
    path = os.environ["PYTHONPATH"]
    run = start(overrides, PYTHONPATH=path)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) >= 3, "three steps", 600)
    os.kill(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=600)
    stopped = len(rows_of(folder))
    assert 3 <= stopped < 9, output
    [checkpoint] = folder.glob("checkpoint-*")
    rollouts, _ = load_open_rollouts(checkpoint)
    assert {each.batch for each in rollouts} == {stopped, stopped + 1}
    run = start([*overrides, "cluster.num_workers=2"], PYTHONPATH=path)
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    assert [event["step"] for event in events_of(folder, "began")] == [0, stopped]
    assert "are discarded" not in output
    assert sorted_groups(folder) == sorted_groups(whole)
    groups = groups_of(folder)
    assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, 11), 4)
    epochs = count_uses(groups)
    assert [len(epochs[epoch]) for epoch in range(7)] == [6] * 6 + [4]
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())


@pytest.mark.slow
def test_stale_run_without_sync_raises(small_run: Callable[..., Any]) -> None:
    settings = [
        *SETTINGS, "rollout.max_staleness=2", "cluster.num_workers=2",
        "rewards.functions=['reward_spies:freeze_a_layer']", "heldout.score=correctness", "run.max_failures=0",
    ]  # fmt: skip
    with pytest.raises(TrainingError, match="SyncError"):
        small_run("frozen", *settings)
