"""Learner sharded over the workers (FSDP2, `cluster.shard_learner`): its loading and checkpoints.

A checkpoint holds the trained weights and the optimizer's state in the format of `models/shards.py`. Each worker
writes the part that it holds, and after a change of the number of workers it reads the part that it then holds.
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import disable_fsdp_ram_efficient_loading
from safetensors.torch import save_file
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_ray.errors import ConfigError
from grpo_ray.learner.sharding_settings import LOADS_ONCE
from grpo_ray.learner.trl_internals import loading_structure_only
from grpo_ray.models.shards import OPTIMIZER_SHARDS, POLICY_SHARDS, ShardedWeights, shard_metadata, shard_name

FILE_BYTES = 1 << 30
"""Approximate size of a worker's file. A worker with a GPU holds the tensors of one file in host memory at a time."""
NUMBERS = "numbers.json"
"""File beside the optimizer's shards with the parts of its state that are not tensors, written by rank 0."""


# Loading


def load_policy(path: str, args: Any) -> Any:
    """Load a policy as TRL does; with the option `LOADS_ONCE` only rank 0 reads the weights.

    The other workers reserve memory for them and never write to it, so that it takes no space. `Accelerator.prepare`
    replaces it by the parts that rank 0 sends.

    Args:
        args: TRL's arguments.

    Raises:
        ConfigError: only rank 0 reads the weights, but the policy has saved buffers, which are not sent.
    """
    from trl.trainer.utils import create_model_from_path

    load_everywhere()
    settings = policy_settings(args)
    if not args.fsdp_plugin_args[LOADS_ONCE]:
        return create_model_from_path(path, **settings)
    with nullcontext() if torch.distributed.get_rank() == 0 else loading_structure_only():
        model = create_model_from_path(path, **settings)
    reserve_weights(model)
    saved = model.state_dict().keys()
    if buffers := [name for name, _ in model.named_buffers() if name in saved]:  # accelerate sends parameters only
        raise ConfigError(
            f"model.path={path}: the policy has saved buffers, such as {buffers[0]}, which are not sent to other "
            f"workers; set grpo.fsdp_config={{{LOADS_ONCE}: false}}"
        )
    return model


def policy_settings(args: Any) -> dict[str, Any]:
    """Return the arguments with which TRL loads a policy, here on the CPU.

    Args:
        args: TRL's arguments.
    """
    return {"trust_remote_code": args.trust_remote_code} | dict(args.model_init_kwargs or {}) | {"device_map": None}


def reserve_weights(model: torch.nn.Module) -> None:
    """Give weights on the device "meta" memory of their own on the CPU, untouched; tied ones stay tied.

    accelerate identifies the optimizer's weights by their addresses, which "meta" does not have.
    """
    reserved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_meta:
                empty = reserved.setdefault(
                    id(weight), torch.nn.Parameter(torch.empty_like(weight, device="cpu"), weight.requires_grad)
                )
                setattr(module, name, empty)


def load_everywhere() -> None:
    """Let every worker read the weights of models that are loaded from now on.

    transformers and accelerate set environment variables for a sharded learner with which all workers but the first of
    a node get zeros, also for a reference model.
    """
    disable_fsdp_ram_efficient_loading()


def reshard(model: torch.nn.Module) -> None:
    """Give a sharded model's parameters back their sharded form after a pass without gradient.

    FSDP2 leaves the parameters of its outermost module whole until the next backward pass, and in the precision of the
    computation. Meanwhile the norm of the gradients, the optimizer's state in a checkpoint and a weight sync, which
    read the model's parameters, would miss them. Does nothing for other models.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Checkpoints


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that training changes and the buffers that are saved, by name, a tied weight once.

    A sharded weight is a DTensor that shares this worker's part with the model. Of a policy with an adapter, only the
    adapter is trained.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    is_adapter = len(trained) < sum(1 for _ in model.parameters())
    kept = trained if is_adapter else trained | {name for name, _ in model.named_buffers()}
    return {name: weight for name, weight in model.state_dict().items() if name in kept}


def gather_weights(weights: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Gather whole weights on the CPU; collective.

    Args:
        keep: True to return the weights; False to only take part in the gathering, and return none.
    """
    gathered = {}
    for name, weight in weights.items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if keep:
            gathered[name] = whole.cpu()
    return gathered


def save_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write this worker's part of weights and optimizer state into a local folder of its own; collective."""
    tensors, numbers = _flatten(_optimizer_state(model, optimizer))
    _save_shards(folder / POLICY_SHARDS, trained_weights(model))
    _save_shards(folder / OPTIMIZER_SHARDS, tensors)
    if torch.distributed.get_rank() == 0:
        (folder / OPTIMIZER_SHARDS / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Read this worker's part of the weights of a checkpoint; collective."""
    _load_shards(folder / POLICY_SHARDS, trained_weights(model))


def load_optimizer(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read this worker's part of the state of a checkpoint's optimizer into a new one; collective.

    Settings, such as betas, are not loaded. A weight without stored state gets none: it had no gradient before.
    """
    numbers = json.loads((folder / OPTIMIZER_SHARDS / NUMBERS).read_text(encoding="utf-8"))
    stored = {*ShardedWeights(folder / OPTIMIZER_SHARDS).tensors, *numbers}
    if not stored:
        return
    get_optimizer_state_dict(model, optimizer)  # gives a new optimizer its state, with a step of size 0
    state = _optimizer_state(model, optimizer)
    _load_shards(folder / OPTIMIZER_SHARDS, {key: each for key, each in _flatten(state)[0].items() if key in stored})
    for key, value in numbers.items():
        name, _, part = key.rpartition(".")
        state[name][part] = value
    trained_before = {key.rpartition(".")[0] for key in stored}
    for name, parameter in model.named_parameters():
        if name not in trained_before:
            optimizer.state.pop(parameter, None)


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's own state of each weight that has one, by the weight's name."""
    return {name: optimizer.state[each] for name, each in model.named_parameters() if each in optimizer.state}


def _flatten(state: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state and its other parts, both by `<weight>.<part>`.

    Tensors without dimensions, such as Adam's number of steps, get one, since the format has none. All tensors share
    memory with the state.
    """
    flat = {f"{name}.{part}": value for name, parts in state.items() for part, value in parts.items()}
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    numbers = {key: value for key, value in flat.items() if not isinstance(value, torch.Tensor)}
    return {key: value if value.dim() else value.reshape(1) for key, value in tensors.items()}, numbers


def _save_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write this worker's parts of tensors; collective."""
    folder.mkdir(parents=True, exist_ok=True)
    if not tensors:  # an optimizer without state
        return
    files = number_files({name: each.nbytes for name, each in tensors.items()}, torch.distributed.get_world_size())
    dcp.save(dict(tensors), storage_writer=ShardWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True))


class ShardWriter(dcp.HuggingFaceStorageWriter):
    """Writer that streams each file to the disk.

    torch's own writer builds each file in memory twice, which takes seven times as long, and waits for the disk. Here
    the files are local copies for the upload, which verifies them by reading them back.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write the parts of a plan, each into the file of its tensor."""
        files: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            files.setdefault(self.fqn_to_index_mapping[item.index.fqn], []).append(item)
        results = []
        for number, items in files.items():
            tensors = {item.index.fqn: planner.resolve_data(item).cpu() for item in items}
            offsets = {item.index.fqn: list(item.tensor_data.chunk.offsets) for item in items}
            file = shard_name(plan.storage_data["shard_index"], number, max(self.fqn_to_index_mapping.values()))
            save_file(tensors, Path(self.path, file), metadata=shard_metadata(offsets))
            results += [WriteResult(item.index, tensors[item.index.fqn].nbytes, storage_data=None) for item in items]
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(results)
        return written


def _load_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read this worker's parts of tensors, in place; collective."""
    if tensors:
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def number_files(sizes: Mapping[str, int], workers: int) -> dict[str, int]:
    """Divide tensors into files, in order.

    Args:
        sizes: name of a tensor -> bytes of the whole tensor.
        workers: number of workers that hold a part of each.

    Returns:
        Name -> number of its file, from 1.
    """
    numbers, number, used = {}, 1, 0
    for name, size in sizes.items():
        if used and used + size > FILE_BYTES * workers:
            number, used = number + 1, 0
        numbers[name] = number
        used += size
    return numbers
