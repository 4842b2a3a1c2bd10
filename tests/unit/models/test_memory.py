"""The estimate of a worker's GPU memory, worked by hand, and the engine's share of a GPU."""

import dataclasses
import json

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.errors import ConfigError
from grpo_ray.models.memory import GIB, MemoryEstimate, ModelShape, estimate_memory, model_shape

SHAPE = ModelShape(parameters=1000, layers=2, hidden=10, intermediate=20, query=10, key_value=5, context=64)
STEP = ["cluster.num_workers=2", "grpo.prompts_per_step=4", "grpo.num_generations=4", "grpo.micro_batch_size=4"]
"""16 completions a step, 8 for each worker, 2 of them at once; with 3 tokens each, T = 6."""
SHARDED = "cluster.shard_learner=true"


def of(*overrides: str) -> MemoryEstimate:
    return estimate_memory(load_config(None, [*STEP, "cluster.use_gpu=true", *overrides]), SHAPE, tokens=3)


def test_estimate_follows_the_documented_formula():
    found = of()
    assert (found.weights, found.reference, found.optimizer) == (4000, 0, 8000)
    assert found.gradients == 8000  # 4000, and as much in DDP's buckets
    # Stream 4 * 2 * 6 * 10 = 480; one layer 6 * (340 + 10 * 15 + 160) = 3900, twice: more than the 2000 of the copies.
    assert found.activations == 480 + 7800
    assert found.engine_weights == 2000
    assert found.kv_cache_of_one == 2 * 2 * 5 * 2 * 3 == 120
    assert found.kv_cache == 8 * 120


def test_estimate_without_checkpointing_keeps_every_layer():
    assert of("grpo.gradient_checkpointing=false").activations == 480 + 2000 + 2 * 3900


def test_estimate_float32_has_no_copies_and_double_width():
    found = of("cluster.use_gpu=false")  # without a GPU there is no checkpointing either
    assert found.activations == 480 + 2 * 7800
    assert (found.engine_weights, found.kv_cache_of_one) == (4000, 240)


def test_estimate_one_worker_has_no_buckets_all_completions():
    found = of("cluster.num_workers=1")
    assert (found.gradients, found.kv_cache) == (4000, 16 * 120)


def test_estimate_reference_and_tensor_parallelism_count():
    found = of("grpo.beta=0.04", "grpo.vllm_tensor_parallel_size=2")
    assert (found.reference, found.engine_weights) == (4000, 1000)


def test_estimate_adapter_alone_has_gradients_and_moments():
    # A = 3 * 2 * (2 (10 + 10) + 2 (10 + 5) + 3 (10 + 20)) = 960; the policy itself in 2 bytes.
    found = of("model.lora={rank: 3}", "grpo.beta=0.04")
    assert (found.weights, found.reference) == (2000 + 3840, 0)
    assert (found.gradients, found.optimizer) == (2 * 3840, 7680)
    # Only the adapter has copies, 2 * 960 bytes, as the policy is in 16 bits already.
    assert of("model.lora={rank: 3}", "grpo.gradient_checkpointing=false").activations == 480 + 1920 + 2 * 3900


def test_estimate_sharded_learner_keeps_two_layers_whole():
    found = of(SHARDED, "grpo.beta=0.04")
    assert (found.weights, found.reference) == (2000 + 2 * 4000 // 2, 2000)  # the model has only two layers
    assert (found.gradients, found.optimizer) == (2000, 4000)
    wide = dataclasses.replace(SHAPE, parameters=100_000)
    both = (
        load_config(None, [*STEP, "cluster.use_gpu=true"]),
        load_config(None, [*STEP, "cluster.use_gpu=true", SHARDED]),
    )
    whole, shared = (estimate_memory(config, wide, tokens=3).activations for config in both)
    assert (whole, shared) == (480 + 200_000, 480 + 200_000)  # with two layers both are whole
    deep = dataclasses.replace(wide, layers=20)
    whole, shared = (estimate_memory(config, deep, tokens=3).activations for config in both)
    assert (whole, shared) == (4800 + 200_000, 4800 + 20_000)


WORKER = MemoryEstimate(
    parameters=0,
    weights=2 * GIB,
    reference=0,
    gradients=2 * GIB,
    optimizer=4 * GIB,
    activations=2 * GIB,
    engine_weights=2 * GIB,
    kv_cache=4 * GIB,
    kv_cache_of_one=GIB // 2,
    sleeps=False,
)
"""The learner takes 10 GiB; the engine 2 + 1.5 + 4 = 7.5 GiB for all completions, and 2 + 1.5 + 0.5 = 4 for one."""


def test_memory_share_with_room_fits_all_completions():
    assert WORKER.memory_share(24) == 0.32  # 7.5 / 24 = 0.3125; 24 - 1 - 10 = 13 GiB are free


def test_memory_share_with_less_room_is_the_remainder():
    assert WORKER.memory_share(16) == 0.31  # 16 - 1 - 10 = 5; 5 / 16 = 0.3125
    assert dataclasses.replace(WORKER, kv_cache=20 * GIB).memory_share(24) == 0.54  # 13 / 24 = 0.5417


def test_memory_share_too_small_gpu_gives_none():
    assert WORKER.memory_share(14) is None  # 14 - 1 - 10 = 3, and 4 are needed
    assert WORKER.memory_share(8) is None


def test_memory_share_sleeping_engine_counts_resting_memory():
    sleeper = dataclasses.replace(WORKER, sleeps=True)
    assert sleeper.memory_share(14) == 0.5  # 14 - 1 - (2 + 4) = 7; 7 / 14
    assert sleeper.memory_share(10) is None  # the learner itself needs 10 and the reserve


def test_memory_estimate_as_json_has_share_for_each_size():
    plain = json.loads(json.dumps(WORKER.to_dict()))
    assert plain["memory_share"] == {"24": 0.32, "40": 0.19, "80": 0.1} and plain["learner"] == 10 * GIB


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
    expected = ModelShape(parameters=464, layers=1, hidden=8, intermediate=6, query=8, key_value=4, context=99)
    assert model_shape(str(tmp_path)) == expected


def test_model_shape_unreadable_policy_raises_with_path(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path=.*cannot be read"):
        model_shape(str(tmp_path))
