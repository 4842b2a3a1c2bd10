"""A share of problems with its confidence interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A share from 0 to 1 with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_with_interval(values: Sequence[float]) -> Estimate:
    """Mean of one value in 0 to 1 for each problem, with a 95 % interval.

    Wilson's interval, exact enough near 0 and 1; for shares of several completions its variance is scaled to theirs.
    """
    n = len(values)
    if not n:
        return Estimate(math.nan, math.nan, math.nan)
    mean, z = sum(values) / n, 1.96
    variance = sum((value - mean) ** 2 for value in values) / n
    # A problem with several completions tells more than a coin toss: count it as so many tosses.
    tosses = n * mean * (1 - mean) / variance if variance else n
    centre = (mean + z * z / (2 * tosses)) / (1 + z * z / tosses)
    half = z * math.sqrt(mean * (1 - mean) / tosses + z * z / (4 * tosses * tosses)) / (1 + z * z / tosses)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def heldout_metrics(estimate: Estimate) -> dict[str, float]:
    """The metrics of a held-out measurement; none where nothing could be measured."""
    if not math.isfinite(estimate.value):
        return {}
    return {
        "heldout/accuracy": estimate.value,
        "heldout/low": estimate.low,
        "heldout/high": estimate.high,
    }
