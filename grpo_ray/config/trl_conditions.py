"""Rules of TRL and transformers across fields: settings that they would ignore, or refuse only in a worker.

Each rule is a function like those in `checks.py`, whose table CHECKS lists the rules of both modules in order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_ray.config.fields import override_text
from grpo_ray.config.trl_fields import (
    ADAM,
    CLIPPED_LOSSES,
    MODEL_ARGUMENTS_REFUSED,
    OPTIMIZER_ARGUMENTS,
    SCHEDULER_ARGUMENTS,
    SHARDING_OPTIONS_REFUSED,
    effective_value,
)

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config


@dataclass(frozen=True)
class Condition:
    """Condition under which fields of TRL have an effect."""

    fields: tuple[str, ...]
    key: str
    """Key of the config that the condition is about: a path, or a field of TRL with the prefix "grpo."."""
    holds: Callable[[Any], bool]
    """Function of the key's value that returns whether the fields have an effect."""
    remedy: str
    """Setting with which the fields have an effect."""


def _is_any_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


CONDITIONS = (
    Condition(("adam_beta1", "adam_beta2", "adam_epsilon"), "grpo.optim", _is_any_of(*ADAM), "grpo.optim=adamw_torch"),
    Condition(("optim_args",), "grpo.optim", _is_any_of(*OPTIMIZER_ARGUMENTS), "grpo.optim=sgd"),
    Condition(
        ("warmup_steps",),
        "grpo.lr_scheduler_type",
        lambda kind: kind != "constant",
        "grpo.lr_scheduler_type=constant_with_warmup",
    ),
    Condition(
        ("gradient_checkpointing_kwargs",), "grpo.gradient_checkpointing", bool, "grpo.gradient_checkpointing=true"
    ),
    Condition(("fsdp_config",), "cluster.shard_learner", bool, "cluster.shard_learner=true"),
    Condition(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        "cluster.shard_learner",
        lambda shards: not shards,
        "cluster.shard_learner=false",
    ),
    Condition(("tf32", "vllm_enable_sleep_mode"), "cluster.use_gpu", bool, "cluster.use_gpu=true"),
    Condition(("delta",), "grpo.loss_type", _is_any_of(*CLIPPED_LOSSES), "grpo.loss_type=dapo"),
    Condition(
        ("epsilon", "epsilon_high"), "grpo.loss_type", _is_any_of(*CLIPPED_LOSSES, "cispo"), "grpo.loss_type=dapo"
    ),
    Condition(
        ("sapo_temperature_neg", "sapo_temperature_pos"), "grpo.loss_type", _is_any_of("sapo"), "grpo.loss_type=sapo"
    ),
    Condition(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        "grpo.loss_type",
        _is_any_of("vespo"),
        "grpo.loss_type=vespo",
    ),
    # VESPO weights whole sequences by itself.
    Condition(("importance_sampling_level",), "grpo.loss_type", lambda loss: loss != "vespo", "grpo.loss_type=luspo"),
    Condition(
        ("scale_rewards", "multi_objective_aggregation"), "grpo.advantages", _is_any_of("grpo"), "grpo.advantages=grpo"
    ),
    Condition(("sync_ref_model", "use_bias_correction_kl"), "grpo.beta", bool, "grpo.beta=0.04"),
    # TRL's reference is the policy without the adapter, which does not change.
    Condition(("sync_ref_model",), "model.lora", lambda lora: lora is None, "model.lora=null"),
    Condition(("sync_ref_model",), "model.peft", lambda peft: peft is None, "model.peft=null"),
    Condition(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"), "grpo.sync_ref_model", bool, "grpo.sync_ref_model=true"
    ),
    Condition(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        "grpo.use_adaptive_entropy",
        bool,
        "grpo.use_adaptive_entropy=true",
    ),
    Condition(
        (
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_clip_max",
        ),
        "grpo.vllm_importance_sampling_correction",
        bool,
        "grpo.vllm_importance_sampling_correction=true",
    ),
)
"""Conditions of fields that TRL, transformers or torch would ignore without them."""


def trl_fields_have_an_effect(config: "Config") -> str | None:
    """Refuse a field of TRL that has no effect with the other settings, according to the table above."""
    for condition in CONDITIONS:
        value = _value_of(config, condition.key)
        for name in condition.fields:
            given = config.grpo.trl.get(name)
            if given != effective_value({}, name) and name in config.grpo.trl and not condition.holds(value):
                return (
                    f"grpo.{name}={override_text(given)} has no effect with {condition.key}={override_text(value)}; "
                    f"set {condition.remedy}, or leave grpo.{name} out"
                )
    return None


def _value_of(config: "Config", key: str) -> Any:
    """Return the value of a key of the config, or of a field of TRL in the section `grpo`."""
    section, _, name = key.partition(".")
    if key == "grpo.gradient_checkpointing":  # the default is not TRL's: it follows from each worker's memory plan
        return config.grpo.trl.get(name)
    values = getattr(config, section)
    return getattr(values, name) if hasattr(values, name) else effective_value(config.grpo.trl, name)


def optimizer_arguments_are_known(config: "Config") -> str | None:
    """Require `grpo.optim_args` to be NAME=NUMBER pairs that the optimizer reads."""
    text, optimizer = config.grpo.trl.get("optim_args"), effective_value(config.grpo.trl, "optim")
    for pair in (text or "").replace(" ", "").split(",") if text else ():
        name, _, value = pair.partition("=")
        allowed = OPTIMIZER_ARGUMENTS.get(optimizer, ())
        if name not in allowed:
            return (
                f"grpo.optim_args={text!r}: {name!r} is no argument of grpo.optim={optimizer}; "
                f"write NAME=VALUE pairs of {', '.join(allowed)}, separated by commas"
            )
        if name in ("nesterov", "centered"):
            if value not in ("true", "false"):
                return f"grpo.optim_args={text!r}: {name} must be true or false"
        elif not _is_finite_number(value):
            return f"grpo.optim_args={text!r}: {name} must be a number"
    return None


def _is_finite_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def scheduler_arguments_fit(config: "Config") -> str | None:
    """Require `grpo.lr_scheduler_kwargs` to hold the arguments of `grpo.lr_scheduler_type`, with those it requires."""
    kind = effective_value(config.grpo.trl, "lr_scheduler_type")
    given = config.grpo.trl.get("lr_scheduler_kwargs") or {}
    allowed = SCHEDULER_ARGUMENTS[kind]
    for name in given:
        if name not in allowed:
            takes = ", ".join(allowed) or "no arguments"
            return (
                f"grpo.lr_scheduler_kwargs: {name!r} is no argument of grpo.lr_scheduler_type={kind}; it takes {takes}"
            )
    if "min_lr" in allowed and len({"min_lr", "min_lr_rate"} & given.keys()) != 1:
        return (
            f"grpo.lr_scheduler_type={kind} requires either min_lr or min_lr_rate; "
            "set grpo.lr_scheduler_kwargs={min_lr_rate: 0.1}"
        )
    if kind == "warmup_stable_decay" and "num_decay_steps" not in given:
        return f"grpo.lr_scheduler_type={kind} requires its decay; set grpo.lr_scheduler_kwargs={{num_decay_steps: 20}}"
    return None


def model_arguments_are_supported(config: "Config") -> str | None:
    """Refuse keys of `grpo.model_init_kwargs` that quantize the policy, or that other keys of the config set."""
    for name in config.grpo.trl.get("model_init_kwargs") or {}:
        if name in MODEL_ARGUMENTS_REFUSED:
            return f"grpo.model_init_kwargs: {name} is not supported: {MODEL_ARGUMENTS_REFUSED[name]}"
    return None


def sharding_options_are_supported(config: "Config") -> str | None:
    """Refuse keys of `grpo.fsdp_config` that the learner sets itself, or that rename the policy's layers."""
    for name in config.grpo.trl.get("fsdp_config") or {}:
        if reason := SHARDING_OPTIONS_REFUSED.get(name.removeprefix("fsdp_")):
            return f"grpo.fsdp_config: {name} does not go with cluster.shard_learner=true: {reason}"
    return None


def vespo_masks_tokens(config: "Config") -> str | None:
    """Require a mode of `grpo.vllm_importance_sampling_mode` for tokens with the loss type vespo, as in TRL."""
    trl = config.trl
    mode = effective_value(trl, "vllm_importance_sampling_mode")
    if (
        trl.get("loss_type") == "vespo"
        and effective_value(trl, "vllm_importance_sampling_correction")
        and not mode.startswith("token_")
    ):
        return (
            f"grpo.loss_type=vespo does not go with grpo.vllm_importance_sampling_mode={mode}; set "
            "grpo.vllm_importance_sampling_mode=token_truncate or token_mask"
        )
    return None


def importance_bounds_are_ordered(config: "Config") -> str | None:
    """Require `grpo.vllm_importance_sampling_clip_min` to be below `..._clip_max`, and one of them to be set for the
    truncating modes."""
    trl = config.trl
    low, high = (effective_value(trl, f"vllm_importance_sampling_clip_{end}") for end in ("min", "max"))
    mode = effective_value(trl, "vllm_importance_sampling_mode")
    if low is not None and high is not None and low >= high:
        return (
            f"grpo.vllm_importance_sampling_clip_min={low} must be below grpo.vllm_importance_sampling_clip_max={high}"
        )
    if low is None and high is None and mode.endswith("_truncate"):
        return (
            f"grpo.vllm_importance_sampling_mode={mode} requires a bound; set grpo.vllm_importance_sampling_clip_max "
            "or grpo.vllm_importance_sampling_clip_min"
        )
    return None


def entropy_bounds_are_ordered(config: "Config") -> str | None:
    """Require `grpo.entropy_coef_min` to be at most `grpo.entropy_coef_max`."""
    low, high = (effective_value(config.grpo.trl, f"entropy_coef_{end}") for end in ("min", "max"))
    if low > high:
        return f"grpo.entropy_coef_min={low} must be at most grpo.entropy_coef_max={high}"
    return None


def every_reward_has_a_weight(config: "Config") -> str | None:
    """Require as many `grpo.reward_weights` as `rewards.functions`."""
    weights, functions = config.grpo.trl.get("reward_weights"), config.rewards.functions
    if weights is not None and len(weights) != len(functions):
        return f"grpo.reward_weights has {len(weights)} weights for {len(functions)} rewards.functions; set one each"
    return None
