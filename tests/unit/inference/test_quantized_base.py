"""Comparison of one base in four bits (`model.quantization=int4`), with an engine's layer written by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from grpo_ray.errors import SyncError
from grpo_ray.inference.quantized_base import require_same_base
from grpo_ray.models.quantized import QuantizedLinear


class Policy(torch.nn.Sequential):
    """Policy of one layer, which stands for one with an adapter."""

    def get_base_model(self) -> "Policy":
        return self


class EngineLayer(torch.nn.Module):
    """Layer of an engine, which multiplies with a plain weight."""

    weight_packed = None

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.output_partition_sizes = [len(weight)]
        self.quant_method = SimpleNamespace(apply=lambda layer, inputs, bias: inputs @ weight.T)


def compare(weight: torch.Tensor, change: float = 0.0, scale: float = 1.0) -> None:
    """Compare a layer with an engine's: its weight times `scale`, with `change` added to one number."""
    plain = torch.nn.Linear(64, 8, bias=False)
    plain.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer = QuantizedLinear(plain, "int4")
    of_engine = layer.weight.clone() * scale
    of_engine[5, 7] += change
    require_same_base(Policy(layer), torch.nn.Sequential(EngineLayer(of_engine)))


def test_layer_of_zeros_is_compared_too() -> None:
    compare(torch.zeros(8, 64))
    for change in (1e-6, math.nan):
        with pytest.raises(SyncError, match=r"products of 0 differ from zero$"):
            compare(torch.zeros(8, 64), change)


def test_layer_of_other_weights_is_refused() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    compare(weight)
    compare(weight, scale=1.005)  # rounding
    with pytest.raises(SyncError, match=r"products of 0 differ by a part of 0\.1$"):
        compare(weight, scale=1.1)
    with pytest.raises(SyncError, match="products of 0 differ by a part of nan"):
        compare(weight, math.nan)
