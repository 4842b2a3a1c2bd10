"""Packed linear weights of vLLM's CPU backend that follow every weight sync.

After loading, vLLM's CPU backend packs linear weights into a layout of oneDNN and discards the originals. Weights that
are loaded later never reach the packed copy, so the engine would silently generate with stale weights. Here the
originals are kept next to the packed copy, which doubles the memory of the engine's weights, and are packed again
after each sync. Packing takes as long as a few matrix products, and a step has hundreds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo_ray.inference.vllm_internals import is_linear, pack_linear_weight, replaced_linear_packing

MIN_PACKED_WEIGHTS = 100_000
"""Smallest float32 layer, in weights, that is packed: from about this size on vLLM's packed product is faster on the
CPU than torch's. Measured with 1 to 128 rows and 1 and 2 threads: torch's product takes 0.4 to 1.5 times the packed
one's time with 12,000 weights, 0.9 to 1.6 times with 98,000, and 1.1 to 2.2 times with 440,000. In 16 bits torch's is
never faster."""


@contextmanager
def repackable_layers() -> Iterator[list[torch.nn.Module]]:
    """Keep the original weights of the linear layers that a CPU engine created in this context packs.

    Yields:
        The layers, appended while the engine is created; none on CUDA. Call `pack_on_next_use` for each of them
        whenever its weight has changed.
    """
    layers: list[torch.nn.Module] = []

    def keep_weight(layer: torch.nn.Module, pack_by_default: Callable[[], None]) -> None:
        if not is_linear(layer):
            pack_by_default()
            return
        layers.append(layer)
        pack_on_next_use(layer)

    with replaced_linear_packing(keep_weight):
        yield layers


class _PackFirst:
    """Product of a linear layer that packs the weight on its first call; the packed product then takes its place."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        pack_linear_weight(self.layer)
        product: torch.Tensor = self.layer.cpu_linear(x, weight, bias)
        return product


def pack_on_next_use(layer: Any) -> None:
    """Make a linear layer of vLLM's CPU backend pack its present weight on its next call, unless it is too small.

    The weight is not packed at once because vLLM registers embeddings too, and an embedding is never called as a linear
    layer unless the output layer shares its weight.
    """
    layer.cpu_linear = _PackFirst(layer) if is_faster_packed(layer.weight) else torch.nn.functional.linear


def is_packed(layer: Any) -> bool:
    """Return True if a layer multiplies with a packed copy of its weight, which later changes do not reach."""
    return layer.cpu_linear is not torch.nn.functional.linear and not isinstance(layer.cpu_linear, _PackFirst)


def is_faster_packed(weight: torch.Tensor) -> bool:
    """Return True if products with a weight, (out, in), are faster with packing, including the time to pack it."""
    return weight.dtype != torch.float32 or weight.numel() >= MIN_PACKED_WEIGHTS
