"""The learner's adapter in the engine as a LoRA request (`engine.adapter=request`).

The engine holds the frozen weights of the policy, and vLLM adds the update of each adapted layer in its forward pass.
The frozen weights are sent once; a sync then sends the two matrices of each update, from memory, under a new id. They
are stored in the slot of one adapter, in tensors beside the weights of vLLM's layers.

Both are proven as other weights are (`weight_proof.py`). The recorded place of a layer's weight in the engine
(`weight_layout.py`) gives the places of the matrices: the second one has the rows of the weight, in the same part of a
fused layer, and the first one its columns. So the parts of fused and tensor-parallel layers need no rules of their own.

The scale of an update is multiplied into the second matrix in float32 before it is rounded to the engine's precision.
vLLM would multiply the rounded matrix, and round it a second time.

| private part of vLLM                            | reason for using it                                              |
|-------------------------------------------------|------------------------------------------------------------------|
| `lora_manager` of the model runner, and its     | an adapter is added from memory, where vLLM's own functions read |
| `_adapter_manager`                              | a folder; requests then find their adapter loaded                |
| `LoRAModel`, `LoRALayerWeights`                 | the form in which the manager takes an adapter                   |
| `modules`, `lora_index_to_id` of the manager,   | the matrices are read back for the proof                         |
| `lora_a_stacked`, `lora_b_stacked`,             |                                                                  |
| `output_slices` of its layers                   |                                                                  |
| `BaseLayerWithLoRA.base_layer`                  | weights are loaded and listed under the names without adapter    |

`tests/integration/inference/test_vllm_internals.py` fails when a release changes the code behind one of them. vLLM is
imported inside the functions, as in `vllm_internals.py`.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import torch

from grpo_ray.errors import ConfigError, SyncError
from grpo_ray.inference.vllm_internals import lora_manager
from grpo_ray.inference.weight_layout import Recorded, Region
from grpo_ray.inference.weight_proof import FIRST, SECOND, is_matrix
from grpo_ray.models.adapters import LoraUpdate

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

MERGE = "set engine.adapter=merge, without model.quantization=int4 and model.share_base"
"""Remedy where an engine cannot apply or prove an adapter."""

FIRST_VERSION = 1000
"""Id of the first adapter; vLLM itself uses small ones while it starts."""

SLOT = 0
"""Slot of the only adapter that the engine has."""


def lora_arguments(ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` with which an engine takes one adapter at a time.

    Args:
        ranks: name of each adapted layer -> rank of its update.
    """
    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": slot_rank(max(ranks.values()), get_args(MaxLoRARanks)),
        # Other layers, the output layer above all, would be computed with matrices of zeros.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in ranks}),
    }


def slot_rank(rank: int, allowed: Iterable[int]) -> int:
    """Return the smallest rank of a slot that holds an adapter of this rank."""
    return min(each for each in allowed if each >= rank)


@contextmanager
def base_layers(model: torch.nn.Module) -> Iterator[None]:
    """Replace vLLM's layers with LoRA by the layers inside them; without such layers, do nothing.

    The model then lists its parameters, and loads weights, under the names that it has without LoRA.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent._modules, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for children, name, child in wrapped:
        children[name] = child.base_layer
    try:
        yield
    finally:
        for children, name, child in wrapped:
            children[name] = child


class LoraSlot:
    """The adapter in an engine that was started with `lora_arguments`."""

    def __init__(self, llm: "LLM") -> None:
        """
        Raises:
            ConfigError: vLLM has no LoRA for a layer of this policy.
        """
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        self._manager = lora_manager(llm)
        for name, layer in self._layers.items():
            if not isinstance(layer, BaseLinearLayerWithLoRA):
                raise ConfigError(
                    f"engine.adapter=request: vLLM computes {name} as {type(layer).__name__}, whose adapter cannot be "
                    f"proven; leave the layer out of target_modules, or {MERGE}"
                )
        self.request: LoRARequest | None = None
        """Adapter of the requests; None before the first sync."""
        self._version = FIRST_VERSION - 1
        self._names: dict[str, str] = {}
        self._regions: dict[str, list[Region]] = {}

    @property
    def _layers(self) -> Mapping[str, Any]:
        layers: Mapping[str, Any] = self._manager._adapter_manager.modules
        return layers

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the slot's matrices, by the names of vLLM's layers: (rank, inputs) and (outputs, rank) each."""
        return {
            f"{name}.{kind}.{part}": stacked[SLOT, 0]
            for name, layer in self._layers.items()
            for kind, parts in ((FIRST, layer.lora_a_stacked), (SECOND, layer.lora_b_stacked))
            for part, stacked in enumerate(parts)
        }

    def send(self, updates: Iterable[LoraUpdate]) -> None:
        """Put an adapter into the slot in place of the former one, with a new id. The frozen weights must be loaded."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights
        from vllm.lora.request import LoRARequest

        dtype = next(iter(self.tensors().values())).dtype
        self._manager.remove_all_adapters()
        loras = {}
        for update in updates:
            if update.layer not in self._names:
                raise SyncError(
                    f"the engine has no place for the adapter of {update.layer}, since no parameter is a copy of its "
                    f"weight; {MERGE}"
                )
            name, rank = self._names[update.layer], len(update.first)
            # Copies in main memory, as vLLM's own loader makes them: the manager keeps them beside the slot.
            first, second = (each.to("cpu", dtype, copy=True) for each in (update.first, update.second))
            loras[name] = LoRALayerWeights(name, rank, rank, first, second, scaling=1.0)
        self._version += 1
        adapters = self._manager._adapter_manager
        adapters.add_adapter(LoRAModel(self._version, max(each.rank for each in loras.values()), loras))
        adapters.activate_adapter(self._version)
        self.request = LoRARequest(f"version-{self._version}", self._version, "loaded from memory")

    def with_matrices(self, recorded: Recorded, updates: Iterable[LoraUpdate]) -> Recorded:
        """Add the places of an adapter's matrices to the recorded places of the frozen weights.

        Args:
            recorded: places of the weights in the parameters of `base_layers`.
            updates: the learner's, for their names and sizes.

        Raises:
            SyncError: the place of a layer's weight does not give those of its matrices.
        """
        of_weight: dict[str, list[Region]] = {}
        for region in recorded.regions:
            of_weight.setdefault(region.weight, []).append(region)
        weights, tensors = dict(recorded.weights), self.tensors()
        self._regions = {name: [] for name in tensors}
        for update in updates:
            for name, matrix in ((FIRST, update.first), (SECOND, update.second)):
                weights[f"{update.layer}.{name}"] = matrix.numel()
            for region in of_weight.get(f"{update.layer}.weight", []):
                self._add_matrices(update, region, tensors)
        regions = [region for each in self._regions.values() for region in each]
        # Elements outside of the matrices must be zeros (`require_nothing_else`), as padding.
        filled = {
            name: tensor.numel() - sum(each.numel() for each in self._regions[name]) for name, tensor in tensors.items()
        }
        return dataclasses.replace(
            recorded,
            regions=(*recorded.regions, *regions),
            weights=weights,
            parameters=recorded.parameters | {name: tensor.numel() for name, tensor in tensors.items()},
            filled=recorded.filled | filled,
        )

    def of_matrices(self, frozen: Recorded, updates: Iterable[LoraUpdate]) -> Recorded:
        """Return the places of an adapter's matrices alone, from those that the frozen weights would have.

        Raises:
            SyncError: the place of a layer's weight does not give those of its matrices.
        """
        both = self.with_matrices(frozen, updates)
        return Recorded(
            regions=tuple(each for each in both.regions if is_matrix(each.weight)),
            weights={name: numel for name, numel in both.weights.items() if is_matrix(name)},
            parameters={name: numel for name, numel in both.parameters.items() if name not in frozen.parameters},
            filled=both.filled,
        )

    def _add_matrices(self, update: LoraUpdate, region: Region, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add the places of an update's matrices that belong to a region of its layer's weight."""
        module, _, attribute = region.parameter.rpartition(".")
        rank, inputs = update.first.shape
        has_rows = len(region.size) == 2 and region.strides[1] == 1 and region.stored_strides[1] == 1
        if module not in self._layers or attribute != "weight" or not has_rows or region.strides[0] != inputs:
            raise SyncError(
                f"the engine has no place for the adapter of {update.layer}, whose weight is in {region.parameter}; "
                f"{MERGE}"
            )
        rows, columns = region.size
        row, column = divmod(region.offset, inputs)
        stored_row = region.stored_offset // region.stored_strides[0]
        part, start = self._part_of(module, stored_row, rows)
        self._names[update.layer] = f"{module.rpartition('.')[0]}.{update.layer.rpartition('.')[2]}".lstrip(".")
        first, second = f"{module}.{FIRST}.{part}", f"{module}.{SECOND}.{part}"
        of_first = Region(
            weight=f"{update.layer}.{FIRST}",
            parameter=first,
            size=(rank, columns),
            strides=(inputs, 1),
            offset=column,
            stored_strides=tensors[first].stride(),
            stored_offset=0,
        )
        of_second = Region(
            weight=f"{update.layer}.{SECOND}",
            parameter=second,
            size=(rows, rank),
            strides=(rank, 1),
            offset=row * rank,
            stored_strides=tensors[second].stride(),
            stored_offset=(stored_row - start) * tensors[second].stride(0),
        )
        if of_first not in self._regions[first]:  # several blocks of rows have the same columns
            self._regions[first].append(of_first)
        self._regions[second].append(of_second)

    def _part_of(self, module: str, row: int, rows: int) -> tuple[int, int]:
        """Return the part of a fused layer that holds these rows, and the part's first row."""
        start = 0
        for part, size in enumerate(self._layers[module].output_slices):
            if start <= row and row + rows <= start + size:
                return part, start
            start += size
        raise SyncError(
            f"the parts of the engine's {module} divide a weight that was sent as one, so that its adapter cannot be "
            f"proven; {MERGE}"
        )

    def require_nothing_else(self) -> None:
        """Require that the slot holds the adapter of the requests, and zeros outside of its matrices.

        Raises:
            SyncError: it does not.
        """
        ids = self._manager._adapter_manager.lora_index_to_id
        if self.request is not None and ids[SLOT] != self.request.lora_int_id:
            raise SyncError(
                f"the engine does not hold the learner's weights: its adapter is {ids[SLOT]}, and the requests' is "
                f"{self.request.lora_int_id}"
            )
        tensors = self.tensors()
        for name, tensor in tensors.items():
            own = sum(int(each.stored(tensors).count_nonzero()) for each in self._regions.get(name, []))
            if int(tensor.count_nonzero()) != own:
                raise SyncError(
                    f"the engine does not hold the learner's weights: {name} has numbers that are not the adapter's"
                )
