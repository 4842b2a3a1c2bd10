"""Tests of the table of built-in rewards against the tables of the config, which imports none of them."""

from grpo_ray.config.reward_names import SOLUTION_REWARDS
from grpo_ray.rewards.registry import REWARDS, _requires_solution


def test_rewards_that_require_a_solution_are_named_in_the_config() -> None:
    # Otherwise rows without a solution would be accepted, and the reward would get None for them.
    assert {name for name, function in REWARDS.items() if _requires_solution(function)} == set(SOLUTION_REWARDS)
