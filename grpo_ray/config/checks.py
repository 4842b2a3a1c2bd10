"""Checks across fields of a config. Types and ranges of single fields are in the schema.

The rules here are ours; those of TRL are in `trl_conditions.py`.

Nothing here imports a heavy library, so that a wrong setting is refused at once, before any machine is reserved.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from grpo_ray.config.benchmarks import find_benchmark
from grpo_ray.config.fields import override_text
from grpo_ray.config.heldout_keys import HELDOUT
from grpo_ray.config.peft_fields import (
    MOVES_THE_BASE,
    NOT_QUANTIZED,
    NOT_SHARDED,
    PLAIN_LORA,
    REQUEST_RANKS,
    STARTS_ELSEWHERE,
    is_requestable,
    largest_rank,
    moves_the_base,
    starts_elsewhere,
)
from grpo_ray.config.reward_names import MAX_ENDED_PROCESSES, REWARD_SCORES, SCORES, reward_name
from grpo_ray.config.sampling import MIN_TEMPERATURE, TRL_FIELDS
from grpo_ray.config.similar_names import suggestion
from grpo_ray.config.sources import CHECKPOINT_PREFIX
from grpo_ray.config.tool_paths import NO_ENVIRONMENT
from grpo_ray.config.trl_conditions import (
    entropy_bounds_are_ordered,
    every_reward_has_a_weight,
    importance_bounds_are_ordered,
    model_arguments_are_supported,
    optimizer_arguments_are_known,
    scheduler_arguments_fit,
    sharding_options_are_supported,
    trl_fields_have_an_effect,
    vespo_masks_tokens,
)
from grpo_ray.config.trl_fields import effective_value
from grpo_ray.errors import ConfigError

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config


def check_across_fields(config: "Config") -> None:
    """Raise ConfigError with the message of the first check in CHECKS that fails."""
    for check in CHECKS:
        if message := check(config):
            raise ConfigError(message)


def numbers_are_finite(config: "Config") -> str | None:
    """Refuse infinities and NaN inside mappings and lists; the schema refuses them as values of fields."""
    return next(_infinite_numbers("", dataclasses.asdict(config)), None)


def _infinite_numbers(path: str, value: Any) -> Iterator[str]:
    """Yield a message for each number below a path of the config that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path.removeprefix('.').replace('grpo.trl.', 'grpo.')}={value} must be a finite number"
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _infinite_numbers(f"{path}.{key}", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _infinite_numbers(f"{path}[{index}]", each)


def run_name_is_no_checkpoint(config: "Config") -> str | None:
    """Refuse a `run.name` that begins like a checkpoint's folder: its run folder would be taken for a checkpoint."""
    name = config.run.name
    if name.startswith(CHECKPOINT_PREFIX):
        return f"run.name={name} must not begin with {CHECKPOINT_PREFIX}, as checkpoints do; try run.name=run-{name}"
    return None


def worker_range_is_ordered(config: "Config") -> str | None:
    """Require the two numbers of `cluster.num_workers: [min, max]` to be in order."""
    low, high = config.cluster.min_workers, config.cluster.max_workers
    if low > high:
        return f"cluster.num_workers=[{low}, {high}] must be [min, max]; set cluster.num_workers=[{high}, {low}]"
    return None


def engine_range_is_ordered(config: "Config") -> str | None:
    """Require the two numbers of `engine.replicas: [least, most]` to be in order."""
    low, high = config.engine.replica_range
    if low > high:
        return f"engine.replicas=[{low}, {high}] must be [least, most]; set engine.replicas=[{high}, {low}]"
    return None


def best_metric_ranks_checkpoints(config: "Config") -> str | None:
    """Require `run.best_metric` to be a metric that every checkpoint has and of which higher values are better."""
    metric, known = config.run.best_metric, ranking_metrics(config)
    if metric not in known:
        return f"run.best_metric={metric} must be one of {', '.join(known)}{suggestion(metric, known)}"
    return None


RANKING_MEASURES = ("accuracy", "low")
"""Measures of a held-out set that can rank checkpoints."""


def ranking_metrics(config: "Config") -> list[str]:
    """Return the metrics that `run.best_metric` may name in this config.

    Checkpoints are ranked by a metric that all of them have and of which higher values are better. Most metrics of a
    step, such as the loss or a length, do not qualify.
    """
    prefixes = dict.fromkeys([HELDOUT, *config.heldout_keys])
    gives_reward = config.rollout.environments or "environment" in config.rewards.functions
    measures = [*RANKING_MEASURES, *(["reward"] if gives_reward else [])]
    heldout = [f"{prefix}/{measure}" for prefix in prefixes for measure in measures]
    return [*heldout, "reward/mean", *(f"reward/{reward_name(each)}_mean" for each in config.rewards.functions)]


def ranking_reward_is_of_each_checkpoint(config: "Config") -> str | None:
    """Require `grpo.logging_steps` to be a multiple of the steps per batch if a training reward ranks checkpoints."""
    metric, steps, logging_steps = config.run.best_metric, config.steps_per_batch, config.grpo.logging_steps
    if metric.startswith("reward/") and logging_steps % steps:
        return (
            f"run.best_metric={metric} is measured once for each generation batch of {_steps_on_a_batch(config)} "
            f"steps, and grpo.logging_steps={logging_steps} reports a checkpoint's step without it; set "
            f"grpo.logging_steps={steps}, or run.best_metric=heldout/accuracy"
        )
    return None


def solved_problems_are_known(config: "Config") -> str | None:
    """Require `correctness` in `rewards.functions` for `data.skip_solved` and `data.prefer_mixed`."""
    data = config.data
    if (data.skip_solved or data.prefer_mixed) and "correctness" not in config.rewards.functions:
        skip_solved, prefer_mixed = map(override_text, (data.skip_solved, data.prefer_mixed))
        return (
            f"data.skip_solved={skip_solved} and data.prefer_mixed={prefer_mixed} "
            f"require the correctness of completions, and rewards.functions={list(config.rewards.functions)} does not "
            "compute it; put correctness in rewards.functions, or set data.skip_solved=null and data.prefer_mixed=false"
        )
    return None


BUILT_IN_ADVANTAGES = {"grpo": True, "rloo": True, "dr_grpo": True, "reinforce_pp": False}
"""Built-in value of `grpo.advantages`, a name of a function in `learner/advantages.py` -> whether a group's advantages
depend on the rewards of that group only."""


def check_advantages(name: str) -> str:
    """Return the name of an advantage function. Raises ValueError if it is neither built in nor a path."""
    if name not in BUILT_IN_ADVANTAGES and ":" not in name:
        known, similar = ", ".join(BUILT_IN_ADVANTAGES), suggestion(name, BUILT_IN_ADVANTAGES)
        raise ValueError(f"grpo.advantages={name} must be one of {known}, or package.module:function{similar}")
    return name


def dynamic_sampling_scales_by_group(config: "Config") -> str | None:
    """Refuse `grpo.dynamic_sampling` with advantages that depend on other groups."""
    grpo = config.grpo
    if grpo.dynamic_sampling and not BUILT_IN_ADVANTAGES.get(grpo.advantages, False):
        by_group = ", ".join(name for name, is_of_one_group in BUILT_IN_ADVANTAGES.items() if is_of_one_group)
        return (
            f"grpo.advantages={grpo.advantages} may depend on all groups that were sampled together, and with "
            f"grpo.dynamic_sampling={grpo.dynamic_sampling} the step uses other groups; set grpo.advantages to "
            f"one of {by_group}, or grpo.dynamic_sampling=0"
        )
    for name, per_batch in {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"}.items():
        if grpo.dynamic_sampling and grpo.trl.get(name) == per_batch:
            return (
                f"grpo.{name}={per_batch} scales rewards by all groups that were generated together, and with "
                f"grpo.dynamic_sampling={grpo.dynamic_sampling} the step uses other groups; set another grpo.{name}, "
                "or grpo.dynamic_sampling=0"
            )
    return None


def sampling_is_supported(config: "Config") -> str | None:
    """Require sampling options that the engine, the learner and the proof of the weight sync support."""
    sampling = config.sampling  # raises ConfigError for an option that is not supported
    if sampling.ends_early and config.grpo.trl.get("mask_truncated_completions"):
        return (
            "grpo.mask_truncated_completions=true does not go with grpo.generation_kwargs.stop and stop_token_ids: TRL "
            "treats every completion that they end as truncated; set grpo.mask_truncated_completions=false, or remove "
            "them"
        )
    return None


def sampling_is_corrected_by_token(config: "Config") -> str | None:
    """Refuse sampling filters and penalties with loss corrections that multiply their effect over a completion."""
    trl, processing = config.trl, config.sampling.processing
    names = ", ".join(f"grpo.{name}" if name in TRL_FIELDS else f"grpo.generation_kwargs.{name}" for name in processing)
    mode = trl.get("vllm_importance_sampling_mode", "sequence_mask")
    if names and trl.get("vllm_importance_sampling_correction", True) and str(mode).startswith("sequence"):
        return (
            f"grpo.vllm_importance_sampling_mode={mode} does not go with {names}: the ratio of a completion is the "
            "product over its tokens, and each token contributes the probability that the filter kept, so that long "
            "completions would lose all weight; set grpo.vllm_importance_sampling_mode=token_truncate, or "
            "grpo.vllm_importance_sampling_correction=false"
        )
    if names and (threshold := trl.get("off_policy_mask_threshold")) is not None:
        return (
            f"grpo.off_policy_mask_threshold={threshold} does not go with {names}: TRL would treat the filter's effect "
            "as a change of the policy; set grpo.off_policy_mask_threshold=null, or remove these options"
        )
    return None


def structured_outputs_are_one_form(config: "Config") -> str | None:
    """Require one form in `rollout.structured_outputs`, single turns, and no option that may exclude all its tokens."""
    form = config.rollout.structured_outputs
    if form is None:
        return None
    if len(form.given) != 1:
        given = ", ".join(form.given) or "none"
        return f"rollout.structured_outputs must have one of regex, json, choice and grammar, and has {given}"
    try:
        json.dumps(form.given)
    except (TypeError, ValueError) as error:
        return f"rollout.structured_outputs.json holds a value that is no JSON: {error}; put it in quotation marks"
    if "structured_outputs_config" in config.engine.vllm:
        return (
            "engine.vllm.structured_outputs_config does not go with rollout.structured_outputs, which sets it; remove "
            "it, and set rollout.structured_outputs.compact for JSON without white space"
        )
    if config.rollout.has_conversations:
        return (
            "rollout.structured_outputs is a form of completions of one turn, and does not go with rollout.tools, "
            "rollout.environment and rollout.function; remove it, or check the turns in a reward"
        )
    empty = [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if name in config.sampling.changed]
    if empty:
        return (
            f"rollout.structured_outputs does not go with grpo.generation_kwargs.{empty[0]}: together they may exclude "
            "every token; remove one of them"
        )
    return None


def heldout_sampling_is_possible(config: "Config") -> str | None:
    """Require a temperature above 0 for several samples, and one that vLLM does not change."""
    heldout = config.heldout
    if 0 < heldout.temperature < MIN_TEMPERATURE:
        return f"heldout.temperature={heldout.temperature:g} must be 0 or at least {MIN_TEMPERATURE}; the default is 0"
    if heldout.num_samples > 1 and not heldout.temperature:
        return (
            f"heldout.num_samples={heldout.num_samples} completions of a problem would all be the same at "
            f"heldout.temperature=0; set heldout.temperature={config.sampling.temperature:g}, or heldout.num_samples=1"
        )
    return None


def staleness_is_not_sharded(config: "Config") -> str | None:
    """Refuse `rollout.max_staleness` above 0 with `cluster.shard_learner` and colocated engines."""
    staleness = config.rollout.max_staleness
    if staleness and config.cluster.shard_learner and not config.engine.is_dedicated:
        return (
            f"rollout.max_staleness={staleness} does not go with cluster.shard_learner=true and colocated engines: "
            "the learner's weights are gathered in the middle of a step; set cluster.shard_learner=false, or "
            "engine.placement=dedicated, or rollout.max_staleness=0"
        )
    return None


def followed_reference_is_not_sharded(config: "Config") -> str | None:
    """Refuse `grpo.sync_ref_model`, a field of TRL, with `cluster.shard_learner`."""
    if config.grpo.trl.get("sync_ref_model") and config.cluster.shard_learner:
        return (
            "grpo.sync_ref_model=true does not go with cluster.shard_learner=true, whose checkpoints cannot hold the "
            "reference; set cluster.shard_learner=false, or grpo.sync_ref_model=false"
        )
    return None


_SEVERAL_STEPS = "takes several steps on a batch, so that tokens would be older"

NOT_WITH_STALENESS: dict[str, tuple[Any, str]] = {
    "dynamic_sampling": (0, "draws further problems depending on a batch that is not scored when the next ones begin"),
    "steps_per_generation": (1, _SEVERAL_STEPS),
    "epochs": (1, _SEVERAL_STEPS),
    "num_iterations": (1, _SEVERAL_STEPS),
    "vllm_tensor_parallel_size": (1, "makes the engines of several workers communicate while the learners do"),
    "vllm_enable_sleep_mode": (False, "puts the engine to sleep while the learner works"),
}
"""Field of `grpo` -> the only value allowed with `rollout.max_staleness` above 0, and the reason against others."""


def staleness_goes_with_options(config: "Config") -> str | None:
    """Refuse `rollout.max_staleness` above 0 with dynamic sampling, several steps on a batch, and shared or sleeping
    engines; and `rollout.anchor` without it."""
    grpo, rollout = config.grpo, config.rollout
    if not rollout.max_staleness:
        if rollout.anchor != "proximal":
            return (
                f"rollout.anchor={rollout.anchor} has no effect with rollout.max_staleness=0; set "
                "rollout.max_staleness=1, or leave rollout.anchor out"
            )
        return None
    for name, (required, reason) in NOT_WITH_STALENESS.items():
        value = getattr(grpo, name, grpo.trl.get(name, required))
        if value != required:
            return (
                f"rollout.max_staleness={rollout.max_staleness} does not go with grpo.{name}={value}, which {reason}; "
                f"set grpo.{name}={str(required).lower()}, or rollout.max_staleness=0"
            )
    return None


NOT_IN_SEGMENTS = {
    "presence_penalty": "counts the tokens of a request",
    "frequency_penalty": "counts the tokens of a request",
    "min_tokens": "counts the tokens of a request",
    "bad_words": "compares the tokens of a request",
    "stop": "searches the text of a request",
}
"""Sampling options that vLLM computes from a request's own tokens -> how. `repetition_penalty` includes the prompt."""

MIN_SEGMENT = 256
"""Smallest limit of a segment on GPUs, tokens; below it, prompts and earlier tokens that are read again cost more than
the staleness saves."""


def segments_continue_completions(config: "Config") -> str | None:
    """Refuse `rollout.max_staleness` above 1 with options that depend on all of a completion's tokens or weights, and
    with segments below 256 tokens on GPUs."""
    rollout, staleness = config.rollout, config.rollout.max_staleness
    if staleness < 2:
        return None
    start, mend = f"rollout.max_staleness={staleness} does not go with", "or rollout.max_staleness=1"
    if rollout.structured_outputs is not None:
        return (
            f"{start} rollout.structured_outputs: a completion is sampled by several requests, and the form begins "
            f"anew with each; remove it, {mend}"
        )
    has_turns = rollout.has_turns  # a turn is sampled by one request, as without staleness
    if not has_turns and (used := [name for name in NOT_IN_SEGMENTS if name in config.sampling.changed]):
        return (
            f"{start} grpo.generation_kwargs.{used[0]}, which {NOT_IN_SEGMENTS[used[0]]}, and a completion is sampled "
            f"by several; remove it, {mend}"
        )
    level, mode = (
        effective_value(config.trl, name) for name in ("importance_sampling_level", "vllm_importance_sampling_mode")
    )
    if level != "token":
        return (
            f"{start} grpo.importance_sampling_level={level}: the tokens of a completion are sampled with several "
            f"weights; set grpo.importance_sampling_level=token, {mend}"
        )
    if mode.startswith("sequence") and effective_value(config.trl, "vllm_importance_sampling_correction"):
        return (
            f"{start} grpo.vllm_importance_sampling_mode={mode}: the tokens of a completion are sampled with several "
            f"weights; set grpo.vllm_importance_sampling_mode=token_truncate or token_mask, {mend}"
        )
    segment = -(-config.grpo.max_completion_length // staleness)
    if config.cluster.use_gpu and not has_turns and segment < MIN_SEGMENT:
        return (
            f"{start} grpo.max_completion_length={config.grpo.max_completion_length} and cluster.use_gpu=true: a round "
            f"samples at most {segment} tokens of a completion, and must have space for {MIN_SEGMENT}; set "
            f"rollout.max_staleness={max(1, config.grpo.max_completion_length // MIN_SEGMENT)}"
        )
    return None


def prompts_fit_into_a_pass_on_the_cpu(config: "Config") -> str | None:
    """Refuse `engine.vllm.enable_chunked_prefill` without GPUs."""
    if config.engine.vllm.get("enable_chunked_prefill") and not config.cluster.use_gpu:
        return (
            "engine.vllm={enable_chunked_prefill: true} does not work without GPUs: vLLM then rewinds the random "
            "generators of requests, which torch does not support on the CPU; set it to false, or cluster.use_gpu=true"
        )
    return None


def quantized_engine_has_16_bits(config: "Config") -> str | None:
    """Refuse `engine.vllm.quantization` with `model.dtype=float32`, which vLLM does not quantize."""
    method = config.engine.vllm.get("quantization")
    if method is not None and config.dtype == "float32":
        return f"engine.vllm={{quantization: {method}}} needs weights of 16 bits; set model.dtype=bfloat16"
    return None


def workers_share_prompts(config: "Config") -> str | None:
    """Require `grpo.prompts_per_step` to be a multiple of `cluster.num_workers`."""
    prompts, workers = config.grpo.prompts_per_step, config.cluster.num_workers
    if isinstance(workers, int) and prompts % workers:
        return (
            f"grpo.prompts_per_step={prompts} must be a multiple of cluster.num_workers={workers}; "
            f"try grpo.prompts_per_step={_near_multiple(prompts, workers)}"
        )
    return None


def workers_share_micro_batches(config: "Config") -> str | None:
    """Require `grpo.micro_batch_size` to be a multiple of `cluster.num_workers`."""
    step, micro, workers = config.sizes.completions_per_step, config.sizes.micro_batch_size, config.cluster.num_workers
    if isinstance(workers, int) and step % micro == 0 and micro % workers:
        fitting = [size for size in range(workers, step + 1, workers) if step % size == 0]
        return (
            f"grpo.micro_batch_size={micro} must be a multiple of cluster.num_workers={workers}; "
            f"try grpo.micro_batch_size={min(fitting, key=lambda size: abs(size - micro))}"
        )
    return None


def some_worker_count_shares_step(config: "Config") -> str | None:
    """Require some number in `cluster.num_workers: [min, max]` to divide problems and micro-batches evenly."""
    if not isinstance(config.cluster.num_workers, int) and not config.sizes.worker_counts:
        return (
            f"cluster.num_workers={list(config.cluster.num_workers)}: none of these numbers divides both "
            f"grpo.prompts_per_step={config.grpo.prompts_per_step} and "
            f"grpo.micro_batch_size={config.sizes.micro_batch_size}; set a range that contains such a divisor"
        )
    return None


def micro_batches_divide_step(config: "Config") -> str | None:
    """Require `grpo.micro_batch_size` to divide the step's completions."""
    step, micro, workers = config.sizes.completions_per_step, config.sizes.micro_batch_size, config.cluster.min_workers
    if step % micro:
        fitting = [size for size in range(workers, min(micro, step) + 1, workers) if step % size == 0]
        of_step = (
            f"{step} demonstrations (prompts_per_step)"
            if config.run.kind == "sft"
            else f"{step} completions (prompts_per_step x num_generations)"
        )
        return (
            f"grpo.micro_batch_size={micro} must divide the step's {of_step}; try "
            f"grpo.micro_batch_size={max(fitting, default=step)}"
        )
    return None


def micro_batches_have_one_limit(config: "Config") -> str | None:
    """Refuse `grpo.tokens_per_micro_batch` together with `grpo.micro_batch_size`."""
    tokens, rows = config.grpo.tokens_per_micro_batch, config.grpo.micro_batch_size
    if tokens is not None and rows is not None:
        return (
            f"grpo.tokens_per_micro_batch={tokens} and grpo.micro_batch_size={rows} are two limits of one pass; "
            "set one of them to null"
        )
    return None


def token_limit_holds_a_completion(config: "Config") -> str | None:
    """Require `grpo.tokens_per_micro_batch` to hold the longest completion with its prompt."""
    tokens = config.grpo.tokens_per_micro_batch
    longest = config.sizes.least_token_limit
    if tokens is not None and tokens < longest:
        return (
            f"grpo.tokens_per_micro_batch={tokens} must be at least {longest}, the tokens of the longest completion "
            f"with its prompt, since a completion is never divided; set grpo.tokens_per_micro_batch={longest}, or "
            "lower grpo.max_completion_length"
        )
    return None


def token_limit_keeps_the_loss(config: "Config") -> str | None:
    """Refuse `grpo.tokens_per_micro_batch` with the loss type bnpo, which divides by the tokens of a micro-batch."""
    if config.grpo.tokens_per_micro_batch is not None and config.grpo.trl.get("loss_type") == "bnpo":
        return (
            f"grpo.tokens_per_micro_batch={config.grpo.tokens_per_micro_batch} would change the gradient of "
            "grpo.loss_type=bnpo, which divides by the tokens of each micro-batch; set grpo.loss_type=dapo, or "
            "grpo.micro_batch_size in place of it"
        )
    return None


def router_loss_issue(config: "Config", coefficient: float) -> str | None:
    """Return the error message for a router's auxiliary loss with this coefficient; None if the loss is allowed.

    The loss is a product of means over the tokens of one forward pass, so its mean over micro-batches or workers is
    not its value for the whole step.
    """
    step = config.sizes.completions_per_step
    if coefficient == 0 or (config.cluster.max_workers == 1 and config.sizes.micro_batch_size == step):
        return None
    return (
        f"grpo.router_aux_loss_coef={coefficient:g}: the auxiliary loss of a mixture of experts depends on the number "
        "of workers and micro-batches, and a step must not; set grpo.router_aux_loss_coef=0, or cluster.num_workers=1 "
        f"and grpo.micro_batch_size={step}"
    )


def router_loss_is_of_one_pass(config: "Config") -> str | None:
    """Refuse `grpo.router_aux_loss_coef`, a field of TRL, with several workers or micro-batches."""
    coefficient = config.grpo.trl.get("router_aux_loss_coef")
    return router_loss_issue(config, float(coefficient)) if isinstance(coefficient, int | float) else None


def vespo_keeps_a_ratio_of_one(config: "Config") -> str | None:
    """Refuse bounds of the importance ratio that exclude 1 with the loss type `vespo`.

    VESPO sums the logarithm of the ratio over a completion and its padding, whose ratio is 1. If the bounds excluded 1,
    padding would change the gradient, and its length depends on the other completions of a worker.
    """
    trl = config.trl
    low, high = (trl.get(f"vllm_importance_sampling_clip_{side}") for side in ("min", "max"))
    if trl.get("loss_type") != "vespo" or not trl.get("vllm_importance_sampling_correction", True):
        return None
    for name, bound, is_wrong in (("min", low, lambda x: x > 1), ("max", high, lambda x: x < 1)):
        if isinstance(bound, int | float) and is_wrong(bound):
            side = "at most" if name == "min" else "at least"
            return (
                f"grpo.vllm_importance_sampling_clip_{name}={bound} must be {side} 1 with grpo.loss_type=vespo, which "
                "would otherwise depend on the length of padding; set another bound or loss type"
            )
    return None


def epochs_have_one_name(config: "Config") -> str | None:
    """Refuse `grpo.epochs` together with `grpo.num_iterations`, TRL's name of the same setting."""
    iterations = config.grpo.trl.get("num_iterations")
    if iterations is not None and config.grpo.epochs != 1:
        return (
            f"grpo.epochs={config.grpo.epochs} and grpo.num_iterations={iterations} are two names of one setting; "
            "leave grpo.num_iterations out"
        )
    return None


def checkpoints_are_between_batches(config: "Config") -> str | None:
    """Require the steps with a checkpoint to be multiples of `grpo.steps_per_generation` x `grpo.epochs`."""
    for name, steps in (
        ("grpo.save_steps", config.grpo.save_steps),
        ("grpo.max_steps", config.grpo.max_steps),
        ("run.pause_at", config.run.pause_at or 0),
    ):
        if steps % config.steps_per_batch:
            return (
                f"{name}={steps} must be a multiple of {_steps_on_a_batch(config)}, so that no checkpoint is "
                f"saved in the middle of a batch; try {name}={_near_multiple(steps, config.steps_per_batch)}"
            )
    return None


def _steps_on_a_batch(config: "Config") -> str:
    """Format the number of optimizer steps per generation batch as the product of the settings above 1."""
    factors = {
        "steps_per_generation": config.grpo.steps_per_generation,
        "num_iterations" if "num_iterations" in config.grpo.trl else "epochs": config.num_iterations,
    }
    return " x ".join(f"grpo.{name}={factor}" for name, factor in factors.items() if factor > 1)


def _replicas_text(config: "Config") -> str:
    """Format `engine.replicas` as in an override."""
    replicas = config.engine.replicas
    return str(replicas if isinstance(replicas, int) else list(replicas))


def engines_are_counted_if_dedicated(config: "Config") -> str | None:
    """Refuse `engine.replicas` and `engine.tensor_parallel_size` for colocated engines."""
    engine = config.engine
    if engine.is_dedicated:
        return None
    if engine.replicas != 1:
        return (
            f"engine.replicas={_replicas_text(config)} has no effect with engine.placement=colocated, which "
            "gives each worker an engine; set engine.placement=dedicated, or leave engine.replicas out"
        )
    if (size := engine.tensor_parallel_size) != 1:
        return (
            f"engine.tensor_parallel_size={size} has no effect with engine.placement=colocated; set "
            f"engine.placement=dedicated, or grpo.vllm_tensor_parallel_size={size}, which lets {size} workers share an "
            "engine"
        )
    return None


def dedicated_engines_share_nothing(config: "Config") -> str | None:
    """Refuse options that need engine and learner in one process, or on one GPU, with `engine.placement=dedicated`."""
    if not config.engine.is_dedicated:
        return None
    size = effective_value(config.grpo.trl, "vllm_tensor_parallel_size")
    settings = (
        (
            size > 1 and f"grpo.vllm_tensor_parallel_size={size}",
            "is the number of workers that share a colocated engine",
            f"set engine.tensor_parallel_size={size} instead",
        ),
        (
            config.grpo.trl.get("vllm_enable_sleep_mode") and "grpo.vllm_enable_sleep_mode=true",
            "frees an engine's memory for the learner on the same GPU",
            "set grpo.vllm_enable_sleep_mode=false",
        ),
        (
            config.model.quantization == "int4" and "model.quantization=int4",
            "needs an engine that reads the learner's base in its own process",
            "set model.quantization=nf4",
        ),
        (
            config.model.share_base and "model.share_base=true",
            "lets the learner read the weights of an engine on the same GPU",
            "set model.share_base=false",
        ),
        (
            config.rollout.structured_outputs is not None and "rollout.structured_outputs",
            "needs an engine in the learner's process, whose grammar the learner follows",
            "set rollout.structured_outputs=null",
        ),
    )
    for setting, reason, remedy in settings:
        if setting:
            return (
                f"engine.placement=dedicated does not go with {setting}, which {reason}; {remedy}, or "
                "engine.placement=colocated"
            )
    return None


def transport_has_gpus(config: "Config") -> str | None:
    """Refuse `engine.transport` for colocated engines, and `engine.transport=nccl` without GPUs."""
    transport = config.engine.transport
    if transport is not None and not config.engine.is_dedicated:
        return (
            f"engine.transport={transport} has no effect with engine.placement=colocated, whose engines read the "
            "learner's own memory; set engine.placement=dedicated, or leave engine.transport out"
        )
    if transport == "nccl" and not config.cluster.use_gpu:
        return (
            "engine.transport=nccl sends the weights from GPU to GPU; set cluster.use_gpu=true, or "
            "engine.transport=object_store"
        )
    return None


def dedicated_engines_have_prompts(config: "Config") -> str | None:
    """Require `engine.replicas` to be at most the number of problems of a generation batch, which they divide."""
    most, prompts = config.engine.replica_range[1], config.sizes.prompts_per_generation
    if config.engine.is_dedicated and most > prompts:
        low = min(config.engine.replica_range[0], prompts)
        fitting = prompts if isinstance(config.engine.replicas, int) else f"[{low}, {prompts}]"
        return (
            f"engine.placement=dedicated divides the groups of a generation batch among {most} engines, and "
            f"grpo.prompts_per_step={config.grpo.prompts_per_step} gives it {prompts}, so that "
            f"engine.replicas={_replicas_text(config)} would leave engines without work; set "
            f"engine.replicas={fitting}, or a larger grpo.prompts_per_step"
        )
    return None


def engines_have_equal_workers(config: "Config") -> str | None:
    """Require `cluster.num_workers` to be a multiple of `grpo.vllm_tensor_parallel_size`."""
    engines = effective_value(config.grpo.trl, "vllm_tensor_parallel_size")
    if uneven := [count for count in config.sizes.worker_counts if count % engines]:
        return (
            f"grpo.vllm_tensor_parallel_size={engines} workers share an engine, and cluster.num_workers={uneven[0]} is "
            "no multiple of it"
        )
    return None


def policy_has_one_adapter(config: "Config") -> str | None:
    """Refuse `model.lora` beside `model.peft`."""
    if config.model.lora is not None and config.model.peft is not None:
        return "model.lora is the short form of model.peft={type: LORA}; set one of them, and the other one to null"
    return None


def reference_is_the_first_policy(config: "Config") -> str | None:
    """Refuse `grpo.beta`, a field of TRL, with a `model.peft` that does not begin as the policy of `model.path`."""
    adapter = config.model.peft
    if not adapter or not config.grpo.trl.get("beta", 0.0):
        return None
    if starts_elsewhere(adapter) or moves_the_base(adapter):
        name, value = STARTS_ELSEWHERE.get(adapter["type"], ("", None))
        remedy = (
            f"set model.peft.{name}={override_text(value)}"
            if name
            else "leave out bias and fields of its first weights"
        )
        return (
            f"grpo.beta={config.grpo.trl['beta']:g} does not go with these settings of model.peft.type="
            f"{adapter['type']}: the reference is the policy without the adapter, and training would begin with "
            f"another one, or train its biases too; {remedy}, or choose another type, or set grpo.beta=0"
        )
    return None


def adapter_can_be_sharded(config: "Config") -> str | None:
    """Refuse `cluster.shard_learner` with a type of `model.peft` whose adapter cannot be divided over workers."""
    adapter = config.model.peft
    if adapter and config.cluster.shard_learner and adapter["type"] in NOT_SHARDED:
        return (
            f"cluster.shard_learner=true does not go with model.peft.type={adapter['type']}, whose tensors cannot be "
            "divided over workers; choose another type, or set cluster.shard_learner=false"
        )
    return None


def shared_base_is_constant(config: "Config") -> str | None:
    """Require for `model.share_base` an engine that keeps the frozen weights as the learner has them."""
    if not config.model.share_base:
        return None
    settings = {
        "engine.adapter=merge": (config.engine.adapter == "merge", "changes the engine's weights at each sync"),
        f"model.quantization={config.model.quantization}": (
            config.model.quantization is not None,
            "gives learner and engine weights of different forms",
        ),
        "cluster.shard_learner=true": (config.cluster.shard_learner, "gives each worker a part of the weights"),
        f"{config.tensor_parallel_field}={config.tensor_parallel_size}": (
            config.tensor_parallel_size > 1,
            "gives each engine's GPU a part of the weights",
        ),
        "grpo.vllm_enable_sleep_mode=true": (
            bool(config.grpo.trl.get("vllm_enable_sleep_mode")),
            "frees the engine's weights while the learner reads them",
        ),
    }
    for setting, (is_set, reason) in settings.items():
        if is_set:
            return f"model.share_base=true does not go with {setting}, which {reason}; set one of them only"
    return None


def quantized_policy_has_an_adapter(config: "Config") -> str | None:
    """Require for `model.quantization` an adapter that leaves the policy's own weights as they are."""
    method, adapter = config.model.quantization, config.model.adapter
    if method is None:
        return None
    if adapter is None:
        return (
            f"model.quantization={method} freezes the policy's weights, so nothing would be trained; set model.lora or "
            "model.peft, or model.quantization=null"
        )
    if config.cluster.shard_learner:
        return (
            f"model.quantization={method} does not go with cluster.shard_learner=true: codes of four bits are not "
            "divided over workers; set one of them only"
        )
    if adapter["type"] in NOT_QUANTIZED:
        return (
            f"model.quantization={method} does not go with model.peft.type={adapter['type']}, which PEFT "
            "builds on plain linear layers only; choose another type"
        )
    if adapter.get("init_lora_weights") in MOVES_THE_BASE:
        return (
            f"model.quantization={method} does not go with model.peft.init_lora_weights="
            f"{adapter['init_lora_weights']}, which changes the frozen weights, and these are quantized; leave it out"
        )
    return None


def adapter_optimizer_fits(config: "Config") -> str | None:
    """Require LoRA for `model.adapter_optimizer`, and plain LoRA with a whole learner and AdamW for LoRA-FA."""
    optimizer, adapter = config.model.adapter_optimizer, config.model.adapter
    if optimizer is None:
        return None
    if not adapter or adapter["type"] != "LORA":
        return (
            f"model.adapter_optimizer={{name: {optimizer.name}}} needs LoRA; set model.lora, or "
            "model.peft={type: LORA}, or model.adapter_optimizer=null"
        )
    if optimizer.name == "loraplus":
        return None
    if others := sorted(name for name in adapter if name not in PLAIN_LORA and adapter[name]):
        return (
            f"model.adapter_optimizer={{name: lorafa}} does not go with model.peft.{others[0]}="
            f"{override_text(adapter[others[0]])}: it trains plain LoRA; leave it out"
        )
    for field, value in (("cluster.shard_learner", config.cluster.shard_learner), *_own_optimizer(config)):
        if value:
            return (
                f"model.adapter_optimizer={{name: lorafa}} does not go with {field}={override_text(value)}: it is an "
                f"AdamW of its own on whole weights; leave {field} out"
            )
    return None


def _own_optimizer(config: "Config") -> list[tuple[str, Any]]:
    """Return the settings of an optimizer that PEFT's AdamW for LoRA-FA would ignore."""
    names = ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")
    return [(f"grpo.{name}", config.grpo.trl[name]) for name in names if name in config.grpo.trl]


def adapter_can_be_requested(config: "Config") -> str | None:
    """Require LoRA that vLLM can apply in its forward pass for `engine.adapter=request`, and for what implies it."""
    adapter = config.model.adapter
    if config.adapter_sync != "request":
        return None
    setting, other = "engine.adapter=request", "engine.adapter=merge"
    if config.model.quantization == "int4":
        setting, other = "model.quantization=int4", "model.quantization=nf4"
    elif config.model.share_base:
        setting, other = "model.share_base=true", "model.share_base=false"
    if not adapter or adapter["type"] != "LORA":
        return (
            f"{setting} needs LoRA, the only adapter that vLLM applies in its forward pass; set model.lora or "
            f"model.peft={{type: LORA}}, or {other}"
        )
    if others := sorted(name for name in adapter if not is_requestable(name, adapter[name])):
        return (
            f"{setting} does not go with model.peft.{others[0]}={override_text(adapter[others[0]])}: vLLM applies the "
            f"two matrices of each layer and nothing else; leave {others[0]} out, or set {other}"
        )
    if (rank := largest_rank(adapter)) > REQUEST_RANKS[-1]:
        field = "model.lora.rank" if config.model.lora else "model.peft.r"
        return (
            f"{setting} does not go with a rank of {rank} ({field}): vLLM takes at most {REQUEST_RANKS[-1]}; set a "
            f"smaller rank, or {other}"
        )
    if (method := config.engine.vllm.get("quantization")) is not None:
        return (
            f"{setting} does not go with engine.vllm={{quantization: {method}}}: the adapter would be applied to other "
            f"weights than those it is trained on, and no checksum would prove it; set {other}, or leave quantization "
            "out"
        )
    if config.cluster.use_gpu and config.dtype == "float32":
        return (
            f"{setting} does not go with model.dtype=float32 on GPUs, for which vLLM's kernels of LoRA have 16 bits "
            f"only; set model.dtype=bfloat16, or {other}"
        )
    return None


def int4_is_of_the_engine_too(config: "Config") -> str | None:
    """Require for `model.quantization=int4` what vLLM needs to read the same base."""
    if config.model.quantization != "int4":
        return None
    if config.adapter_sync == "merge":
        return (
            "model.quantization=int4 does not go with engine.adapter=merge: a sum of base and update is no number of "
            "four bits; leave engine.adapter out, or set model.quantization=nf4"
        )
    if config.dtype == "float32":
        return (
            "model.quantization=int4 needs 16 bits, in which vLLM computes with such weights; set model.dtype=bfloat16 "
            "or float16, or model.quantization=nf4"
        )
    if config.tensor_parallel_size > 1:
        return (
            f"model.quantization=int4 does not go with {config.tensor_parallel_field}={config.tensor_parallel_size}, "
            "whose engine would divide the blocks of a layer; set 1, or model.quantization=nf4"
        )
    return None


def sharded_learner_has_workers(config: "Config") -> str | None:
    """Require at least 2 `cluster.num_workers` for `cluster.shard_learner`."""
    if config.cluster.shard_learner and config.cluster.min_workers < 2:
        return "cluster.shard_learner=true needs at least 2 workers; set cluster.num_workers"
    return None


def stop_on_names_active_warnings(config: "Config") -> str | None:
    """Require each warning in `run.stop_on` to have a threshold and a metric that this run measures."""
    for name in config.run.stop_on:
        if getattr(config.health, name) is None:
            return f"run.stop_on={name} has no effect with health.{name}=null; set a threshold, or leave it out"
        if name == "high_kl" and not config.grpo.trl.get("beta"):
            return "run.stop_on=high_kl has no effect with grpo.beta=0, which measures no divergence; set grpo.beta"
        if name.startswith("reward_") and changes_difficulty(config):
            return (
                f"run.stop_on={name} has no effect with data.skip_solved={override_text(config.data.skip_solved)} and "
                f"data.prefer_mixed={override_text(config.data.prefer_mixed)}, which change the difficulty of the "
                "problems; set them to null and false, or leave it out"
            )
    return None


def changes_difficulty(config: "Config") -> bool:
    """Return True if problems are selected by earlier rewards: rewards of different steps are then not comparable."""
    return config.data.skip_solved is not None or config.data.prefer_mixed


def notify_is_a_web_address(config: "Config") -> str | None:
    """Require `run.notify` to be an http:// or https:// address with a host."""
    if config.run.notify is None:
        return None
    try:
        parts = urlsplit(config.run.notify)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_address &= parts.username is None
        is_address &= config.run.notify.isascii() and config.run.notify.isprintable() and " " not in config.run.notify
    except ValueError:  # a port that is no number, or brackets that are no address
        is_address = False
    # The address itself is a secret: anyone who has it can post to the chat.
    return None if is_address else "run.notify must be http://HOST/... or https://HOST/..., without user and password"


def turns_go_with_options(config: "Config") -> str | None:
    """Refuse tools and environments with `rollout.max_staleness` above `rollout.max_turns`, or with turns longer than
    `run.hang_seconds`."""
    turns, seconds, staleness = config.rollout.max_turns, config.rollout.time_limit, config.rollout.max_staleness
    if config.rollout.has_turns and staleness > turns:
        return (
            f"rollout.max_staleness={staleness} is more than rollout.max_turns={turns}: with rollout.tools or "
            "rollout.environment a round samples whole turns, and some would sample nothing; set "
            f"rollout.max_staleness={turns}, or raise rollout.max_turns"
        )
    if config.rollout.has_turns and turns * seconds >= config.run.hang_seconds:
        return (
            f"rollout.max_turns={turns} calls of up to rollout.time_limit={seconds:g} seconds may take longer than "
            f"run.hang_seconds={config.run.hang_seconds:g}, after which the run counts as hanging; lower one of the "
            "two, or raise run.hang_seconds"
        )
    return None


def rollout_function_goes_with_options(config: "Config") -> str | None:
    """Require `rollout.function` to be package.module:function, and refuse options that it replaces or ignores."""
    rollout, name = config.rollout, config.rollout.function
    if name is None:
        return None
    module, colon, function = name.partition(":")
    if not (module and colon and function) or ":" in function:
        return f"rollout.function={name} must have the form package.module:function"
    if rollout.has_turns:
        other = "tools" if rollout.tools else "environment"
        return (
            f"rollout.function={name} does not go with rollout.{other}: the function makes all turns of a completion "
            f"by itself; call the tools in it, or remove one of the two"
        )
    if rollout.max_staleness:
        return (
            f"rollout.max_staleness={rollout.max_staleness} does not go with rollout.function={name}, which would run "
            "beside the learner; set rollout.max_staleness=0"
        )
    if rollout.confine:
        return (
            f"rollout.confine=true does not go with rollout.function={name}, which runs in the process of the worker; "
            "confine in the function what has to be confined, and set rollout.confine=false"
        )
    default = type(rollout)()
    for option in FIELDS_OF_TURNS:
        if getattr(rollout, option) != getattr(default, option):
            return (
                f"rollout.{option} has no effect with rollout.function={name}, which makes turns and calls by itself; "
                "give the function such a limit in rollout.settings, and leave the field out"
            )
    return None


FIELDS_OF_TURNS = (
    *("max_turns", "max_calls", "time_limit", "memory_gib", "max_processes", "disk_gib", "max_files", "variables"),
    "isolation",
)
"""Fields of `rollout` for tools and environments only."""


def remote_sandbox_is_complete(config: "Config") -> str | None:
    """Require a sandbox address for the remote tool, and https:// for a token that leaves this machine."""
    rollout = config.rollout
    if rollout.sandbox_url is None:
        if rollout.uses_remote_python:
            return (
                "rollout.tools has grpo_ray.tools.remote_python:python, which needs the address of a remote sandbox; "
                "set rollout.sandbox_url"
            )
        if rollout.sandbox_token_variable is not None:
            return "rollout.sandbox_token_variable has no effect without rollout.sandbox_url; set that, or leave it out"
        return None
    parts = _plain_web_address(rollout.sandbox_url)
    if parts is None:
        return (
            "rollout.sandbox_url must be http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH], without user, "
            "password and query; put a token into an environment variable, and its name into "
            "rollout.sandbox_token_variable"
        )
    if not rollout.has_turns:
        return "rollout.sandbox_url has no effect without rollout.tools or rollout.environment; leave it out"
    if rollout.confine:
        return (
            "rollout.confine=true takes the network from all tools, so they do not reach rollout.sandbox_url; set one "
            "of the two"
        )
    if rollout.sandbox_token_variable is not None and parts.scheme != "https" and parts.hostname not in OWN_HOSTS:
        return (
            "rollout.sandbox_token_variable: anyone on the way can read a token that is sent over http://; set "
            "rollout.sandbox_url to an https:// address"
        )
    return None


OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Hosts of addresses that do not leave this machine."""


def _plain_web_address(address: str) -> SplitResult | None:
    """Return the parts of an http:// or https:// address without user, query and fragment; None for any other text."""
    try:
        parts = urlsplit(address)
        is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or brackets that are no address
        return None
    is_plain &= address.isascii() and address.isprintable() and not set(" @?#\\") & set(address)
    return parts if is_plain else None


def environments_are_named_alike(config: "Config") -> str | None:
    """Require an environment or rollout function for the reward `environment` and all entries of `rollout.settings`."""
    function = config.rollout.function
    paths = sorted({*config.rollout.environments.values(), *([] if function is None else [function])})
    if "environment" in config.rewards.functions and not paths:
        return (
            "rewards.functions has `environment`, the reward of the environment, but neither rollout.environment nor "
            "rollout.function is set; name a class with a method get_reward, or a function that gives rewards, or "
            "remove the reward"
        )
    if unknown := sorted(set(config.rollout.settings) - set(paths)):
        return (
            f"rollout.settings has {unknown[0]!r}, which rollout.environment and rollout.function do not name"
            f"{suggestion(unknown[0], paths)}; use the same path, or remove the entry"
        )
    return None


def reward_names_differ(config: "Config") -> str | None:
    """Require a distinct name for each reward, for its metrics and saved state, and refuse reserved names."""
    functions = config.rewards.functions
    names = [reward_name(each) for each in functions]
    for at, (function, name) in enumerate(zip(functions, names, strict=True)):
        if name in names[:at]:
            first = functions[names.index(name)]
            return (
                f"rewards.functions has {first!r} and {function!r}, whose metrics and state would both be named "
                f"{name!r}; rename or remove one of them"
            )
        if name != function and name in ("correctness", "environment"):
            return (
                f"rewards.functions has {function!r}, but {name!r} is the name of a built-in reward, whose values are "
                "read as such; rename the function"
            )
    return None


def limits_are_of_isolated_rewards(config: "Config") -> str | None:
    """Refuse limits of isolated rewards without `rewards.isolate`, and calls that may exceed `run.hang_seconds`.

    A failed call is repeated for each problem; these calls together take at most as long as `MAX_ENDED_PROCESSES` calls
    (`IsolatedReward`). The time in which ended processes are started again is not included.
    """
    rewards, defaults = config.rewards, type(config.rewards)()
    for name in ("isolate_seconds", "isolate_memory_gib"):
        if not rewards.isolate and (given := getattr(rewards, name)) != getattr(defaults, name):
            return f"rewards.{name}={given} has no effect with rewards.isolate=false; set rewards.isolate=true"
    own = sum(":" in name for name in rewards.functions)
    calls = MAX_ENDED_PROCESSES + 1
    if rewards.isolate and own * calls * rewards.isolate_seconds >= config.run.hang_seconds:
        return (
            f"{calls} calls of up to rewards.isolate_seconds={rewards.isolate_seconds:g} seconds of {own} "
            f"functions may take longer than run.hang_seconds={config.run.hang_seconds:g}, after which the run counts "
            "as hanging; lower the first, or raise run.hang_seconds"
        )
    return None


MAX_SHARE = 0.45
"""Largest part of a worker's GPU that reward models may share: the worker reserves more than half of it."""


def reward_models_have_a_share(config: "Config") -> str | None:
    """Require `rewards.model_gpus` to leave each worker most of a GPU of its own, or to be a whole GPU."""
    share = config.reward_model_gpus
    if MAX_SHARE < share < 1:
        return (
            f"rewards.model_gpus={share:g} must be at most {MAX_SHARE}, beside a worker, or 1, a GPU of its own: with "
            "a model in rewards.functions and cluster.use_gpu=true, each worker reserves the rest of a GPU, and two "
            "workers must not fit on one"
        )
    if 0 < share < 1 and not isinstance(config.cluster.num_workers, int):
        return (
            f"rewards.model_gpus={share:g} shares the GPU of a worker, which Ray cannot count for a varying number of "
            "workers; set rewards.model_gpus=1, a GPU of its own, or 0, on the CPU, or a fixed cluster.num_workers"
        )
    engine = config.tensor_parallel_size
    if config.reward_model_share_of_engines and engine > 1:
        return (
            f"rewards.model_gpus={share:g} shares the GPU of the engine that measures held-out problems, and "
            f"{config.tensor_parallel_field}={engine} needs {engine} whole ones; set rewards.model_gpus=1 or 0"
        )
    return None


def settings_are_of_rewards(config: "Config") -> str | None:
    """Refuse `rewards.settings` of `choice` or `code_tests` if it is neither a reward nor a held-out score."""
    scores = [config.heldout_score_of(config.source_of(key)) for key in config.heldout_keys]
    for name in REWARD_SCORES:
        if name in config.rewards.settings and name not in (*config.rewards.functions, *scores):
            return (
                f"rewards.settings has {name!r}, which neither rewards.functions nor a held-out score names; add it "
                "there or remove it"
            )
    return None


def benchmarks_have_plain_completions(config: "Config") -> str | None:
    """Refuse held-out benchmarks if completions use an environment or a rollout function, or have a required form."""
    named = [each.dataset for each in config.heldout_sources.values() if find_benchmark(each.dataset)]
    if not named:
        return None
    rollout = config.rollout
    options = {
        "function": rollout.function is not None,
        "environment": None in rollout.environments,
        "structured_outputs": rollout.structured_outputs is not None,
    }
    if used := [name for name, is_used in options.items() if is_used]:
        return (
            f"data.heldout names the benchmark {named[0]}, whose completions would be those of rollout.{used[0]}; "
            f"measure it with `grpo-ray eval CHECKPOINT --suite {named[0]}`"
        )
    return None


def heldout_score_is_known(config: "Config") -> str | None:
    """Require `heldout.score` to be a score that this run has."""
    for source in dict.fromkeys(map(config.source_of, config.heldout_keys)):
        if mistake := _mistaken_score(config, config.heldout_score_of(source), config.rewards_of(source)):
            return mistake
    return None


def _mistaken_score(config: "Config", score: str, functions: Sequence[str]) -> str | None:
    """Return the error message for a held-out score that is unknown or needs a missing environment; None if valid."""
    if score not in SCORES and ":" not in score:
        return (
            f"heldout.score={score} must be one of {', '.join(SCORES)} or package.module:function"
            f"{suggestion(score, SCORES)}"
        )
    has_environment = config.rollout.has_conversations or "environment" in functions
    if score == "environment" and not has_environment:
        return (
            "heldout.score=environment requires an environment, and rollout.environment is null; set it, or "
            "heldout.score=reward"
        )
    return None


def eased_conciseness_knows_the_success_rate(config: "Config") -> str | None:
    """Require `correctness` and `grpo.logging_steps=1` for `eased_conciseness`, which depends on the success rate."""
    functions, logging_steps = config.rewards.functions, config.grpo.logging_steps
    if "eased_conciseness" not in functions:
        return None
    if "correctness" not in functions:
        return (
            "rewards.functions has `eased_conciseness`, which follows the mean of `correctness` and is always 0 "
            "without it; add `correctness`, or use `conciseness`"
        )
    if logging_steps > 1:
        return (
            f"grpo.logging_steps={logging_steps} must be 1 with `eased_conciseness` in rewards.functions, which "
            "averages the success rates that are logged; set grpo.logging_steps=1, or use `conciseness`"
        )
    return None


def sources_name_what_exists(config: "Config") -> str | None:
    """Require each source of a mixture to name rewards and an environment of the run, and a source for each reward."""
    if not config.is_mixture:
        return None
    functions, named = config.rewards.functions, [name for name in config.rollout.environments if name is not None]
    if NO_ENVIRONMENT in named:
        return f"rollout.environment has the name {NO_ENVIRONMENT!r}, which stands for no environment; choose another"
    for name, source in config.training_sources.items():
        field = f"data.train.{name}"
        if unknown := [each for each in source.rewards or () if each not in functions]:
            return (
                f"{field}.rewards has {unknown[0]!r}, which rewards.functions does not name"
                f"{suggestion(unknown[0], functions)}; add it there, or remove it"
            )
        environment = source.environment
        if environment is not None and environment not in (*named, *([NO_ENVIRONMENT] if named else [])):
            known = f"has {', '.join(named)}" if named else "has no names"
            return f"{field}.environment={environment} must be a name in rollout.environment, which {known}"
    used = {each for name in config.training_sources for each in config.rewards_of(name)}
    if unused := [each for each in functions if each not in used]:
        return (
            f"rewards.functions has {unused[0]!r}, which applies to no source of data.train; add it to the rewards of "
            "a source, or remove it"
        )
    return None


def fine_tuning_goes_with_options(config: "Config") -> str | None:
    """Refuse options that supervised fine-tuning cannot have, and a ranking by rewards, which it has none of."""
    if config.run.kind != "sft":
        return None
    metric = config.run.best_metric
    wrong = (
        (config.cluster.shard_learner, "cluster.shard_learner=true", "cluster.shard_learner=false"),
        (config.engine.is_dedicated, "engine.placement=dedicated", "engine.placement=colocated"),
        (config.model.quantization is not None, f"model.quantization={config.model.quantization}", "it to null"),
        (config.model.share_base, "model.share_base=true", "model.share_base=false"),
        (config.model.adapter_optimizer is not None, "model.adapter_optimizer", "it to null"),
        (config.rollout.has_conversations, "rollout.tools, environment or function", "them to [] and null"),
        (config.rollout.max_staleness > 0, f"rollout.max_staleness={config.rollout.max_staleness}", "it to 0"),
        (config.grpo.steps_per_generation > 1, f"grpo.steps_per_generation={config.grpo.steps_per_generation}", "1"),
        (config.num_iterations > 1, f"grpo.epochs={config.num_iterations}", "1"),
        (config.grpo.dynamic_sampling > 0, f"grpo.dynamic_sampling={config.grpo.dynamic_sampling}", "0"),
        (config.data.skip_solved is not None, f"data.skip_solved={config.data.skip_solved}", "it to null"),
        (config.data.prefer_mixed, "data.prefer_mixed=true", "data.prefer_mixed=false"),
        (metric.startswith("reward/"), f"run.best_metric={metric}", "run.best_metric=heldout/accuracy"),
    )
    return next(
        (f"{setting} cannot be used with run.kind=sft; set {mend}" for is_set, setting, mend in wrong if is_set), None
    )


CHECKS: tuple[Callable[["Config"], str | None], ...] = (
    numbers_are_finite,
    run_name_is_no_checkpoint,
    worker_range_is_ordered,
    engine_range_is_ordered,
    best_metric_ranks_checkpoints,
    fine_tuning_goes_with_options,
    ranking_reward_is_of_each_checkpoint,
    solved_problems_are_known,
    dynamic_sampling_scales_by_group,
    sampling_is_supported,
    structured_outputs_are_one_form,
    sampling_is_corrected_by_token,
    heldout_sampling_is_possible,
    staleness_is_not_sharded,
    staleness_goes_with_options,
    segments_continue_completions,
    followed_reference_is_not_sharded,
    prompts_fit_into_a_pass_on_the_cpu,
    quantized_engine_has_16_bits,
    # Worker-count invariance: the step is global, so workers and micro-batches must divide it evenly.
    workers_share_prompts,
    workers_share_micro_batches,
    some_worker_count_shares_step,
    micro_batches_divide_step,
    micro_batches_have_one_limit,
    token_limit_holds_a_completion,
    token_limit_keeps_the_loss,
    router_loss_is_of_one_pass,
    vespo_keeps_a_ratio_of_one,
    epochs_have_one_name,
    checkpoints_are_between_batches,
    engines_are_counted_if_dedicated,
    dedicated_engines_share_nothing,
    transport_has_gpus,
    dedicated_engines_have_prompts,
    engines_have_equal_workers,
    sharded_learner_has_workers,
    policy_has_one_adapter,
    reference_is_the_first_policy,
    adapter_can_be_sharded,
    int4_is_of_the_engine_too,
    shared_base_is_constant,
    quantized_policy_has_an_adapter,
    adapter_optimizer_fits,
    adapter_can_be_requested,
    every_reward_has_a_weight,
    reward_names_differ,
    limits_are_of_isolated_rewards,
    reward_models_have_a_share,
    settings_are_of_rewards,
    benchmarks_have_plain_completions,
    sources_name_what_exists,
    heldout_score_is_known,
    eased_conciseness_knows_the_success_rate,
    # Without these checks, TRL and transformers would ignore such mistakes, or report them only in a worker.
    entropy_bounds_are_ordered,
    trl_fields_have_an_effect,
    optimizer_arguments_are_known,
    scheduler_arguments_fit,
    model_arguments_are_supported,
    sharding_options_are_supported,
    vespo_masks_tokens,
    importance_bounds_are_ordered,
    stop_on_names_active_warnings,
    notify_is_a_web_address,
    turns_go_with_options,
    rollout_function_goes_with_options,
    environments_are_named_alike,
    remote_sandbox_is_complete,
)
"""Checks in this order, each named after the rule it enforces. A check returns the error message, or None if the rule
holds. Later checks rely on earlier ones: sizes are compared only once the range of workers is in order."""


def _near_multiple(value: int, of: int) -> int:
    """Return the largest multiple of `of` up to `value`, at least `of` itself."""
    return max(of, value - value % of)
