"""Tests of the sharded format and its consolidation, on files written by hand as two workers would."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripted_tools import tool_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_ray.errors import CheckpointError
from grpo_ray.models.adapter_folders import write_policy
from grpo_ray.models.shards import POLICY_SHARDS, ShardedWeights, consolidate, has_shards

SIZES = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], workers: int = 2, shift: Sequence[int] = ()) -> None:
    """Write tensors as `workers` workers do, each the rows that it holds.

    Args:
        shift: numbers that are added to the offsets of all but the first worker.
    """
    folder.mkdir(parents=True)
    for rank in range(workers):
        parts = {name: tensor.chunk(workers) for name, tensor in tensors.items()}
        own = {name: each[rank].clone() for name, each in parts.items() if rank < len(each)}
        offsets = {name: {"saved_offsets": [rank * len(parts[name][0]), *[0] * (own[name].dim() - 1)]} for name in own}
        if rank:
            for each in offsets.values():
                each["saved_offsets"] = [at + by for at, by in zip_longest(each["saved_offsets"], shift, fillvalue=0)]
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(own, folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors", metadata=metadata)


def sharded_checkpoint(folder: Path, model: Any) -> Path:
    """Write a model's config and its shards."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    write_shards(folder / POLICY_SHARDS, dict(model.named_parameters()))
    return folder


def same_logits(a: Any, b: Any) -> bool:
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        return torch.equal(a.eval()(tokens).logits, b.eval()(tokens).logits)


def test_sharded_weights_read_whole_tensors_of_uneven_parts(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(15.0).reshape(5, 3), "b": torch.arange(3), "c": torch.tensor([7.0])}
    write_shards(tmp_path / "shards", tensors)  # 3 + 2 rows of a, 2 + 1 of b; only worker 0 has c
    weights = ShardedWeights(tmp_path / "shards")
    assert {name: (tuple(each.shape), each.dtype) for name, each in weights.tensors.items()} == {
        "a": ((5, 3), torch.float32),
        "b": ((3,), torch.int64),
        "c": ((1,), torch.float32),
    }
    read = weights.read(["a", "b"], torch.bfloat16)
    assert torch.equal(read["a"], tensors["a"].bfloat16()) and torch.equal(read["b"], tensors["b"])
    assert torch.equal(weights.read(["c"])["c"], tensors["c"])


@pytest.mark.parametrize("tied", [False, True])
def test_consolidate_gives_the_same_policy(tmp_path: Path, tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    checkpoint = sharded_checkpoint(tmp_path / "checkpoint", model)
    assert has_shards(checkpoint)
    consolidate(checkpoint, tmp_path / "plain")
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    assert ("lm_head.weight" in load_file(tmp_path / "plain" / "model.safetensors")) is not tied
    assert same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), model)
    assert not has_shards(tmp_path / "plain")


def test_consolidate_several_files_has_index(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    consolidate(sharded_checkpoint(tmp_path / "checkpoint", model), tmp_path / "plain", file_size="2KB")
    files = sorted(path.name for path in (tmp_path / "plain").glob("*.safetensors"))
    # 4-byte numbers: embedding and head 32 x 8 = 1,024 bytes each; one layer 832 numbers and three norms of 8.
    assert len(files) > 2 and files[0].startswith("model-00001-of-")
    index = json.loads((tmp_path / "plain" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == dict(model.named_parameters()).keys()
    assert same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), model)


def test_consolidate_rounds_to_another_precision(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    consolidate(sharded_checkpoint(tmp_path / "checkpoint", model), tmp_path / "half", "bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(tmp_path / "half" / "model.safetensors")
    for name, weight in model.named_parameters():
        assert torch.equal(weights[name], weight.bfloat16()), name


def test_consolidate_mixture_of_experts_has_its_published_names(tmp_path: Path) -> None:
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, head_dim=4, moe_intermediate_size=4, num_experts=2, num_experts_per_tok=1)
    )
    consolidate(sharded_checkpoint(tmp_path / "checkpoint", model), tmp_path / "plain")
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    assert "model.layers.0.mlp.experts.1.gate_proj.weight" in weights
    assert same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), model)


def test_sharded_weights_pickle_in_the_folder_is_not_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(4.0)}
    write_shards(tmp_path / "shards", tensors)
    (tmp_path / "shards" / ".metadata").write_bytes(b"cposix\nsystem\n(S'false'\ntR.")
    assert torch.equal(ShardedWeights(tmp_path / "shards").read(["a"])["a"], tensors["a"])


@pytest.mark.parametrize(
    "shift",
    # A gap, one of 20 billion rows, an overlap of one row, of all rows, a column beside the first worker's.
    [(1,), (20_000_000_000,), (-1,), (-3,), (-3, 1), (0, 1)],
)
def test_parts_that_overlap_or_leave_gaps_are_refused(tmp_path: Path, shift: tuple[int, ...]) -> None:
    tensors = {"a": torch.arange(15.0).reshape(5, 3)}  # 3 + 2 rows
    write_shards(tmp_path / "shards", tensors, shift=shift)
    with pytest.raises(CheckpointError, match=r"shards is damaged: the parts of 'a' overlap, or leave gaps$"):
        ShardedWeights(tmp_path / "shards")


def test_part_of_a_tensor_alone_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", {"a": torch.arange(15.0).reshape(5, 3), "b": torch.arange(2.0)})
    (tmp_path / "shards" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the parts of 'a' overlap, or leave gaps"):
        ShardedWeights(tmp_path / "shards")


def test_parts_without_rows_and_tensors_without_dimensions_are_taken(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    files = {"1": {"a": torch.ones(1, 4), "b": torch.tensor(7.0)}, "2": {"a": torch.ones(0, 4)}}
    for worker, own in files.items():
        # torch gives a worker without rows the offset after the last row.
        offsets = {name: {"saved_offsets": [1, 0] if worker == "2" else [0] * each.dim()} for name, each in own.items()}
        save_file(own, folder / f"{worker}.safetensors", metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
    weights = ShardedWeights(folder)
    assert {name: tuple(each.shape) for name, each in weights.tensors.items()} == {"a": (1, 4), "b": ()}
    assert torch.equal(weights.read(["a"])["a"], torch.ones(1, 4))


def test_write_policy_parts_with_gaps_are_a_damaged_checkpoint(tmp_path: Path) -> None:
    checkpoint = sharded_checkpoint(tmp_path / "checkpoint", LlamaForCausalLM(LlamaConfig(**SIZES)))
    tool_tokenizer("tiny-arithmetic").save_pretrained(checkpoint)
    write_policy(str(checkpoint), None, tmp_path / "plain", None)
    (checkpoint / POLICY_SHARDS / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is damaged: the parts of "):
        write_policy(str(checkpoint), None, tmp_path / "damaged", None)
