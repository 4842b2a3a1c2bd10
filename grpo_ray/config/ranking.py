"""Names of the held-out sets, and metrics that can rank checkpoints: the values of `run.best_metric`.

A held-out set is identified by the prefix of its metrics, its key: "heldout" if `data.heldout` names one dataset,
"heldout/<name>" for each set of a mapping. The primary set ranks checkpoints; its metrics are also reported under
"heldout", so that runs with one and with several sets can be compared.

A ranking needs a metric that every checkpoint has and whose higher values are better. Most metrics of a step, such as
the loss or a length, are neither.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config

HELDOUT = "heldout"
"""Key of the only held-out set, and prefix of the primary set's metrics."""
RANKING_MEASURES = ("accuracy", "low")
"""Measures of a held-out set that can rank checkpoints."""


def heldout_keys(heldout: Any) -> list[str]:
    """Return the keys of the held-out sets that a value of `data.heldout` names, in its order."""
    return [f"{HELDOUT}/{name}" for name in heldout] if isinstance(heldout, Mapping) else [HELDOUT]


def heldout_label(key: str) -> str:
    """Return the name of a held-out set; "" for the only one."""
    return key.removeprefix(HELDOUT).removeprefix("/")


def split_name(key: str) -> str:
    """Return the name of a held-out set in messages."""
    return f"held-out {heldout_label(key)}".strip()


def ranking_metric(best_metric: str, keys: Sequence[str]) -> str:
    """Return the metric that checkpoints are ranked by: `run.best_metric`, with the primary set in place of "heldout".

    Args:
        keys: keys of the held-out sets; the first is the primary one unless `best_metric` names another.
    """
    prefix, _, measure = best_metric.rpartition("/")
    return f"{keys[0]}/{measure}" if prefix == HELDOUT else best_metric


def primary_key(best_metric: str, keys: Sequence[str]) -> str:
    """Return the key of the primary held-out set: the one that `run.best_metric` names, else the first."""
    prefix = ranking_metric(best_metric, keys).rpartition("/")[0]
    return prefix if prefix in keys else keys[0]


def ranking_metrics(config: "Config") -> list[str]:
    """Return the metrics that `run.best_metric` may name in this config."""
    prefixes = dict.fromkeys([HELDOUT, *config.heldout_keys])
    gives_reward = config.rollout.environments or "environment" in config.rewards.functions
    measures = [*RANKING_MEASURES, *(["reward"] if gives_reward else [])]
    heldout = [f"{prefix}/{measure}" for prefix in prefixes for measure in measures]
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
