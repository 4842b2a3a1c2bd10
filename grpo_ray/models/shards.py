"""Sharded weights in a checkpoint, and their consolidation into a plain Hugging Face folder.

With `cluster.shard_learner` each worker writes the part of the weights that it holds, as safetensors files in the
format of `torch.distributed.checkpoint`: a file also records the offset of each of its parts in the whole tensor.
No file is pickled, so a folder of unknown origin can be read.
"""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from grpo_ray.errors import CheckpointError

POLICY_SHARDS = "shards/policy"
"""Folder of a checkpoint with the trained weights, one or more files per worker."""
OPTIMIZER_SHARDS = "shards/optimizer"
"""Folder of a checkpoint with the optimizer's state in the same format."""

NOT_POLICY = (OPTIMIZER_SHARDS, "optimizer.pt")
"""Folders and files of a checkpoint that belong to the optimizer; they are larger than the policy."""

WEIGHTS = "model.safetensors"
"""transformers' file name for weights that fit into one file."""


def has_shards(folder: str | Path) -> bool:
    """Return True if a local checkpoint was written by a sharded learner."""
    return Path(folder, POLICY_SHARDS).exists()


def shard_name(worker: int, number: int, count: int) -> str:
    """Return the name of one of a worker's files; both numbers begin at 1."""
    return f"shard-{worker:05}-model-{number:05}-of-{count:05}.safetensors"


def shard_metadata(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the header of a file in `torch.distributed.checkpoint`'s format.

    Args:
        offsets: name of a tensor -> position of this file's part in it, one number per dimension.
    """
    parts = {name: {"saved_offsets": list(each)} for name, each in offsets.items()}
    return {"DCP_SHARDING_INFO": json.dumps(parts), "DCP_VERSION": "1.0", "format": "pt"}


class ShardedWeights:
    """Reader of whole tensors of a sharded checkpoint, a few at a time."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of the files in a folder with shards, which may be untrusted.

        Raises:
            CheckpointError: the parts of a tensor overlap, or leave gaps.
        """
        self._folder = str(folder)
        stored = self._reader().read_metadata().state_dict_metadata
        for name, each in stored.items():
            # torch takes the size from the offsets, and would leave gaps as the memory was.
            if not _fills(each.size, [(part.offsets, part.sizes) for part in each.chunks]):
                raise CheckpointError(f"{folder} is damaged: the parts of {name[:200]!r} overlap, or leave gaps")
        self.tensors = {name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
                        for name, each in stored.items()}  # fmt: skip
        """Name -> tensor with its shape and precision, on the device "meta"."""

    def _reader(self) -> dcp.HuggingFaceStorageReader:
        return dcp.HuggingFaceStorageReader(self._folder)

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Read whole tensors.

        Args:
            dtype: precision of floating-point tensors; None keeps the stored one.
        """
        whole = {name: torch.empty_like(self.tensors[name], device="cpu") for name in names}
        with warnings.catch_warnings():  # torch warns that there is no process group, although `no_dist` declares it
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(whole, storage_reader=self._reader(), no_dist=True)
        return {name: _cast(tensor, dtype) for name, tensor in whole.items()}


def _fills(size: Sequence[int], parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return True if parts contain each row of a tensor once; workers divide tensors by rows only.

    Args:
        size: size of the whole tensor.
        parts: (offsets, sizes) of each part, one number per dimension.
    """
    if not size:
        return len(parts) == 1 and not any(map(len, parts[0]))
    rows = 0
    for offsets, sizes in sorted((tuple(offsets), tuple(sizes)) for offsets, sizes in parts):
        if offsets != (rows, *[0] * (len(size) - 1)) or sizes[1:] != tuple(size[1:]):
            return False
        rows += sizes[0]
    return rows == size[0]


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def consolidate(
    checkpoint: str | Path,
    target: Path,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    file_size: str = "5GB",
) -> None:
    """Write the policy of a sharded checkpoint as a plain Hugging Face folder, without its tokenizer.

    Only the tensors of one output file are in memory at a time. A mixture of experts is the exception: transformers
    trains it under other names than those of its published format, and converts all of it at once.

    Args:
        checkpoint: local folder of the checkpoint.
        dtype: precision of the weights; None keeps that of the checkpoint.
        file_size: largest size of an output file, such as "5GB".

    Raises:
        CheckpointError: the parts of a tensor overlap, or leave gaps.
        OSError, ValueError: the config of the policy cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    weights = ShardedWeights(Path(checkpoint, POLICY_SHARDS))
    precision = getattr(torch, dtype) if dtype else None
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    config.dtype = precision or next(each.dtype for each in weights.tensors.values() if each.is_floating_point())
    with torch.device("meta"):  # parameters without memory
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    if Path(checkpoint, "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    if _is_published_format(model, weights.tensors):
        model.save_pretrained(target, state_dict={})  # the configs only
        _write_files(weights, target, precision, file_size)
    else:
        model.save_pretrained(target, state_dict=weights.read(list(weights.tensors), precision))


def _is_published_format(model: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return True if transformers saves tensors under the names under which it trains them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors)).keys() == tensors.keys()


def _write_files(weights: ShardedWeights, target: Path, dtype: torch.dtype | None, file_size: str) -> None:
    sizes = {name: _cast(tensor, dtype) for name, tensor in weights.tensors.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=file_size)
    for file, names in split.filename_to_tensors.items():
        save_file(weights.read(names, dtype), target / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (target / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
