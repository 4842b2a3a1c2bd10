"""A version of the learner's weights as objects of Ray's object store.

The tensors of a chunk lie in plain byte arrays, which every process of a node reads from shared memory without a copy.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

CHUNK_BYTES = 1 << 30
"""Largest size of a chunk, but for a larger single weight. The learner's process holds one chunk at a time."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as bytes."""

    name: str
    data: "np.ndarray[Any, np.dtype[np.uint8]]"
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "StoredTensor":
        plain = tensor.detach().to("cpu").contiguous()
        return cls(name, plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))

    def tensor(self) -> torch.Tensor:
        """Return the tensor; it shares the memory of the bytes, and must not be written to."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(self.data)
        return flat.view(self.dtype).view(self.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a precision in torch, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


Chunk = list[StoredTensor]


def chunks(weights: Iterable[tuple[str, torch.Tensor]], most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Divide weights into chunks, in order.

    Args:
        weights: name and tensor of each weight, on any device.
        most_bytes: largest size of a chunk, but for a larger single weight.
    """
    chunk: Chunk = []
    size = 0
    for name, weight in weights:
        stored = StoredTensor.of(name, weight)
        if chunk and size + stored.data.nbytes > most_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(stored)
        size += stored.data.nbytes
    if chunk:
        yield chunk


def tensors(of: Iterable[Chunk]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each weight of the chunks."""
    for chunk in of:
        for stored in chunk:
            yield stored.name, stored.tensor()
