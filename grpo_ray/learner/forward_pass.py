"""Forward passes over rows without the padding that TRL's rows have.

A causal model's output at a token depends on the tokens before it. So a row may start in the first column, with all
padding at its end (shifted), or follow another row without any padding, if the attention keeps the two apart (packed).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class ShiftedRows:
    """Rows of a batch that start in the first column, so that all padding comes last."""

    input_ids: torch.Tensor
    """(B, W), W the longest row; 0 on padding."""
    labels: torch.Tensor
    """(B, W), -100 on all but the tokens of completions."""
    is_token: torch.Tensor
    """(B, T) bool, True on tokens of completions."""
    columns: torch.Tensor
    """(B, T), column in the shifted row of each completion token."""

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Move a model's values for all tokens but the first, (B, W - 1), to (B, T); 0 on padding."""
        values = torch.nn.functional.pad(values, (1, 0))
        return values.gather(1, self.columns.clamp(max=values.size(1) - 1)).masked_fill(~self.is_token, 0.0)


def shift_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor, completions: int) -> ShiftedRows:
    """Shift each row to the left by the padding of its prompt.

    Args:
        input_ids, attention_mask: (B, L), prompts padded on the left and completions on the right.
        completions: number of completion columns, which are the last ones. Neither a completion nor a prompt has
            padding between its tokens.
    """
    mask = attention_mask.bool()
    prompt = mask[:, :-completions].sum(dim=1, keepdim=True)
    lengths = mask.sum(dim=1, keepdim=True)
    columns = torch.arange(input_ids.size(1), device=input_ids.device)
    padding = input_ids.size(1) - completions - prompt
    width = int(lengths.max())
    places = columns[:width].expand(len(mask), -1)
    ids = input_ids.gather(1, (places + padding).clamp(max=input_ids.size(1) - 1)).masked_fill(places >= lengths, 0)
    labels = ids.masked_fill((places < prompt) | (places >= lengths), -100)
    return ShiftedRows(ids, labels, mask[:, -completions:], prompt + columns[:completions])


@dataclass(frozen=True)
class PackedRows:
    """Rows of a batch one after the other, without padding. N tokens in all."""

    input_ids: torch.Tensor
    """(1, N)"""
    position_ids: torch.Tensor
    """(1, N), from 0 in each row."""
    labels: torch.Tensor
    """(1, N), -100 on all but the tokens of completions."""
    mask: torch.Tensor
    """(B, L) bool, True where the batch has a token."""
    starts: torch.Tensor
    """(B + 1,) int32, start offsets of the rows, and N."""
    longest: int
    """Tokens of the longest row."""

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Arguments of a model. The last four are transformers' `FlashAttentionKwargs`, the same for all layers."""
        return {
            "input_ids": self.input_ids, "position_ids": self.position_ids, "labels": self.labels,
            "cu_seq_lens_q": self.starts, "cu_seq_lens_k": self.starts,
            "max_length_q": self.longest, "max_length_k": self.longest,
        }  # fmt: skip

    def spread(self, values: torch.Tensor, completions: int) -> torch.Tensor:
        """Move a model's values for all tokens but the first, (1, N - 1), to (B, `completions`); 0 on padding."""
        values = torch.nn.functional.pad(values[0], (1, 0))
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)[:, -completions:]


def pack_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor, completions: int) -> PackedRows:
    """Concatenate the unmasked tokens of (B, L) rows, whose last `completions` columns are the completions."""
    mask = attention_mask.bool()
    labels = input_ids.clone()
    labels[:, :-completions] = -100
    positions = mask.long().cumsum(dim=1) - 1
    lengths = mask.sum(dim=1)
    starts = torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0)).int()
    longest = int(lengths.max())
    return PackedRows(input_ids[mask][None], positions[mask][None], labels[mask][None], mask, starts, longest)


def score_tokens(
    layout: Literal["shifted", "packed"],
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completions: int,
    autocast: AbstractContextManager[Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probability and entropy of each completion token in one forward pass.

    Args:
        model: causal model with TRL's output layer (`fused_lm_head`).
        input_ids, attention_mask: (B, L), as for `shift_rows`.
        completions: T, the number of columns of the completions.
        autocast: context of the pass that sets its precision.

    Returns:
        Log-probabilities and entropies, (B, T) in nats; 0 on padding. None in place of entropies if the output layer
        computes none, as that of TRL's reference model.
    """
    if layout == "packed":
        packed = pack_rows(input_ids, attention_mask, completions)
        with autocast:
            scores = model(**packed.model_inputs, fused_lm_head=True)
        entropies = None if scores.entropy is None else packed.spread(scores.entropy, completions)
        return packed.spread(scores.log_probs, completions), entropies
    shifted = shift_rows(input_ids, attention_mask, completions)
    with autocast:
        scores = model(input_ids=shifted.input_ids, labels=shifted.labels, fused_lm_head=True)
    return shifted.spread(scores.log_probs), None if scores.entropy is None else shifted.spread(scores.entropy)


def score_rows(
    layout: Literal["shifted", "packed"],
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completions: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    parts: Sequence[Sequence[int]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probability and entropy of each completion token without gradient, one part of the rows at a time.

    Args:
        input_ids, attention_mask: (B, L), as for `shift_rows`.
        completions: T, the number of columns of the completions.
        autocast: returns the context of a pass, which sets its precision.
        parts: rows of each forward pass; every row is in exactly one.

    Returns:
        As `score_tokens`.
    """
    scores = []
    with torch.no_grad():
        for part in parts:
            rows = torch.tensor(part, device=input_ids.device)
            scores.append(score_tokens(layout, model, input_ids[rows], attention_mask[rows], completions, autocast()))
    places = torch.tensor([row for part in parts for row in part], device=input_ids.device).argsort()
    logps = torch.cat([values for values, _ in scores])[places]
    entropies = [values for _, values in scores if values is not None]
    return logps, torch.cat(entropies)[places] if entropies else None
