"""Two rewards that are always 0, for `bench_overlap.py`; to use the first keeps verdicts from being begun ahead."""

from typing import Any


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Nothing, and from the first call on no verdict is begun before all completions are there."""
    from grpo_ray.training.learner import Learner

    Learner._judge_ahead = lambda self, inputs: None
    return [0.0] * len(completions)


def nothing(completions: list[Any], **kwargs: Any) -> list[float]:
    """Nothing at all."""
    return [0.0] * len(completions)
