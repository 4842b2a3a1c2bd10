"""Policies whose linear layers are kept in four bits, and trained through an adapter (QLoRA, arXiv 2305.14314).

A frozen weight is stored as codes of four bits with a scale for each block of weights. Each pass dequantizes it, layer
by layer, so the policy that is trained is the *dequantized* one: engine, export and evaluation take the same weights.
An export adds the adapter to them and rounds the sum to 16 bits, as the engine does with nf4; with int4 the engine
computes both apart. Weights are quantized on the CPU, since the kernels of a GPU may round a few of them to the next
code; so every machine, and each attempt of a run, gets the same policy from the same files.

The output layer, embeddings, norms and biases keep their precision. The layer below is a `torch.nn.Linear` whose
`weight` is computed when it is read, so PEFT treats it as any linear layer. Layers of bitsandbytes are not used: PEFT
merges into them by quantizing the sum again, which loses updates that are smaller than the distance of two codes, and
one of their passes on a CPU with AVX512-BF16 repacks the codes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import functional

from grpo_ray.config.schema import Config
from grpo_ray.errors import CheckpointError, ConfigError
from grpo_ray.models.memory import BYTES_PER_NUMBER

QUANTIZATION = "quantization.json"
"""File of a checkpoint that says how the policy was quantized to which its adapter belongs."""

BLOCK = 64
"""Number of weights that share a scale: bitsandbytes' default, and QLoRA's."""


@dataclass(frozen=True)
class Quantizer:
    """A format of four bits."""

    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Returns codes and scales of a weight, (outputs, inputs) in floating point, whose inputs are a multiple of BLOCK.
    """
    dequantize: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
    """Returns the weight of codes and scales in a precision, contiguous, in any shape."""


class QuantizedLinear(torch.nn.Linear):
    """Linear layer with a frozen weight in four bits, which is dequantized whenever it is read."""

    codes: torch.nn.Parameter
    scales: torch.nn.Parameter

    def __init__(self, layer: torch.nn.Linear, method: str) -> None:
        """
        Args:
            layer: layer on the CPU whose weight is quantized; its bias is kept.
            method: a key of QUANTIZERS.
        """
        torch.nn.Module.__init__(self)  # that of Linear would create a weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.quantized_from = self.dtype = layer.weight.dtype
        self.quantizer = QUANTIZERS[method]
        codes, scales = self.quantizer.quantize(layer.weight.detach())
        # Parameters, not buffers, which DDP would broadcast in each pass.
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)
        self.register_parameter("bias", layer.bias)

    def __getattr__(self, name: str) -> Any:
        """Dequantize the weight; a merge may set one of its own (`merged_layer` in `models/adapters.py`)."""
        if name == "weight" and "weight" not in self._parameters:
            return self.dequantized()
        return super().__getattr__(name)

    def dequantized(self) -> torch.Tensor:
        """Return the weight: (outputs, inputs), in the layer's precision."""
        weight = self.quantizer.dequantize(self.codes, self.scales, self.quantized_from)
        return weight.view(self.out_features, self.in_features).to(self.dtype)

    def expand(self, dtype: torch.dtype) -> None:
        """Replace codes and scales by a weight, the dequantized one in a precision."""
        weight = self.dequantized().to(dtype)
        del self.codes, self.scales
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return (..., outputs) for (..., inputs). The backward pass dequantizes again, so no weight is kept for it."""
        return cast(torch.Tensor, _Linear.apply(input, self.bias, self))

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> "QuantizedLinear":
        """Move or convert the layer. A conversion changes the dequantized weight, but neither codes nor scales."""
        scales = self.scales.data
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales.data = scales.to(self.scales.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self


class _Linear(torch.autograd.Function):
    """A linear layer's product with a dequantized weight."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return functional.linear(inputs, layer.weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        of_inputs = gradient @ ctx.layer.weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return of_inputs, of_bias, None


def _quantize_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # As rows of one block: the CPU kernel that dequantizes begins a new block in each row, the one that quantizes does
    # not, so rows of another length would give wrong weights.
    codes, state = _bitsandbytes().quantize_4bit(weight.reshape(-1, BLOCK), blocksize=BLOCK, quant_type="nf4")
    return codes, state.absmax


def _dequantize_nf4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    library = _bitsandbytes()
    computed = torch.float32 if dtype == torch.float64 else dtype  # it has no kernel for float64
    state = library.QuantState(
        absmax=scales, shape=torch.Size([scales.numel(), BLOCK]), blocksize=BLOCK, quant_type="nf4", dtype=computed
    )
    weight: torch.Tensor = library.dequantize_4bit(codes, state)
    return weight.to(dtype)


def _bitsandbytes() -> Any:
    """Import the functions of bitsandbytes. Raises ConfigError."""
    try:
        from bitsandbytes import functional as library
    except ImportError:
        raise ConfigError(MISSING) from None
    return library


def _quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The values of compressed-tensors' format "pack-quantized": 15 steps from the negative to the positive maximum,
    # eight codes in each number of 32 bits, the first one in its lowest bits.
    blocks = weight.float().view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 7.5).to(weight.dtype)
    scales[scales == 0] = 1.0  # a block of zeros
    values = (blocks / scales.float()[..., None]).round().clamp(-8, 7)
    pairs = (values + 8).to(torch.uint8).view(len(weight), -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).view(torch.int32), scales


def _dequantize_int4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    pairs = codes.view(torch.uint8)
    values = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(*scales.shape, BLOCK)
    return values.to(dtype).sub_(8).mul_(scales.to(dtype)[..., None])  # in place: a copy of a weight is large


MISSING = "model.quantization=nf4 needs bitsandbytes, which is not installed: pip install 'grpo-ray[nf4]'"

QUANTIZERS: Mapping[str, Quantizer] = {
    "nf4": Quantizer(_quantize_nf4, _dequantize_nf4),
    "int4": Quantizer(_quantize_int4, _dequantize_int4),
}
"""Value of `model.quantization` -> its format."""


def require_quantizer(method: str | None) -> None:
    """Require the package that a format needs, without importing it. Raises ConfigError."""
    if method == "nf4" and find_spec("bitsandbytes") is None:
        raise ConfigError(MISSING)


def quantize_policy(policy: Any, method: str, kept: Sequence[str] = ()) -> None:
    """Quantize the linear layers of a policy on the CPU in place, all but its output layer.

    Args:
        policy: a causal language model of transformers.
        method: a key of QUANTIZERS.
        kept: names of modules that stay as they are with all layers in them, whole or parts of names, such as modules
            that are trained as a whole.

    Raises:
        ConfigError: the policy has no linear layer that can be quantized.
    """
    names = quantizable_layers(policy, kept)
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(policy.get_submodule(parent), attribute, QuantizedLinear(policy.get_submodule(name), method))


def round_policy(policy: Any, method: str, kept: Sequence[str] = ()) -> None:
    """Set the weights of a plain policy to those of the quantized one, in place: quantized and dequantized again."""
    quantizer = QUANTIZERS[method]
    for name in quantizable_layers(policy, kept):
        weight = policy.get_submodule(name).weight
        weight.data = quantizer.dequantize(*quantizer.quantize(weight.detach()), weight.dtype).view(weight.shape)


def quantizable_layers(policy: Any, kept: Sequence[str] = ()) -> list[str]:
    """Return the names of the layers that are quantized, in the policy's order; see `quantize_policy`."""
    output = policy.get_output_embeddings()
    names = [
        name
        for name, module in policy.named_modules()
        if type(module) is torch.nn.Linear
        and module is not output
        and module.in_features % BLOCK == 0
        and not any(f".{each}." in f".{name}." for each in kept)
    ]
    if not names:
        raise ConfigError(
            f"model.quantization: the policy has no linear layer with a multiple of {BLOCK} inputs to quantize; set "
            "model.quantization=null"
        )
    return names


def quantized_layers(model: torch.nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield each quantized layer with its name."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module


def identities(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameter that each weight of a layer is, or the codes that it is dequantized from, by its name."""
    named = dict(layer.named_parameters())
    if isinstance(layer, QuantizedLinear):
        del named["scales"]
        named["weight"] = named.pop("codes")
    return named


@dataclass(frozen=True)
class Quantization:
    """Quantization of the policy under an adapter."""

    method: str
    """A key of QUANTIZERS."""
    dtype: str
    """Precision of the weights before and after, such as "bfloat16"."""

    @staticmethod
    def of(config: Config) -> "Quantization | None":
        """Return that of a run; None for a policy that is not quantized."""
        return Quantization(config.model.quantization, config.dtype) if config.model.quantization else None

    @staticmethod
    def describe(base: "Quantization | None") -> str:
        """Describe a policy, or None for one that is not quantized, for a message."""
        return f"a policy in {base.method} of {base.dtype}" if base else "a policy that is not quantized"


def record_quantization(folder: Path, base: Quantization | None) -> None:
    """Write beside an adapter how the policy was quantized that it belongs to; nothing for None."""
    if base is not None:
        (folder / QUANTIZATION).write_text(json.dumps(asdict(base)) + "\n", encoding="utf-8")


def read_quantization(folder: str | Path) -> Quantization | None:
    """Read the file beside an adapter, which may be a stranger's; None without one. Raises CheckpointError."""
    path = Path(folder, QUANTIZATION)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        found = None
    known = [asdict(Quantization(method, dtype)) for method in QUANTIZERS for dtype in BYTES_PER_NUMBER]
    if found not in known:
        raise CheckpointError(f"{path} is damaged: it names no format of four bits and precision")
    return Quantization(**found)


def kept_modules(adapter: Mapping[str, Any] | None) -> Sequence[str]:
    """Return the modules that an adapter trains as a whole, which therefore are not quantized."""
    return list((adapter or {}).get("modules_to_save") or ())
