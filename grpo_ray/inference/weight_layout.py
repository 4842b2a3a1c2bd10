"""Places of the learner's weights in the engine's parameters, observed while the engine's own loader writes them.

vLLM fuses weights (queries, keys and values; gate and up; experts), keeps a part of each in a tensor-parallel engine,
pads some, and does so differently for each architecture and release. All loaders end with the same operation: a slice
of the weight that was sent is copied into a slice of a parameter. `LoadRecorder` records these copies once, in the
first sync, which gives the place of each element of each weight in the engine, without a table of architectures.
Later syncs must put the weights in the same places: the proof (`weight_proof.py`) compares only these.

The recorded places follow the loader's interpretation of the names, so one thing is checked separately: the parts of
fused matrices must be in the order in which the model's forward pass splits them (`FUSED`). A weight that a loader
transforms before storing it (by quantization, or into another layout) has no such copy, and cannot be compared.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_ray.errors import SyncError

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Module of the engine that fuses others -> these, in the order in which the forward pass splits its output."""

FILLS = {"aten::fill_", "aten::zero_"}
"""Operations with which a loader sets padding."""


@dataclass(frozen=True)
class Region:
    """Elements of a sent weight and their place in a parameter of the engine."""

    weight: str
    """Name of the sent weight."""
    parameter: str
    """The engine's name of the parameter."""
    size: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides of the elements in the weight, which is contiguous."""
    offset: int
    """Offset of the first element in the weight."""
    stored_strides: tuple[int, ...]
    """Strides of the elements in the parameter's memory."""
    stored_offset: int
    """Offset of the first element from the parameter's own first element."""

    @property
    def elements(self) -> tuple[Any, ...]:
        """Identity of the elements, equal for replicas."""
        return self.weight, self.size, self.strides, self.offset

    def numel(self) -> int:
        """Return the number of elements."""
        count = 1
        for size in self.size:
            count *= size
        return count

    def stored(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the elements in the engine's memory."""
        parameter = parameters[self.parameter].data
        return parameter.as_strided(self.size, self.stored_strides, parameter.storage_offset() + self.stored_offset)


@dataclass(frozen=True)
class Recorded:
    """Observations of one worker's load."""

    regions: tuple[Region, ...]
    weights: dict[str, int]
    """Sent weight -> number of its elements."""
    parameters: dict[str, int]
    """Parameter of the engine -> number of its elements."""
    filled: dict[str, int] = field(default_factory=dict)
    """Parameter -> number of elements that were set to a constant, as padding."""
    computed: frozenset[str] = frozenset()
    """Parameters into which values other than copies of sent weights were written."""


class LoadRecorder(TorchDispatchMode):
    """Recorder of the copies from sent weights into an engine's parameters, active within its context."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """
        Args:
            parameters: the engine's, by name.
        """
        super().__init__()
        self._parameters = dict(parameters)
        self._stored: dict[int, list[str]] = {}
        for name, parameter in self._parameters.items():
            self._stored.setdefault(_memory(parameter), []).append(name)
        self._sent: dict[int, list[tuple[StorageWeakRef, str, range]]] = {}
        self._weights: dict[str, int] = {}
        self._regions: dict[tuple[Any, ...], Region] = {}
        self._filled: Counter[str] = Counter()
        self._computed: set[str] = set()

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights to the loader, and keep a reference to the memory of each."""
        for name, sent in weights:
            weight = sent.contiguous()
            self._weights[name] = weight.numel()
            # A weak reference: a gathered weight is freed after its turn, and another weight may then take its memory.
            sent_as = StorageWeakRef(weight.untyped_storage()), name, _elements(weight)
            self._sent.setdefault(_memory(weight), []).append(sent_as)
            yield name, weight

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record its writes into parameters."""
        given = kwargs or {}
        result = func(*args, **given)
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else given.get(argument.name)
            for written in value if isinstance(value, list | tuple) else [value]:
                if (name := self._parameter_of(written)) is not None:
                    self._note(name, written, func._schema.name, args[1] if len(args) > 1 else None)
        return result

    def _parameter_of(self, written: Any) -> str | None:
        """Return the parameter whose memory a tensor shares."""
        if not _has_memory(written):
            return None
        names = self._stored.get(_memory(written), [])
        holding = (name for name in names if written.storage_offset() in _elements(self._parameters[name]))
        return next(holding, None)

    def _sent_as(self, source: Any) -> tuple[str, int] | None:
        """Return the sent weight whose memory a tensor shares, with the place of its first element."""
        if _has_memory(source):
            for reference, name, elements in reversed(self._sent.get(_memory(source), [])):
                if not reference.expired() and source.storage_offset() in elements:
                    return name, elements.start
        return None

    def _note(self, name: str, written: torch.Tensor, operation: str, source: Any) -> None:
        parameter = self._parameters[name]
        sent = self._sent_as(source)
        if operation in FILLS:
            self._filled[name] += written.numel()
        elif operation != "aten::copy_" or sent is None or written.dtype != parameter.dtype:
            self._computed.add(name)
        else:
            weight, first = sent
            source = source.expand_as(written)
            place = tuple(written.stride()), written.storage_offset() - parameter.storage_offset()
            self._regions[name, tuple(written.shape), place] = Region(
                weight, name, tuple(written.shape), tuple(source.stride()), source.storage_offset() - first, *place
            )

    def recorded(self) -> Recorded:
        """Return the observations."""
        return Recorded(
            tuple(self._regions.values()),
            self._weights,
            {name: each.numel() for name, each in self._parameters.items()},
            dict(self._filled),
            frozenset(self._computed),
        )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _has_memory(value: Any) -> bool:
    """Return True for a tensor with elements of its own; a DTensor is only a wrapper of one."""
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 0


def _elements(tensor: torch.Tensor) -> range:
    """Return the places of a contiguous tensor's elements in its memory."""
    return range(tensor.storage_offset(), tensor.storage_offset() + tensor.numel())


@dataclass(frozen=True)
class WeightLayout:
    """Places of all weights in an engine that several workers may share, and the tensors that cannot be compared."""

    regions: tuple[tuple[Region, int], ...]
    """Regions of this worker, each with the index of the replica that it belongs to."""
    replicas: dict[str, int]
    """Weight -> number of its replicas in all workers' parts of the engine."""
    places: dict[str, tuple[str, ...]]
    """Weight -> the engine's parameters that hold its parts."""
    unproven: dict[str, str]
    """Weight or parameter that cannot be compared -> reason."""

    @staticmethod
    def of(workers: Sequence[Recorded], rank: int) -> "WeightLayout":
        """Join the observations of the workers that share an engine.

        In a tensor-parallel engine each worker has a part of a weight, or several workers have the same elements. In
        the order of the workers' ranks, the first occurrence of the same elements belongs to replica 0, the second to
        replica 1, and so on. Each replica must be complete.

        Raises:
            SyncError: a weight reaches the engine only in part, a parameter was not written, or parts of a fused
                matrix are in the wrong order.
        """
        unproven: dict[str, str] = {}
        found: Counter[tuple[str, int]] = Counter()
        seen: Counter[tuple[Any, ...]] = Counter()
        own: list[tuple[Region, int]] = []
        places: dict[str, dict[str, None]] = {}
        for worker, recorded in enumerate(workers):
            require_order(recorded.regions)
            unproven |= _uncopied(recorded)
            for region in recorded.regions:
                replica = seen[region.elements]
                seen[region.elements] += 1
                found[region.weight, replica] += region.numel()
                places.setdefault(region.weight, {})[region.parameter] = None
                if worker == rank:
                    own.append((region, replica))
                if region.parameter in recorded.computed:
                    unproven[region.weight] = f"vLLM computes with it before it stores it in {region.parameter}"
        replicas = Counter(weight for weight, _ in found)
        computes = any(recorded.computed for recorded in workers)
        for weight, numel in workers[0].weights.items():
            counts = [found[weight, replica] for replica in range(replicas[weight])]
            if weight in unproven or (counts and all(count == numel for count in counts)):
                continue
            if not counts:
                unproven[weight] = "no parameter of the engine is a copy of it"
            elif max(counts) < numel and not computes:
                raise SyncError(
                    f"the engine does not hold the learner's weights: of {numel} elements of {weight} only "
                    f"{max(counts)} were copied into the engine"
                )
            else:
                unproven[weight] = "its parts in the engine overlap, or are not all copies of it"
        regions = tuple((region, replica) for region, replica in own if region.weight not in unproven)
        proven = {weight: tuple(each) for weight, each in places.items() if weight not in unproven}
        return WeightLayout(regions, {weight: replicas[weight] for weight in proven}, proven, unproven)


def _uncopied(recorded: Recorded) -> dict[str, str]:
    """Return the parameters of which some elements are not copies of sent weights, with the reason.

    Raises:
        SyncError: nothing was written into a parameter.
    """
    copied: Counter[str] = Counter()
    for region in recorded.regions:
        copied[region.parameter] += region.numel()
    reasons = {}
    for name, numel in recorded.parameters.items():
        left = numel - copied[name] - recorded.filled.get(name, 0)
        if name in recorded.computed:
            reasons[name] = "vLLM computes its values"
        elif left == numel and numel:
            raise SyncError(
                f"the engine does not hold the learner's weights: nothing was written into its parameter {name}"
            )
        elif left > 0:
            reasons[name] = f"{left} of its {numel} elements are not copies of sent weights, such as padding"
    return reasons


def require_order(regions: Iterable[Region]) -> None:
    """Raise SyncError if parts of a fused matrix are not in the order in which the forward pass splits it."""
    parts: dict[str, dict[int, str]] = {}
    for region in regions:
        if _module(region.parameter) in FUSED:
            parts.setdefault(region.parameter, {})[region.stored_offset] = _module(region.weight)
    for parameter, by_offset in parts.items():
        order = FUSED[_module(parameter)]
        found = [by_offset[offset] for offset in sorted(by_offset) if by_offset[offset] in order]
        if found != sorted(found, key=order.index):
            raise SyncError(
                f"the engine does not hold the learner's weights: its fused {parameter} has the parts "
                f"{', '.join(found)} in this order, and the forward pass splits it into {', '.join(order)}"
            )


def _module(name: str) -> str:
    """Return the module that a parameter belongs to: `q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.split(".")[-2] if "." in name else ""
