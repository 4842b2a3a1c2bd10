"""Checks of the functions, files and folders that a config names, before anything is started.

They import none of the heavy libraries, so that a misspelled name fails at once.
"""

import os

from grpo_ray.config.schema import Config
from grpo_ray.data.registry import require_local_files
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.scores import heldout_scores
from grpo_ray.inference.rollout_function import load_rollout_function
from grpo_ray.rewards.registry import load_rewards
from grpo_ray.tools.definitions import require_importable


def check_functions(config: Config) -> None:
    """Load the rewards of a config, and what `check_scoring_and_turns` loads.

    Raises:
        ConfigError: a tool, an environment or the rollout function cannot be loaded.
        RewardError: a reward cannot be loaded.
    """
    load_rewards(config.rewards)
    check_scoring_and_turns(config)


def check_scoring_and_turns(config: Config) -> None:
    """Load the held-out score of a config, its tools, environments and rollout function; raises as `check_functions`.

    Measuring a checkpoint uses them too, but not all of the run's rewards.
    """
    heldout_scores(config)
    require_importable(config.rollout)
    if config.rollout.function is not None:
        load_rollout_function(config.rollout)


def require_files(config: Config, *, has_policy: bool = True) -> None:
    """Find the local files of the problems and the folder of the policy, without reading them.

    Args:
        has_policy: False if `model.path` is not the policy that the run begins with, as in a later stage.

    Raises:
        ConfigError: the policy's folder does not exist.
        DataError: a dataset has no files.
    """
    require_local_files(config)
    path = config.model.path
    if has_policy and os.path.isabs(path) and not os.path.isdir(path):
        raise ConfigError(f"model.path={path}: there is no such folder")
