"""Output layer of the learner for completions of a given form (`rollout.structured_outputs`).

The engine samples each token from the policy's probabilities among the tokens that the form allows there. The policy
that is trained is that one: its log-probabilities are normalized over the allowed tokens, so the importance ratio of
learner to engine stays 1, and the gradient is that of the expected reward of completions of the form.
"""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

POSITIONS = 256
"""Positions whose logits exist at a time, as many as the vocabulary in float32 each."""


def allowed_tokens(masks: torch.Tensor, vocabulary_size: int) -> torch.Tensor:
    """Unpack (N, W) int32 words, lowest bit first, to (N, V) bool; tokens beyond the words are not allowed."""
    bits = (masks.unsqueeze(-1) >> torch.arange(32, device=masks.device, dtype=masks.dtype)) & 1
    bits = bits.flatten(1).bool()[:, :vocabulary_size]
    return torch.nn.functional.pad(bits, (0, vocabulary_size - bits.shape[1]))


class MaskedOutputLayer:
    """Takes the place of TRL's `ChunkedLogProbFunction`, for the positions of one or several passes in order.

    Logits of a few positions exist at a time; the backward pass computes them again.
    """

    def __init__(self, masks: torch.Tensor) -> None:
        """
        Args:
            masks: (N, W) int32, bits of the allowed tokens of all positions.
        """
        self._masks = masks
        self.scored = 0
        """Number of positions that have been scored."""

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        """Compute log-probability and entropy of the next positions, as TRL's function does among all tokens.

        Args:
            hidden: (n, H)
            weight, bias: (V, H) and (V,) of the output layer.
            targets: (n,) ids of the tokens.
            temperature: divides the logits.
            chunk_size: not used; TRL's tile of the vocabulary.
            softcap, logit_scale: of the model's logits.
            outputs: further values than the log-probability; "entropy" or none.

        Returns:
            Log-probabilities and entropies, (n,) float32 in nats, and TRL's further values, which are not computed.
        """
        masks = self._masks[self.scored : self.scored + len(targets)]
        self.scored += len(targets)

        def score(hidden: torch.Tensor, targets: torch.Tensor, masks: torch.Tensor) -> tuple[torch.Tensor, Any]:
            logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float() * logit_scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            allowed = allowed_tokens(masks, logits.shape[1])
            logps = (logits / temperature).masked_fill(~allowed, -torch.inf).log_softmax(dim=-1)
            of_targets = logps.gather(1, targets.unsqueeze(1)).squeeze(1)
            if "entropy" not in outputs:
                return of_targets, None
            return of_targets, -(logps.exp() * logps.masked_fill(~allowed, 0.0)).sum(dim=-1)

        parts = [
            checkpoint(
                score, *(each[first : first + POSITIONS] for each in (hidden, targets, masks)), use_reentrant=False
            )
            for first in range(0, max(1, len(targets)), POSITIONS)
        ]
        logps = torch.cat([logps for logps, _ in parts])
        entropies = torch.cat([entropy for _, entropy in parts]) if "entropy" in outputs else None
        return logps, entropies, None, None, None
