"""Diversity of the completions within a group."""

from collections.abc import Sequence

import torch

from grpo_ray.learner.collectives import Workers


def distinct_share(completions: Sequence[Sequence[int]], num_generations: int, workers: Workers) -> float:
    """Compute the share of completions that differ from all earlier ones of their group; collective.

    The first completion of each group is not counted: 0 if all completions of each group are the same, 1 if all differ.

    Args:
        completions: (B,), token ids of this worker's completions, in whole groups.
        num_generations: completions of a group.
    """
    groups = [completions[first : first + num_generations] for first in range(0, len(completions), num_generations)]
    distinct = sum(len({tuple(ids) for ids in group}) - 1 for group in groups)
    # Integers, whose sum does not depend on the number of workers.
    counts = torch.tensor([distinct, len(completions) - len(groups)], device=workers.device)
    total = workers.gather(counts).sum(dim=0)
    return float(total[0]) / float(total[1])
