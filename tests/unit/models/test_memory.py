"""Tests of the estimate of a worker's GPU memory, worked by hand, and of the engine's fraction of a GPU."""

import dataclasses
import json

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.errors import ConfigError
from grpo_ray.models.memory import GIB, MemoryEstimate, ModelShape, estimate_memory, model_shape

SHAPE = ModelShape(
    parameters=1000, layers=2, hidden_size=10, intermediate_size=20, query_size=10, key_value_size=5, context_length=64
)
STEP = ["cluster.num_workers=2", "grpo.prompts_per_step=4", "grpo.num_generations=4", "grpo.micro_batch_size=4"]
"""16 completions per step, 8 on each worker, 2 in a micro-batch; with 3 tokens each, T = 6."""
SHARDED = "cluster.shard_learner=true"


def estimate(*overrides: str) -> MemoryEstimate:
    return estimate_memory(load_config(None, [*STEP, "cluster.use_gpu=true", *overrides]), SHAPE, sequence_length=3)


def test_estimate_follows_the_documented_formula():
    memory = estimate()
    assert (memory.weights, memory.reference_model, memory.optimizer_states) == (4000, 0, 8000)
    assert memory.gradients == 8000  # 4000, and again 4000 in DDP's buckets
    # Residual stream 4 * 2 * 6 * 10 = 480; one layer 6 * (340 + 10 * 15 + 160) = 3900, twice: above the copies' 2000.
    assert memory.activations == 480 + 7800
    assert memory.engine_weights == 2000
    assert memory.kv_cache_per_sequence == 2 * 2 * 5 * 2 * 3 == 120
    assert memory.kv_cache == 8 * 120


def test_estimate_without_checkpointing_keeps_every_layer():
    assert estimate("grpo.gradient_checkpointing=false").activations == 480 + 2000 + 2 * 3900


def test_estimate_float32_has_no_copies_and_twice_the_bytes():
    memory = estimate("cluster.use_gpu=false")  # without a GPU there is no checkpointing either
    assert memory.activations == 480 + 2 * 7800
    assert (memory.engine_weights, memory.kv_cache_per_sequence) == (4000, 240)


def test_estimate_one_worker_has_no_buckets():
    memory = estimate("cluster.num_workers=1")
    assert (memory.gradients, memory.kv_cache) == (4000, 16 * 120)


def test_estimate_includes_reference_and_tensor_parallelism():
    memory = estimate("grpo.beta=0.04", "grpo.vllm_tensor_parallel_size=2")
    assert (memory.reference_model, memory.engine_weights) == (4000, 1000)


def test_estimate_lora_trains_the_adapter_only():
    # A = 3 * 2 * (2 (10 + 10) + 2 (10 + 5) + 3 (10 + 20)) = 960; the policy itself in 2 bytes.
    memory = estimate("model.lora={rank: 3}", "grpo.beta=0.04")
    assert (memory.weights, memory.reference_model) == (2000 + 3840, 0)
    assert (memory.gradients, memory.optimizer_states) == (2 * 3840, 7680)
    # Only the adapter has copies, 2 * 960 bytes, as the policy is in 16 bits already.
    assert estimate("model.lora={rank: 3}", "grpo.gradient_checkpointing=false").activations == 480 + 1920 + 2 * 3900


def test_estimate_sharded_learner_has_two_layers_unsharded():
    memory = estimate(SHARDED, "grpo.beta=0.04")
    assert (memory.weights, memory.reference_model) == (2000 + 2 * 4000 // 2, 2000)  # the model has only two layers
    assert (memory.gradients, memory.optimizer_states) == (2000, 4000)
    wide = dataclasses.replace(SHAPE, parameters=100_000)
    both = (
        load_config(None, [*STEP, "cluster.use_gpu=true"]),
        load_config(None, [*STEP, "cluster.use_gpu=true", SHARDED]),
    )
    replicated, sharded = (estimate_memory(config, wide, sequence_length=3).activations for config in both)
    assert (replicated, sharded) == (480 + 200_000, 480 + 200_000)  # with two layers, both are unsharded
    deep = dataclasses.replace(wide, layers=20)
    replicated, sharded = (estimate_memory(config, deep, sequence_length=3).activations for config in both)
    assert (replicated, sharded) == (4800 + 200_000, 4800 + 20_000)


WORKER = MemoryEstimate(
    parameters=0,
    weights=2 * GIB,
    reference_model=0,
    gradients=2 * GIB,
    optimizer_states=4 * GIB,
    activations=2 * GIB,
    engine_weights=2 * GIB,
    kv_cache=4 * GIB,
    kv_cache_per_sequence=GIB // 2,
    sleep_mode=False,
)
"""The learner takes 10 GiB; the engine 2 + 1.5 + 4 = 7.5 GiB with a KV cache for all completions, and
2 + 1.5 + 0.5 = 4 GiB for one."""


def test_gpu_memory_utilization_large_gpu_fits_all_completions():
    assert WORKER.gpu_memory_utilization(24) == 0.32  # 7.5 / 24 = 0.3125; 24 - 1 - 10 = 13 GiB are free


def test_gpu_memory_utilization_small_gpu_is_the_remainder():
    assert WORKER.gpu_memory_utilization(16) == 0.31  # 16 - 1 - 10 = 5; 5 / 16 = 0.3125
    assert dataclasses.replace(WORKER, kv_cache=20 * GIB).gpu_memory_utilization(24) == 0.54  # 13 / 24 = 0.5417


def test_gpu_memory_utilization_too_small_gpu_is_none():
    assert WORKER.gpu_memory_utilization(14) is None  # 14 - 1 - 10 = 3, and 4 are needed
    assert WORKER.gpu_memory_utilization(8) is None


def test_gpu_memory_utilization_sleep_mode_shares_the_gpu():
    sleeping = dataclasses.replace(WORKER, sleep_mode=True)
    assert sleeping.gpu_memory_utilization(14) == 0.5  # 14 - 1 - (2 + 4) = 7; 7 / 14
    assert sleeping.gpu_memory_utilization(10) is None  # the learner alone needs 10 and the reserve


def test_memory_estimate_to_dict_has_each_gpu_size():
    plain = json.loads(json.dumps(WORKER.to_dict()))
    assert plain["gpu_memory_utilization"] == {"24": 0.32, "40": 0.19, "80": 0.1} and plain["learner"] == 10 * GIB


def test_model_shape_counts_parameters_from_the_config(tmp_path):
    settings = {
        "model_type": "qwen2",
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 6,
        "max_position_embeddings": 99,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    # Embedding 88, once; q 72, k 36, v 36, o 64 with biases on the first three; MLP 3 * 48; norms 3 * 8.
    expected = ModelShape(
        parameters=464, layers=1, hidden_size=8, intermediate_size=6, query_size=8, key_value_size=4, context_length=99
    )
    assert model_shape(str(tmp_path)) == expected


def test_model_shape_unreadable_policy_raises_with_path(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path=.*cannot be read"):
        model_shape(str(tmp_path))
