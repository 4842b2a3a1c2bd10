"""Entropy terms of the loss over a whole optimizer step (worker-count invariance).

TRL computes them for one micro-batch at a time: the threshold of `top_entropy_quantile` and the mean of `entropy_coef`.
The gradient would then depend on the size of micro-batches and on the number of workers. The functions here take the
tokens of all micro-batches of a step, over all workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from grpo_ray.learner.collectives import Workers


@dataclass(frozen=True)
class EntropyTokens:
    """Tokens of one micro-batch on which the entropy terms act."""

    mask: torch.Tensor
    """(B, T), 1 or True on these tokens."""
    in_step: torch.Tensor
    """Scalar, their number in the whole step, over all workers."""


def select_high_entropy(
    entropies: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], quantile: float, workers: Workers
) -> list[EntropyTokens]:
    """Select the tokens of a step whose entropy is at or above a quantile (arXiv 2506.01939); collective.

    Args:
        entropies: (B, T) of each of this worker's micro-batches, nats.
        masks: (B, T) of each, 1 on tokens that count in the loss.
        quantile: between 0 and 1, interpolated linearly between the two nearest entropies, as in TRL.

    Returns:
        The selected tokens of each micro-batch.
    """
    kept = [mask.bool() for mask in masks]
    own = torch.cat([values[mask] for values, mask in zip(entropies, kept, strict=True)])
    own = own.to(torch.promote_types(own.dtype, torch.float32))
    values = _gather_all(own, workers).sort().values
    if len(values):  # torch.quantile takes at most 16 million values
        position = quantile * (len(values) - 1)
        below = int(position)
        above = min(below + 1, len(values) - 1)
        threshold = torch.lerp(values[below], values[above], position - below)
        kept = [mask & (each >= threshold) for each, mask in zip(entropies, kept, strict=True)]
        in_step = (values >= threshold).sum()
    else:
        in_step = torch.zeros((), dtype=torch.long, device=own.device)
    return [EntropyTokens(mask, in_step) for mask in kept]


def entropy_bonus_correction(
    entropies: torch.Tensor, tokens: EntropyTokens, micro_batches: int, workers: int
) -> torch.Tensor:
    """Compute the difference between a micro-batch's part of the step's mean entropy and TRL's part.

    TRL takes the mean over the tokens of the micro-batch and divides it by the number of micro-batches. Both parts are
    added up over micro-batches and averaged over workers.

    Args:
        entropies: (B, T), nats, with gradient.
        micro_batches: number of micro-batches of a step on each worker.
        workers: number of workers.

    Returns:
        Scalar, nats, to be added to TRL's mean entropy of the micro-batch.
    """
    total = (entropies * tokens.mask).sum()
    of_step = total * workers / tokens.in_step.clamp(min=1)
    of_trl = total / tokens.mask.sum().clamp(min=1) / micro_batches
    return of_step - of_trl


def _gather_all(own: torch.Tensor, workers: Workers) -> torch.Tensor:
    """Concatenate every worker's (N,), of different lengths; collective."""
    lengths = workers.gather(torch.tensor([len(own)], device=own.device)).flatten().tolist()
    rows = workers.gather(pad(own, (0, max(lengths) - len(own))))
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
