"""Helpers for collectives of torch.distributed that also work in a single process."""

from typing import Any

import torch.distributed as dist


def all_gather_object(value: Any) -> list[Any]:
    """Every worker's value, by rank, on every worker."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_rank_zero() -> bool:
    """Whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0
