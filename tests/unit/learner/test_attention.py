"""Attention for packed rows: its result on whole models, and the choice among kernels."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from varlen_reference import grouped_varlen_by_definition, varlen_by_definition

from grpo_ray.errors import ConfigError
from grpo_ray.learner.attention import (
    VARLEN,
    AttentionFacts,
    VarlenAttention,
    choose_attention,
    obstacle_to_packing,
    packs_rows,
    register_varlen,
    use_packing_attention,
)
from grpo_ray.learner.forward_pass import pack_rows

KERNELS = {"torch 2.11": varlen_by_definition, "torch 2.13": grouped_varlen_by_definition}

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip


def windowed_qwen() -> Qwen2ForCausalLM:
    """Two layers, of which the second sees 5 tokens."""
    layers = ["full_attention", "sliding_attention"]
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, layer_types=layers))


MODELS = {"llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), "qwen, sliding window": windowed_qwen}


@pytest.fixture(autouse=True)
def no_registration_left() -> Any:
    yield
    for interface in (AttentionInterface, type(ALL_MASK_ATTENTION_FUNCTIONS)):
        interface._global_mapping.pop(VARLEN, None)


def padded_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, (4, 18), of rows of 9, 14, 2 and 18 tokens; the last 10 columns are completions."""
    ids = torch.randint(2, 50, (4, 18), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0] * (8 - p) + [1] * (p + c) + [0] * (10 - c) for p, c in ((3, 6), (8, 6), (1, 1), (8, 10))])
    return ids * mask, mask


def gradients(model: Any, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum over tokens, with a factor for each that differs."""
    model.zero_grad()
    factors = torch.arange(logits.numel(), dtype=logits.dtype).view_as(logits).sin()
    (logits * factors).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# VarlenAttention


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("make_model", MODELS)
def test_varlen_attention_packed_rows_equal_rows_alone(make_model: str, kernel: str, checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[make_model]().double().train()
    ids, mask = padded_batch()
    packed = pack_rows(ids, mask, 10)
    alone = [model(input_ids=row[keep.bool()][None]).logits[0] for row, keep in zip(ids, mask, strict=True)]
    expected = torch.cat(alone)
    expected_gradients = gradients(model, expected)
    if checkpointing:  # repeats each layer in the backward pass, outside of the code that called the model
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    register_varlen(KERNELS[kernel])
    model.set_attn_implementation(VARLEN)
    assert packs_rows(model)
    inputs = {name: value for name, value in packed.model_inputs.items() if name != "labels"}
    actual = model(**inputs, use_cache=False).logits[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)  # norms and angles are in float32
    for name, gradient in gradients(model, actual).items():
        assert (gradient - expected_gradients[name]).norm() < 1e-6 * expected_gradients[name].norm(), name


@pytest.mark.parametrize("make_model", MODELS)
def test_varlen_attention_padded_rows_equal_sdpa(make_model: str) -> None:
    torch.manual_seed(0)
    model = MODELS[make_model]()
    ids, mask = padded_batch()
    expected = model(input_ids=ids, attention_mask=mask).logits
    whole = model(input_ids=ids).logits  # without padding
    register_varlen(varlen_by_definition)
    model.set_attn_implementation(VARLEN)
    actual = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)
    torch.testing.assert_close(model(input_ids=ids).logits, whole, rtol=0, atol=1e-5)


def test_varlen_attention_autocast_passes_16_bits() -> None:
    seen = []

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen.append((query.dtype, key.dtype, value.dtype))
        return query

    attention = VarlenAttention(kernel, has_grouped_queries=False)
    rows = torch.ones(1, 4, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = attention(torch.nn.Module(), rows, rows[:, :2], rows[:, :2].bfloat16(), None)
    assert seen == [(torch.bfloat16,) * 3] and output.shape == (1, 6, 4, 8)


@pytest.mark.parametrize(
    ("option", "named"), [({"softcap": 30.0}, "softcap"), ({"dropout": 0.1}, "dropout"), ({"is_causal": False}, "is_")]
)
def test_varlen_attention_unknown_option_raises(option: dict[str, Any], named: str) -> None:
    rows = torch.ones(1, 4, 6, 8)
    with pytest.raises(ConfigError, match=rf"Module calls its attention with {named}.*attn_implementation"):
        VarlenAttention(varlen_by_definition, False)(torch.nn.Module(), rows, rows, rows, None, **option)


def test_varlen_attention_arguments_fit_torch() -> None:
    """The installed kernel takes our arguments. With fake tensors it computes shapes only, forward and backward."""
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    with FakeTensorMode():
        query = torch.ones(1, 4, 6, 8, dtype=torch.bfloat16, requires_grad=True)
        keys = torch.ones(1, 2, 6, 8, dtype=torch.bfloat16, requires_grad=True)
        starts = torch.zeros(3, dtype=torch.int32)
        for window in (None, 3):
            output, _ = VarlenAttention(varlen_attn, grouped)(
                torch.nn.Module(), query, keys, keys, None, scaling=0.3, sliding_window=window, cu_seq_lens_q=starts,
                max_length_q=4,
            )  # fmt: skip
            assert output.shape == (1, 6, 4, 8)
            output.sum().backward()
    assert query.grad is not None and keys.grad is not None and keys.grad.shape == keys.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on GPUs only")
def test_varlen_attention_on_gpu_equals_rows_alone() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"hidden_size": 64})).cuda().train()
    ids, mask = (each.cuda() for each in padded_batch())
    packed = pack_rows(ids, mask, 10)
    results = []
    with torch.autocast("cuda", torch.bfloat16):
        for name in ("sdpa", VARLEN):
            register_varlen(varlen_attn)
            model.set_attn_implementation(name)
            inputs = {key: value for key, value in packed.model_inputs.items() if key != "labels"}
            model.zero_grad()
            logits = model(**inputs, use_cache=False).logits.float()
            logits.square().sum().backward()
            results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() < 0.02 * expected.norm()


# Choice

FACTS = AttentionFacts(
    current="sdpa", is_chosen=False, head_size=64, has_interface=True, has_flash=True, has_softcap=False,
    is_16_bit=True, capability=(9, 0), has_flash_2=False, has_flash_3=False,
)  # fmt: skip
"""A model of common kind on a Hopper GPU without flash-attn."""


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, VARLEN),
        ({"has_flash_2": True}, "flash_attention_2"),
        ({"has_flash_2": True, "has_flash_3": True}, "flash_attention_3"),
        ({"has_flash_2": True, "has_flash_3": True, "capability": (8, 0)}, "flash_attention_2"),
        ({"has_flash_2": True, "has_flash": False}, VARLEN),
        ({"has_flash_3": True, "capability": (12, 0)}, VARLEN),
    ],
    ids=str,
)
def test_choose_attention_fastest_kernel_that_is_there(changed: dict[str, Any], name: str) -> None:
    assert choose_attention(replace(FACTS, **changed)) == name


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"is_chosen": True}, "grpo.model_init_kwargs names its attention"),
        ({"current": "eager"}, "its attention is eager"),
        ({"has_interface": False}, "its attention does not go through transformers' interface"),
        ({"has_softcap": True}, "it bounds the scores of its attention (attn_logit_softcapping)"),
        ({"head_size": 36}, "the size of a head, 36, is no multiple of 8 up to 256"),
        ({"head_size": 264}, "the size of a head, 264, is no multiple of 8 up to 256"),
        ({"is_16_bit": False}, "the learner computes in float32, not in 16 bits"),
        ({"capability": (7, 5)}, "the GPU's compute capability is 7.5, below 8.0"),
    ],
    ids=str,
)
def test_obstacle_to_packing_is_named(changed: dict[str, Any], reason: str) -> None:
    facts = replace(FACTS, **changed)
    assert obstacle_to_packing(facts) == reason and choose_attention(facts) is None


def test_use_packing_attention_sets_policy_and_reference() -> None:
    models = [LlamaForCausalLM(LlamaConfig(**SIZES)) for _ in range(2)]
    facts = AttentionFacts.of(models[0], is_chosen=False, is_16_bit=True, capability=(8, 0))
    assert facts == replace(FACTS, head_size=8, capability=(8, 0))
    line = use_packing_attention(models, facts)
    assert line == "learner's attention: torch_varlen (torch.nn.attention.varlen), rows packed without padding"
    assert all(packs_rows(model) for model in models)
    assert "torch_varlen" not in str(models[0].config.to_dict())  # not in a checkpoint


def test_use_packing_attention_obstacle_keeps_attention() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    line = use_packing_attention([model], replace(FACTS, is_16_bit=False))
    assert line.startswith("learner's attention: sdpa, with rows padded") and line.endswith("float32, not in 16 bits")
    assert not packs_rows(model)
