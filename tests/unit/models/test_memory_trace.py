"""The estimate against the memory that a pass of a small Qwen2 policy really allocates (`live_memory.py`)."""

import dataclasses
import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from live_memory import LiveMemory
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from grpo_ray.config.loader import load_config
from grpo_ray.models.adapters import build_config, train_in_float32
from grpo_ray.models.memory import TILE_COLUMNS, TILE_TOKENS, ModelShape, estimate_memory
from grpo_ray.models.quantized import QUANTIZERS, quantizable_layers, quantize_policy

HIDDEN, QUERY, KEY, INTERMEDIATE, HEAD = 32, 32, 16, 160, 16
"""The ratio of the MLP to the rest is that of Qwen2.5. Weights are small beside the activations of TOKENS tokens."""
LAYERS, TOKENS, RANK = 4, 2048, 8


@dataclass(frozen=True)
class Traced:
    """Bytes allocated by one pass beyond parameters."""

    kept: int
    """Bytes at the end of the forward pass."""
    peak: int
    """Bytes at the peak, gradients of parameters included."""


def build_policy(dtype: torch.dtype, lora: bool) -> torch.nn.Module:
    config = Qwen2Config(
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=QUERY // HEAD,
        num_key_value_heads=KEY // HEAD,
        head_dim=HEAD,
        vocab_size=32,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not lora:
        return model
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules="all-linear"))


def shape_of_policy() -> ModelShape:
    return ModelShape(
        parameters=sum(each.numel() for each in build_policy(torch.float32, lora=False).parameters()),
        layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        query_size=QUERY,
        key_value_size=KEY,
        vocabulary=32,
        tied_embeddings=True,
        context_length=TOKENS,
    )


def trace(rows: int, dtype: torch.dtype, *, lora: bool, autocast: bool, recompute: bool) -> Traced:
    """Run a pass over rows of TOKENS / rows tokens."""
    model = build_policy(dtype, lora).train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        model.enable_input_require_grads()  # as TRL does
    ids = torch.zeros(rows, TOKENS // rows, dtype=torch.long)
    backbone = model.get_base_model().model if lora else model.model
    with LiveMemory([*model.parameters(), *model.buffers()]) as memory:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
        kept = memory.current
        hidden.sum().backward()
    return Traced(kept, memory.peak)


CASES = {
    "autocast": ([], torch.float32, False, True),
    "adapter": ([f"model.lora={{rank: {RANK}}}"], torch.bfloat16, True, True),
    "sharded": (["cluster.num_workers=2", "cluster.shard_learner=true"], torch.bfloat16, False, False),
    "float32": (["model.dtype=float32"], torch.float32, False, False),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 4])
def test_estimate_is_within_a_tenth_of_a_traced_pass(case: str, recompute: bool, rows: int) -> None:
    overrides, dtype, lora, autocast = CASES[case]
    config = load_config(None, ["cluster.use_gpu=true", *overrides])
    shape = shape_of_policy()
    memory = estimate_memory(config, shape, sequence_length=TOKENS, tokens=TOKENS, gradient_checkpointing=recompute)
    traced = trace(rows, dtype, lora=lora, autocast=autocast, recompute=recompute)
    estimated = memory.kept_activations + memory.working_memory
    assert estimated == pytest.approx(traced.peak, rel=0.1), f"{estimated / traced.peak:.3f}"
    # Beside what the layers keep, the end of the forward pass has the last norm's activations, part of working memory.
    last_norm = traced.kept - memory.kept_activations
    assert abs(last_norm) < 0.1 * traced.kept + 16 * TOKENS * HIDDEN, f"{memory.kept_activations / traced.kept:.3f}"


ADAPTERS: dict[str, dict[str, Any]] = {
    "C3A": {"block_size": 16},
    "LOHA": {},
    "OFT": {"oft_block_size": 16},
    "VERA": {"r": 16},
}


@pytest.mark.slow  # traced passes take seconds each on a busy machine
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_estimate_of_other_adapters_is_near_a_traced_pass(kind: str, recompute: bool) -> None:
    settings = {"type": kind} | ADAPTERS[kind]
    model = get_peft_model(build_policy(torch.bfloat16, lora=False), build_config(settings)).train()
    train_in_float32(model)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    config = load_config(None, ["cluster.use_gpu=true", f"model.peft={json.dumps(settings)}"])
    shape = dataclasses.replace(
        shape_of_policy(), adapter_parameters=sum(each.numel() for each in model.parameters() if each.requires_grad)
    )
    memory = estimate_memory(config, shape, sequence_length=TOKENS, tokens=TOKENS, gradient_checkpointing=recompute)
    with LiveMemory([*model.parameters(), *model.buffers()]) as traced:
        with torch.autocast("cpu", torch.bfloat16):
            ids = torch.zeros(1, TOKENS, dtype=torch.long)
            hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state
        hidden.float().sum().backward()
    assert 0.8 < (memory.kept_activations + memory.working_memory) / traced.peak < 1.35


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("hidden", "tokens"), [(128, 1024), (512, 512), (1024, 64)])
@pytest.mark.parametrize("method", QUANTIZERS)
def test_estimate_of_a_policy_in_four_bits_is_within_a_tenth(
    method: str, hidden: int, tokens: int, recompute: bool
) -> None:
    """The last size has larger weights than activations, the first one smaller ones."""
    config = Qwen2Config(
        num_hidden_layers=2,
        hidden_size=hidden,
        intermediate_size=5 * hidden,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        vocab_size=32,
        tie_word_embeddings=True,
    )
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parameters = sum(each.numel() for each in policy.parameters())
    in_four_bits = sum(policy.get_submodule(name).weight.numel() for name in quantizable_layers(policy))
    quantize_policy(policy, method)
    model = get_peft_model(policy, LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules="all-linear")).train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    shape = ModelShape(
        parameters=parameters,
        layers=2,
        hidden_size=hidden,
        intermediate_size=5 * hidden,
        query_size=hidden,
        key_value_size=hidden // 2,
        vocabulary=32,
        tied_embeddings=True,
        context_length=tokens,
        adapter_parameters=sum(each.numel() for each in model.parameters() if each.requires_grad),
        quantized_parameters=in_four_bits,
    )
    settings = ["cluster.use_gpu=true", f"model.lora={{rank: {RANK}}}", f"model.quantization={method}"]
    memory = estimate_memory(
        load_config(None, settings), shape, sequence_length=tokens, tokens=tokens, gradient_checkpointing=recompute
    )
    stored = sum(each.nbytes for each in model.parameters())
    assert memory.weights == pytest.approx(stored, rel=0.001)
    with LiveMemory([*model.parameters(), *model.buffers()]) as traced:
        with torch.autocast("cpu", torch.bfloat16):
            ids = torch.zeros(1, tokens, dtype=torch.long)
            states = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state
        states.float().sum().backward()
    estimated = memory.weights + memory.kept_activations + memory.working_memory
    assert estimated == pytest.approx(stored + traced.peak, rel=0.1), f"{estimated / (stored + traced.peak):.3f}"


def test_estimate_has_the_tile_of_the_output_layer() -> None:
    assert (chunked_logprob.TOKEN_CHUNK_SIZE, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE) == (TILE_TOKENS, TILE_COLUMNS)


def test_output_layer_gradient_is_float32_for_the_whole_vocabulary() -> None:
    """Beyond one tile, memory grows with the vocabulary by that gradient alone: 4 bytes per weight."""

    def peak(vocabulary: int) -> int:
        hidden = torch.zeros(8, HIDDEN, requires_grad=True)
        weight = torch.zeros(vocabulary, HIDDEN, requires_grad=True)
        targets = torch.zeros(8, dtype=torch.long)
        with LiveMemory([hidden, weight, targets]) as memory:
            with torch.autocast("cpu", torch.bfloat16):
                logps, *_ = trl_utils._ChunkedLogProbFunction.apply(
                    hidden, weight, None, targets, 1.0, TILE_COLUMNS, None, 1.0, ("log_probs", "entropy")
                )
            logps.sum().backward()
        return memory.peak

    assert peak(4 * TILE_COLUMNS) - peak(2 * TILE_COLUMNS) == 2 * TILE_COLUMNS * HIDDEN * 4
