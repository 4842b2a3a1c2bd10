"""Batches of completions as TRL's loss takes them: masks, and selection, trimming, padding and concatenation of rows.

Prompts are padded on the left and completions on the right, so that the two meet in the middle.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

Batch = dict[str, Any]
"""Columns of a batch: tensors with one row for each completion, and scalars."""

PROMPT_COLUMNS = ("prompt_ids", "prompt_mask")
"""Columns of shape (B, P), padded on the left."""

COMPLETION_COLUMNS = (
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "unprocessed_per_token_logps", "importance_sampling_ratio",
)  # fmt: skip
"""Columns of shape (B, T), padded on the right. The importance ratio of a whole completion has shape (B, 1)."""

SAMPLED_ROWS = "sampled_rows"
"""Column of shape (B,) that marks completions whose tokens are recorded (`rollouts/recorded_samples.py`)."""


def proof_logps(batch: Batch) -> torch.Tensor:
    """Return the engine's log-probabilities that the learner's must equal, (B, T): those before filters and penalties.

    Without filters and penalties they are the same as those of TRL's importance ratio.
    """
    unprocessed: torch.Tensor | None = batch.get("unprocessed_per_token_logps")
    return batch["sampling_per_token_logps"] if unprocessed is None else unprocessed


def loss_mask(batch: Batch) -> torch.Tensor:
    """Return (B, T), 1 on tokens that count in the loss."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def follows_result(batch: Batch) -> torch.Tensor:
    """Return (B, T) bool, True on tokens after the first result of a tool or environment: those of later turns."""
    results = batch["completion_mask"] * (1 - batch.get("tool_mask", 1))
    return results.cumsum(dim=1) > 0


def has_gradient(batch: Batch) -> torch.Tensor:
    """Return (B,) bool, True for rows with a policy gradient: a nonzero advantage and a token that counts."""
    return (batch["advantages"] != 0) & loss_mask(batch).any(dim=1)


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Copy some rows of a batch, in the given order; scalars are kept."""
    index = torch.tensor(rows, dtype=torch.long, device=batch["advantages"].device)
    return {key: value[index] if _has_rows(value) else value for key, value in batch.items()}


def trim_padding(batch: Batch, prompts: bool = True, completions: bool = True) -> Batch:
    """Cut the columns that are padding in every row; at least one column of completions stays."""
    if prompts:
        first = _first_true(batch["prompt_mask"].any(dim=0))
        batch = batch | {key: batch[key][:, first:] for key in PROMPT_COLUMNS}
    if completions:
        used = batch["completion_mask"].any(dim=0)
        width = max(1, len(used) - _first_true(used.flip(0)))
        batch = batch | {
            key: batch[key][:, :width] for key in COMPLETION_COLUMNS if isinstance(batch.get(key), torch.Tensor)
        }
    return batch


def concatenate(
    batches: Sequence[Batch], widths: Mapping[str, int] | None = None, fill: Mapping[str, float] | None = None
) -> Batch:
    """Concatenate the rows of batches of different widths.

    Args:
        batches: batches with the same columns.
        widths: width of a column in the result, where it is not that of the widest batch. Narrower columns are padded,
            wider ones are cut, on the side of their padding.
        fill: padding value of a column, where it is not 0.

    Returns:
        All rows in order, with the scalars of the first batch.
    """
    widths, fill = widths or {}, fill or {}
    joined: Batch = {}
    for key, value in batches[0].items():
        if not _has_rows(value):
            joined[key] = value
            continue
        columns = [batch[key] for batch in batches]
        if value.ndim > 1:
            width = widths[key] if key in widths else max(column.shape[1] for column in columns)
            columns = [_fit(column, width, fill.get(key, 0), left=key.startswith("prompt")) for column in columns]
        joined[key] = torch.cat(columns)
    return joined


def move_to(batch: Batch, device: torch.device | str) -> Batch:
    """Move all tensors of a batch to a device."""
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _first_true(used: torch.Tensor) -> int:
    """Return the index of the first True, or the length if there is none."""
    return int(used.int().argmax()) if used.any() else len(used)


def _fit(column: torch.Tensor, width: int, value: float, left: bool) -> torch.Tensor:
    """Pad or cut a column (B, T) to a width, on one side."""
    missing = width - column.shape[1]
    return pad(column, (missing, 0) if left else (0, missing), value=value)
