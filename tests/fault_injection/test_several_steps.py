"""Test of several optimizer steps from one generation in a real run: without faults, killed between them, and alone."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from faulty_runs import outcome_of, same
from small_runs import assert_near, count_uses, events_of, sorted_groups

from grpo_ray.resilience.chaos import Fault


@pytest.mark.slow
def test_several_steps_run_killed_or_alone_takes_the_same_steps(small_run: Callable[..., Any]) -> None:
    settings = [
        # Four steps on each batch of 8 problems; there are 10, so that epochs of the data end inside batches.
        "grpo.steps_per_generation=2", "grpo.epochs=2", "grpo.max_steps=12", "grpo.save_steps=4",
        "grpo.learning_rate=1e-4", "data.limit=10", "data.heldout_limit=4",
        "rewards.functions=[correctness, 'reward_spies:vary']", "run.max_failures=9",
    ]  # fmt: skip
    _, folder = small_run("whole", *settings)
    whole, groups = outcome_of(folder), sorted_groups(folder)
    assert [row["step"] for row in whole["rows"]] == list(range(1, 13))
    assert all({"learner/loss", "learner/gradient_norm"} <= row.keys() for row in whole["rows"])
    # Rewards, and the proof of the sync, belong to the first step on a batch.
    for name in ("reward/mean", "engine/logprob_gap_max"):
        assert [row["step"] for row in whole["rows"] if name in row] == [1, 5, 9], name
    assert all(row["engine/logprob_gap_max"] < 1e-4 for row in whole["rows"][::4])
    assert Counter(group["step"] for group in groups) == dict.fromkeys((1, 5, 9), 8)
    epochs = count_uses(groups)
    assert [len(epochs[epoch]) for epoch in range(3)] == [10, 10, 4]
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())

    faults = [Fault("kill-backward", 3, 0), Fault("kill-backward", 8, 1)]  # in the middle of the first two batches
    _, killed = small_run("killed", *settings, faults=faults)
    assert [event["step"] for event in events_of(killed, "began")] == [0, 0, 4]
    same(outcome_of(killed), whole)

    _, alone = small_run("alone", *settings, "cluster.num_workers=1")
    assert sorted_groups(alone) == groups
    assert_near(outcome_of(alone)["weights"], whole["weights"])
