"""Entries of `rewards.functions`: built-in names, `package.module:function`, and reward models; and `heldout.score`."""

from collections.abc import Collection

SOLUTION_REWARDS = ("correctness", "cosine_length", "choice")
"""Built-in rewards that require a solution of each problem."""


def is_reward_model(name: str) -> bool:
    """Return True if an entry of `rewards.functions` is a reward model: a folder or a hub id, with a slash."""
    return "/" in name and ":" not in name


def is_own_reward(name: str) -> bool:
    """Return True if an entry of `rewards.functions` is not built in: a function or class of the user, or a model."""
    return ":" in name or is_reward_model(name)


def reward_name(function: str) -> str:
    """Return the name of a reward function as it appears in its metrics.

    Args:
        function: an entry of `rewards.functions`: a built-in name, `package.module:function`, or a reward model.
    """
    return function.rpartition(":")[2].rpartition("/")[2]


REWARD_SCORES = ("choice", "code_tests")
"""Built-in values of `heldout.score` that are rewards, with settings in `rewards.settings`."""

SCORES = ("correctness", "environment", "reward", *REWARD_SCORES)
"""Built-in values of `heldout.score`."""

VERDICTS = ("correctness", *REWARD_SCORES)
"""Scores that judge a completion as right or wrong."""

MAX_ENDED_PROCESSES = 3
"""Number of processes of an isolated reward that may end while its failed call is repeated problem by problem; the
remaining problems then get no reward."""


def derived_score(functions: Collection[str]) -> str:
    """Return the score of held-out completions where `heldout.score` is null.

    Args:
        functions: `rewards.functions`.
    """
    return next((name for name in ("correctness", "environment") if name in functions), "reward")


def score_noun(score: str) -> str:
    """Return the word for the mean of a score over held-out completions: "accuracy" or "score"."""
    return "accuracy" if score in VERDICTS else "score"
