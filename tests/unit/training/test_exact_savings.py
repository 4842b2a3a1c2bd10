"""Which savings are exact for a model and its settings, and the importance ratio."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from grpo_ray.training import exact_savings
from grpo_ray.training.exact_savings import (
    has_flash_attention,
    has_relative_positions,
    importance_ratio,
    is_noisy,
    scoring_labels_only,
)
from grpo_ray.training.micro_batches import SavingsPlan


def llama(**changed: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **changed))


def rope(**parameters: Any) -> LlamaForCausalLM:
    return llama(rope_parameters={"rope_theta": 1e4, **parameters})


# exact_savings

TRIMMING = {"trim_prompts", "trim_completions", "shift"}
REGROUPING = {"regroup", "share", "fewer_passes"}


@pytest.mark.parametrize(
    ("changed", "off"),
    [
        ({}, set()),
        ({"device": "cpu"}, {"fewer_passes"}),
        ({"num_iterations": 2}, {"one_pass"}),
        ({"accumulation": 1}, {"one_pass", *REGROUPING}),
        ({"beta": 0.01}, {"rows"}),
        ({"_entropy_bonus_enabled": True}, {"rows", *REGROUPING}),
        ({"top_entropy_quantile": 0.8}, {"rows", *REGROUPING}),
        ({"aux_loss_enabled": True}, {"rows", *REGROUPING, "pack", "shift"}),
        ({"loss_type": "bnpo"}, REGROUPING),
        ({"loss_type": "vespo"}, set()),
        ({"loss_type": "vespo", "vllm_importance_sampling_clip_max": 0.9}, TRIMMING),
        ({"loss_type": "vespo", "vllm_importance_sampling_clip_min": 1.1}, TRIMMING),
        ({"pad_to_multiple_of": 64}, TRIMMING),
        ({"rope_type": "dynamic"}, {"trim_prompts", "shift", "pack"}),
        ({"attention": "sdpa"}, {"pack"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_exact_savings_setting_changes_gradient_saving_off(changed: dict[str, Any], off: set[str]) -> None:
    model = rope(rope_type="dynamic", factor=2.0) if "rope_type" in changed else llama()
    model.config._attn_implementation_internal = changed.get("attention", "flash_attention_2")
    device = torch.device(changed.get("device", "cuda"))
    trainer = {
        "model": model, "accelerator": SimpleNamespace(device=device),
        "num_iterations": 1, "beta": 0.0, "_entropy_bonus_enabled": False,
        "top_entropy_quantile": 1.0, "aux_loss_enabled": False, "loss_type": "dapo",
        "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 3.0,
    } | changed  # fmt: skip
    args = SimpleNamespace(
        gradient_accumulation_steps=changed.get("accumulation", 4),
        steps_per_generation=4,
        pad_to_multiple_of=changed.get("pad_to_multiple_of"),
    )
    savings = vars(exact_savings.exact_savings(SimpleNamespace(args=args, **trainer)))
    assert {name for name, on in savings.items() if not on} == off


def test_exact_savings_noisy_model_all_off() -> None:
    assert exact_savings.exact_savings(SimpleNamespace(model=llama(attention_dropout=0.1))) == SavingsPlan()


# Properties of models


def test_is_noisy_dropout_of_model_or_adapter_true() -> None:
    from peft import LoraConfig, get_peft_model

    assert not is_noisy(llama()) and is_noisy(llama(attention_dropout=0.1))
    for rate in (0.0, 0.1):
        adapter = LoraConfig(target_modules=["q_proj"], lora_dropout=rate)
        assert is_noisy(get_peft_model(llama(), adapter)) == bool(rate)


def test_has_flash_attention_follows_model_config() -> None:
    model = llama()
    assert not has_flash_attention(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert has_flash_attention(model)


def test_has_relative_positions_plain_rotation_true() -> None:
    assert has_relative_positions(llama()) and has_relative_positions(rope(rope_type="linear", factor=2.0))
    assert not has_relative_positions(rope(rope_type="dynamic", factor=2.0))  # another base for each length
    assert not has_relative_positions(SimpleNamespace(config=GPT2Config()))


def test_has_relative_positions_stateful_model_false() -> None:
    model = llama()
    model._is_stateful = True
    assert not has_relative_positions(model)


# importance_ratio

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Ratios of the tokens are 2, 1/4 and, where the engine gave no log-probability, 1; their product is 1/2.
        ("token_truncate", [[1.5, 0.3, 1.0]]),
        ("token_mask", [[0.0, 0.0, 1.0]]),
        ("sequence_truncate", [[0.5]]),
        ("sequence_mask", [[0.5]]),
    ],
)
def test_importance_ratio_worked_example(mode: str, expected: list[list[float]]) -> None:
    gap = torch.tensor([[LOG2, -2 * LOG2, math.nan]])
    torch.testing.assert_close(importance_ratio(gap, mode, 0.3, 1.5), torch.tensor(expected))


@given(
    gap=st.lists(st.floats(-5, 5), min_size=1, max_size=5),
    level=st.sampled_from(["token", "sequence"]),
    low=st.floats(0.01, 1),
    high=st.floats(1, 10),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_importance_ratio_stays_in_bounds(gap: list[float], level: str, low: float, high: float) -> None:
    gaps = torch.tensor([gap], dtype=torch.float64)
    truncated = importance_ratio(gaps, f"{level}_truncate", low, high)
    masked = importance_ratio(gaps, f"{level}_mask", low, high)
    assert truncated.shape == masked.shape == (1, len(gap) if level == "token" else 1)
    assert ((truncated >= low) & (truncated <= high)).all()
    kept = masked != 0
    assert (masked[kept] == truncated[kept]).all()
    assert ((truncated[~kept] == low) | (truncated[~kept] == high)).all()


def test_scoring_labels_only_leaves_no_trace_after_error() -> None:
    utils = exact_savings.trl.trainer.utils
    before = utils._use_triton
    with pytest.raises(KeyError), scoring_labels_only(True):
        assert utils._use_triton(torch.device("cpu"))
        raise KeyError
    assert utils._use_triton is before
    with scoring_labels_only(False):
        assert utils._use_triton is before
