"""Advantages of completions: how the rewards of a step's groups become the weights of their gradient.

A function of `ADVANTAGES` gets the rewards of whole groups, of all workers, so its result does not depend on the number
of workers. TRL's own (`grpo.scale_rewards`, `grpo.multi_objective_aggregation`) is the default.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from trl.trainer.utils import nanstd

EPSILON = 1e-4
"""Added to a standard deviation before a division, as in TRL."""


class Advantages(NamedTuple):
    """Advantages of N groups of G completions."""

    values: torch.Tensor
    """(N, G), 0 where no reward applies."""
    zero_std: torch.Tensor
    """(N, G) bool, True where the standard deviation that scales the rewards is 0."""


Advantage = Callable[[torch.Tensor, torch.Tensor], Advantages]
"""Computes advantages of rewards, (N, G, R), one column for each reward function and NaN where it does not apply, with
the weights of the functions, (R,)."""


def combine_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each completion's rewards, as TRL computes it.

    Args:
        rewards: (..., R), one column for each reward function; NaN where it does not apply.
        weights: (R,)

    Returns:
        (...), NaN where no reward function applies.
    """
    total = (rewards * weights.to(rewards.device)).nansum(dim=-1)
    total[rewards.isnan().all(dim=-1)] = torch.nan
    return total


@dataclass(frozen=True)
class CenteredSum:
    """TRL's `sum_then_normalize`: the weighted sum of the rewards minus its mean over the group (GRPO, arXiv
    2402.03300), divided by a standard deviation plus 1e-4."""

    scale: str
    """`group`: divide by the group's standard deviation; `batch`: by that of the step; `none`: do not divide."""

    def __call__(self, rewards: torch.Tensor, weights: torch.Tensor) -> Advantages:
        total = combine_rewards(rewards, weights)
        centered = total - torch.nanmean(total, dim=1, keepdim=True)
        std = _std_of_all(total) if self.scale == "batch" else nanstd(total, dim=1, keepdim=True).expand_as(total)
        scaled = centered if self.scale == "none" else centered / (std + EPSILON)
        return Advantages(scaled.nan_to_num(nan=0.0), _is_zero(std))


def sum_of_normalized(rewards: torch.Tensor, weights: torch.Tensor) -> Advantages:
    """Normalize each reward in its group, sum them up, and normalize the sum over the step (GDPO, arXiv 2601.05242).

    TRL's `normalize_then_sum`.
    """
    mean = torch.nanmean(rewards, dim=1, keepdim=True)
    normalized = (rewards - mean) / (nanstd(rewards, dim=1, keepdim=True) + EPSILON)
    total = (normalized * weights.to(rewards.device)).nansum(dim=-1)
    total[rewards.isnan().all(dim=-1)] = torch.nan
    std = _std_of_all(total)
    return Advantages(((total - torch.nanmean(total)) / (std + EPSILON)).nan_to_num(nan=0.0), _is_zero(std))


def trl_advantages(scale_rewards: str, aggregation: str) -> Advantage:
    """Return TRL's advantages for its two settings."""
    return sum_of_normalized if aggregation == "normalize_then_sum" else CenteredSum(scale_rewards)


def _std_of_all(values: torch.Tensor) -> torch.Tensor:
    return nanstd(values).expand_as(values)


def _is_zero(std: torch.Tensor) -> torch.Tensor:
    return torch.isclose(std, torch.zeros_like(std))
