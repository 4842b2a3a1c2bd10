"""Proof of a weight sync, bit for bit: checksums of the learner's weights, compared with those of the engine's.

After each sync, and again before a generation without one, the learner's weights are read anew from its model, merged
with their adapter and rounded to the engine's precision; the engine's are read from its parameters. Both must have the
same checksum for each weight (`weight_sums.py`); otherwise the run stops with an error that names the weight. A change
of one bit is detected, in any precision. So an optimizer step that never arrived is detected even at a learning rate
of 1e-6 in bfloat16, wherever it changes a rounded weight, while it moves log-probabilities by far less than the
tolerance of `sync_proof.py`.

Reasons for this design:

- The learner's weights are not taken from the iterator that sends them, because that iterator may be wrong: an adapter
  that is not merged, names that are mixed up, weights of an earlier step.
- Their places in the engine are those into which the engine's own loader copied them in the first sync
  (`weight_layout.py`), so that no table of architectures is needed.
- Checksums are compared instead of elements, because the checksums of parts add up: a sharded learner needs no second
  gather, since each worker reads only its own part, and the workers of a tensor-parallel engine add up theirs.

An adapter that requests name (`engine.adapter=request`) is not merged: the frozen weights are compared, and both
matrices of each update, with those that vLLM holds beside its weights (`lora_requests.py`).

The checksums prove the content of the parameters. Data that the engine has computed from older weights and keeps beside
them (packed weights of the CPU backend, keys and values of earlier prompts) must be gone once the weights have changed.
The log-probabilities show, within their tolerance, that the engine computes with its parameters.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch.distributed.tensor import DTensor

from grpo_ray.distributed import all_gather_object
from grpo_ray.errors import SyncError
from grpo_ray.inference.weight_layout import LoadRecorder, Recorded, Region, WeightLayout
from grpo_ray.inference.weight_sums import add_sums, shard_sum, weight_sum
from grpo_ray.models.adapters import merged_layer, saved_copy, sharded_update
from grpo_ray.models.quantized import identities, quantized_layers

Gather = Callable[[Any], list[Any]]
"""Collects the objects of several workers, by rank; collective."""

Weights = Mapping[str, torch.Tensor]
"""Weights or parameters, by name."""

NAMED = 3
"""Maximum number of weights that a message names; the others are counted."""


def learner_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) of each parameter of the learner's policy, merged with its adapter; collective.

    A weight that no adapter changes stays a DTensor if it is sharded, of which this worker holds a part; so does a
    weight with plain LoRA. Updates are added and rounded as in the weights that are sent (`merged_weights` in
    `models/adapters.py`), but a weight is looked up by its parameter, not by the place of its layer.
    """
    if not isinstance(model, PeftModel):
        yield from model.named_parameters()
        return
    policy = model.get_base_model()
    layers: list[Any] = [each for each in policy.modules() if isinstance(each, BaseTunerLayer)]
    owners = {
        id(parameter): (layer, attribute)
        for layer in layers
        for attribute, parameter in identities(layer.get_base_layer()).items()
    }
    quantized = dict(quantized_layers(policy))
    copies = _saved_copies(policy)
    added = {id(each) for layer in layers for each in layer.parameters()} - owners.keys()
    added |= {id(copy) for copy in copies.values()}
    added |= {id(layer.scales) for layer in quantized.values()}
    merged_of: BaseTunerLayer | None = None
    merged: dict[str, torch.Tensor] = {}
    for name, parameter in policy.named_parameters():
        if id(parameter) in added:
            continue
        weight: torch.Tensor = copies.get(id(parameter), parameter)
        if id(parameter) in owners:
            layer, attribute = owners[id(parameter)]
            update = sharded_update(layer)
            if update is not None:
                weight = weight.float() + update if attribute == "weight" else weight
            else:
                if layer is not merged_of:  # a layer's parameters follow each other
                    with merged_layer(layer) as base:
                        merged_of, merged = layer, dict(base.named_parameters())
                weight = merged[attribute]
        if (layer_name := name.removesuffix(CODES)) in quantized:
            name = f"{layer_name}.weight"
            if id(parameter) not in owners:
                weight = quantized[layer_name].dequantized()
        yield WRAPPERS.sub("", name), weight.detach()


CODES, SCALES = ".codes", ".scales"
"""Ends of the names of a quantized layer's parameters."""


def request_weights(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) of the learner's frozen weights, and of both matrices of each update of plain LoRA.

    The matrices are named <layer>.lora_A and <layer>.lora_B, the second one with the update's scale. Sharded weights
    stay DTensors. As in `learner_weights`, they are looked up by the model's parameters.
    """
    policy = model.get_base_model()
    quantized = dict(quantized_layers(policy))
    for name, parameter in policy.named_parameters():
        weight, found = parameter.detach(), LORA_MATRIX.fullmatch(name)
        if found is None:
            if (layer := name.removesuffix(CODES)) in quantized:
                name, weight = f"{layer}.weight", quantized[layer].dequantized()
            elif name.removesuffix(SCALES) in quantized:
                continue
            yield WRAPPERS.sub("", name), weight
            continue
        layer, matrix, adapter = found["layer"], found["matrix"], found["adapter"]
        scale = policy.get_submodule(layer).scaling[adapter]
        yield f"{layer}.{matrix}", weight.float() * scale if matrix == SECOND else weight


FIRST, SECOND = "lora_A", "lora_B"
"""Names of the matrices of an update: (r, inputs) and (outputs, r)."""


def is_matrix(name: str) -> bool:
    """Return whether `request_weights` has this name for a matrix of an update."""
    return name.endswith((f".{FIRST}", f".{SECOND}"))


LORA_MATRIX = re.compile(rf"(?P<layer>.+)\.(?P<matrix>{FIRST}|{SECOND})\.(?P<adapter>[^.]+)\.weight")
"""Name of the parameter of PEFT that holds such a matrix."""
WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.)")
"""Parts of a parameter's name that come from the modules of an adapter around its layer."""


def _saved_copies(policy: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """Return the trained copies of whole modules (`modules_to_save`), by the id of the parameter that they replace."""
    copies: dict[int, torch.nn.Parameter] = {}
    for wrapper in policy.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            originals = dict(wrapper.original_module.named_parameters())
            copies |= {id(originals[name]): copy for name, copy in saved_copy(wrapper).named_parameters()}
    return copies


class WeightProof:
    """Proof that an engine's parameters are the learner's weights, for one engine. All methods are collective."""

    def __init__(
        self,
        notify: Callable[[str], None],
        gather_in_group: Gather,
        rank_in_group: int = 0,
        gather_workers: Gather = all_gather_object,
    ) -> None:
        """
        Args:
            notify: shows the user a line, once, about weights that cannot be compared.
            gather_in_group: collects an object from each worker that shares this engine.
            rank_in_group: this worker's rank among them.
            gather_workers: collects an object from every worker; the learner may be sharded over all of them.
        """
        self._notify = notify
        self._gather_in_group = gather_in_group
        self._rank_in_group = rank_in_group
        self._gather_workers = gather_workers
        self._layout: WeightLayout | None = None
        self._loaded_as: dict[str, torch.dtype] = {}
        self._precision: dict[str, torch.dtype] | None = None
        """Precision of each weight in the whole engine; None until it is needed."""
        self._sums: dict[str, int] | None = None
        self._constant: frozenset[str] = frozenset()
        self._is_quantized = False

    @property
    def has_layout(self) -> bool:
        """True if the places of the weights are known; always False for a quantized engine."""
        return self._layout is not None

    def recorder(self, parameters: Weights) -> LoadRecorder:
        """Return a recorder of the first load, for `set_layout`."""
        return LoadRecorder(parameters)

    def set_layout(self, recorded: Recorded) -> None:
        """Keep the places of the weights that were recorded in this worker's first load.

        Raises:
            SyncError: weights reached the engine in part, or in the wrong order.
        """
        self._layout = WeightLayout.of(self._gather_in_group(recorded), self._rank_in_group)
        if reasons := self._layout.unproven:
            first = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:NAMED])
            more = f"; and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
            self._notify(
                f"the checksums of the weight sync leave out {len(reasons)} of the engine's tensors, which the "
                f"log-probabilities alone prove ({first}{more})"
            )

    def single_regions(self) -> dict[str, Region]:
        """Return the place of each weight that this worker's engine holds once, and in one piece."""
        if self._layout is None:
            return {}
        found: dict[str, list[Region]] = {}
        for region, _ in self._layout.regions:
            found.setdefault(region.weight, []).append(region)
        return {name: regions[0] for name, regions in found.items() if len(regions) == 1}

    def keep_constant(self, names: frozenset[str]) -> None:
        """Require of these weights from now on that they are those of the last proof."""
        self._constant = names

    def set_quantized(self, method: str) -> None:
        """Mark the engine as quantized: it stores other values than it receives, so nothing can be compared."""
        if not self._is_quantized:
            self._is_quantized = True
            self._notify(
                f"the engine quantizes the learner's weights ({method}), so no checksums of the weight sync can be "
                "compared; the log-probabilities alone prove it, within engine.logprob_tolerance"
            )

    def note_precision(self, parameters: Weights) -> None:
        """Keep the precision in which the engine has just stored the weights.

        The CPU backend may later widen a bias for its kernels; the added bits are zeros, not the learner's.
        """
        self._loaded_as = {name: each.dtype for name, each in parameters.items()}
        self._precision = None

    def compare(
        self, weights: Iterable[tuple[str, torch.Tensor]], parameters: Weights, stale_copies: Callable[[], list[str]]
    ) -> None:
        """Compare the learner's weights with the engine's.

        Args:
            weights: the learner's, whole or sharded, under the names under which they are sent.
            parameters: the engine's, by its own names.
            stale_copies: see `compare_sums`.

        Raises:
            SyncError: a weight differs, or the engine keeps data of older weights.
        """
        learner = learner_sums(weights, self.precision(), self._gather_workers)
        self.compare_sums(learner, parameters, stale_copies)

    def compare_sums(self, learner: "LearnerSums", parameters: Weights, stale_copies: Callable[[], list[str]]) -> None:
        """Compare checksums of the learner's weights with the engine's weights.

        Args:
            learner: computed in the engine's precision (`precision`).
            parameters: the engine's, by its own names.
            stale_copies: describes the data that the engine keeps besides its parameters. Called if the weights are new
                to the engine, since all such data was computed with older ones.

        Raises:
            SyncError: a weight differs, or the engine keeps data of older weights.
        """
        own = learner.sums
        changed = self._sums is None or any(own.get(name) != each for name, each in self._sums.items())
        if moved := [name for name in own if name in self._constant and own[name] != (self._sums or {}).get(name)]:
            raise SyncError(
                f"the engine does not hold the learner's weights: {_named(moved)}, which both share, have changed "
                "since the first sync"
            )
        if self._layout is not None:
            _require_equal(learner, self._engine_sums(self._layout, parameters), self._layout)
        if changed and (copies := stale_copies()):
            raise SyncError(
                f"the engine does not hold the learner's weights: after they have changed it still keeps "
                f"{'; '.join(copies)}"
            )
        self._sums = dict(own)

    def precision(self) -> dict[str, torch.dtype]:
        """Return the precision in which the engine holds each weight; empty if no weight can be compared."""
        if self._layout is None:
            return {}
        if self._precision is None:
            self._precision = {}
            own = {region.weight: self._loaded_as[region.parameter] for region, _ in self._layout.regions}
            for each in self._gather_in_group(own):
                self._precision |= each
        return self._precision

    @torch.no_grad()
    def _engine_sums(self, layout: WeightLayout, parameters: Weights) -> dict[tuple[str, int], int]:
        """Return the checksum of each replica of a weight in the engine."""
        parts: dict[tuple[str, int], torch.Tensor] = {}
        for region, replica in layout.regions:
            key, dtype = (region.weight, replica), self._loaded_as[region.parameter]
            part = weight_sum(region.stored(parameters), region.strides, region.offset, dtype)
            parts[key] = parts[key] + part if key in parts else part
        sums: dict[tuple[str, int], int] = {}
        for own in self._gather_in_group(_numbers(parts)):
            for key, number in own.items():
                sums[key] = add_sums([sums.get(key, 0), number])
        return sums


@dataclass(frozen=True)
class LearnerSums:
    """Checksums of the learner's weights."""

    sums: Mapping[str, int]
    """Name of a weight -> its checksum, in the engine's precision."""
    numels: Mapping[str, int]
    """Name of a weight -> its number of elements."""

    @property
    def digest(self) -> str:
        """Hash of all checksums."""
        return hashlib.sha256(repr(sorted(self.sums.items())).encode()).hexdigest()


@torch.no_grad()
def learner_sums(
    weights: Iterable[tuple[str, torch.Tensor]],
    precision: Mapping[str, torch.dtype],
    gather_workers: Gather = all_gather_object,
) -> LearnerSums:
    """Compute the checksums of the learner's weights; collective.

    Args:
        weights: whole or sharded, under the names under which they are sent.
        precision: precision to which each weight is rounded first (`WeightProof.precision`).
        gather_workers: collects an object from every worker; the learner may be sharded over all of them.
    """
    sums, numels, sharded = {}, {}, []
    for name, weight in weights:
        sums[name], numels[name] = shard_sum(weight, precision.get(name)), weight.numel()
        if isinstance(weight, DTensor):
            sharded.append(name)
    numbers = _numbers(sums)
    if sharded:
        for name, *parts in zip(sharded, *gather_workers([numbers[name] for name in sharded]), strict=True):
            numbers[name] = add_sums(parts)
    return LearnerSums(numbers, numels)


def _require_equal(learner: LearnerSums, engine: Mapping[tuple[str, int], int], layout: WeightLayout) -> None:
    """Raise SyncError if a weight has another checksum in the engine, or is not there at all."""
    own = learner.sums
    if not_sent := [name for name in own if name not in layout.places and name not in layout.unproven]:
        raise SyncError(f"the engine does not hold the learner's weights: {_named(not_sent)} never reached it")
    compared = [name for name in own if name in layout.places]
    differing = [name for name in compared if any(engine[name, i] != own[name] for i in range(layout.replicas[name]))]
    if differing:
        first = differing[0]
        raise SyncError(
            f"the engine does not hold the learner's weights: of {len(compared)} tensors the checksums of "
            f"{_named(differing)} differ; {first} has {learner.numels[first]} elements, which are in the engine's "
            f"{', '.join(layout.places[first])}. Nothing is generated with such weights"
        )


def _numbers(sums: Mapping[Any, torch.Tensor]) -> dict[Any, int]:
    """Move checksums to the host, all at once, as numbers of at least 0."""
    if not sums:
        return {}
    values: Sequence[int] = torch.stack(list(sums.values())).tolist()
    return {key: add_sums([value]) for key, value in zip(sums, values, strict=True)}


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} other tensors"
