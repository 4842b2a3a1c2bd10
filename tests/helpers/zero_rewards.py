"""Two rewards for `bench_overlap.py` that are always 0; the first one disables early verification."""

from typing import Any


def disable_early_verification(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return zeros; from the first call on, no verdict is started before all completions are generated."""
    from grpo_ray.learner.rollouts.sampler import SingleTurn

    SingleTurn.grade = lambda self, row, token_ids: None  # type: ignore[method-assign]
    return [0.0] * len(completions)


def zero_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return zeros."""
    return [0.0] * len(completions)
