"""Batches of made-up tokens, with prompts padded on the left and completions on the right."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

ROWS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 5), st.sampled_from([0.0, 0.0, 1.0, -0.5])), min_size=4, max_size=4
)
"""Rows of a micro-batch: tokens of the prompt, tokens of the completion that count, advantage."""


def batch_of(
    rows: Sequence[tuple[int, int, float]], extra: int = 1, prompts: int | None = None, completions: int | None = None
) -> dict[str, Any]:
    """Make a micro-batch of the given widths, or with `extra` columns more than its longest rows need."""
    prompts = prompts or max(p for p, _, _ in rows) + extra
    completions = completions or max(c for _, c, _ in rows) + extra
    prompt_mask = torch.tensor([[0] * (prompts - p) + [1] * p for p, _, _ in rows])
    completion_mask = torch.tensor([[1] * c + [0] * (completions - c) for _, c, _ in rows])
    return {
        "prompt_ids": prompt_mask * (torch.arange(prompt_mask.numel()).view_as(prompt_mask) + 3),
        "prompt_mask": prompt_mask,
        "completion_ids": completion_mask * (torch.arange(completion_mask.numel()).view_as(completion_mask) + 100),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([a for _, _, a in rows], dtype=torch.float64),
    }


def tokens_of(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return each row's tokens without padding."""
    sides = [zip(batch[f"{side}_ids"], batch[f"{side}_mask"].bool(), strict=True) for side in ("prompt", "completion")]
    return [tuple(ids[mask].tolist() for ids, mask in row) for row in zip(*sides, strict=True)]
