"""Output layer of the learner for completions of a given form (`rollout.structured_outputs`).

The engine samples each token from the policy's probabilities among the tokens that the form allows there. The policy
that is trained is that one: its log-probabilities are normalized over the allowed tokens, so the importance ratio of
learner to engine stays 1, and the gradient is that of the expected reward of completions of the form.
"""

from collections.abc import Callable
from typing import Any

import torch

POSITIONS = 64
"""Positions whose logits exist at a time, with several values for each token of the vocabulary. The memory estimate
counts TRL's tile, which is larger."""


def allowed_tokens(masks: torch.Tensor, vocabulary_size: int) -> torch.Tensor:
    """Unpack (N, W) int32 words, lowest bit first, to (N, V) bool; tokens beyond the words are not allowed."""
    bits = (masks.unsqueeze(-1) >> torch.arange(32, device=masks.device, dtype=masks.dtype)) & 1
    bits = bits.flatten(1).bool()[:, :vocabulary_size]
    return torch.nn.functional.pad(bits, (0, vocabulary_size - bits.shape[1]))


class MaskedOutputLayer:
    """Replacement for TRL's `_ChunkedLogProbFunction`, for the positions of one or several passes in order."""

    def __init__(self, next_masks: Callable[[int], torch.Tensor]) -> None:
        """
        Args:
            next_masks: returns the masks of the next n positions, (n, W) int32 on the CPU, given n.
        """
        self._next_masks = next_masks

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
        logps, entropies = _AllowedLogProbs.apply(
            hidden, weight, bias, targets, self._next_masks, temperature, softcap, logit_scale
        )
        return logps, entropies if "entropy" in outputs else None, None, None, None


class _AllowedLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies among the allowed tokens, without the logits of all positions.

    The backward pass computes the logits again. As in TRL's function, products have the precision of autocast, and the
    gradients of weight and bias are summed up in float32: sums in 16 bits are wrong by percents after 65,536 positions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        next_masks: Callable[[int], torch.Tensor],
        temperature: float,
        softcap: float | None,
        logit_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.options = temperature, softcap, logit_scale
        ctx.set_materialize_grads(False)
        ctx.masks = []
        logps, entropies = (torch.empty(len(targets), device=hidden.device) for _ in range(2))
        for part in _parts(len(targets)):
            masks = next_masks(part.stop - part.start)
            if any(ctx.needs_input_grad[:3]):
                ctx.masks.append(masks)  # on the CPU: they have a bit for each token of the vocabulary
            log_p, _, _ = _log_probabilities(hidden[part].to(ctx.dtype), weight, bias, masks, *ctx.options)
            logps[part] = log_p.gather(1, targets[part].unsqueeze(1)).squeeze(1)
            entropies[part] = _entropy(log_p)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logps, grad_entropies = grads
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        temperature, _, logit_scale = ctx.options
        # No gradients of a frozen output layer, as with LoRA: they would take the memory of the whole layer in float32.
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for part, masks in zip(_parts(len(targets)), ctx.masks, strict=True):
            inputs = hidden[part].to(ctx.dtype)
            log_p, allowed, slope = _log_probabilities(inputs, weight, bias, masks, *ctx.options)
            p = log_p.exp()
            grad = torch.zeros_like(p)
            if grad_logps is not None:
                # d log p[target] / dz[j] = 1[j = target] - p[j]
                outer = grad_logps[part].unsqueeze(1)
                grad = (-outer * p).scatter_add(1, targets[part].unsqueeze(1), outer.to(p.dtype))
            if grad_entropies is not None:
                # d entropy / dz[j] = -p[j] (log p[j] + entropy)
                surprise = (log_p + entropies[part].unsqueeze(1)).masked_fill(~allowed, 0.0)
                grad -= grad_entropies[part].unsqueeze(1) * p * surprise
            grad = grad * (logit_scale / temperature)
            if slope is not None:
                grad = grad * slope
            grad = grad.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (grad @ weight.to(ctx.dtype)).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad.float().t(), inputs.float())
            if grad_bias is not None:
                grad_bias += grad.float().sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _parts(positions: int) -> list[slice]:
    return [slice(first, min(first + POSITIONS, positions)) for first in range(0, positions, POSITIONS)]


def _log_probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    masks: torch.Tensor,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities (n, V) in float32, -inf where not allowed; the allowed tokens; the softcap's slope."""
    product = torch.mm(hidden, weight.to(hidden.dtype).t())
    if bias is not None:
        product += bias.to(hidden.dtype)
    logits, slope = product.float() * logit_scale, None
    if softcap is not None:
        bounded = torch.tanh(logits / softcap)
        logits, slope = softcap * bounded, 1 - bounded**2
    allowed = allowed_tokens(masks.to(hidden.device), logits.shape[1])
    return (logits / temperature).masked_fill(~allowed, -torch.inf).log_softmax(dim=-1), allowed, slope


def _entropy(log_p: torch.Tensor) -> torch.Tensor:
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)
