"""Metrics that rewards record with `log_metric`: their names in the metrics of a run."""

from collections.abc import Collection
from typing import Any

from grpo_ray.errors import RewardError
from grpo_ray.text.redaction import redact

PREFIX = "reward/"
"""First part of the name of every metric that a reward records."""

FAILED_SHARE = f"{PREFIX}failed_share"
"""Metric of each call of a judge or an isolated reward: share of its completions without a reward due to a failure."""

OF_GRADING = frozenset({"verifier_timeouts", "unscorable_share", "undecided_share", "failed_share"})
"""Metrics of the built-in rewards that grade or may fail. Another reward may record them only by their full names, with
`reward/`."""


def reward_metric(name: Any, value: Any, rewards: Collection[str]) -> tuple[str, float]:
    """Return the name and value under which a metric of a reward is reported; secrets in the name are hidden.

    Args:
        name: name that the reward gave, with or without `reward/`.
        value: number that the reward gave.
        rewards: names of the run's reward functions.

    Raises:
        RewardError: the name is empty, not a string, or that of a metric of the run itself; or the value is not a
            number.
    """
    if not isinstance(name, str) or not name.removeprefix(PREFIX):
        raise RewardError(f"log_metric: the name must be a text that is not empty; got {name!r}")
    short = name.removeprefix(PREFIX)
    own = {"mean", "std", *(f"{reward}_{measure}" for reward in rewards for measure in ("mean", "std"))}
    if short in own or (short in OF_GRADING and name == short):
        raise RewardError(
            f"log_metric: {PREFIX}{short} is a metric of the run itself; choose another name than {name!r}"
        )
    try:
        return PREFIX + (short if short in OF_GRADING else redact(short)), float(value)
    except (TypeError, ValueError):
        raise RewardError(f"log_metric: the value of {name!r} must be a number; got {value!r}") from None
