"""Runs whose own reward fails, in a process of its own."""

from collections.abc import Callable
from typing import Any

import pytest
from faulty_runs import outcome_of, same
from small_runs import FinishedRun, events_of, groups_of, rows_of

from grpo_ray.resilience.chaos import Fault

OPTIONS = (
    "rewards.functions=['failing_rewards:Moody', 'reward_spies:vary']", "rewards.isolate=true",
    "grpo.reward_weights=[10, 1]", "grpo.max_steps=4", "grpo.save_steps=2", "heldout.score=correctness",
    "run.max_failures=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(module_run: Callable[..., Any]) -> FinishedRun:
    """An undisturbed run."""
    return FinishedRun(*module_run("whole", *OPTIONS))


def test_run_goes_on_where_its_reward_fails(whole: FinishedRun) -> None:
    shares = [row["reward/failed_share"] for row in rows_of(whole.folder)]
    assert len(shares) == 4 and 0 < sum(shares) / 4 < 1
    groups = groups_of(whole.folder)
    kinds = {int(group["problem"], 16) % 4 for group in groups}
    assert kinds & {0, 1} and kinds & {2, 3}
    for group in groups:  # without the reward that fails, what is left is at most 1
        assert (max(group["rewards"]) <= 1) == (int(group["problem"], 16) % 4 < 2)


@pytest.mark.slow
def test_run_goes_on_where_its_reward_fails_and_is_exact_when_killed(
    whole: FinishedRun, small_run: Callable[..., Any]
) -> None:
    _, killed = small_run("killed", *OPTIONS, faults=[Fault("kill-backward", step=3)])
    assert [event["step"] for event in events_of(killed, "began")] == [0, 2]
    same(outcome_of(killed), outcome_of(whole.folder))
