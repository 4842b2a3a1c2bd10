"""Savings that are exact for a model and the settings of its loss."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from grpo_ray.learner.exact_savings import (
    LossSettings,
    SavingsPlan,
    has_relative_positions,
    is_noisy,
    plan_savings,
)
from grpo_ray.learner.passes import PassLimit
from grpo_ray.learner.sync_check import ImportanceSampling
from grpo_ray.models.adapters import build_config


def llama(**changed: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **changed))


def rope(**parameters: Any) -> LlamaForCausalLM:
    return llama(rope_parameters={"rope_theta": 1e4, **parameters})


# plan_savings

TRIMMING = {"trim_prompts", "trim_completions", "shift", "share"}
REGROUPING = {"regroup", "share"}


def loss_settings(**changed: Any) -> LossSettings:
    """Make settings under which all savings are exact, but for those changed."""
    importance = ImportanceSampling("token_truncate", changed.pop("low", -math.inf), changed.pop("high", 3.0))
    defaults: dict[str, Any] = {
        "loss_type": "dapo", "beta": 0.0, "num_iterations": 1, "gradient_accumulation_steps": 4,
        "steps_per_generation": 4, "top_entropy_quantile": 1.0, "has_entropy_bonus": False, "has_router_loss": False,
        "pad_to_multiple_of": None, "importance": importance,
    }  # fmt: skip
    return LossSettings(**(defaults | changed))


@pytest.mark.parametrize(
    ("changed", "off"),
    [
        ({}, set()),
        ({"num_iterations": 2}, {"one_pass"}),
        ({"gradient_accumulation_steps": 1}, {"one_pass"}),  # four optimizer steps from one generation batch
        ({"gradient_accumulation_steps": 8}, set()),
        ({"beta": 0.01}, {"rows"}),
        ({"has_entropy_bonus": True}, {"rows", *REGROUPING}),
        ({"top_entropy_quantile": 0.8}, {"rows", *REGROUPING}),
        ({"has_router_loss": True}, {"rows", *REGROUPING, "pack", "shift"}),
        ({"loss_type": "bnpo"}, REGROUPING),
        ({"loss_type": "vespo"}, set()),
        ({"loss_type": "vespo", "low": 1.0, "high": 1.0}, set()),  # a ratio of 1 is within the bounds
        ({"loss_type": "vespo", "high": 0.9}, TRIMMING),
        ({"loss_type": "vespo", "low": 1.1}, TRIMMING),
        ({"pad_to_multiple_of": 64}, TRIMMING),
        ({"rope_type": "dynamic"}, {"trim_prompts", "shift", "pack", "share"}),
        ({"attention": "sdpa"}, {"pack"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_plan_savings_setting_changes_gradient_saving_off(changed: dict[str, Any], off: set[str]) -> None:
    changed = dict(changed)
    model = rope(rope_type="dynamic", factor=2.0) if changed.pop("rope_type", None) else llama()
    model.config._attn_implementation_internal = changed.pop("attention", "flash_attention_2")
    savings = vars(plan_savings(model, loss_settings(**changed)))
    assert {name for name, on in savings.items() if not on} == off


def test_plan_savings_noisy_model_all_off() -> None:
    assert plan_savings(llama(attention_dropout=0.1), loss_settings()) == SavingsPlan()


@pytest.mark.parametrize(
    ("savings", "repacks"),
    [
        (SavingsPlan(), False),
        (SavingsPlan(one_pass=True, share=True, shift=True, pack=True, head=True), False),
        (SavingsPlan(rows=True), True),
        (SavingsPlan(regroup=True), True),
        (SavingsPlan(trim_prompts=True), True),
        (SavingsPlan(trim_completions=True), True),
    ],
)
def test_savings_plan_repacks_for_each_change_of_micro_batches(savings: SavingsPlan, repacks: bool) -> None:
    assert savings.repacks == repacks


def test_savings_plan_limits_tokens_of_rows_without_outer_padding() -> None:
    padded, shifted, packed = SavingsPlan(), SavingsPlan(shift=True), SavingsPlan(shift=True, pack=True)
    assert padded.pass_limit(4, 100) == PassLimit(rows=4, layout="padded")
    assert shifted.pass_limit(4, 100) == PassLimit(tokens=100, layout="shifted")
    assert packed.pass_limit(4, 100) == PassLimit(tokens=100, layout="packed")
    assert packed.pass_limit(4, None) == PassLimit(rows=4, layout="packed")


# Properties of models


@pytest.mark.parametrize(
    ("name", "rate", "noisy"),
    [
        ("router_jitter_noise", 0.01, True),
        ("drop_path_rate", 0.01, True),
        ("drop_path_rate", 0.0, False),
        ("drop_path_rate", None, False),
        ("scale", 0.01, False),
    ],
)
def test_is_noisy_rate_of_a_module_decides(name: str, rate: float | None, noisy: bool) -> None:
    inner = torch.nn.Linear(1, 1)
    setattr(inner, name, rate)
    assert is_noisy(torch.nn.Sequential(torch.nn.Linear(1, 1), inner)) == noisy


def test_is_noisy_dropout_of_model_or_adapter_true() -> None:
    from peft import LoraConfig, get_peft_model

    assert not is_noisy(llama()) and is_noisy(llama(attention_dropout=0.1))
    for rate in (0.0, 0.1):
        adapter = LoraConfig(target_modules=["q_proj"], lora_dropout=rate)
        assert is_noisy(get_peft_model(llama(), adapter)) == bool(rate)


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "LOHA", "rank_dropout": 0.1},
        {"type": "LOKR", "module_dropout": 0.1},
        {"type": "BOFT", "boft_dropout": 0.1},
        {"type": "OFT", "module_dropout": 0.1},
    ],
    ids=str,
)
def test_is_noisy_dropout_of_any_adapter_true(settings: dict[str, Any]) -> None:
    from peft import get_peft_model

    quiet = {"type": settings["type"]}
    assert is_noisy(get_peft_model(llama(), build_config(settings)))
    assert not is_noisy(get_peft_model(llama(), build_config(quiet)))


def test_has_relative_positions_plain_rotation_true() -> None:
    assert has_relative_positions(llama()) and has_relative_positions(rope(rope_type="linear", factor=2.0))
    assert not has_relative_positions(rope(rope_type="dynamic", factor=2.0))  # another base for each length
    assert not has_relative_positions(SimpleNamespace(config=GPT2Config()))


@pytest.mark.parametrize(
    ("config", "relative"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "new_parameter": 1}}, False),
        ({"rope_parameters": {"rope_theta": 1e4}}, False),
        ({"rope_parameters": None}, False),
        # One dictionary for each type of layer.
        ({"rope_parameters": {"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "default"}}}, True),
        ({"rope_parameters": {"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "dynamic"}}}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"layer_types": None}, True),
        ({"layer_types": ["full_attention", "linear_attention"]}, False),
        ({"attn_temperature_tuning": True}, False),
        ({"attn_temperature_tuning": False}, True),
    ],
    ids=str,
)
def test_has_relative_positions_config_decides(config: dict[str, Any], relative: bool) -> None:
    text = SimpleNamespace(**({"rope_parameters": {"rope_type": "default"}} | config))
    assert has_relative_positions(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))) == relative


def test_has_relative_positions_stateful_model_false() -> None:
    model = llama()
    model._is_stateful = True
    assert not has_relative_positions(model)
