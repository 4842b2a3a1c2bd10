"""Lengths of a batch's completions: a heavy-tailed distribution, or lengths that a run recorded."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

Batch = list[list[int]]
"""Lengths of a batch's completions in tokens, one list for each group."""
DrawBatch = Callable[[random.Random], Batch]
"""Draws a batch."""

SPREAD = 0.8
"""Default standard deviation of a length's logarithm: half of the lengths are below 0.73 of the mean, 1 % above 4.7."""


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths:
    """Independent log-normal lengths, cut off at the longest allowed.

    The mean is that of the lengths after they are cut off, so it can be compared with a recorded mean.
    """

    groups: int
    """Problems of a batch."""
    completions: int
    """Completions of a problem."""
    mean: float
    """Mean length, tokens."""
    longest: int
    """Longest completion allowed, tokens."""
    spread: float = SPREAD
    """Standard deviation of the logarithm before lengths are cut off."""

    def __call__(self, rng: random.Random) -> Batch:
        """Draw the lengths of a batch."""
        median = _median_of(self.mean, self.spread, self.longest)
        return [
            [
                max(1, min(self.longest, round(median * rng.lognormvariate(0, self.spread))))
                for _ in range(self.completions)
            ]
            for _ in range(self.groups)
        ]


@dataclass(frozen=True, kw_only=True)
class RecordedLengths:
    """Whole groups of lengths, drawn with replacement from those that a run recorded."""

    groups: int
    """Problems of a batch."""
    recorded: Sequence[Sequence[int]]
    """Lengths of each recorded group."""

    def __call__(self, rng: random.Random) -> Batch:
        """Draw the lengths of a batch."""
        return [list(rng.choice(self.recorded)) for _ in range(self.groups)]


def _median_of(mean: float, spread: float, longest: int) -> float:
    """Return the median before lengths are cut off, by bisection: the mean of min(x, longest) rises with it."""
    if not 0 < mean < longest:
        raise ValueError(f"the mean length must be between 0 and the longest, {longest}; got {mean}")
    low, high = mean / 100, longest * 100.0
    for _ in range(80):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _clipped_mean(middle, spread, longest) < mean else (low, middle)
    return (low * high) ** 0.5


def _clipped_mean(median: float, spread: float, longest: int) -> float:
    """Return the mean of min(x, longest) for a log-normal x."""
    normal, edge = NormalDist(), math.log(longest / median) / spread
    return median * math.exp(spread**2 / 2) * normal.cdf(edge - spread) + longest * (1 - normal.cdf(edge))
