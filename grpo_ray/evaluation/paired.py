"""Comparison of two policies on the same problems: difference in accuracy, its interval, and an exact paired test.

Accuracy varies far more between problems than between two policies on one problem. The test uses only the differences
within problems, so it detects changes that are smaller than the intervals of the two accuracies.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_ray.evaluation.confidence import Z
from grpo_ray.telemetry.measures import Measure


@dataclass(frozen=True)
class PairedComparison:
    """Accuracy of two policies on the problems for which the verdicts of both are known."""

    num_samples: int
    """Completions per problem and policy, k."""
    before: float
    """Accuracy of the first policy, 0 to 1."""
    after: float
    """Accuracy of the second policy."""
    difference: Measure
    """`after - before`, -1 to 1."""
    p_value: float
    """Probability of a difference at least this large, in either direction, between equally good policies."""
    better: int
    """Problems of which the second policy solves more completions."""
    worse: int
    """Problems of which the second policy solves fewer completions."""


def compare_paired(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> PairedComparison | None:
    """Compare two policies on the problems that both were measured on.

    Args:
        before: id of a problem -> (k,) verdicts of the first policy, 1 or 0; NaN if unknown.
        after: the same of the second policy.

    Returns:
        None if no problem has known verdicts of both, if the number of completions varies, or if a score is neither 0
        nor 1, as those of an environment can be.
    """
    known = [each for each in before if each in after and not any(map(math.isnan, (*before[each], *after[each])))]
    counts = {len(verdicts[each]) for each in known for verdicts in (before, after)}
    if len(counts) != 1 or 0 in counts:
        return None
    if any(verdict not in (0, 1) for each in known for verdict in (*before[each], *after[each])):
        return None  # scores of an environment
    (k,) = counts
    differences = [round(sum(after[each])) - round(sum(before[each])) for each in known]
    accuracies = [sum(sum(verdicts[each]) for each in known) / (k * len(known)) for verdicts in (before, after)]
    interval = difference_interval([difference / k for difference in differences])
    return PairedComparison(
        num_samples=k,
        before=accuracies[0],
        after=accuracies[1],
        difference=Measure(accuracies[1] - accuracies[0], *interval, len(known)),
        p_value=sign_flip_test(differences),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
    )


def sign_flip_test(differences: Sequence[int]) -> float:
    """Return the two-sided p-value of the exact sign-flip test (Fisher, The Design of Experiments, 1935, section 21).

    If two policies are equally good, each problem's difference is as likely to be -d as d. The p-value is the share of
    the 2^n sign assignments whose sum is at least as far from 0 as the observed one. With one completion per problem
    this is McNemar's exact test: of b + c problems that differ, the number in favour of one policy is
    Binomial(b + c, 1/2).

    Args:
        differences: (n,) correct completions of the second policy minus those of the first, of each problem.
    """
    observed = abs(sum(differences))
    sizes = Counter(abs(difference) for difference in differences if difference)
    # Probability of each sum from -total to total. The problems of one size contribute size * (2 B - count) with
    # B ~ Binomial(count, 1/2), so one convolution per size is enough.
    probabilities: NDArray[np.floating] = np.ones(1)
    for size, count in sizes.items():
        contribution = np.zeros(2 * size * count + 1)
        contribution[:: 2 * size] = [math.comb(count, heads) / 2**count for heads in range(count + 1)]
        probabilities = np.convolve(probabilities, contribution)
    total = len(probabilities) // 2
    sums = np.abs(np.arange(-total, total + 1))
    return min(1.0, float(probabilities[sums >= observed].sum()))


def difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean paired difference: the adjusted Wald interval.

    One problem in favour of each policy is added before the normal approximation (Bonett and Price, Journal of
    Educational and Behavioral Statistics 37, 2012). The interval then keeps its coverage with few problems, and its
    width is not 0 if all differences are 0. With several completions per problem the same values, 1 and -1, are added.

    Args:
        differences: (n,) differences in accuracy per problem, -1 to 1.
    """
    values = [*differences, 1.0, -1.0]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    half = Z * math.sqrt(variance / len(values))
    return max(-1.0, mean - half), min(1.0, mean + half)
