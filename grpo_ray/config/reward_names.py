"""Entries of `rewards.functions`: built-in names, `package.module:function`, and reward models."""


def is_reward_model(name: str) -> bool:
    """Return True if an entry of `rewards.functions` is a reward model: a folder or a hub id, with a slash."""
    return "/" in name and ":" not in name


def reward_name(function: str) -> str:
    """Return the name of a reward function as it appears in its metrics.

    Args:
        function: an entry of `rewards.functions`: a built-in name, `package.module:function`, or a reward model.
    """
    return function.rpartition(":")[2].rpartition("/")[2]
