"""Chi-square test of sampled tokens against their probabilities, and seeded generators."""

import torch


def seeded_generators(rows: int, first: int = 0) -> dict[int, torch.Generator]:
    """Return row -> generator of its request, seeded with `first` + row."""
    return {row: torch.Generator().manual_seed(first + row) for row in range(rows)}


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of token counts under the probabilities (Pearson's chi-square test).

    Tokens with an expected count below ten are pooled.
    """
    expected = probabilities.double() * counts.sum()
    rare = expected < 10
    counts = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    possible = expected > 0
    assert counts[~possible].sum() == 0
    if possible.sum() == 1:
        return 1.0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2, (statistic / 2).float()))
