"""Test of dynamic sampling in a real run: without faults, with killed workers, and with one worker."""

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from faulty_runs import outcome_of, same
from small_runs import count_uses, events_of

from grpo_ray.resilience.chaos import Fault


@pytest.mark.slow
def test_dynamic_sampling_run_killed_or_alone_uses_problems_once(small_run: Callable[..., Any]) -> None:
    settings = [
        "grpo.dynamic_sampling=2", "grpo.max_steps=6", "grpo.save_steps=2", "data.limit=18", "data.heldout_limit=4",
        "rewards.functions=['reward_spies:half_signal']", "heldout.score=correctness", "run.max_failures=9",
    ]  # fmt: skip
    _, folder = small_run("whole", *settings)
    whole = outcome_of(folder)
    rounds = [row["group/rounds"] for row in whole["rows"]]
    assert set(rounds) == {2.0, 3.0}, rounds  # determined by half_signal and the ids of the problems
    drawn: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    for group in whole["groups"]:
        drawn[group["step"]] += 1
        trained[group["step"]] += group["trained"]
        if len(set(group["rewards"])) > 1:  # without signal only if all groups with signal are in the step
            assert group["trained"] or whole["rows"][group["step"] - 1]["group/signal_share"] == 1.0
    assert [drawn[step] for step in range(1, 7)] == [4 * count for count in rounds]
    assert trained == dict.fromkeys(range(1, 7), 4)
    epochs = count_uses(whole["groups"])
    assert len(epochs) >= 3  # epochs end inside steps
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())
    assert all(len(epochs[epoch]) == 18 for epoch in sorted(epochs)[:-1])

    faults = [Fault("kill-backward", 3, 0), Fault("kill-generation", 5, 1)]
    _, folder = small_run("killed", *settings, faults=faults)
    assert len(events_of(folder, "failed")) == 2
    same(outcome_of(folder), whole)

    _, folder = small_run("alone", *settings, "cluster.num_workers=1")
    facts = operator.itemgetter("step", "epoch", "problem", "trained")
    assert list(map(facts, outcome_of(folder)["groups"])) == list(map(facts, whole["groups"]))
