"""Checks across the fields of a config.

Nothing here imports a heavy library, so that a bad setting is refused in a moment, before any machine is taken.
"""

import re
from typing import TYPE_CHECKING

from grpo_ray.errors import ConfigError

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config


def check(config: "Config") -> None:
    """Refuse what contradicts itself, naming the fields and the mend."""
    run, cluster, data, engine, grpo = config.run, config.cluster, config.data, config.engine, config.grpo
    lora = config.model.lora
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run.name):
        raise ConfigError(f"run.name={run.name!r} names a folder: use letters, digits, '.', '_' and '-'")
    positive = {
        "cluster.num_workers": cluster.min_workers,
        "cluster.cpus_per_worker": cluster.cpus_per_worker,
        "cluster.threads_per_worker": cluster.threads_per_worker,
        "run.keep_checkpoints": run.keep_checkpoints,
        "model.lora.rank": lora.rank if lora else None,
        "model.lora.alpha": lora.alpha if lora else None,
        "data.limit": data.limit,
        "data.heldout_limit": data.heldout_limit,
        "data.skip_solved": data.skip_solved,
        "engine.cpu_cache_gib": engine.cpu_cache_gib,
        "engine.max_context": engine.max_context,
        "grpo.prompts_per_step": grpo.prompts_per_step,
        "grpo.micro_batch_size": grpo.micro_batch_size,
        "grpo.max_steps": grpo.max_steps,
        "grpo.save_steps": grpo.save_steps,
        "grpo.logging_steps": grpo.logging_steps,
        "grpo.max_completion_length": grpo.max_completion_length,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if grpo.num_generations < 2:
        raise ConfigError(f"grpo.num_generations={grpo.num_generations} must be at least 2: a group of one has no mean")
    if run.max_failures < -1:
        raise ConfigError(f"run.max_failures={run.max_failures} must be 0 or more, or -1 for no limit")
    if cluster.min_workers > cluster.max_workers:
        raise ConfigError(
            f"cluster.num_workers=[{cluster.min_workers}, {cluster.max_workers}] must name the least before the most"
        )
    above_zero = {"run.hang_seconds": run.hang_seconds, "run.storage_patience": run.storage_patience}
    for name, seconds in above_zero.items():
        if not seconds > 0:  # NaN is refused too
            raise ConfigError(f"{name}={seconds} must be above 0 seconds")
    if not run.hang_factor > 1:
        raise ConfigError(f"run.hang_factor={run.hang_factor} must be above 1")
    for name, count in {
        "run.max_bad_steps": run.max_bad_steps,
        "grpo.dynamic_sampling": grpo.dynamic_sampling,
    }.items():
        if count < 0:
            raise ConfigError(f"{name}={count} must be 0 or more")
    if (data.skip_solved or data.prefer_mixed) and "correctness" not in config.rewards.functions:
        raise ConfigError(
            "data.skip_solved and data.prefer_mixed need to know what was solved; put correctness in rewards.functions"
        )
    for name, share in {"engine.memory_share": engine.memory_share, "data.heldout_share": data.heldout_share}.items():
        if not 0 < share < 1:
            raise ConfigError(f"{name}={share} must lie between 0 and 1")
    if not 0 <= config.rewards.boolean_share <= 1:
        raise ConfigError(f"rewards.boolean_share={config.rewards.boolean_share} must lie between 0 and 1")
    if not config.rewards.time_limit > 0:  # NaN is refused too
        raise ConfigError(f"rewards.time_limit={config.rewards.time_limit} must be above 0 seconds")
    if not config.rewards.functions:
        raise ConfigError("rewards.functions is empty; without a reward nothing is learned")
    if grpo.dynamic_sampling:
        for name, by_batch in {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"}.items():
            if grpo.trl.get(name) == by_batch:
                raise ConfigError(
                    f"grpo.{name}={by_batch} scales rewards by all groups that were generated together, and with "
                    f"grpo.dynamic_sampling={grpo.dynamic_sampling} the step is taken on others; change one of them"
                )
        if not grpo.dynamic_sampling + 1 < run.hang_factor:
            raise ConfigError(
                f"grpo.dynamic_sampling={grpo.dynamic_sampling}: a step may take {grpo.dynamic_sampling + 1} times its "
                f"usual time, and counts as hanging at run.hang_factor={run.hang_factor:g} times; raise that"
            )
    iterations = grpo.trl.get("num_iterations", 1)
    if not isinstance(iterations, int) or iterations < 1:
        raise ConfigError(f"grpo.num_iterations={iterations!r} must be a whole number of at least 1")
    if lora and not 0 <= lora.dropout < 1:
        raise ConfigError(f"model.lora.dropout={lora.dropout} must be 0 or more and below 1")
    if lora and not lora.target_modules:
        raise ConfigError("model.lora.target_modules is empty; name layers, or write all-linear")
    if grpo.generate_ahead:
        _check_ahead(config)
    _check_sizes(config)


def _check_ahead(config: "Config") -> None:
    """Refuse what does not go together with generation one step ahead."""
    grpo = config.grpo
    if config.cluster.shard_learner:
        raise ConfigError(
            "grpo.generate_ahead=true does not go with cluster.shard_learner=true, whose weights are gathered in the "
            "middle of a step; set cluster.shard_learner=false, or grpo.generate_ahead=false"
        )
    for name, value, why in (
        ("dynamic_sampling", 0, "draws again by what became of a batch, which is not known when the next one begins"),
        ("num_iterations", 1, "takes several steps on a batch, and the next one would be as many steps old"),
        ("vllm_tensor_parallel_size", 1, "has the engine talk to other workers while the learner does"),
        ("vllm_enable_sleep_mode", False, "puts the engine to sleep while the learner works"),
    ):
        found = getattr(grpo, name, grpo.trl.get(name, value))
        if found != value:
            raise ConfigError(
                f"grpo.generate_ahead=true does not go with grpo.{name}={found}, which {why}; "
                f"set grpo.{name}={str(value).lower()}, or grpo.generate_ahead=false"
            )


def _check_sizes(config: "Config") -> None:
    """The step is global (law 1): worker and micro-batch sizes must divide it."""
    grpo, step, micro = config.grpo, config.completions_per_step, config.micro_batch_size
    if isinstance(config.cluster.num_workers, int):
        _check_workers(config, config.cluster.num_workers)
    elif not config.worker_counts:
        raise ConfigError(
            f"cluster.num_workers={list(config.cluster.num_workers)}: none of these numbers divides "
            f"grpo.prompts_per_step={grpo.prompts_per_step} and grpo.micro_batch_size={micro}"
        )
    if step % micro:
        workers = config.cluster.min_workers
        mends = [n for n in range(workers, min(micro, step) + 1, workers) if step % n == 0]
        raise ConfigError(
            f"grpo.micro_batch_size={micro} must divide the step's {step} completions "
            f"(prompts_per_step x num_generations); try grpo.micro_batch_size={max(mends, default=step)}"
        )
    if grpo.save_steps % config.num_iterations:
        raise ConfigError(
            f"grpo.save_steps={grpo.save_steps} must be a multiple of grpo.num_iterations={config.num_iterations}, "
            f"so that a checkpoint never stands inside a batch; "
            f"try grpo.save_steps={_near_multiple(grpo.save_steps, config.num_iterations)}"
        )


def divides(workers: int, config: "Config") -> bool:
    """Whether so many workers can share the step evenly."""
    return config.grpo.prompts_per_step % workers == 0 and config.micro_batch_size % workers == 0


def _check_workers(config: "Config", workers: int) -> None:
    """Refuse a fixed number of workers that does not divide the step."""
    grpo, step, micro = config.grpo, config.completions_per_step, config.micro_batch_size
    if grpo.prompts_per_step % workers:
        raise ConfigError(
            f"grpo.prompts_per_step={grpo.prompts_per_step} must be a multiple of cluster.num_workers={workers}; "
            f"try grpo.prompts_per_step={_near_multiple(grpo.prompts_per_step, workers)}"
        )
    if step % micro == 0 and micro % workers:
        mends = [n for n in range(workers, step + 1, workers) if step % n == 0]
        raise ConfigError(
            f"grpo.micro_batch_size={micro} must be a multiple of cluster.num_workers={workers}; "
            f"try grpo.micro_batch_size={min(mends, key=lambda n: abs(n - micro))}"
        )


def _near_multiple(value: int, of: int) -> int:
    return max(of, value - value % of)
