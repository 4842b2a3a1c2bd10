"""Chi-square test of drawn tokens against their probabilities, and request seeds."""

import torch


def seeded(rows: int, first: int = 0) -> dict[int, torch.Generator]:
    """Row -> generator of its request, seeded with `first` + row."""
    return {row: torch.Generator().manual_seed(first + row) for row in range(rows)}


def chance(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of counts under the probabilities, by the chi-square test.

    Words that are expected less than ten times are added up.
    """
    expected = probabilities.double() * counts.sum()
    rare = expected < 10
    counts = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    there = expected > 0
    assert counts[~there].sum() == 0
    if there.sum() == 1:
        return 1.0
    statistic = ((counts - expected)[there] ** 2 / expected[there]).sum()
    return float(torch.special.gammaincc((there.sum() - 1) / 2, (statistic / 2).float()))
