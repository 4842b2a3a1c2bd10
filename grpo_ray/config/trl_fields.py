"""Every field of TRL's GRPOConfig, which includes transformers' TrainingArguments, in one of three tables.

| table | the field in the section `grpo` |
|---|---|
| `OURS` | follows from other keys of the config, which are named |
| `PASSED` | is checked here and passed to TRL |
| `REFUSED` | is refused: it would have no effect, or break a guarantee of the run |

Nothing here imports TRL. Types, defaults and meanings are in trl_fields.json, which
`python scripts/trl_field_table.py` generates; tests/integration/config/test_trl_fields.py compares it with
the installed TRL, and fails for a field that is in none of the tables.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from grpo_ray.config.fields import values_text
from grpo_ray.config.sampling import DEFAULTS, MIN_TEMPERATURE, SET_IN_ROLLOUT
from grpo_ray.config.sampling import REFUSED as REFUSED_KWARGS

DATA = Path(__file__).with_name("trl_fields.json")

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
"""Values are passed to TRL as they are in the YAML, so none is converted: "3" is not a number."""

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]

SAVINGS = "tests/integration/learner/test_exact_savings.py"
OTHER_SETTINGS = f"{SAVINGS}::test_exact_savings_other_settings_same_gradient"
ALL_SAVINGS = f"{SAVINGS}::test_exact_savings_all_savings_same_gradient"
INVARIANCE = "tests/integration/learner/test_worker_count_invariance.py"
ANY_MICRO_BATCHES = f"{INVARIANCE}::test_gradient_any_micro_batches_equals_trl_with_one"
PROVEN = "tests/integration/inference/test_sampling_options.py::test_sync_proof_right_weights_no_false_alarm"
CARRIED = "tests/integration/config/test_trl_fields.py::test_passed_field_reaches_trl"

TORCH_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop")
BITSANDBYTES_OPTIMIZERS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
"""Optimizers of the package bitsandbytes, which the user installs on every node."""

ADAM = ("adamw_torch_fused", "adamw_torch", *BITSANDBYTES_OPTIMIZERS)
"""Optimizers that read `adam_beta1`, `adam_beta2` and `adam_epsilon`."""

OPTIMIZER_ARGUMENTS = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
"""Optimizer -> names that `optim_args` may set. transformers silently ignores all others."""

SCHEDULER_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles",
    ),
}  # fmt: skip
"""Learning rate schedule -> names that `lr_scheduler_kwargs` may set."""

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
CLIPPED_LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "luspo")
"""Loss types with PPO's clipped objective."""

MODEL_ARGUMENTS_REFUSED = {
    "quantization_config": "the engine's weights cannot be synced from the layers of other libraries; set "
    "model.quantization",
    "device_map": "each worker holds the policy on its own device; use cluster.shard_learner to divide it",
    "revision": "tokenizer and engine would not use it; download the revision and set model.path to its folder",
    "trust_remote_code": "set model.trust_remote_code",
    "token": "set HF_TOKEN in the environment of the nodes",
    "state_dict": "weights come from model.path",
    "config": "the policy's config comes from model.path",
}
"""Key of `model_init_kwargs` that is refused -> the reason, and the alternative."""

SHARDING_OPTIONS_REFUSED = {
    "version": "it is 2; leave it out",
    "state_dict_type": "each worker writes its part of a checkpoint; leave it out",
    "activation_checkpointing": "it renames the layers, and the engine's weights go by their names; set "
    "grpo.gradient_checkpointing",
}
"""Key of `fsdp_config` that is refused -> the reason, and the alternative."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Field that is passed to TRL, with the proof that it works here."""

    values: Any = None
    """Allowed values as a type that pydantic checks. None: TRL's type."""
    test: str = ""
    """Test that shows the effect, `path::name`."""
    reason: str = ""
    """Reason why no test of ours is needed."""
    default: str = ""
    """Description of our default, if it differs from TRL's."""
    meaning: str = ""
    """Our description of the field, if TRL's mentions options that do not exist here."""


def _one_of(*values: str) -> Any:
    return Annotated[str, Field(json_schema_extra={"enum": list(values)}, pattern=f"^({'|'.join(values)})$")]


_OWN_OPTIMIZER_STEP = "transformers' own optimizer step, which the learner does not override."
_OWN_SCHEDULE = "transformers' own schedule, which the learner does not override."
_DISTRIBUTED = "Passed to torch's DistributedDataParallel; changes speed and memory, not the gradient."
_MEMORY = "Changes speed and memory, not the gradient."

PASSED: dict[str, Passed] = {
    # Optimizer and schedule
    "lr_scheduler_type": Passed(
        values=_one_of(*SCHEDULER_ARGUMENTS), test=CARRIED, meaning="Learning rate schedule of transformers."
    ),
    "lr_scheduler_kwargs": Passed(
        values=dict[str, Any] | None,
        reason=_OWN_SCHEDULE,
        meaning="Arguments of the learning rate schedule, such as {min_lr_rate: 0.1} of cosine_with_min_lr.",
    ),
    "warmup_steps": Passed(values=NonNegative, reason=_OWN_SCHEDULE),
    "optim": Passed(
        values=_one_of(*TORCH_OPTIMIZERS, *BITSANDBYTES_OPTIMIZERS),
        meaning="Optimizer of transformers. Those with 8bit or paged in their names need the package bitsandbytes on "
        "every node.",
        test="tests/integration/resilience/test_nonfinite.py::test_monitor_bad_step_keeps_weights_and_optimizer",
    ),
    "optim_args": Passed(
        reason=_OWN_OPTIMIZER_STEP,
        meaning="Further arguments of sgd, adagrad or rmsprop, such as momentum=0.9,nesterov=true.",
    ),
    "weight_decay": Passed(values=NonNegative, reason=_OWN_OPTIMIZER_STEP),
    "adam_beta1": Passed(values=Decay, reason=_OWN_OPTIMIZER_STEP),
    "adam_beta2": Passed(values=Decay, reason=_OWN_OPTIMIZER_STEP),
    "adam_epsilon": Passed(values=Positive, reason=_OWN_OPTIMIZER_STEP),
    "max_grad_norm": Passed(
        values=NonNegative,
        test="tests/integration/resilience/test_nonfinite.py::test_monitor_bad_step_keeps_weights_and_optimizer",
    ),
    # Memory and speed of the learner
    "tf32": Passed(reason="Flag of torch's matrix products; the proof of the weight sync bounds its rounding."),
    "gradient_checkpointing": Passed(
        default="derived",
        meaning="Recompute activations in the backward pass: less memory for a third more arithmetic. Derived with "
        "GPUs: on where the memory estimate has a use for the memory (gpu-memory.md); without GPUs: off.",
        test="tests/integration/learner/rollouts/test_bounded_staleness.py"
        "::test_staleness_other_settings_same_gradient_as_trl",
    ),
    "gradient_checkpointing_kwargs": Passed(values=dict[str, Any] | None, reason=_MEMORY),
    "torch_empty_cache_steps": Passed(values=Count | None, reason=_MEMORY),
    "ddp_find_unused_parameters": Passed(reason=_DISTRIBUTED),
    "ddp_bucket_cap_mb": Passed(values=Count | None, reason=_DISTRIBUTED),
    "ddp_broadcast_buffers": Passed(reason=_DISTRIBUTED),
    "fsdp_config": Passed(
        values=dict[str, Any] | None,
        meaning="Options of FSDP2 for cluster.shard_learner, such as {reshard_after_forward: false}. "
        "cpu_ram_efficient_loading is on: rank 0 alone reads the weights.",
        test="tests/integration/learner/test_learner.py::test_trl_arguments_shard_learner_sets_fsdp2",
    ),
    # Logs
    "logging_first_step": Passed(reason="transformers' own callback asks for the log, and every log is reported."),
    "logging_nan_inf_filter": Passed(reason="Changes the reported loss only; the gradient is checked on its own."),
    "log_level": Passed(
        values=_one_of("detail", "debug", "info", "warning", "error", "critical", "passive"),
        reason="Verbosity of transformers' messages in the workers' logs.",
    ),
    "log_level_replica": Passed(
        values=_one_of("detail", "debug", "info", "warning", "error", "critical", "passive"),
        reason="Verbosity of transformers' messages in the logs of the workers other than the first.",
    ),
    # Policy
    "model_init_kwargs": Passed(
        values=dict[str, Any] | None,
        meaning="Arguments of `AutoModelForCausalLM.from_pretrained` for the learner's policy and its reference, such "
        "as {attn_implementation: eager}.",
        test="tests/integration/models/test_lora.py::test_lora_frozen_weights_have_the_engines_precision",
    ),
    "router_aux_loss_coef": Passed(
        values=NonNegative | None, test=f"{INVARIANCE}::test_learner_router_loss_with_micro_batches_raises"
    ),
    "disable_dropout": Passed(reason="TRL sets the rates of the policy's dropout layers to 0 before training."),
    "cast_lm_head_to_fp32": Passed(reason="TRL changes the policy's output layer before training."),
    "pad_to_multiple_of": Passed(
        values=Count | Literal["auto"] | None,
        test="tests/integration/learner/rollouts/test_bounded_staleness.py"
        "::test_staleness_other_settings_same_gradient_as_trl",
    ),
    # Sampling
    "temperature": Passed(values=Annotated[float, Field(ge=MIN_TEMPERATURE)], test=CARRIED),
    "top_p": Passed(
        values=PositiveShare,
        test=PROVEN,
    ),
    "top_k": Passed(
        values=Annotated[int, Field(ge=0)],
        test=PROVEN,
    ),
    "min_p": Passed(
        values=Share | None,
        test=PROVEN,
    ),
    "generation_kwargs": Passed(
        values=dict[str, Any] | None,
        meaning="Further sampling parameters of vLLM (`SamplingParams`), such as {stop: ['###']}. They override TRL's "
        "fields. Supported are " + ", ".join(sorted(set(vars(DEFAULTS)) - set(REFUSED_KWARGS))) + ".",
        test="tests/integration/inference/test_engine.py::test_engine_stop_string_ends_completion",
    ),
    "chat_template_kwargs": Passed(
        values=dict[str, Any] | None,
        test="tests/unit/evaluation/test_solve.py::test_solve_problems_renders_prompts_as_training",
    ),
    "repetition_penalty": Passed(values=Positive, test=PROVEN),
    # Engine
    "vllm_model_impl": Passed(
        values=_one_of("vllm", "transformers"), reason="Argument of the engine; the proof of the weight sync covers it."
    ),
    "vllm_enable_sleep_mode": Passed(
        reason="Needs a GPU; the proof of the weight sync covers weights that were put to sleep."
    ),
    "vllm_tensor_parallel_size": Passed(
        values=Count, test="tests/integration/test_sharding.py::test_two_workers_share_one_engine"
    ),
    # Rewards and advantages
    "reward_weights": Passed(
        values=list[float] | None,
        test="tests/integration/rewards/test_reward_model_run.py::test_reward_model_scores_beside_a_function",
    ),
    "multi_objective_aggregation": Passed(
        values=_one_of("sum_then_normalize", "normalize_then_sum"), test=OTHER_SETTINGS
    ),
    "scale_rewards": Passed(values=_one_of("group", "batch", "none") | bool, test=ALL_SAVINGS),
    # Loss
    "loss_type": Passed(values=_one_of(*LOSS_TYPES), test=ALL_SAVINGS),
    "beta": Passed(values=NonNegative, test=OTHER_SETTINGS),
    "num_iterations": Passed(values=Count, test=ALL_SAVINGS, meaning="TRL's name of `epochs`; set one of the two."),
    "epsilon": Passed(values=NonNegative, test=f"{SAVINGS}::test_exact_savings_metrics_equal_trl"),
    "epsilon_high": Passed(values=NonNegative | None, reason="Read by TRL's loss beside epsilon."),
    "delta": Passed(values=Positive | None, test=OTHER_SETTINGS),
    "sapo_temperature_neg": Passed(values=Positive, test=ALL_SAVINGS),
    "sapo_temperature_pos": Passed(values=Positive, test=ALL_SAVINGS),
    "vespo_k_pos": Passed(values=NonNegative, test=ALL_SAVINGS),
    "vespo_lambda_pos": Passed(values=NonNegative, test=ALL_SAVINGS),
    "vespo_k_neg": Passed(values=NonNegative, test=ALL_SAVINGS),
    "vespo_lambda_neg": Passed(values=NonNegative, test=ALL_SAVINGS),
    "importance_sampling_level": Passed(values=_one_of("token", "sequence"), test=ALL_SAVINGS),
    "mask_truncated_completions": Passed(test=OTHER_SETTINGS),
    "off_policy_mask_threshold": Passed(values=Positive | None, test=OTHER_SETTINGS),
    "use_bias_correction_kl": Passed(test=OTHER_SETTINGS),
    "vllm_importance_sampling_correction": Passed(test=OTHER_SETTINGS),
    "vllm_importance_sampling_mode": Passed(
        values=_one_of("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        test=OTHER_SETTINGS,
        default='"sequence_mask"; with rollout.max_staleness above 0: "token_truncate"',
    ),
    "vllm_importance_sampling_clip_max": Passed(
        values=Positive | None,
        test=OTHER_SETTINGS,
        default="3.0; with rollout.max_staleness above 0 and no mode set: 2.0",
    ),
    "vllm_importance_sampling_clip_min": Passed(values=NonNegative | None, test=OTHER_SETTINGS),
    # Reference policy
    "sync_ref_model": Passed(
        test="tests/integration/learner/test_resume.py::test_learner_resumed_ends_with_the_same_weights"
    ),
    "ref_model_mixup_alpha": Passed(values=Share, reason="Read by TRL's callback of sync_ref_model."),
    "ref_model_sync_steps": Passed(values=Count, reason="Read by TRL's callback of sync_ref_model."),
    # Entropy
    "top_entropy_quantile": Passed(values=Share, test=ANY_MICRO_BATCHES),
    "entropy_coef": Passed(test=ANY_MICRO_BATCHES),
    "use_adaptive_entropy": Passed(test=ANY_MICRO_BATCHES),
    "entropy_coef_min": Passed(reason="Bound of the coefficient of use_adaptive_entropy, in TRL's loss."),
    "entropy_coef_max": Passed(reason="Bound of the coefficient of use_adaptive_entropy, in TRL's loss."),
    "entropy_coef_delta": Passed(
        values=NonNegative, reason="Step of the coefficient of use_adaptive_entropy, in TRL's loss."
    ),
    "entropy_target": Passed(values=NonNegative, test=ANY_MICRO_BATCHES),
}
"""Field that is passed to TRL -> its allowed values, and the proof that it works."""

OURS: dict[str, str] = {
    "learning_rate": "grpo.learning_rate",
    "max_steps": "grpo.max_steps",
    "save_steps": "grpo.save_steps",
    "logging_steps": "grpo.logging_steps",
    "num_generations": "grpo.num_generations",
    "max_completion_length": "grpo.max_completion_length",
    "steps_per_generation": "grpo.steps_per_generation",
    "per_device_train_batch_size": "grpo.micro_batch_size, grpo.tokens_per_micro_batch and cluster.num_workers",
    "gradient_accumulation_steps": "grpo.prompts_per_step, grpo.num_generations and grpo.micro_batch_size",
    "generation_batch_size": "grpo.steps_per_generation, grpo.prompts_per_step and grpo.num_generations",
    "num_train_epochs": "grpo.max_steps",
    "save_strategy": "grpo.save_steps",
    "logging_strategy": "grpo.logging_steps",
    "save_total_limit": "run.keep_checkpoints",
    "metric_for_best_model": "run.best_metric",
    "output_dir": "run.storage_path and run.name",
    "resume_from_checkpoint": "run.resume",
    "seed": "run.seed",
    "data_seed": "run.seed",
    "use_cpu": "cluster.use_gpu",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "fsdp": "cluster.shard_learner",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "vllm_max_model_length": "engine.max_model_len",
}
"""Field that follows from keys of the config -> these keys. The first rows are keys of the section `grpo` itself."""

_EVALUATION = "has no effect: held-out problems are measured by grpo_ray itself; set grpo.save_steps and data.heldout"
_HUB = "would push checkpoints that nothing has ranked; run `grpo-ray export RUN FOLDER --push REPO`"
_DATA = "has no effect: problems come from Ray Data and the ledger determines their order"
_SERVER = "has no effect: each worker's engine is in its own process; there is no vLLM server"
_TRANSFORMERS_ENGINE = "has no effect: completions are generated by vLLM"
_COMPILE = "would compile a forward pass whose parts the learner replaces; leave it out"
_LIGER = "needs the package liger-kernel, which no test covers; leave it out, exact savings already skip work"
_LOGGED = "has no effect: the driver sends one run to the trackers, over all restarts; set run.trackers"
_TRACKIO = "has no effect: the driver sends the run to Trackio; set run.trackers and the variable TRACKIO_SPACE_ID"
_COMPLETIONS = (
    "would write to a folder that is deleted with the attempt; completions are in rollouts/ of the run folder, and "
    "`grpo-ray report` shows them"
)
_PROCESS_GROUP = "has no effect: Ray Train creates the process group"

REFUSED: dict[str, str] = {
    # Evaluation by TRL
    "do_eval": _EVALUATION,
    "eval_strategy": _EVALUATION,
    "eval_steps": _EVALUATION,
    "eval_delay": _EVALUATION,
    "eval_on_start": "has no effect: the initial policy is always measured before the first step",
    "per_device_eval_batch_size": _EVALUATION,
    "num_generations_eval": _EVALUATION,
    "prediction_loss_only": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "batch_eval_metrics": _EVALUATION,
    "bf16_full_eval": _EVALUATION,
    "fp16_full_eval": _EVALUATION,
    "do_predict": _EVALUATION,
    "do_train": "has no effect: grpo-ray train always trains; leave it out",
    # Checkpoints
    "save_only_model": "would restart optimizer and schedule at every resume; run `grpo-ray export` for weights alone",
    "save_on_each_node": "has no effect: the workers write one checkpoint together, to run.storage_path",
    "enable_jit_checkpoint": "has no effect: a run that receives SIGTERM, or whose node is preempted, saves by itself",
    "load_best_model_at_end": "has no effect: the run keeps its best checkpoint; set run.best_metric",
    "greater_is_better": "has no effect: a higher run.best_metric is better; use a metric of which this is true",
    "ignore_data_skip": _DATA,
    "restore_callback_states_from_checkpoint": "has no effect: callbacks restore their state themselves",
    # Hub
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    # Trackers and logs
    "report_to": _LOGGED,
    "run_name": "has no effect: trackers show the run under run.name; set that",
    "project": "has no effect: trackers put the run into the project run.project; set that",
    "trackio_space_id": _TRACKIO,
    "trackio_bucket_id": _TRACKIO,
    "trackio_static_space_id": _TRACKIO,
    "log_completions": _COMPLETIONS,
    "log_multimodal": _COMPLETIONS,
    "num_completions_to_print": _COMPLETIONS,
    "log_unique_prompts": _COMPLETIONS,
    "log_completions_hub_repo": _COMPLETIONS,
    "log_on_each_node": "has no effect: every worker has a log of its own; set grpo.log_level_replica",
    "disable_tqdm": "has no effect: the driver shows the progress",
    "include_num_input_tokens_seen": "has no effect: TRL's batches have no input ids yet when tokens are counted; see "
    "the metrics of tokens in docs/metrics.md",
    "skip_memory_metrics": "has no effect: these metrics are not reported; see `grpo-ray check` for memory",
    "debug": "would stop a run at the first number that is not finite; set run.max_bad_steps",
    # Data
    "shuffle_dataset": "has no effect: run.seed determines the order of problems",
    "remove_unused_columns": "has no effect: rewards get every column",
    "label_names": "has no effect: a batch has no labels",
    "label_smoothing_factor": "has no effect: the GRPO loss has no labels to smooth",
    "train_sampling_strategy": _DATA,
    "length_column_name": _DATA,
    "dataloader_drop_last": _DATA,
    "dataloader_num_workers": _DATA,
    "dataloader_pin_memory": _DATA,
    "dataloader_persistent_workers": _DATA,
    "dataloader_prefetch_factor": _DATA,
    "dataloader_multiprocessing_context": _DATA,
    "dataloader_in_order": _DATA,
    "accelerator_config": "changes how accelerate divides batches, which worker-count invariance determines",
    "auto_find_batch_size": "would break up groups; lower grpo.tokens_per_micro_batch or grpo.micro_batch_size",
    "average_tokens_across_devices": "has no effect: the GRPO loss averages over all workers itself; leave it out",
    # Parallelism and compilation
    "deepspeed": "is not supported; set cluster.shard_learner=true to shard the learner",
    "ds3_gather_for_generation": "is not supported; set cluster.shard_learner=true to shard the learner",
    "parallelism_config": "is not supported; set cluster.shard_learner, or grpo.vllm_tensor_parallel_size",
    "local_rank": _PROCESS_GROUP,
    "ddp_backend": _PROCESS_GROUP,
    "ddp_timeout": f"{_PROCESS_GROUP}; run.hang_seconds limits the time of a step",
    "ddp_static_graph": "does not hold: a worker whose rows have no gradient skips its forward pass; leave it out",
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "full_determinism": "would change torch's algorithms for the engine in the same process too; on the CPU a run is "
    "deterministic without it",
    "use_cache": "has no effect: the learner reads each completion in one pass; leave it out",
    "optim_target_modules": "has an effect with GaLore and APOLLO only, which are not supported; use model.lora",
    "neftune_noise_alpha": "adds noise to the learner's embeddings that the engine does not have, so that the proof of "
    "the weight sync fails; use lora.dropout of model.lora for regularization",
    # Generation by other engines
    "use_vllm": "has no effect: completions are always generated by vLLM",
    "vllm_mode": "has no effect: each worker has an engine in its own process",
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "vllm_server_timeout": _SERVER,
    "vllm_group_port": _SERVER,
    "vllm_structured_outputs_regex": SET_IN_ROLLOUT,
    "cache_implementation": _TRANSFORMERS_ENGINE,
    "use_transformers_continuous_batching": _TRANSFORMERS_ENGINE,
    "transformers_continuous_batching_config": _TRANSFORMERS_ENGINE,
    "use_transformers_paged": _TRANSFORMERS_ENGINE,
    "max_tool_calling_iterations": "has no effect; set rollout.max_turns",
    "vllm_importance_sampling_cap": "is deprecated; set grpo.vllm_importance_sampling_clip_max",
}
"""Field that is refused -> the rest of the sentence "grpo.<field> ...": the reason, and the alternative."""


@dataclass(frozen=True)
class TrlField:
    """Row of trl_fields.json."""

    types: tuple[str, ...]
    """JSON types of the field in TRL."""
    default: Any
    meaning: str
    values: tuple[str, ...] = ()
    """Values of an enumeration."""


@functools.cache
def trl_fields() -> Mapping[str, TrlField]:
    """Read trl_fields.json: name -> description, in TRL's order."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))
    return MappingProxyType(
        {
            name: TrlField(tuple(row["types"]), row["default"], row["meaning"], tuple(row.get("values", ())))
            for name, row in rows.items()
        }
    )


_TYPES: dict[str, Any] = {"boolean": bool, "integer": int, "number": float, "string": str, "null": None}


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """Build the validator of a passed field."""
    values = PASSED[name].values
    if values is None:
        values = functools.reduce(lambda a, b: a | b, (_TYPES[each] for each in trl_fields()[name].types))
    return TypeAdapter(values, config=STRICT)


def allowed_values(name: str) -> str:
    """Return a noun phrase for a passed field's values, such as "a number above 0, or null"."""
    return values_text(_adapter(name).json_schema())


def default_text(name: str) -> str:
    """Return a passed field's default as it is written in YAML, or the key that it follows from."""
    return PASSED[name].default or json.dumps(trl_fields()[name].default)


def effective_value(settings: Mapping[str, Any], name: str) -> Any:
    """Return the value of a passed field: the one that is set, or TRL's default."""
    return settings.get(name, trl_fields()[name].default)


def meaning(name: str) -> str:
    """Return the description of a passed field."""
    return PASSED[name].meaning or trl_fields()[name].meaning


def find_mistake(name: str, value: Any) -> str | None:
    """Describe in one line why a field of TRL cannot have a value in the section `grpo`; None if it can.

    The value of a refused field is not repeated: it may be a token.
    """
    if name in OURS:
        return f"grpo.{name} is derived; set {OURS[name]}"
    if name in REFUSED:
        return f"grpo.{name} {REFUSED[name]}"
    try:
        _adapter(name).validate_python(value)
    except ValidationError:
        return f"grpo.{name}={value!r} must be {allowed_values(name)}; the default is {default_text(name)}"
    return None
