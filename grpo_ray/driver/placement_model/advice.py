"""Advice of `grpo-ray check`: would dedicated engines take more steps than colocated ones on the same GPUs?"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo_ray.driver.placement_model.engine import EngineSpeed
from grpo_ray.driver.placement_model.hardware import H100, ModelSize, engine_speed, learner_token_seconds
from grpo_ray.driver.placement_model.learner import LearnerSpeed
from grpo_ray.driver.placement_model.lengths import DrawBatch, LogNormalLengths, RecordedLengths
from grpo_ray.driver.placement_model.placements import Workload, colocated_step
from grpo_ray.driver.placement_model.search import Comparison, compare_placements
from grpo_ray.errors import ConfigError
from grpo_ray.models.memory import plan_memory
from grpo_ray.storage.jsonl import read_events, read_metrics
from grpo_ray.storage.records.rollout_files import list_rollout_files, read_steps

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config
    from grpo_ray.models.memory import ModelShape
    from grpo_ray.storage.run_folder import RunFolder

ASSUMED_MEAN = 0.3
"""Mean length as a share of the longest allowed, as long as no step was recorded."""
ASSUMED_PROMPT = 200
"""Tokens of a prompt, for the time of computing it."""
TRANSFER_RATE = 5e9
"""Bytes per second at which dedicated engines receive weights, through the object store."""
WORTHWHILE = 1.1
"""Gain from which dedicated engines are recommended. A smaller one is within the errors of the simulation."""
RECORDED_ROWS, RECORDED_STEPS = 50, 20
"""Latest rows of metrics, and latest steps of recorded lengths, that are read."""
_OF_COLOCATED = {"vllm_enable_sleep_mode", "vllm_tensor_parallel_size"}
"""Fields of `grpo` about a GPU that learner and engine share, and about engines that workers share."""
_OF_OTHERS = {"engine/count", "engine/idle_share"}
"""Metrics of steps with dedicated engines, or with `rollout.max_staleness` above 0."""


@dataclass(frozen=True, kw_only=True)
class RecordedSteps:
    """Earlier steps of a run with colocated engines."""

    generate_seconds: float
    """Median time of generating a step, waiting for the slowest worker included."""
    learn_seconds: float
    """Median time of forward and backward passes and the optimizer."""
    other_seconds: float
    """Median time of the rest of a step, without checkpoints."""
    workers: int
    """Workers of these steps, with one GPU each."""
    lengths: Sequence[Sequence[int]]
    """Completion lengths of each group."""


@dataclass(frozen=True, kw_only=True)
class PlacementAdvice:
    """Comparison for a run, and the sizes from which colocated engines are better."""

    comparison: Comparison
    mean: float
    """Mean completion length, tokens."""
    is_recorded: bool
    """True if lengths and durations are those of recorded steps."""
    colocated_up_to: int
    """Largest number of GPUs, of halves of the run's, on which dedicated engines gain too little; 0 if there is none.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the advice in JSON's types."""
        return asdict(self) | {"recommended": self.comparison.gain(self.comparison.best) >= WORTHWHILE}

    def lines(self) -> list[str]:
        """Return the text for the user."""
        comparison = self.comparison
        best = comparison.best
        source = "from recorded steps" if self.is_recorded else f"assuming H100s and {self.mean:.0f} tokens on average"
        gains = ", ".join(
            f"{comparison.gain(split):.1f} times with {split.staleness}" for split in comparison.dedicated
        )
        if comparison.gain(best) < WORTHWHILE:
            return [
                f"engines (simulated, {source}): colocated engines suit this run; dedicated ones on some of the "
                f"{comparison.gpus} GPUs would take at most {comparison.gain(best):.1f} times the steps"
            ]
        few = f"; with {self.colocated_up_to} GPUs colocated engines are as good" if self.colocated_up_to else ""
        return [
            f"engines (simulated, {source}): dedicated engines on {best.engine_gpus} of {comparison.gpus} GPUs with "
            f"rollout.max_staleness={best.staleness} would take about {comparison.gain(best):.1f} times the steps",
            f"  by rollout.max_staleness: {gains}{few}",
        ]


def advise_placement(
    config: "Config", shape: "ModelShape", recorded: RecordedSteps | None = None
) -> PlacementAdvice | None:
    """Compare the placements for a run; None without GPUs, with a single one, or if staleness is not possible.

    Args:
        shape: sizes of the policy.
        recorded: steps of the run so far; None: lengths and durations are assumed.
    """
    gpus = config.cluster.max_workers
    if config.engine.is_dedicated:
        gpus += config.engine.replica_range[0] * config.engine.tensor_parallel_size
    stalenesses = possible_stalenesses(config)
    if not config.cluster.use_gpu or gpus < 2 or not stalenesses:
        return None
    work = workload_of(config, shape, recorded)

    def fits(learner: int) -> bool:
        # The GPUs of recorded steps may have more memory than an H100.
        return config.grpo.prompts_per_step % learner == 0 and (
            recorded is not None or learner_fits(config, shape, learner)
        )

    comparison = compare_placements(work, gpus, stalenesses, fits)
    if comparison is None:
        return None
    mean = statistics.fmean(map(statistics.fmean, next(work.batches())))
    return PlacementAdvice(
        comparison=comparison,
        mean=mean,
        is_recorded=recorded is not None,
        colocated_up_to=_colocated_up_to(work, gpus // 2, stalenesses),
    )


def _colocated_up_to(work: Workload, gpus: int, stalenesses: tuple[int, ...]) -> int:
    while gpus >= 2:
        comparison = compare_placements(work, gpus, stalenesses)
        if comparison is not None and comparison.gain(comparison.best) < WORTHWHILE:
            return gpus
        gpus //= 2
    return 0


def possible_stalenesses(config: "Config") -> tuple[int, ...]:
    """Return the values of `rollout.max_staleness` that a run's other settings allow with dedicated engines.

    None for completions with tools: the simulation knows no tools.
    """
    if config.rollout.has_conversations:
        return ()
    return tuple(k for k in (1, 2, 4) if allows_staleness(config, k))


def allows_staleness(config: "Config", staleness: int) -> bool:
    """Return True if the config would be valid with dedicated engines and a value of `rollout.max_staleness`."""
    try:
        replace(with_dedicated_engines(config), rollout=replace(config.rollout, max_staleness=staleness))
    except ConfigError:
        return False
    return True


def with_dedicated_engines(config: "Config") -> "Config":
    """Return the config of the same run with dedicated engines of as many GPUs.

    Raises:
        ConfigError: other settings do not go with them.
    """
    trl = {name: value for name, value in config.grpo.trl.items() if name not in _OF_COLOCATED}
    size = config.tensor_parallel_size
    return replace(
        config,
        grpo=replace(config.grpo, trl=trl),
        engine=replace(config.engine, placement="dedicated", tensor_parallel_size=size),
    )


def learner_fits(config: "Config", shape: "ModelShape", gpus: int) -> bool:
    """Return True if the learner of a run with dedicated engines fits on a number of H100s."""
    try:
        run = replace(with_dedicated_engines(config), cluster=replace(config.cluster, num_workers=gpus))
    except ConfigError:
        return False
    return plan_memory(run, shape, int(H100.memory)).fits


def workload_of(config: "Config", shape: "ModelShape", recorded: RecordedSteps | None) -> Workload:
    """Return the work of a run, with the durations of an H100, or of the steps that it recorded."""
    grpo = config.grpo
    draw: DrawBatch = LogNormalLengths(
        groups=grpo.prompts_per_step,
        completions=grpo.num_generations,
        mean=ASSUMED_MEAN * grpo.max_completion_length,
        longest=grpo.max_completion_length,
    )
    if recorded is not None:
        draw = RecordedLengths(groups=grpo.prompts_per_step, recorded=recorded.lengths)
    model = model_size(shape)
    work = Workload(
        draw=draw,
        longest=grpo.max_completion_length,
        prompt_tokens=min(ASSUMED_PROMPT, config.data.max_prompt_length or ASSUMED_PROMPT),
        engine=engine_speed(model, H100, config.tensor_parallel_size),
        gpus_per_engine=config.tensor_parallel_size,
        learner=LearnerSpeed(token_seconds=learner_token_seconds(model, H100)),
        publish_seconds=2 * model.parameters / TRANSFER_RATE,
        seed=config.run.seed,
    )
    return work if recorded is None else fit_recorded(work, recorded)


def model_size(shape: "ModelShape") -> ModelSize:
    """Return the sizes that determine a policy's speed; keys and values have 16 bits.

    The MLP of `shape` has the width of the active experts only, so that a mixture of experts uses fewer parameters.
    """
    attention = 2 * shape.hidden_size * (shape.query_size + shape.key_value_size)
    layers = shape.layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)
    active = layers + shape.vocabulary * shape.hidden_size
    return ModelSize(
        parameters=shape.parameters,
        active=min(active, shape.parameters),
        cache_bytes=4 * shape.layers * shape.key_value_size,
    )


def fit_recorded(work: Workload, recorded: RecordedSteps) -> Workload:
    """Scale the durations so that a colocated step takes as long as the recorded ones."""
    step = colocated_step(work, recorded.workers)
    engine = recorded.generate_seconds / step.engine_seconds
    speed, learner = work.engine, work.learner
    return replace(
        work,
        engine=EngineSpeed(
            step_seconds=engine * speed.step_seconds,
            sequence_seconds=engine * speed.sequence_seconds,
            context_seconds=engine * speed.context_seconds,
            prefill_seconds=engine * speed.prefill_seconds,
            max_running=speed.max_running,
            cache_tokens=speed.cache_tokens,
        ),
        learner=replace(learner, token_seconds=learner.token_seconds * recorded.learn_seconds / step.learner_seconds),
        switch_seconds=recorded.other_seconds,
        publish_seconds=work.publish_seconds + recorded.other_seconds,
    )


def recorded_steps(folder: "RunFolder") -> RecordedSteps | None:
    """Read the latest steps of a run in which its engines were colocated and waited for the learner; None without any.

    The phases of other steps do not show how long generating takes.
    """
    shown = (row for row in read_metrics(folder) if row.get("phase/generate", 0.0) > 0 and not _OF_OTHERS & row.keys())
    rows = deque(shown, maxlen=RECORDED_ROWS)
    files = list_rollout_files(folder)
    if not rows or not files:
        return None
    table = read_steps(folder, first=max(0, max(file.last_step for file in files) - RECORDED_STEPS + 1), limit=None)
    lengths = table["lengths"].to_pylist()
    workers = [event["workers"] for event in read_events(folder) if event["event"] == "began"]
    generate, learn, other = (statistics.median(values) for values in zip(*map(_durations, rows), strict=True))
    if not lengths or not workers or generate <= 0 or learn <= 0:
        return None
    return RecordedSteps(
        generate_seconds=generate, learn_seconds=learn, other_seconds=other, workers=workers[-1], lengths=lengths
    )


def _durations(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the seconds of generating, of learning, and of the rest of a step without checkpoints."""

    def total(*phases: str) -> float:
        return sum(float(row.get(f"phase/{phase}", 0.0)) for phase in phases)

    generate, learn = total("generate", "wait_workers"), total("forward_backward", "optimizer")
    return generate, learn, total("sync", "score", "prepare", "other")
