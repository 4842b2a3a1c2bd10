"""Tests of the estimate of a worker's GPU memory, worked by hand, and of the plan of the learner's passes."""

import dataclasses
import json
from pathlib import Path

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError
from grpo_ray.models.memory import (
    CONTEXT,
    GIB,
    NCCL,
    MemoryEstimate,
    MemoryPlan,
    ModelShape,
    estimate_memory,
    longest_sequence,
    plan_memory,
    policy_shape,
)

SHAPE = ModelShape(
    parameters=1000,
    layers=2,
    hidden_size=10,
    intermediate_size=20,
    query_size=10,
    key_value_size=5,
    vocabulary=40,
    tied_embeddings=True,
    context_length=64,
)
"""Embedding 400 parameters, so 300 in each layer."""
STEP = ["cluster.num_workers=2", "grpo.prompts_per_step=4", "grpo.num_generations=4"]
"""16 completions per step, 8 on each worker."""
SHARDED = "cluster.shard_learner=true"


def estimate(*overrides: str, tokens: int = 6, recompute: bool = True) -> MemoryEstimate:
    config = load_config(None, [*STEP, "cluster.use_gpu=true", *overrides])
    return estimate_memory(config, SHAPE, sequence_length=3, tokens=tokens, gradient_checkpointing=recompute)


def test_estimate_follows_the_documented_terms() -> None:
    memory = estimate()
    assert (memory.weights, memory.reference_model, memory.optimizer_states) == (4000, 0, 8000)
    assert (memory.gradients, memory.gradient_buckets) == (4000, 4000)
    assert memory.kept_activations == 2 * 6 * 4 * 10  # two layers, 6 tokens, float32, hidden size 10
    # One layer keeps 26 * 10 + 4 * 10 + 4 * 5 + 8 * 20 = 480 bytes per token, and its gradients are 6 * 10 + 4 * 20;
    # copies of 300 weights in 16 bits; the gradient of a weight of 10 * 20 in 16 bits and in float32; the output
    # layer's gradient, 4 * 400.
    assert memory.working_memory == 6 * 480 + 6 * 140 + 600 + 200 * 6 + 1600
    assert memory.engine_weights == 2000
    assert memory.kv_cache_per_sequence == 2 * 2 * 5 * 2 * 3 == 120
    assert memory.kv_cache == 8 * 120
    assert memory.context == CONTEXT + NCCL


def test_estimate_output_layer_is_the_peak_of_a_large_vocabulary() -> None:
    wide = dataclasses.replace(SHAPE, vocabulary=100_000, parameters=1_000_600)
    config = load_config(None, [*STEP, "cluster.use_gpu=true"])
    memory = estimate_memory(config, wide, sequence_length=3, tokens=6, gradient_checkpointing=False)
    # float32 gradient; a tile of 6 tokens x 32768 columns and two copies of the columns in 16 bits; 20 bytes per
    # hidden state.
    output = 4 * 1_000_000 + 2 * 32768 * (6 + 2 * 10) + 20 * 6 * 10
    # When the embedding's gradient is added, the kept activations are gone, but both gradients are there.
    assert 2 * 4 * 1_000_000 - memory.kept_activations > output
    assert memory.working_memory == 8_000_000 - memory.kept_activations


def test_estimate_without_recomputation_keeps_every_layer_and_the_copies() -> None:
    memory = estimate(recompute=False)
    assert memory.kept_activations == 2 * 6 * 480 + 2 * 600
    # The output layer: its gradient, a tile of 6 tokens x 40 columns with two copies of the columns in 16 bits, and 20
    # bytes per hidden state. One layer's backward pass takes less, as it is not computed again.
    assert memory.working_memory == 1600 + 2 * 40 * (6 + 2 * 10) + 20 * 6 * 10 == 4880
    assert memory.fragmentation == (6960 + 4880) // 10


def test_estimate_float32_has_no_copies() -> None:
    memory = estimate("cluster.use_gpu=false", recompute=False)
    # 24 * 10 + 8 * 10 + 8 * 5 + 16 * 20 = 680 bytes per token and layer
    assert memory.kept_activations == 2 * 6 * 680
    assert (memory.engine_weights, memory.kv_cache_per_sequence) == (4000, 240)


def test_estimate_one_worker_has_no_buckets() -> None:
    memory = estimate("cluster.num_workers=1")
    assert (memory.gradients, memory.gradient_buckets, memory.kv_cache) == (4000, 0, 16 * 120)
    assert memory.context == CONTEXT


def test_estimate_tensor_parallel_engine_is_divided() -> None:
    memory = estimate("grpo.beta=0.04", "grpo.vllm_tensor_parallel_size=2")
    assert (memory.reference_model, memory.engine_weights) == (4000, 1000)
    assert (memory.kv_cache_per_sequence, memory.kv_cache) == (60, 60 * 16)  # of both workers' completions


DEDICATED = "engine.placement=dedicated"


def test_estimate_dedicated_engine_is_divided_over_its_own_gpus() -> None:
    # 4 problems of 4 completions: 3 engines get at most 2 problems each.
    memory = estimate(DEDICATED, "engine.replicas=3", "engine.tensor_parallel_size=2")
    assert memory.is_dedicated and not estimate().is_dedicated
    assert (memory.engine_weights, memory.kv_cache_per_sequence, memory.kv_cache) == (1000, 60, 60 * 8)
    elastic = estimate(DEDICATED, "engine.replicas=[1, 4]")
    assert elastic.kv_cache == 4 * elastic.kv_cache_per_sequence  # its part does not depend on how many there are
    assert (memory.learner, memory.context) == (estimate().learner, estimate().context)


def test_estimate_follows_arguments_of_the_engine() -> None:
    memory = estimate("engine.vllm={kv_cache_dtype: fp8, enforce_eager: true, max_num_batched_tokens: 1000}")
    assert (memory.kv_cache_per_sequence, memory.cuda_graphs) == (2 * 2 * 5 * 3, 0)
    # Per token in 16 bits 4 * 10 + (10 + 2 * 5 + 3 * 20); 8 requests have 40 logits of 24 bytes each.
    assert memory.engine_activations == 1000 * 2 * 120 + 24 * 8 * 40


def test_estimate_foreach_optimizer_has_temporaries() -> None:
    small = estimate(tokens=1, recompute=False)
    foreach = estimate("grpo.optim=adamw_torch", tokens=1, recompute=False)
    # 4 bytes for each of 1000 parameters, when the kept activations (2 * 480 + 1200) are gone, is less than the rest.
    assert foreach.working_memory == small.working_memory == 1600 + 2 * 40 * (1 + 2 * 10) + 20 * 10
    large = dataclasses.replace(SHAPE, parameters=100_000)
    config = load_config(None, [*STEP, "cluster.use_gpu=true", "grpo.optim=adamw_torch"])
    memory = estimate_memory(config, large, sequence_length=3, tokens=1, gradient_checkpointing=True)
    assert memory.working_memory == 400_000 - memory.kept_activations


def test_estimate_lora_trains_the_adapter_only() -> None:
    # A = 3 * 2 * (2 (10 + 10) + 2 (10 + 5) + 3 (10 + 20)) = 960; the policy itself in 2 bytes.
    memory = estimate("model.lora={rank: 3}", "grpo.beta=0.04")
    assert (memory.weights, memory.reference_model) == (2000 + 3840, 0)
    assert (memory.gradients, memory.gradient_buckets, memory.optimizer_states) == (3840, 3840, 7680)
    assert memory.kept_activations == 2 * 6 * 2 * 10
    assert memory.weight_sync == 12 * 10 * 20  # three float32 copies of an MLP's weight
    # Per token and layer 18 * 10 + 6 * 10 + 4 * 5 + 8 * 20 + 14 * 3 = 462; only the adapter has copies, 2 * 960 bytes.
    assert estimate("model.lora={rank: 3}", recompute=False).kept_activations == 2 * 6 * 462 + 1920


def test_estimate_adapter_of_requests_has_a_slot_and_no_merge() -> None:
    # A slot of rank 8 for an adapter of rank 3, in 2 bytes: 960 parameters / 3 * 8.
    memory = estimate("model.lora={rank: 3}", "engine.adapter=request")
    assert (memory.engine_weights, memory.weight_sync) == (2000 + 2 * 2560, 0)
    assert estimate("model.lora={rank: 3}").engine_weights == 2000


def test_estimate_of_a_shared_base_has_one_copy_after_the_first_sync() -> None:
    own = estimate("model.lora={rank: 3}", "engine.adapter=request")
    shared = estimate("model.lora={rank: 3}", "model.share_base=true")
    assert (own.weights, shared.weights) == (2000 + 3840, 3840)
    assert (own.before_sharing, shared.before_sharing) == (0, 2000 + 3840)
    assert shared.engine_weights == own.engine_weights
    assert own.used(10**6, 0.5) - shared.used(10**6, 0.5) == min(2000, own.learner - shared.before_sharing)


@pytest.mark.parametrize(("method", "bytes_per_weight"), [("nf4", 0.5 + 4 / 64), ("int4", 0.5 + 2 / 64)])
def test_estimate_of_four_bits_counts_codes_and_scales(method: str, bytes_per_weight: float) -> None:
    shape = dataclasses.replace(SHAPE, quantized_parameters=512, adapter_parameters=30)
    overrides = [*STEP, "cluster.use_gpu=true", "model.lora={rank: 3}", f"model.quantization={method}"]
    memory = estimate_memory(
        load_config(None, overrides), shape, sequence_length=3, tokens=1, gradient_checkpointing=True
    )
    in_four_bits = int(bytes_per_weight * 512)
    assert memory.weights == 2 * (1000 - 512) + in_four_bits + 4 * 30
    if method == "nf4":
        assert memory.engine_weights == 2000
        # Of an MLP's weight: three copies in float32 for the merge, the dequantized one in 16 bits, and its copy.
        assert memory.weight_sync == (12 + 2 + 4) * 10 * 20
    else:  # a slot of rank 8 for an adapter of rank 3
        assert memory.engine_weights == 2 * (1000 - 512) + in_four_bits + 2 * 30 * 8 // 3
        assert memory.weight_sync == 0


def test_estimate_sharded_learner_has_single_layers_unsharded() -> None:
    memory = estimate(SHARDED, "grpo.beta=0.04")
    assert (memory.weights, memory.reference_model, memory.gradients) == (2000, 2000, 2000)
    assert (memory.optimizer_states, memory.gradient_buckets) == (4000, 0)
    assert memory.kept_activations == 2 * 6 * 2 * 10 + 2 * 400  # embedding and output layer in 16 bits
    # One layer keeps 16 * 10 + 4 * 10 + 4 * 5 + 8 * 20 = 380 bytes per token; gradients as above; output layer 1600;
    # a weight's gradient 1200; two layers unsharded and a buffer, 3 * 2 * 300; a layer's gradients in 16 bits and
    # twice in float32, 10 * 300.
    assert memory.working_memory == 6 * 380 + 6 * 140 + 1600 + 1200 + 1800 + 3000
    assert memory.weight_sync == 4 * (400 + 10 * 20)  # the embedding, and the weight before it


WORKER = MemoryEstimate(
    parameters=0,
    tokens_per_micro_batch=4096,
    gradient_checkpointing=False,
    weights=2 * GIB,
    reference_model=0,
    optimizer_states=4 * GIB,
    gradient_buckets=0,
    gradients=2 * GIB,
    kept_activations=GIB,
    working_memory=GIB,
    weight_sync=0,
    engine_weights=2 * GIB,
    engine_activations=GIB // 2,
    cuda_graphs=GIB,
    kv_cache=4 * GIB,
    kv_cache_per_sequence=GIB // 2,
    context=GIB,
    reward_models=0,
    before_sharing=0,
    sleep_mode=False,
    is_dedicated=False,
)
"""The learner takes 10.2 GiB, a fifth of a GiB of it by fragmentation; the engine 2 + 0.5 + 1 + 4 = 7.5 GiB with a KV
cache for all eight completions, and 4 GiB for one."""


def test_memory_estimate_sums_learner_and_engine() -> None:
    assert WORKER.learner == pytest.approx(10.2 * GIB, abs=1)
    assert (WORKER.resident, WORKER.engine, WORKER.engine_fixed) == (6 * GIB, 7.5 * GIB, 3.5 * GIB)


def test_gpu_memory_utilization_large_gpu_fits_all_completions() -> None:
    assert WORKER.gpu_memory_utilization(24 * GIB) == 0.32  # 7.5 / 24 = 0.3125; 24 - 1 - 10.2 = 12.8 GiB are free


def test_gpu_memory_utilization_small_gpu_is_the_remainder() -> None:
    # A twentieth stays free: 17 - 0.85 - 1 - 10.2 = 4.95; 4.95 / 17 = 0.291.
    assert WORKER.gpu_memory_utilization(17 * GIB) == 0.29
    large_cache = dataclasses.replace(WORKER, kv_cache=20 * GIB)
    assert large_cache.gpu_memory_utilization(24 * GIB) == 0.48  # 24 - 1.2 - 1 - 10.2 = 11.6; 11.6 / 24 = 0.483


def test_gpu_memory_utilization_too_small_gpu_is_none() -> None:
    assert WORKER.gpu_memory_utilization(15 * GIB) is None  # 15 - 0.75 - 1 - 10.2 = 3.05, and 4 are needed
    assert WORKER.gpu_memory_utilization(8 * GIB) is None


def test_gpu_memory_utilization_sleep_mode_shares_the_gpu() -> None:
    sleeping = dataclasses.replace(WORKER, sleep_mode=True)
    assert sleeping.gpu_memory_utilization(15 * GIB) == 0.48  # 15 - 0.75 - 1 - 6 = 7.25; 7.25 / 15 = 0.483
    # The learner needs 10.2, CUDA graphs 1, other 1 and a twentieth 0.6.
    assert sleeping.gpu_memory_utilization(12 * GIB) is None


def test_memory_estimate_used_adds_what_is_there_at_once() -> None:
    assert WORKER.used(20 * GIB, 0.25) == pytest.approx((1 + 10.2 + 5) * GIB, abs=2)
    sleeping = dataclasses.replace(WORKER, sleep_mode=True)
    assert sleeping.used(20 * GIB, 0.25) == pytest.approx((1 + 10.2 + 1) * GIB, abs=2)
    assert sleeping.used(20 * GIB, 0.5) == (1 + 6 + 10) * GIB


def test_memory_estimate_dedicated_engine_is_on_another_gpu() -> None:
    alone = dataclasses.replace(WORKER, is_dedicated=True)
    assert alone.used(12 * GIB, 0.9) == pytest.approx((1 + 10.2) * GIB, abs=2)
    assert alone.fits(12 * GIB, 0.9) and not alone.fits(11 * GIB, 0.9)
    assert not WORKER.fits(12 * GIB, 0.9)
    assert alone.fits(12 * GIB, 0.03)  # an engine without space for a completion is another GPU's matter
    assert alone.completions_at_once(12 * GIB, 0.9) == 14  # 10.8 - 3.5 = 7.3 GiB, half a GiB each
    assert alone.gpu_memory_utilization(24 * GIB) is None
    gathered = dataclasses.replace(alone, weight_sync=5 * GIB)  # beside 6 GiB that stay
    assert gathered.used(24 * GIB, 0.9) == 12 * GIB


def test_completions_at_once_is_the_rest_of_the_engines_share() -> None:
    assert WORKER.completions_at_once(20 * GIB, 0.25) == 3  # 5 - 3.5 = 1.5 GiB, half a GiB each
    assert WORKER.completions_at_once(10 * GIB, 0.25) == 0
    assert not WORKER.fits(100 * GIB, 0.03)  # 3 GiB hold no completion beside the engine's 3.5


def test_memory_estimate_to_dict_is_plain() -> None:
    plain = json.loads(json.dumps(WORKER.to_dict()))
    assert (plain["engine"], plain["cuda_graphs"]) == (7.5 * GIB, GIB)


# Plan

POLICY = ModelShape(
    parameters=500_000_000,
    layers=24,
    hidden_size=1000,
    intermediate_size=5000,
    query_size=1000,
    key_value_size=125,
    vocabulary=100_000,
    tied_embeddings=True,
    context_length=32_768,
)
"""A token keeps 24 * (26,000 + 4,000 + 500 + 40,000) bytes = 1.692 MB without recomputation."""


def policy_config(*overrides: str) -> Config:
    return load_config(None, ["cluster.use_gpu=true", "cluster.num_workers=1", "engine.max_model_len=2048", *overrides])


def plan_for(config: Config, tokens: int, recompute: bool) -> MemoryPlan:
    """Return the plan on a GPU of which these passes leave a twentieth free."""
    estimate = estimate_memory(config, POLICY, sequence_length=2048, tokens=tokens, gradient_checkpointing=recompute)
    size = (estimate.context + estimate.learner) / (0.95 - config.engine_fraction)
    return plan_memory(config, POLICY, int(size) + 2)


def test_plan_takes_the_largest_passes_that_fit() -> None:
    config = policy_config("grpo.gradient_checkpointing=false")
    plan = plan_for(config, tokens=4096, recompute=False)
    assert (plan.tokens_per_micro_batch, plan.gradient_checkpointing, plan.fits) == (4096, False, True)
    # 256 tokens more take 1.1 * 256 * (1.692 + 0.020) MB = 482 MB more, and the learner has 95 - 30 = 65 % of the GPU.
    assert plan_memory(config, POLICY, plan.gpu_bytes + 700_000_000).tokens_per_micro_batch == 4096
    assert plan_memory(config, POLICY, plan.gpu_bytes + 800_000_000).tokens_per_micro_batch == 4096 + 256


def test_plan_beside_dedicated_engines_uses_the_whole_gpu() -> None:
    config = policy_config(DEDICATED, "grpo.gradient_checkpointing=false")
    memory = estimate_memory(config, POLICY, sequence_length=2048, tokens=4096, gradient_checkpointing=False)
    size = int((memory.context + memory.learner) / 0.95) + 2
    plan = plan_memory(config, POLICY, size)
    assert (plan.tokens_per_micro_batch, plan.fits, plan.gpu_memory_utilization) == (4096, True, 0.9)
    colocated = plan_memory(policy_config("grpo.gradient_checkpointing=false"), POLICY, size)
    assert colocated.tokens_per_micro_batch < 4096


def test_plan_recomputes_only_where_small_passes_cost_more() -> None:
    # 3 (1 + 2048 / 8192) = 3.75 is below 4 (1 + 2048 / 32768) = 4.25.
    roomy = plan_for(policy_config(), tokens=8192, recompute=False)
    assert (roomy.tokens_per_micro_batch, roomy.gradient_checkpointing) == (8192, False)
    assert roomy.relative_cost == 3.75
    # 3 (1 + 2048 / 4096) = 4.5 is above it.
    tight = plan_for(policy_config(), tokens=4096, recompute=False)
    assert (tight.tokens_per_micro_batch, tight.gradient_checkpointing) == (32_768, True)
    assert tight.relative_cost == 4.25


def test_plan_ends_at_the_workers_part_of_a_step() -> None:
    config = policy_config("grpo.prompts_per_step=2", "grpo.num_generations=4")
    plan = plan_memory(config, POLICY, 80 * GIB)
    assert (plan.tokens_per_micro_batch, plan.gradient_checkpointing) == (8 * 2048, False)


def test_plan_keeps_settings_of_the_config() -> None:
    rows = policy_config("grpo.micro_batch_size=4", "grpo.gradient_checkpointing=true")
    plan = plan_memory(rows, POLICY, 80 * GIB)
    assert (plan.tokens_per_micro_batch, plan.gradient_checkpointing) == (4 * 2048, True)
    assert (
        plan_memory(policy_config("grpo.tokens_per_micro_batch=3000"), POLICY, 80 * GIB).tokens_per_micro_batch == 3000
    )
    # The loss type bnpo needs the whole step of 128 completions in one pass.
    assert plan_memory(policy_config("grpo.loss_type=bnpo"), POLICY, 80 * GIB).tokens_per_micro_batch == 128 * 2048
    # Recomputation alone is chosen: on a GPU of 80 GiB four rows need none.
    assert not plan_memory(policy_config("grpo.micro_batch_size=4"), POLICY, 80 * GIB).gradient_checkpointing


def test_plan_too_small_gpu_has_the_smallest_passes() -> None:
    plan = plan_memory(policy_config(), POLICY, 8 * GIB)
    assert (plan.tokens_per_micro_batch, plan.gradient_checkpointing, plan.fits) == (2048, True, False)


def test_longest_sequence_comes_from_the_narrowest_limit() -> None:
    completion = "grpo.max_completion_length=256"
    assert longest_sequence(load_config(None, [completion]), 32_768) == 2048 + 256  # an assumed prompt
    assert longest_sequence(load_config(None, [completion, "data.max_prompt_length=100"]), 32_768) == 356
    assert longest_sequence(load_config(None, [completion, "engine.max_model_len=1024"]), 32_768) == 1024
    assert longest_sequence(load_config(None, [completion]), 512) == 512  # the model's own limit


# The model's config


@pytest.mark.parametrize("tied", [True, False])
def test_policy_shape_counts_parameters_from_the_config(tmp_path: Path, tied: bool) -> None:
    settings = {
        "model_type": "qwen2",
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 6,
        "max_position_embeddings": 99,
        "tie_word_embeddings": tied,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    # Embedding 88, once; q 72, k 36, v 36, o 64 with biases on the first three; MLP 3 * 48; norms 3 * 8.
    expected = ModelShape(
        parameters=464 if tied else 464 + 88,
        layers=1,
        hidden_size=8,
        intermediate_size=6,
        query_size=8,
        key_value_size=4,
        vocabulary=11,
        tied_embeddings=tied,
        context_length=99,
    )
    assert policy_shape(load_config(), str(tmp_path)) == expected


def test_policy_shape_unreadable_policy_raises_with_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=.*cannot be read"):
        policy_shape(load_config(), str(tmp_path))
