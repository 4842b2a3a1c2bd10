"""The `environment` reward: the value that a completion's environment returned from `get_reward`."""

from collections.abc import Sequence
from typing import Any

from grpo_ray.errors import RewardError

COLUMN = "environment_reward"
"""Column in which the learner passes the environments' rewards to reward functions."""


def environment_reward(
    completions: Sequence[Any], environment_reward: Sequence[float | None] | None = None, **kwargs: Any
) -> list[float | None]:
    """Reward each completion with the value that its environment returned from `get_reward`.

    Args:
        environment_reward: (B,) the environments' rewards; None where an environment failed or was lost.

    Returns:
        One reward per row; None where the environment has none.

    Raises:
        RewardError: No environment has scored the completions.
    """
    if environment_reward is None:
        raise RewardError(
            "rewards.functions has `environment`, but no environment has scored the completions; set "
            "rollout.environment to a class with a method get_reward"
        )
    return list(environment_reward)
