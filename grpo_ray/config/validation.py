"""Checks across fields of a config. Types and ranges of single fields are in the schema.

Nothing here imports a heavy library, so that a wrong setting is refused at once, before any machine is taken.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grpo_ray.config.ranking import ranking_metrics, suggestion
from grpo_ray.errors import ConfigError

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config


def check_across_fields(config: "Config") -> None:
    """Raise ConfigError with the message of the first check in CHECKS that fails."""
    for check in CHECKS:
        if message := check(config):
            raise ConfigError(message)


def worker_range_is_ordered(config: "Config") -> str | None:
    """Require the two numbers of `cluster.num_workers: [min, max]` to be in order."""
    low, high = config.cluster.min_workers, config.cluster.max_workers
    if low > high:
        return f"cluster.num_workers=[{low}, {high}] must be [min, max]; set cluster.num_workers=[{high}, {low}]"
    return None


def best_metric_ranks_checkpoints(config: "Config") -> str | None:
    """Require `run.best_metric` to be a metric of checkpoints whose higher values are better."""
    metric, known = config.run.best_metric, ranking_metrics(config)
    if metric not in known:
        return f"run.best_metric={metric} must be one of {', '.join(known)}{suggestion(metric, known)}"
    return None


def checkpoints_have_rewards(config: "Config") -> str | None:
    """Require rewards to be logged at every checkpoint if `run.best_metric` is a reward."""
    metric, save, logging = config.run.best_metric, config.grpo.save_steps, config.grpo.logging_steps
    if metric.startswith("reward/") and save % logging:
        return (
            f"run.best_metric={metric} is known only at steps that are logged, and grpo.save_steps={save} is not a "
            f"multiple of grpo.logging_steps={logging}; try grpo.save_steps={_near_multiple(save, logging)}"
        )
    return None


def solved_problems_are_known(config: "Config") -> str | None:
    """Require `correctness` in `rewards.functions` for `data.skip_solved` and `data.prefer_mixed`."""
    data = config.data
    if (data.skip_solved or data.prefer_mixed) and "correctness" not in config.rewards.functions:
        return (
            f"data.skip_solved={data.skip_solved} and data.prefer_mixed={data.prefer_mixed} require the correctness of "
            f"completions, and rewards.functions={list(config.rewards.functions)} does not compute it; put correctness "
            "in rewards.functions, or set data.skip_solved=null and data.prefer_mixed=false"
        )
    return None


def dynamic_sampling_scales_by_group(config: "Config") -> str | None:
    """Refuse `grpo.dynamic_sampling` with rewards scaled by the batch instead of by the group."""
    grpo = config.grpo
    for name, per_batch in {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"}.items():
        if grpo.dynamic_sampling and grpo.trl.get(name) == per_batch:
            return (
                f"grpo.{name}={per_batch} scales rewards by all groups that were generated together, and with "
                f"grpo.dynamic_sampling={grpo.dynamic_sampling} the step uses other groups; set another grpo.{name}, "
                "or grpo.dynamic_sampling=0"
            )
    return None


def dynamic_sampling_is_no_hang(config: "Config") -> str | None:
    """Require `run.hang_factor` to exceed the rounds that a step takes with `grpo.dynamic_sampling`."""
    rounds, factor = config.grpo.dynamic_sampling, config.run.hang_factor
    if rounds and not rounds + 1 < factor:
        return (
            f"run.hang_factor={factor:g} must be above {rounds + 1}: with grpo.dynamic_sampling={rounds} a step may "
            f"take {rounds + 1} times its usual time; raise run.hang_factor or lower grpo.dynamic_sampling"
        )
    return None


def num_iterations_is_positive(config: "Config") -> str | None:
    """Require `grpo.num_iterations`, a field of TRL's, to be a whole number of at least 1."""
    iterations = config.grpo.trl.get("num_iterations", 1)
    if not isinstance(iterations, int) or iterations < 1:
        return f"grpo.num_iterations={iterations!r} must be a whole number of at least 1; the default is 1"
    return None


def generate_ahead_is_not_sharded(config: "Config") -> str | None:
    """Refuse `grpo.generate_ahead` with `cluster.shard_learner`."""
    if config.grpo.generate_ahead and config.cluster.shard_learner:
        return (
            "grpo.generate_ahead=true does not go with cluster.shard_learner=true, whose weights are gathered in the "
            "middle of a step; set cluster.shard_learner=false, or grpo.generate_ahead=false"
        )
    return None


NOT_WITH_GENERATE_AHEAD: dict[str, tuple[Any, str]] = {
    "dynamic_sampling": (0, "draws further problems depending on a batch that is not scored when the next one begins"),
    "num_iterations": (1, "takes several steps on a batch, so that the next batch would be as many steps old"),
    "vllm_tensor_parallel_size": (1, "makes the engines of several workers communicate while the learners do"),
    "vllm_enable_sleep_mode": (False, "puts the engine to sleep while the learner works"),
}
"""Field of `grpo` -> the only value that goes with `grpo.generate_ahead`, and the reason against others."""


def generate_ahead_goes_with_options(config: "Config") -> str | None:
    """Refuse `grpo.generate_ahead` with dynamic sampling, several iterations, and shared or sleeping engines."""
    grpo = config.grpo
    if not grpo.generate_ahead:
        return None
    for name, (required, reason) in NOT_WITH_GENERATE_AHEAD.items():
        value = getattr(grpo, name, grpo.trl.get(name, required))
        if value != required:
            return (
                f"grpo.generate_ahead=true does not go with grpo.{name}={value}, which {reason}; "
                f"set grpo.{name}={str(required).lower()}, or grpo.generate_ahead=false"
            )
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
    step, micro, workers = config.completions_per_step, config.micro_batch_size, config.cluster.num_workers
    if isinstance(workers, int) and step % micro == 0 and micro % workers:
        fitting = [size for size in range(workers, step + 1, workers) if step % size == 0]
        return (
            f"grpo.micro_batch_size={micro} must be a multiple of cluster.num_workers={workers}; "
            f"try grpo.micro_batch_size={min(fitting, key=lambda size: abs(size - micro))}"
        )
    return None


def some_worker_count_shares_step(config: "Config") -> str | None:
    """Require some number in `cluster.num_workers: [min, max]` to divide problems and micro-batches evenly."""
    if not isinstance(config.cluster.num_workers, int) and not config.worker_counts:
        return (
            f"cluster.num_workers={list(config.cluster.num_workers)}: none of these numbers divides both "
            f"grpo.prompts_per_step={config.grpo.prompts_per_step} and "
            f"grpo.micro_batch_size={config.micro_batch_size}; set a range that contains such a divisor"
        )
    return None


def micro_batches_divide_step(config: "Config") -> str | None:
    """Require `grpo.micro_batch_size` to divide the step's completions."""
    step, micro, workers = config.completions_per_step, config.micro_batch_size, config.cluster.min_workers
    if step % micro:
        fitting = [size for size in range(workers, min(micro, step) + 1, workers) if step % size == 0]
        return (
            f"grpo.micro_batch_size={micro} must divide the step's {step} completions "
            f"(prompts_per_step x num_generations); try grpo.micro_batch_size={max(fitting, default=step)}"
        )
    return None


def router_loss_issue(config: "Config", coefficient: float) -> str | None:
    """Return the reason against a router's auxiliary loss with this coefficient, or None.

    The loss is a product of means over the tokens of one forward pass, so its mean over micro-batches or workers is
    not its value for the whole step.
    """
    step = config.completions_per_step
    if coefficient == 0 or (config.cluster.max_workers == 1 and config.micro_batch_size == step):
        return None
    return (
        f"grpo.router_aux_loss_coef={coefficient:g}: the auxiliary loss of a mixture of experts depends on the number "
        "of workers and micro-batches, and a step must not; set grpo.router_aux_loss_coef=0, or cluster.num_workers=1 "
        f"and grpo.micro_batch_size={step}"
    )


def router_loss_is_of_one_pass(config: "Config") -> str | None:
    """Refuse `grpo.router_aux_loss_coef`, a field of TRL's, with several workers or micro-batches."""
    coefficient = config.grpo.trl.get("router_aux_loss_coef")
    return router_loss_issue(config, float(coefficient)) if isinstance(coefficient, int | float) else None


def vespo_keeps_a_ratio_of_one(config: "Config") -> str | None:
    """Refuse bounds of the importance ratio that exclude 1 with the loss type `vespo`.

    VESPO adds up the logarithm of the ratio over a completion and its padding, whose ratio is 1. Clipped, padding would
    change the gradient, and its length depends on the other completions of a worker.
    """
    trl = config.grpo.trl
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


def checkpoints_are_between_batches(config: "Config") -> str | None:
    """Require `grpo.save_steps` to be a multiple of `grpo.num_iterations`."""
    save_steps, iterations = config.grpo.save_steps, config.num_iterations
    if save_steps % iterations:
        return (
            f"grpo.save_steps={save_steps} must be a multiple of grpo.num_iterations={iterations}, "
            "so that no checkpoint is saved in the middle of a batch; "
            f"try grpo.save_steps={_near_multiple(save_steps, iterations)}"
        )
    return None


CHECKS: tuple[Callable[["Config"], str | None], ...] = (
    worker_range_is_ordered,
    best_metric_ranks_checkpoints,
    checkpoints_have_rewards,
    solved_problems_are_known,
    dynamic_sampling_scales_by_group,
    dynamic_sampling_is_no_hang,
    num_iterations_is_positive,
    generate_ahead_is_not_sharded,
    generate_ahead_goes_with_options,
    # Worker-count invariance: the step is global, so the sizes of workers and micro-batches must divide it.
    workers_share_prompts,
    workers_share_micro_batches,
    some_worker_count_shares_step,
    micro_batches_divide_step,
    router_loss_is_of_one_pass,
    vespo_keeps_a_ratio_of_one,
    checkpoints_are_between_batches,
)
"""Checks in this order, each named after the rule it enforces. A check returns the error message, or None if the rule
holds. Later checks rely on earlier ones: sizes are compared only once the range of workers is in order."""


def can_share_step(workers: int, config: "Config") -> bool:
    """Return whether this number of workers divides the step's problems and its micro-batches."""
    return config.grpo.prompts_per_step % workers == 0 and config.micro_batch_size % workers == 0


def _near_multiple(value: int, of: int) -> int:
    """Return the largest multiple of `of` up to `value`, at least `of` itself."""
    return max(of, value - value % of)
