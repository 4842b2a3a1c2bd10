"""Tests of the reward that an environment gives."""

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.errors import RewardError
from grpo_ray.rewards.environment import COLUMN
from grpo_ray.rewards.registry import load_reward

ENVIRONMENT = "rollout.environment=package.games:Guess"


def test_environment_reward_returns_the_column_of_the_learner() -> None:
    assert load_reward("environment")(completions=["a", "b", "c"], **{COLUMN: [0.5, None, 2.0]}) == [0.5, None, 2.0]


def test_environment_reward_without_an_environment_says_what_to_set() -> None:
    with pytest.raises(RewardError, match=r"rollout\.environment"):
        load_reward("environment")(completions=["a"])


def test_heldout_completions_are_scored_by_the_environment_only_without_correctness() -> None:
    both = load_config(None, [ENVIRONMENT, "rewards.functions=[environment, correctness]"])
    alone = load_config(None, [ENVIRONMENT, "rewards.functions=[environment]"])
    assert both.heldout_score == "correctness" and both.needs_solutions
    assert alone.heldout_score == "environment" and not alone.needs_solutions
