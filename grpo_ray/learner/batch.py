"""Batches of completions as TRL's loss takes them: masks, and selection, trimming, padding and concatenation of rows.

Prompts are padded on the left and completions on the right, so that the two meet in the middle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from grpo_ray.tools.conversation import Conversation

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
"""Column of shape (B,) that marks completions whose tokens are recorded (`rollouts/samples.py`)."""

TEXT_COLUMNS = {*COMPLETION_COLUMNS, *PROMPT_COLUMNS, "advantages", "num_items_in_batch", "loss_scale", SAMPLED_ROWS}
"""All columns of a batch without images."""


def is_text_only(batch: Batch) -> bool:
    """Return True if a batch has no column of images; only such batches are repacked."""
    return all(value is None or key in TEXT_COLUMNS for key, value in batch.items())


def proof_logps(batch: Batch) -> torch.Tensor:
    """Return the engine's log-probabilities that the learner's must equal, (B, T): those before filters and penalties.

    Without such options they are the ones that TRL's importance ratio uses.
    """
    unprocessed: torch.Tensor | None = batch.get("unprocessed_per_token_logps")
    return batch["sampling_per_token_logps"] if unprocessed is None else unprocessed


def loss_mask(batch: Batch) -> torch.Tensor:
    """Return (B, T), 1 on tokens that count in the loss."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def follows_result(batch: Batch) -> torch.Tensor:
    """Return (B, T) bool, True on tokens that come after a result of a tool or environment: those of later turns."""
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


def pad_logps(logps: Sequence[Sequence[float | None]], width: int, device: torch.device) -> torch.Tensor:
    """Pad (B,) lists of log-probabilities with 0 to (B, `width`); None, where there is none, becomes NaN."""
    padded = torch.zeros(len(logps), width)
    for row, values in zip(padded, logps, strict=True):
        row[: len(values)] = torch.tensor([torch.nan if each is None else each for each in values])
    return padded.to(device)


def pad_completions(
    prompt_ids: list[list[int]], completion_ids: list[list[int]], pad_token_id: int, device: torch.device
) -> Batch:
    """Pad (B,) lists of token ids to the columns that a forward pass reads, as TRL does."""

    def tensor(rows: Sequence[Sequence[float]], padding: float, side: str) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], True, padding, side).to(device)

    def ones(rows: list[list[int]]) -> list[list[int]]:
        return [[1] * len(row) for row in rows]

    return {
        "prompt_ids": tensor(prompt_ids, pad_token_id, "left"),
        "prompt_mask": tensor(ones(prompt_ids), 0, "left"),
        "completion_ids": tensor(completion_ids, pad_token_id, "right"),
        "completion_mask": tensor(ones(completion_ids), 0, "right"),
    }


@dataclass(frozen=True)
class CompletionRows:
    """One worker's scored completions, in whole groups."""

    inputs: list[dict[str, Any]]
    """(B,) rows of the dataloader: the problem's columns, with `epoch` and the completion's `index` in its group."""
    token_ids: list[list[int]]
    """(B,) token ids of each completion."""
    rewards: torch.Tensor
    """(B, R), one column for each reward function; NaN where it does not apply."""
    output: Batch
    """TRL's batch: tensors with B rows, and scalars."""
    conversations: Sequence[Conversation] | None = None
    """(B,) the turns of each completion; None without tools and environments."""

    def take(self, rows: Sequence[int]) -> "CompletionRows":
        """Copy some rows, so that the memory of the others can be freed."""
        return CompletionRows(
            [self.inputs[row] for row in rows],
            [self.token_ids[row] for row in rows],
            self.rewards[list(rows)],
            select_rows(self.output, rows),
            None if self.conversations is None else [self.conversations[row] for row in rows],
        )

    def to(self, device: torch.device | str) -> "CompletionRows":
        """Move all tensors to a device."""
        return replace(self, rewards=self.rewards.to(device), output=move_to(self.output, device))


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _first_true(used: torch.Tensor) -> int:
    """Return the index of the first True, or the length if there is none."""
    return int(used.int().argmax()) if used.any() else len(used)


def _fit(column: torch.Tensor, width: int, value: float, left: bool) -> torch.Tensor:
    """Pad or cut a column (B, T) to a width, on one side."""
    missing = width - column.shape[1]
    return pad(column, (missing, 0) if left else (0, missing), value=value)
