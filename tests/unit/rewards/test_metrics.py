"""Tests of the names of metrics that rewards record."""

from typing import Any

import pytest

from grpo_ray.errors import RewardError
from grpo_ray.rewards.metrics import reward_metric


@pytest.mark.parametrize(("name", "value"), [("steps", 7), ("reward/steps", 7.0), ("reward/verifier_timeouts", True)])
def test_reward_metric_gets_prefix_once(name: str, value: Any) -> None:
    assert reward_metric(name, value, ["short"]) == ("reward/" + name.removeprefix("reward/"), float(value))


@pytest.mark.parametrize(
    "name", ["mean", "reward/std", "short_mean", "reward/short_std", "verifier_timeouts", "unscorable_share"]
)
def test_reward_metric_name_of_the_run_raises(name: str) -> None:
    with pytest.raises(RewardError, match="is a metric of the run itself; choose another name"):
        reward_metric(name, 1.0, ["short"])


@pytest.mark.parametrize("name", ["", "reward/", None, 3])
def test_reward_metric_no_name_raises(name: Any) -> None:
    with pytest.raises(RewardError, match="the name must be a text"):
        reward_metric(name, 1.0, [])


def test_reward_metric_no_number_raises() -> None:
    with pytest.raises(RewardError, match="the value of 'x' must be a number; got 'much'"):
        reward_metric("x", "much", [])
