"""One base in four bits that learner and engine both read (`model.quantization=int4`).

The learner quantizes the policy when it loads it (`models/quantized.py`). The same codes are written once as a folder
in the format "pack-quantized" of compressed-tensors, from which vLLM starts: it has kernels for weights of four bits
and activations of 16, and repacks the codes for them. Only the adapter is sent afterwards, as a LoRA request.

Repacked codes cannot be compared with the learner's by checksums. In their place each proof compares the engine's
layers by their products with random inputs: a layer with other weights, or with those of another layer, differs by far
more than rounding. Weights that are not quantized are compared bit for bit.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grpo_ray.errors import SyncError
from grpo_ray.inference.weight_layout import FUSED, Recorded, Region
from grpo_ray.models.adapters import base_model, frozen_parameters
from grpo_ray.models.quantized import BLOCK, QuantizedLinear, quantized_layers

INPUTS = 16
"""Random inputs of each layer whose products are compared."""
TOLERANCE = 0.01
"""Largest relative difference of the products. Rounding in 16 bits gives 0.002 to 0.004; one policy in four bits and
the same in 16 differ by 0.07 to 0.1."""


def write_compressed_policy(model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the policy that an adapter belongs to, quantized to int4, in the format of compressed-tensors.

    Args:
        model: the learner's, with `QuantizedLinear` layers.
        tokenizer: the policy's.
        folder: a new folder.
    """
    policy = base_model(model)
    folder.mkdir(parents=True)
    policy.config.save_pretrained(folder)
    # Not by its own `save_pretrained`, which refuses values that the files of some policies have.
    (folder / "generation_config.json").write_text(policy.generation_config.to_json_string(), encoding="utf-8")
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["quantization_config"] = compression(model)
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _compressed(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def compression(model: torch.nn.Module) -> dict[str, Any]:
    """Return the section `quantization_config` of a policy's config. Layers that it does not name are plain."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": BLOCK}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": sorted(_plain_names(model)), "weights": weights}},
    }


def _compressed(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter, layer in frozen_parameters(model):
        if not isinstance(layer, QuantizedLinear) or parameter is layer.bias:
            yield name, parameter
            continue
        module = name.removesuffix(".weight")
        yield f"{module}.weight_packed", layer.codes
        yield f"{module}.weight_scale", layer.scales
        yield f"{module}.weight_shape", torch.tensor([layer.out_features, layer.in_features])


def frozen_places(model: torch.nn.Module, slices: Mapping[str, tuple[int, ...]]) -> Recorded:
    """Return the places that the weights of quantized layers would have in the engine if they were not repacked.

    The places of an adapter's matrices follow from them (`LoraSlot.with_matrices`).

    Args:
        model: the learner's.
        slices: the engine's linear layers, with the outputs of their parts.
    """
    regions, weights, parameters = [], {}, {}
    for name, layer in _plain_names(model).items():
        module, start = _place(name, slices)
        size = (layer.out_features, layer.in_features)
        regions.append(
            Region(
                weight=f"{name}.weight",
                parameter=f"{module}.weight",
                size=size,
                strides=(layer.in_features, 1),
                offset=0,
                stored_strides=(layer.in_features, 1),
                stored_offset=start * layer.in_features,
            )
        )
        weights[f"{name}.weight"] = layer.out_features * layer.in_features
        parameters[f"{module}.weight"] = sum(slices[module]) * layer.in_features
    return Recorded(tuple(regions), weights, parameters)


def _plain_names(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers by their names in the policy without an adapter."""
    return {name.removesuffix(".base_layer"): layer for name, layer in quantized_layers(base_model(model))}


def _place(name: str, slices: Mapping[str, tuple[int, ...]]) -> tuple[str, int]:
    """Return the engine's layer that holds a layer of the policy, and the first of its outputs there."""
    parent, _, own = name.rpartition(".")
    for fused, parts in FUSED.items():
        module = f"{parent}.{fused}"
        if own in parts and module in slices:
            return module, sum(slices[module][: parts.index(own)])
    if name not in slices:
        raise SyncError(f"model.quantization=int4: the engine has no layer for {name}; set model.quantization=nf4")
    return name, 0


@torch.no_grad()
def require_same_base(model: torch.nn.Module, engine: torch.nn.Module) -> None:
    """Compare the engine's base with the learner's: products of quantized layers, other weights bit for bit.

    Args:
        engine: the engine's model, without its layers for adapters (`lora_requests.base_layers`).

    Raises:
        SyncError: a layer or a weight differs, or the engine has other layers.
    """
    layers = engine_layers(engine)
    slices = {name: output_slices(layer) for name, layer in layers.items()}
    parts: dict[str, dict[int, QuantizedLinear]] = {name: {} for name in layers}
    for name, layer in _plain_names(model).items():
        module, start = _place(name, slices)
        parts[module][start] = layer
    for module, of_module in parts.items():
        layer = layers[module]
        first = next(iter(of_module.values()), None)
        if first is None or sum(each.out_features for each in of_module.values()) != sum(slices[module]):
            raise SyncError(f"the engine does not hold the learner's weights: {module} has weights of other layers")
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(INPUTS, first.in_features, generator=generator).to(first.codes.device, first.dtype)
        expected = torch.cat(
            [torch.nn.functional.linear(inputs, of_module[start].weight) for start in sorted(of_module)], dim=-1
        ).float()
        found = layer.quant_method.apply(layer, inputs, None).float()
        error, size = (found - expected).norm(), expected.norm()
        if not error <= TOLERANCE * size:  # NaN too; a layer of zeros has exact products
            difference = f"by a part of {float(error / size):.2g}" if size else "from zero"
            raise SyncError(f"the engine does not hold the learner's weights: products of {module} differ {difference}")
    own = dict(engine.named_parameters())
    for name, parameter, frozen in frozen_parameters(model):
        if isinstance(frozen, QuantizedLinear) and parameter is frozen.codes:
            continue
        stored = _stored(name, own, engine)
        if stored is None:
            raise SyncError(f"the engine does not hold the learner's weights: {name} never reached it")
        unpadded = stored[tuple(slice(size) for size in parameter.shape)]  # vLLM pads the vocabulary
        if not torch.equal(parameter, unpadded.to(parameter.dtype)):
            raise SyncError(f"the engine does not hold the learner's weights: {name} differs")


def _stored(name: str, own: Mapping[str, torch.Tensor], engine: torch.nn.Module) -> torch.Tensor | None:
    """Return the part of the engine's own parameters that holds a weight, or None."""
    if name in own:
        return own[name]
    layer, _, attribute = name.rpartition(".")
    parent, _, part = layer.rpartition(".")
    for fused, parts in FUSED.items():
        if part in parts and (stored := own.get(f"{parent}.{fused}.{attribute}")) is not None:
            sizes = output_slices(engine.get_submodule(f"{parent}.{fused}"))
            return stored.split(sizes)[parts.index(part)]
    return None


def engine_layers(engine: torch.nn.Module) -> dict[str, Any]:
    """Return the engine's linear layers with weights in four bits, by name."""
    return {name: module for name, module in engine.named_modules() if hasattr(module, "weight_packed")}


def output_slices(layer: Any) -> tuple[int, ...]:
    """Return the outputs of each part of one of the engine's linear layers, which may be fused."""
    return tuple(layer.output_partition_sizes)
