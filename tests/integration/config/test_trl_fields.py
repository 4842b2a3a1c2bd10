"""Comparison of the tables of TRL's fields with the installed releases of TRL and transformers."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from transformers.trainer_utils import SchedulerType
from trl import GRPOConfig, GRPOTrainer
from trl_field_table import main, render

from grpo_ray.config.loader import load_config
from grpo_ray.config.trl_fields import (
    DATA,
    LOSS_TYPES,
    OPTIMIZER_ARGUMENTS,
    OURS,
    PASSED,
    REFUSED,
    SCHEDULER_ARGUMENTS,
    STRICT,
    trl_fields,
)
from grpo_ray.learner.trl_config import trl_arguments


def test_committed_fields_equal_the_installed_trl() -> None:
    message = "run python scripts/trl_field_table.py, and put new fields into a table of config/trl_fields.py"
    assert DATA.read_text(encoding="utf-8") == render(), message


def test_every_field_of_trl_is_classified() -> None:
    fields = {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    assert fields == OURS.keys() | PASSED.keys() | REFUSED.keys()


def test_main_writes_the_file(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "fields.json")]) == 0
    assert (tmp_path / "fields.json").read_text(encoding="utf-8") == DATA.read_text(encoding="utf-8")


def json_types(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows."""
    if "anyOf" in schema:
        return set().union(*map(json_types, schema["anyOf"]))
    return {schema["type"]}


@pytest.mark.parametrize("name", [name for name, row in PASSED.items() if row.values is not None])
def test_allowed_values_have_types_of_trl(name: str) -> None:
    # TRL annotates scale_rewards as text and takes true and false for "group" and "none".
    wider = {"boolean"} if name == "scale_rewards" else set()
    types = json_types(TypeAdapter(PASSED[name].values, config=STRICT).json_schema())
    assert types <= set(trl_fields()[name].types) | wider


def test_loss_types_are_those_of_trl() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    compared = re.findall(r"self\.loss_type (?:==|in) (\[[^]]*\]|\"\w+\")", source)
    assert {name for text in compared for name in re.findall(r"\w+", text)} == set(LOSS_TYPES)


def test_schedules_and_their_arguments_are_those_of_transformers() -> None:
    # These two read an evaluation by TRL, which does not take place.
    left_out = set(trl_fields()["lr_scheduler_type"].values) - set(SCHEDULER_ARGUMENTS)
    assert left_out == {"reduce_lr_on_plateau", "greedy"}
    given = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for kind, arguments in SCHEDULER_ARGUMENTS.items():
        parameters = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(kind)]).parameters
        assert set(arguments) == parameters.keys() - given, kind


def test_optimizer_arguments_are_those_of_transformers() -> None:
    for optimizer, arguments in OPTIMIZER_ARGUMENTS.items():
        source = inspect.getsource(_OPTIMIZER_HANDLERS[optimizer])
        read = set(re.findall(r'"(\w+)"', source)) - {"true", "1", "yes"}
        assert read == {*arguments, "weight_decay"}  # the groups of parameters carry grpo.weight_decay instead


EXAMPLES: dict[str, Any] = {
    "lr_scheduler_type": "cosine", "warmup_steps": 3, "optim": "adamw_torch", "weight_decay": 0.1, "adam_beta1": 0.8,
    "adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_grad_norm": 0.5,
    "torch_empty_cache_steps": 4, "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 50,
    "ddp_broadcast_buffers": False, "logging_first_step": True, "logging_nan_inf_filter": False, "log_level": "info",
    "log_level_replica": "error", "model_init_kwargs": {"attn_implementation": "eager"},
    "disable_dropout": True, "cast_lm_head_to_fp32": True, "pad_to_multiple_of": 8, "temperature": 0.7, "top_p": 0.9,
    "top_k": 50, "min_p": 0.1, "generation_kwargs": {"stop": ["x"]}, "chat_template_kwargs": {"x": False},
    "repetition_penalty": 1.1, "vllm_model_impl": "transformers", "vllm_tensor_parallel_size": 2,
    "reward_weights": [0.5], "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch",
    "loss_type": "grpo", "beta": 0.04, "num_iterations": 2, "epsilon": 0.3, "epsilon_high": 0.4, "delta": 1.5,
    "importance_sampling_level": "sequence", "mask_truncated_completions": True, "off_policy_mask_threshold": 0.5,
    "vllm_importance_sampling_correction": False, "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 2.0, "vllm_importance_sampling_clip_min": 0.5, "top_entropy_quantile": 0.5,
    "entropy_coef": 0.01, "use_adaptive_entropy": True,
}  # fmt: skip
"""Field that can be set on its own, or with the setting in REQUIRED -> a value other than the default."""

REQUIRED = {
    name: "grpo.vllm_importance_sampling_mode=token_truncate"
    for name in ("top_p", "top_k", "min_p", "repetition_penalty")
}
"""Field -> override without which it is refused."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_passed_field_reaches_trl(name: str) -> None:
    value = EXAMPLES[name]
    assert value != trl_fields()[name].default
    overrides = [f"grpo.{name}={value}", *([REQUIRED[name]] if name in REQUIRED else [])]
    passed = getattr(trl_arguments(load_config(None, overrides), "out"), name)
    assert getattr(passed, "value", passed) == value


def test_trl_arguments_on_driver_need_no_gpu() -> None:
    settings = ["cluster.use_gpu=true", "grpo.vllm_enable_sleep_mode=true", "grpo.tf32=true"]
    args = trl_arguments(load_config(None, settings), "out", on_driver=True)
    assert args.use_cpu and not args.bf16 and args.vllm_enable_sleep_mode
