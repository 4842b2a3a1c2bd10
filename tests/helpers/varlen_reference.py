"""Attention over rows of different lengths by its definition, on any device and in any precision.

The signatures are those of `torch.nn.attention.varlen.varlen_attn`, which runs on GPUs and in 16 bits only.
"""

import math
from typing import Any

import torch


def varlen_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Compute (T, H, D) from (T, H, D) row by row, with the signature of torch 2.11."""
    assert return_aux is None and query.shape == key.shape == value.shape
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.tolist() == cu_seq_k.tolist()
    assert cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query)
    lengths = cu_seq_q.diff().tolist()
    assert min(lengths) > 0 and max_q == max_k == max(lengths)
    outputs = []
    for q, k, v in zip(*(each.split(lengths) for each in (query, key, value)), strict=True):
        at = torch.arange(len(q), device=q.device)
        distance = at[:, None] - at[None, :]  # of a query from a key before it
        left, right = window_size
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance > left
        if right >= 0:
            hidden |= -distance > right
        scores = torch.einsum("qhd,khd->hqk", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def grouped_varlen_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Compute the same with fewer heads of keys, with the signature of torch 2.13."""
    assert cu_seq_k is not None and seqused_k is block_table is num_splits is None
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa or groups == 1
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    return varlen_by_definition(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale, window_size=window_size
    )
