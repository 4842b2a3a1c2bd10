"""Tests of the share of distinct completions."""

import pytest
import torch

from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.diversity import distinct_share


@pytest.mark.parametrize(
    ("completions", "share"),
    [
        ([[1], [1], [1], [1]], 0.0),
        ([[1], [2], [3], [4]], 1.0),  # two groups of two: equal completions of different groups do not matter
        ([[1], [2], [2], [2]], 0.5),
        ([[1, 2], [1], [], []], 0.5),  # an empty completion is one, too
    ],
)
def test_distinct_share_groups_of_two(completions: list[list[int]], share: float) -> None:
    assert distinct_share(completions, 2, Workers()) == share


def test_distinct_share_group_of_four() -> None:
    assert distinct_share([[1], [2], [2], [1]], 4, Workers()) == pytest.approx(1 / 3)  # 2 of 3 repeat an earlier one


def test_distinct_share_counts_all_workers() -> None:
    """Three workers: 1 of 1 is distinct on this one, 0 of 1 and 1 of 1 on the others."""
    others = torch.tensor([[0, 1], [1, 1]])
    workers = Workers(count=3, gather=lambda own: torch.cat([own[None], others]))
    assert distinct_share([[1], [2]], 2, workers) == pytest.approx(2 / 3)
