"""Mean over problems with a 95 % confidence interval."""

import math
import statistics
from collections.abc import Sequence

from grpo_ray.telemetry.measures import Measure

Z = 1.96
"""Quantile of the standard normal distribution for a two-sided 95 % interval."""


def wilson_interval(values: Sequence[float]) -> Measure:
    """Estimate a mean over problems, with the Wilson score interval.

    With the mean p of m Bernoulli trials the interval is (Wilson, JASA 22, 1927)

        (p + z^2 / 2m  +-  z sqrt(p (1 - p) / m + z^2 / 4m^2)) / (1 + z^2 / m)

    Unlike the normal approximation, it is accurate near 0 and 1 too. With one completion per problem the n values are
    Bernoulli trials and m = n. The mean of several completions of a problem varies less than one trial, so m is then
    the effective sample size n p (1 - p) / s^2, where s^2 is the variance of the values (Kish's design effect), or n if
    all values are equal.

    Args:
        values: (n,) one value per problem, 0 to 1.
    """
    n = len(values)
    if not n:
        return Measure(math.nan, count=0)
    mean = sum(values) / n
    # Compared first: the rounded mean of equal values can differ from them, and m would be huge.
    variance = 0.0 if min(values) == max(values) else sum((value - mean) ** 2 for value in values) / n
    trials = n * mean * (1 - mean) / variance if variance else n
    center = (mean + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z * math.sqrt(mean * (1 - mean) / trials + Z * Z / (4 * trials * trials)) / (1 + Z * Z / trials)
    return Measure(mean, max(0.0, center - half), min(1.0, center + half), n)


def normal_interval(values: Sequence[float]) -> Measure:
    """Estimate a mean over problems of any numbers, with the interval of the normal approximation.

    mean +- z s / sqrt(n), with s the standard deviation of the values (n - 1 in its denominator). Unknown for n = 1.

    Args:
        values: (n,) one value per problem.
    """
    if not values:
        return Measure(math.nan, count=0)
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Measure(mean, count=1)
    half = Z * statistics.stdev(values, mean) / math.sqrt(len(values))
    return Measure(mean, mean - half, mean + half, len(values))
