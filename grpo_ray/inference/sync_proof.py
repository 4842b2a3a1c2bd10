"""Proof of a weight sync: the engine's log-probabilities of its own samples, compared with the learner's.

Proven weight sync: if the engine generated with the learner's weights, both compute the same log-probabilities up to
rounding. A larger difference stops the run.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from grpo_ray.errors import SyncError

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class LogprobGap:
    """Absolute difference between the engine's and the learner's log-probabilities of the same tokens, in nats."""

    mean: float
    max: float
    tokens: int
    """Number of compared tokens, over all workers."""


def measure_logprob_gap(
    learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor, accelerator: "Accelerator"
) -> LogprobGap:
    """Compare log-probabilities over all workers; collective.

    Args:
        learner_logps, engine_logps: (B, T) or any common shape, in nats.
        mask: same shape; 0 on padding.

    Returns:
        The same gap on every worker; NaN if one of the compared values is NaN.
    """
    gaps = (learner_logps - engine_logps).abs().float()[mask.bool()]
    totals = accelerator.reduce(
        torch.stack([gaps.sum(), torch.tensor(float(gaps.numel()), device=gaps.device)]), reduction="sum"
    )
    largest = accelerator.gather(gaps.max() if gaps.numel() else gaps.new_zeros(())).max()
    return LogprobGap(mean=(totals[0] / totals[1].clamp(min=1)).item(), max=largest.item(), tokens=int(totals[1]))


def require_synced(gap: LogprobGap, tolerance: float, step: int) -> None:
    """Raise SyncError if the mean gap is above the tolerance (in nats), or NaN."""
    if not gap.mean <= tolerance:  # written so that NaN stops the run too
        raise SyncError(
            f"step {step}: the engine does not hold the learner's weights: the two log-probabilities of each of "
            f"{gap.tokens} sampled tokens differ by {gap.mean:.4g} nats on average and {gap.max:.4g} at most, and "
            f"engine.logprob_tolerance is {tolerance:g}; raise it only if rounding explains such a difference"
        )
