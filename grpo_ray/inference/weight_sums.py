"""Checksums of weights that add up over the parts of a tensor, however it is fused, sharded or laid out.

The checksum of a tensor with elements x_0 ... x_(n-1), in the order of its indices, is

    sum of bits(x_i) * BASE**i,  modulo 2**64

with the element's bits as an integer. A plain sum of the bits would be the same after two equally large matrices, such
as those of queries and keys, have changed places in a fused one; here each element has a coefficient of its own:
powers of BASE repeat after 2**62 steps only. The coefficients are odd, so a change of any single element is detected.
Other changes are missed with a probability of about 2**-64. Where many elements change by the same amount, factors of
two in their number and in the amount raise that probability, but even for a swap of two blocks in the largest matrices
of today's models it stays below 2**-30.

A sum has no order, so parts of a tensor add up to the whole: rows that another worker holds, or a slice of a fused
matrix. And BASE**(i + j) is BASE**i * BASE**j, so in any strided view of the tensor the coefficients are a product of
one vector for each dimension. They are never stored for a whole tensor.
"""

import functools
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

MODULUS = 1 << 64
BASE = 0x9E3779B97F4A7C15
"""Congruent to 5 modulo 8, so that its powers modulo 2**64 have the longest possible period, 2**62."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer type of that size, as which its bits are read."""

CHUNK = {"cpu": 1 << 17, "cuda": 1 << 23}
"""Elements that are multiplied at a time, 8 bytes each: few enough for a CPU's cache, and enough to occupy a GPU."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def weight_sum(
    part: torch.Tensor,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the checksum of a part of a tensor; those of all parts add up to the checksum of the tensor.

    Args:
        part: elements of the tensor, of any shape and layout.
        strides: distance between neighbours in each dimension of the part, in the tensor's order of elements. None: the
            part is the whole tensor.
        offset: place of the part's first element in that order.
        dtype: precision to which the elements are rounded first, a chunk at a time; None keeps theirs.

    Returns:
        () int64, the checksum modulo 2**64 as a signed number, on the part's device.
    """
    part, dtype = part.detach(), dtype or part.dtype
    strides = contiguous_strides(part.shape) if strides is None else strides
    if part.dim() == 0:
        part, strides = part[None], (1,)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if part.numel() == 0:
        return total
    length = part.size(0)
    outer, *inner = (_powers(size, stride, part.device) for size, stride in zip(part.shape, strides, strict=True))
    rows = max(1, CHUNK[part.device.type] * length // part.numel())
    for start in range(0, length, rows):
        sums = part[start : start + rows].to(dtype).view(INTEGERS[dtype.itemsize])
        for weights in reversed(inner):
            sums = (sums * weights).sum(-1)
        total += (sums * outer[start : start + rows]).sum()
    return total * _signed(pow(BASE, offset, MODULUS))


def shard_sum(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the checksum of this worker's part of a weight; the sum over all workers counts replicas once.

    Args:
        weight: a DTensor, or a whole weight, whose checksum is returned.
        dtype: precision to which the elements are rounded first; None keeps theirs.

    Returns:
        () int64, on the weight's device.
    """
    if not isinstance(weight, DTensor):
        return weight_sum(weight, dtype=dtype)
    mesh, placements = weight.device_mesh, weight.placements
    if not all(isinstance(each, Shard | Replicate) for each in placements):
        raise TypeError(f"a weight is laid out as {placements}; its parts have no checksums that add up")
    local = weight.to_local()
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    is_replica = any(
        isinstance(each, Replicate) and place > 0 for each, place in zip(placements, coordinate, strict=True)
    )
    if is_replica:
        return torch.zeros((), dtype=torch.int64, device=local.device)
    _, offsets = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    strides = contiguous_strides(weight.shape)
    offset = sum(place * stride for place, stride in zip(offsets, strides, strict=True))
    return weight_sum(local, strides, offset, dtype)


def add_sums(sums: Sequence[int]) -> int:
    """Add checksums of parts, modulo 2**64; returns a number of at least 0."""
    return sum(sums) % MODULUS


@functools.lru_cache(maxsize=512)
def _powers(length: int, stride: int, device: torch.device) -> torch.Tensor:
    """Return BASE to the power of 0, `stride`, 2 `stride` ..., (length,) int64, modulo 2**64."""
    factors = torch.full((length,), _signed(pow(BASE, stride, MODULUS)), dtype=torch.int64, device=device)
    factors[:1] = 1
    return factors.cumprod(0)


def _signed(number: int) -> int:
    """Return the number of int64 with the same bits as a number below 2**64."""
    return number - MODULUS if number >= MODULUS >> 1 else number
