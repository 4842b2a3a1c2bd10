"""A learner sharded over real processes: its checkpoints, gradients, precision and loading."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import SMALL, VARIANTS, settings_of
from sharded_learners import (
    compare_wide_lora,
    files_of,
    join_checkpoint,
    load_and_compute,
    train_adapters,
    train_sharded,
)
from small_runs import join_shards
from worker_group import run_workers

from grpo_ray.config.peft_fields import NOT_SHARDED

NEAR = 1e-11
"""Tolerance for weights in float64 whose gradients were summed in another order."""

SIZE = 4 * (2 * 384 * 512 + 3 * (512 * 512 * 3 + 3 * 512 * 2048 + 2 * 512) + 512)
"""Bytes of the policy `llama` in float32: embedding and head, three layers (half as many key heads), norms."""


@pytest.fixture(scope="module")
def four_workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """Results of a run of four steps with four workers, and the folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("four")
    results = run_workers(train_sharded, 4, str(folder))
    for step in (2, 4):
        join_checkpoint(folder, 4, step)
    return results, folder


def largest(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def test_sharded_checkpoint_has_all_weights(four_workers: tuple[list[Any], Path]) -> None:
    results, folder = four_workers
    weights = join_shards(folder / "checkpoint-4" / "shards" / "policy")
    assert largest({name: each.numpy() for name, each in weights.items()}, results[0]["weights"]) == 0.0


def test_sharded_checkpoint_each_worker_writes_its_part(four_workers: tuple[list[Any], Path]) -> None:
    _, folder = four_workers
    sizes = [
        sum(path.stat().st_size for path in (folder / str(rank)).glob("checkpoint-2/shards/*/*.safetensors"))
        for rank in range(4)
    ]
    numbers = sum(each.size for each in four_workers[0][0]["weights"].values())
    # Weights and two moments of 8 bytes; the rest are headers.
    assert 3 * 8 * numbers <= sum(sizes) < 1.5 * 3 * 8 * numbers
    assert max(sizes) < 1.2 * min(sizes)
    names = {path.name for path in files_of(folder, 4, 2)}
    assert not names & {"model.safetensors", "optimizer.pt", "optimizer.bin", "pytorch_model_fsdp.bin"}
    assert {"config.json", "tokenizer.json", "scheduler.pt", "rng_state_3.pth"} <= names


def test_sharded_learner_resumed_by_as_many_workers_is_bit_equal(
    four_workers: tuple[list[Any], Path], tmp_path: Path
) -> None:
    results, folder = four_workers
    again = run_workers(train_sharded, 4, str(tmp_path), str(folder / "checkpoint-2"))
    assert largest(again[0]["weights"], results[0]["weights"]) == 0.0


def test_sharded_learner_resumed_by_fewer_and_by_more_workers_takes_the_same_steps(
    four_workers: tuple[list[Any], Path], tmp_path: Path
) -> None:
    results, folder = four_workers
    fewer = run_workers(train_sharded, 2, str(tmp_path / "two"), str(folder / "checkpoint-2"), kwargs={"save_steps": 1})
    assert largest(fewer[0]["weights"], results[0]["weights"]) < NEAR
    step_3 = join_checkpoint(tmp_path / "two", 2, 3)
    more = run_workers(train_sharded, 4, str(tmp_path / "four"), str(step_3))
    assert largest(more[0]["weights"], results[0]["weights"]) < NEAR


def test_sharded_learner_holds_its_part_of_gradients_after_each_micro_batch(
    four_workers: tuple[list[Any], Path],
) -> None:
    for result in four_workers[0]:
        assert len(result["held"]) == 8
        assert all(kinds <= {"DTensor"} for kinds, _ in result["held"]), "a whole or unreduced gradient"
        assert {share for _, share in result["held"]} <= {0.0, 0.25}


@pytest.mark.slow
def test_sharded_learner_takes_the_steps_of_a_whole_one(four_workers: tuple[list[Any], Path], tmp_path: Path) -> None:
    whole = run_workers(train_sharded, 2, str(tmp_path), kwargs={"shard": False})
    assert largest(four_workers[0][0]["weights"], whole[0]["weights"]) < NEAR


@pytest.mark.slow
def test_sharded_reference_is_gathered_by_layer(llama: str, tmp_path: Path) -> None:
    settings = {"policy": llama, "beta": 0.5, "max_steps": 2, "learning_rate": 1e-4}
    whole, sharded = (
        run_workers(train_sharded, 2, str(tmp_path / str(shard)), kwargs=settings | {"shard": shard})
        for shard in (False, True)
    )
    assert (whole[0]["reference"], sharded[0]["reference"]) == (0, 3 + 1 + 2 + 1)
    assert largest(sharded[0]["weights"], whole[0]["weights"]) < 1e-5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a policy of 12 million weights in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=384, hidden_size=512, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False,
        )
    )  # fmt: skip
    assert sum(4 * weight.numel() for weight in model.parameters()) == SIZE
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def in_float32(llama: str) -> list[Any]:
    """Results of a pass of two workers in float32."""
    return run_workers(load_and_compute, 2, llama, "float32")


def test_sharded_learner_in_bfloat16_reduces_in_float32(llama: str, in_float32: list[Any]) -> None:
    half = run_workers(load_and_compute, 2, llama, "bfloat16")
    for result in half:
        assert result["precisions"] == {("torch.bfloat16", "torch.float32", "None")}
        assert result["modules"] == 3 + 1 + 2 + 1  # layers, embedding, norm with head, and the model
        assert result["scores"] == "torch.float32"
        assert result["weights"] == result["gradients"] == {"torch.float32"}
    for mine, theirs in zip(half[0]["gradient"], in_float32[0]["gradient"], strict=True):
        assert np.linalg.norm(mine - theirs) < 0.05 * np.linalg.norm(theirs)  # bfloat16 has 8 significant bits


def test_sharded_learner_loads_the_weights_once(in_float32: list[Any]) -> None:
    first, second = in_float32
    assert first["taken"] > SIZE  # read in bfloat16, converted to float32
    assert second["taken"] < SIZE / 4
    # After sharding each has half, and none has zeros.
    assert first["sharded"] + second["sharded"] == pytest.approx(first["loaded"], rel=1e-5)
    assert 0.3 < first["sharded"] / first["loaded"] < 0.7


def test_sharded_learner_recomputes_without_more_gathering(in_float32: list[Any]) -> None:
    """Each of the three layers is gathered once for forward, and once for backward with its recomputation."""
    calls = in_float32[0]["calls"]
    gathered = sum(count for name, count in calls.items() if "gather" in name)
    # Layers and embedding twice, as without recomputation; norm and head stay gathered. Each is reduced once.
    assert gathered == 2 * (3 + 1) + 1, calls
    assert sum(count for name, count in calls.items() if "reduce_scatter" in name) == 3 + 1 + 1, calls


# Adapters

SHARDED = [name for name in (*SMALL, *VARIANTS) if settings_of(name)["type"] not in NOT_SHARDED]


@pytest.fixture(scope="module")
def whole_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of each type and variant with two workers that hold a whole learner each."""
    folder = tmp_path_factory.mktemp("whole")
    found: dict[str, Any] = run_workers(train_adapters, 2, str(folder), SHARDED, False, limit=900)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_adapter_takes_the_steps_of_a_whole_one(
    whole_adapters: dict[str, Any], tmp_path: Path, name: str
) -> None:
    results = run_workers(train_adapters, 2, str(tmp_path), [name], True)
    assert largest(results[0][name]["merged"], whole_adapters[name]["merged"]) < 1e-6
    assert [result[name]["wrong"] for result in results] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NOT_SHARDED - {"PSOFT"}))  # whose ranks would differ without an error
def test_refused_adapter_cannot_be_sharded(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError, match=r"device_mesh|DTensor|mixed torch\.Tensor"):
        run_workers(train_adapters, 2, str(tmp_path), [name], True)


@pytest.mark.slow
def test_proof_of_a_wide_sharded_adapter_reads_the_bits_that_are_sent() -> None:
    assert run_workers(compare_wide_lora, 2) == [0.0, 0.0]
