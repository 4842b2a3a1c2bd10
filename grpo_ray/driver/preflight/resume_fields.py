"""Config fields whose values change when a run continues: applied from then on, or refused before a worker starts.

| table | a new value |
|---|---|
| `FIXED` | is refused, with the reason |
| `APPLIED` | has effect from the next step, checkpoint or launch |

Every field of the config, and every settable field of TRL, is in one of the tables; a test fails for a missing one.
"""

import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.config.sources import names_files
from grpo_ray.config.trl_fields import effective_value
from grpo_ray.errors import ConfigError
from grpo_ray.text.redaction import HIDDEN, redact, strip_hidden


def _always(config: Config) -> bool:
    return True


def _is_compared_by_contents(old: Any, new: Any) -> bool:
    """Return True for equal values, for any two paths of files, since the files may have moved, and for two mixtures.

    The path of a job's files depends on the folder to which Ray unpacks them. Contents are compared later
    (`check_dataset`), those of all sources together. New weights of a mixture hold from the next step.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return True
    return old == new or all(isinstance(each, str) and names_files(each) for each in (old, new))


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Field that keeps its value while a run continues."""

    reason: str
    """Reason why a new value cannot be applied."""
    in_checkpoint: bool = False
    """True if a checkpoint's files depend on the field, so that `run.from_checkpoint` needs the same value too."""
    applies: Callable[[Config], bool] = _always
    """Returns whether the field is fixed under the other settings."""
    is_same: Callable[[Any, Any], bool] = operator.eq
    """Returns whether the recorded value and the new one mean the same."""


def _has_same_name(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> bool:
    """Return whether two sections, or none, have the same name; their other fields may change."""
    return (old or {}).get("name") == (new or {}).get("name")


_LEDGER = "the ledger counts the problems used so far in terms of it"
_OPTIMIZER = "the checkpoint holds the optimizer's state in terms of it"
_MEASURED = "the run's checkpoints were measured with it, and their ranking compares the results"

FIXED: dict[str, Fixed] = {
    "model.path": Fixed(reason="the checkpoint holds the weights of another policy"),
    "model.lora": Fixed(reason="the checkpoint holds other weights", in_checkpoint=True),
    "model.peft": Fixed(reason="the checkpoint holds other weights", in_checkpoint=True),
    "model.quantization": Fixed(reason="the adapter belongs to other weights", in_checkpoint=True),
    "model.dtype": Fixed(
        reason="the policy is quantized from it, and the adapter belongs to that",
        in_checkpoint=True,
        applies=lambda config: config.model.quantization is not None,
    ),
    "model.adapter_optimizer": Fixed(reason=_OPTIMIZER, in_checkpoint=True, is_same=_has_same_name),
    "cluster.shard_learner": Fixed(reason=_OPTIMIZER, in_checkpoint=True),
    "data.train": Fixed(reason=_LEDGER, is_same=_is_compared_by_contents),
    "data.limit": Fixed(reason=_LEDGER),
    "run.kind": Fixed(reason="the checkpoint holds the optimizer's state of another objective"),
    "run.seed": Fixed(reason="it determines the order of problems, which the ledger relies on"),
    "run.from_checkpoint": Fixed(
        reason="the run has checkpoints of its own, so another one would have no effect",
        applies=lambda config: config.run.from_checkpoint is not None,
    ),
    "heldout.temperature": Fixed(reason=_MEASURED),
    "heldout.num_samples": Fixed(reason=_MEASURED),
    "heldout.score": Fixed(reason=_MEASURED),
    "grpo.prompts_per_step": Fixed(reason=_LEDGER),
    "grpo.num_generations": Fixed(reason=_LEDGER),
    "grpo.steps_per_generation": Fixed(reason=_LEDGER),
    "grpo.epochs": Fixed(reason=_LEDGER),
    "grpo.num_iterations": Fixed(reason=_LEDGER),
    "grpo.optim": Fixed(reason=_OPTIMIZER, in_checkpoint=True),
    "grpo.optim_args": Fixed(reason=_OPTIMIZER, in_checkpoint=True),
    "grpo.sync_ref_model": Fixed(
        reason="the reference of the steps so far would be lost, or was not saved", in_checkpoint=True
    ),
    "grpo.entropy_coef": Fixed(
        reason="with grpo.use_adaptive_entropy the coefficient is a state, which the checkpoint restores",
        in_checkpoint=True,
        applies=lambda config: bool(effective_value(config.grpo.trl, "use_adaptive_entropy")),
    ),
}
"""Field -> reason why it cannot change while a run continues."""

LAUNCH = "to this launch: processes, folders and limits"
WARNINGS = "to the warnings of this launch"

APPLIED: dict[str, tuple[str, ...]] = {
    LAUNCH: (
        "run.name", "run.storage_path", "run.resume", "run.takeover", "run.pause_at", "run.max_failures",
        "run.storage_retry_seconds", "run.hang_factor", "run.hang_seconds", "run.max_bad_steps", "run.trace",
        "run.notify", "run.trackers", "run.project", "run.group", "cluster.num_workers",
        "cluster.use_gpu", "cluster.cpus_per_worker", "cluster.threads_per_worker", "model.share_base",
        "rewards.model_gpus",
        "model.trust_remote_code", "engine.placement", "engine.replicas", "engine.tensor_parallel_size",
        "engine.transport",
        "engine.gpu_memory_utilization", "engine.cpu_cache_gib",
        "engine.logprob_tolerance", "engine.adapter", "engine.compile_cache", "engine.vllm", "grpo.micro_batch_size",
        "grpo.tokens_per_micro_batch", "grpo.exact_savings", "grpo.tf32",
        "grpo.gradient_checkpointing", "grpo.gradient_checkpointing_kwargs", "grpo.torch_empty_cache_steps",
        "grpo.ddp_find_unused_parameters", "grpo.ddp_bucket_cap_mb", "grpo.ddp_broadcast_buffers", "grpo.fsdp_config",
        "grpo.log_level", "grpo.log_level_replica", "grpo.logging_nan_inf_filter", "grpo.model_init_kwargs",
        "grpo.disable_dropout", "grpo.cast_lm_head_to_fp32", "grpo.pad_to_multiple_of", "grpo.vllm_model_impl",
        "grpo.vllm_enable_sleep_mode", "grpo.vllm_tensor_parallel_size",
    ),
    WARNINGS: (
        "run.stop_on", "health.window", "health.no_signal", "health.low_diversity", "health.reward_stuck",
        "health.reward_fallen", "health.length_growth", "health.truncation", "health.high_kl", "health.ratio_drift",
        "health.clipping", "health.entropy_collapse", "health.gradient_growth", "health.skipped_steps",
        "health.verifier_timeouts", "health.unscorable", "health.sync_gap", "health.data_wait", "health.memory",
    ),
    "to the ranking and number of checkpoints, and to the next measurement": (
        "run.best_metric", "run.keep_checkpoints", "run.measure", "data.heldout", "data.heldout_limit",
    ),
    "unless they change the training problems, which `check_dataset` refuses without data.accept_changes": (
        "data.heldout_share", "data.columns", "data.keep_unverifiable", "data.accept_changes", "data.system_prompt",
        "data.max_prompt_length", "data.overlong_prompts",
    ),
    "from the next epoch's plan": ("data.skip_solved", "data.prefer_mixed"),
    "from the next checkpoint or report, by the learner's `ResumedSettings`": ("grpo.save_steps", "grpo.logging_steps"),
    "from the next report": ("grpo.logging_first_step",),
    "from the next step, by the learner's `_load_optimizer_and_scheduler`; the schedule is that of the new values, at "
    "the step that the run has reached": (
        "grpo.learning_rate", "grpo.max_steps", "grpo.lr_scheduler_type", "grpo.lr_scheduler_kwargs",
        "grpo.warmup_steps", "grpo.weight_decay", "grpo.adam_beta1", "grpo.adam_beta2", "grpo.adam_epsilon",
    ),
    "from the next step; completions of later steps in the checkpoint are discarded": (
        "rollout.max_staleness", "rollout.tools", "rollout.environment", "rollout.settings", "rollout.max_turns",
        "rollout.max_calls", "rollout.max_result_tokens", "rollout.structured_outputs", "engine.max_model_len",
        "grpo.max_completion_length", "grpo.temperature",
        "grpo.top_p", "grpo.top_k", "grpo.min_p", "grpo.repetition_penalty", "grpo.generation_kwargs",
    ),
    "from the next step, since nothing of them is in a checkpoint": (
        "rollout.function", "rollout.anchor", "rollout.max_active",
        "rollout.time_limit", "rollout.memory_gib", "rollout.max_processes",
        "rollout.disk_gib", "rollout.max_files", "rollout.variables", "rollout.isolation", "rollout.confine",
        "rollout.sandbox_url", "rollout.sandbox_provider", "rollout.sandbox_token_variable",
        "rewards.functions", "rewards.settings", "rewards.strict", "rewards.boolean_share", "rewards.time_limit",
        "rewards.isolate", "rewards.isolate_seconds", "rewards.isolate_memory_gib",
        "grpo.advantages", "grpo.dynamic_sampling",
        "grpo.max_grad_norm",
        "grpo.router_aux_loss_coef", "grpo.chat_template_kwargs", "grpo.reward_weights",
        "grpo.multi_objective_aggregation", "grpo.scale_rewards", "grpo.loss_type", "grpo.beta", "grpo.epsilon",
        "grpo.epsilon_high", "grpo.delta", "grpo.sapo_temperature_neg", "grpo.sapo_temperature_pos",
        "grpo.vespo_k_pos", "grpo.vespo_lambda_pos", "grpo.vespo_k_neg", "grpo.vespo_lambda_neg",
        "grpo.importance_sampling_level", "grpo.mask_truncated_completions", "grpo.off_policy_mask_threshold",
        "grpo.use_bias_correction_kl", "grpo.vllm_importance_sampling_correction",
        "grpo.vllm_importance_sampling_mode", "grpo.vllm_importance_sampling_clip_max",
        "grpo.vllm_importance_sampling_clip_min", "grpo.ref_model_mixup_alpha", "grpo.ref_model_sync_steps",
        "grpo.top_entropy_quantile", "grpo.use_adaptive_entropy", "grpo.entropy_coef_min", "grpo.entropy_coef_max",
        "grpo.entropy_coef_delta", "grpo.entropy_target",
    ),
}  # fmt: skip
"""Time at which a new value is applied -> the fields."""


@dataclass(frozen=True)
class ChangedField:
    """Field of `FIXED` whose value differs from the recorded one."""

    name: str
    old: Any
    new: Any
    reason: str
    """Reason why the new value cannot be applied."""

    def __str__(self) -> str:
        return f"{self.name}={self.new} differs from {self.old}"


def changed_fields(
    config: Config, recorded: Mapping[str, Any], *, is_other_run: bool = False
) -> Iterator[ChangedField]:
    """Yield the fields of `FIXED` that a config changes; a field that is missing in the record had its default value.

    Args:
        recorded: config with which a run trained, in the shape of the YAML.
        is_other_run: compare only fields that the checkpoint of another run depends on.
    """
    values = _Values(config, recorded)
    for field, fixed in FIXED.items():
        if (is_other_run and not fixed.in_checkpoint) or not fixed.applies(config):
            continue
        old, new = values.of(field)
        if not (fixed.is_same(old, new) or _is_hidden_form(old, new)):
            yield ChangedField(field, old, new, fixed.reason)


def require_same_fields(config: Config, recorded: Mapping[str, Any], run_uri: str, *, is_other_run: bool) -> None:
    """Refuse a config that changes a field of `FIXED`.

    Args:
        recorded: config with which the run at `run_uri` trained, in the shape of the YAML.
        is_other_run: compare only fields that the checkpoint of another run depends on.

    Raises:
        ConfigError: with the field, both values, the reason and the alternatives.
    """
    for changed in changed_fields(config, recorded, is_other_run=is_other_run):
        mend = (
            f"set {changed.name}={changed.old}, or export the checkpoint (grpo-ray export) and begin with it as "
            "model.path"
            if is_other_run
            else f"set {changed.name}={changed.old}, another run.name, or run.resume=never to start over"
        )
        raise ConfigError(f"{changed}, the value of the run {run_uri}, and cannot change: {changed.reason}; {mend}")


def changed_settings(config: Config, recorded: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that change the result of a run and differ from those that it has ended with.

    Processes, folders, limits and warnings change no result. Paths of files may differ, as they do between jobs of Ray,
    if their names are equal.

    Args:
        recorded: config with which the run has trained, in the shape of the YAML.

    Returns:
        Field -> recorded value and new value, without credentials.
    """
    values = _Values(config, recorded)
    changed: dict[str, tuple[Any, Any]] = {}
    for field in (*FIXED, *(name for when in APPLIED if when not in (LAUNCH, WARNINGS) for name in APPLIED[when])):
        old, new = values.of(field)
        if not _has_same_result(old, new):
            changed[field] = old, new
    return changed


def _has_same_result(old: Any, new: Any) -> bool:
    """Return True for equal settings, also with hidden parts or moved files, and for mappings of such settings."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_has_same_result(old[name], new[name]) for name in old)
    return bool(old == new) or _is_hidden_form(old, new) or _are_moved_files(old, new)


def _are_moved_files(old: Any, new: Any) -> bool:
    """Return True for two paths of files of the same name."""
    is_paths = all(isinstance(each, str) and names_files(each) for each in (old, new))
    return is_paths and os.path.basename(old.rstrip("/")) == os.path.basename(new.rstrip("/"))


class _Values:
    """Values of fields in a recorded config and in a new one, without credentials.

    Args:
        recorded: in the shape of the YAML; a field that is missing had its default value.
    """

    def __init__(self, config: Config, recorded: Mapping[str, Any]):
        self._current, self._recorded, self._defaults = config.to_dict(), recorded, Config().to_dict()

    def of(self, field: str) -> tuple[Any, Any]:
        """Return the recorded value and the new one."""
        section, _, name = field.partition(".")
        defaults = self._defaults[section]
        default = defaults[name] if name in defaults else effective_value({}, name)
        old = _without_credentials((self._recorded.get(section) or {}).get(name, default))
        return old, _without_credentials(self._current[section].get(name, default))


def is_same_setting(old: Any, new: Any) -> bool:
    """Return True if a recorded value equals the new one, apart from credentials."""
    old, new = _without_credentials(old), _without_credentials(new)
    return bool(old == new) or _is_hidden_form(old, new)


def _is_hidden_form(old: Any, new: Any) -> bool:
    """Return True if a recorded text equals the new one except for hidden parts, which were secrets in that launch."""
    if not (isinstance(old, str) and isinstance(new, str) and HIDDEN in old):
        return False
    return re.fullmatch(".*".join(map(re.escape, old.split(HIDDEN))), new, re.DOTALL) is not None


def _without_credentials(value: Any) -> Any:
    """Return a setting without secrets: they are not recorded, and other credentials for the same data are no change.

    A path that was recorded with ~ becomes absolute, like the new one.
    """
    value = redact(value)
    return os.path.expanduser(strip_hidden(value)) if isinstance(value, str) else value
