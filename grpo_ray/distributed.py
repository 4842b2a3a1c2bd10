"""Collectives of torch.distributed that also work in a single process."""

from typing import Any

import torch.distributed as dist


def all_gather_object(value: Any) -> list[Any]:
    """Gather a picklable value from every worker.

    A collective: all workers must call it the same number of times, in the same order.

    Returns:
        The values in rank order, on every worker.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_rank_zero() -> bool:
    """Return True if this worker has rank 0, or is the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0
