"""Metrics that can rank checkpoints: the values of `run.best_metric`.

A ranking needs a metric that every checkpoint has and whose higher values are better. Most metrics of a step, such as
the loss or a length, are neither.
"""

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config

HELDOUT_MEASURES = ("accuracy", "low")
"""Measures of a held-out set that can rank checkpoints."""


def ranking_metrics(config: "Config") -> list[str]:
    """Return the metrics that `run.best_metric` may name in this config."""
    heldout = [f"heldout/{measure}" for measure in HELDOUT_MEASURES]
    return [*heldout, "reward/mean", *(f"reward/{reward_name(each)}_mean" for each in config.rewards.functions)]


def reward_name(function: str) -> str:
    """Return the name of a reward function in the names of its metrics.

    Args:
        function: an entry of `rewards.functions`: a built-in name, `package.module:function`, or a reward model.
    """
    return function.rpartition(":")[2].rpartition("/")[2]


def suggestion(name: str, known: list[str]) -> str:
    """Return "; did you mean ...?" with the nearest known name, or "" if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
