"""Assembly of a learner's collector from the learner's parts and the config."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import TrainerState

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import SOURCE, reward_columns
from grpo_ray.inference.conversation_sampler import ConversationSampler
from grpo_ray.learner.advantages import load_advantage
from grpo_ray.learner.batch import Batch
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.bounded_staleness import BoundedStalenessSampler, require_deterministic_model
from grpo_ray.learner.rollouts.collector import Collector, LossNeeds, PolicyPasses
from grpo_ray.learner.rollouts.conversation_rounds import ConversationRounds
from grpo_ray.learner.rollouts.dynamic_sampling import DynamicSampler
from grpo_ray.learner.rollouts.group_recorder import GroupRecorder
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.recorded_samples import SampleChooser
from grpo_ray.learner.rollouts.rounds import Rounds
from grpo_ray.learner.rollouts.sampler import MultiTurn, OnPolicySampler, Sampler, SingleTurn, StartGrading, WeightSync
from grpo_ray.learner.rollouts.scoring import Reward, Scorer
from grpo_ray.learner.rollouts.segment_rounds import SegmentRounds
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule
from grpo_ray.learner.rollouts.sync_probe import ProbePasses, SyncProbe
from grpo_ray.learner.schedule import DrawOrder
from grpo_ray.learner.sync_check import ImportanceSampling
from grpo_ray.rewards.registry import start_grading
from grpo_ray.telemetry.profiler import PhaseProfiler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl import GRPOConfig

    from grpo_ray.inference.conversation_source import ConversationSource
    from grpo_ray.inference.engine import Engine


class LearnerPasses(PolicyPasses, ProbePasses, Protocol):
    """Methods of the learner that the collector calls."""

    def prove_batch(self, logps: torch.Tensor, batch: Batch) -> None:
        """Check the sync with the learner's log-probabilities of a whole batch, (B, T) in nats; collective."""


@dataclass(frozen=True, kw_only=True)
class LearnerParts:
    """Parts of a learner that its collector uses."""

    config: Config
    args: "GRPOConfig"
    engine: "Engine"
    tokenizer: "PreTrainedTokenizerBase"
    sync: WeightSync
    conversation_source: "ConversationSource | None"
    rewards: Sequence[Reward]
    reward_weights: torch.Tensor
    """(R,)"""
    end_tokens: Collection[int]
    """Token ids with which a completion can end."""
    num_generations: int
    parts: int
    """Optimizer steps that a generation batch is divided into."""
    repeats: int
    """Number of times that the dataloader yields each batch."""
    pad_to_multiple_of: int | None
    importance: ImportanceSampling
    model: torch.nn.Module
    passes: LearnerPasses
    needs: Callable[[], LossNeeds]
    workers: Workers
    profiler: PhaseProfiler
    state: Callable[[], TrainerState]
    append_metrics: Callable[[Mapping[str, float]], None]
    count_tokens: Callable[[int], None]
    notify: Callable[[str], None]


def build_collector(parts: LearnerParts) -> Collector:
    """Return the collector of a learner's steps."""
    dynamic = parts.config.grpo.dynamic_sampling
    order = DrawOrder(parts.workers, parts.parts)
    padding = Padding(
        parts.tokenizer.pad_token_id, parts.pad_to_multiple_of, parts.importance.padding_ratio, parts.workers.device
    )
    return Collector(
        sampler=build_sampler(parts, padding),
        padding=padding,
        scorer=build_scorer(parts),
        advantage=load_advantage(
            parts.config.grpo.advantages, parts.args.scale_rewards, parts.args.multi_objective_aggregation
        ),
        needs=parts.needs,
        passes=parts.passes,
        prove=parts.passes.prove_batch,
        filler=DynamicSampler(dynamic, parts.num_generations, parts.reward_weights, padding, parts.workers, parts.parts)
        if dynamic
        else None,
        recorder=GroupRecorder(
            parts.num_generations,
            [reward.name for reward in parts.rewards],
            parts.reward_weights,
            parts.tokenizer,
            parts.end_tokens,
        ),
        chooser=SampleChooser(parts.num_generations, parts.reward_weights, order),
        order=order,
        workers=parts.workers,
        state=parts.state,
        append_metrics=parts.append_metrics,
        count_tokens=parts.count_tokens,
    )


def build_sampler(parts: LearnerParts, padding: Padding) -> Sampler:
    """Return the sampler for the kind of rollouts that the config selects."""
    config, workers, profiler = parts.config, parts.workers, parts.profiler
    grade = _early_grading(config, profiler, parts.rewards)
    source, staleness = parts.conversation_source, config.rollout.max_staleness
    turns: MultiTurn | SingleTurn = (
        SingleTurn(config, parts.engine, parts.tokenizer, grade)
        if source is None
        else MultiTurn(config, parts.engine, source, grade, workers, profiler, parts.append_metrics)
    )
    if not staleness:
        return OnPolicySampler(parts.sync, turns, workers, profiler)
    if not config.engine.is_dedicated:  # otherwise no engine draws numbers in this process
        require_deterministic_model(parts.model, workers.device)
    schedule = StalenessSchedule(staleness, parts.args.max_completion_length, parts.args.max_steps)
    if isinstance(turns, MultiTurn):
        assert isinstance(source, ConversationSampler)  # the config refuses a rollout function
        rounds: Rounds = ConversationRounds(turns, source, schedule)
    else:
        rounds = SegmentRounds(turns, schedule)
    return BoundedStalenessSampler(
        schedule,
        parts.sync,
        rounds,
        SyncProbe(parts.passes, padding, workers),
        repeats=parts.repeats,
        workers=workers,
        profiler=profiler,
        append_metrics=parts.append_metrics,
        notify=parts.notify,
    )


def build_scorer(parts: LearnerParts) -> Scorer:
    """Return the scorer of the run's rewards."""
    return Scorer(
        rewards=parts.rewards,
        functions=parts.config.rewards.functions,
        tokenizer=parts.tokenizer,
        workers=parts.workers,
        profiler=parts.profiler,
        state=parts.state,
        notify=parts.notify,
        rewards_of=parts.config.rewards_of,
    )


def _early_grading(config: Config, profiler: PhaseProfiler, loaded: Sequence[Reward]) -> StartGrading | None:
    """Return a function that starts grading a completion before it is scored; None if no reward can be graded early.

    `correctness` can, and rewards with a method `begin(completion, row)`, which returns a future or None.

    Args:
        loaded: the rewards, in the order of `rewards.functions`.
    """
    rewards = config.rewards
    begins = {
        name: reward.function.begin
        for name, reward in zip(rewards.functions, loaded, strict=True)
        if callable(getattr(reward.function, "begin", None))
    }
    if "correctness" not in rewards.functions and not begins:
        return None

    def grade(row: Mapping[str, Any], answer: str | list[dict[str, Any]]) -> None:
        applies = config.rewards_of(row.get(SOURCE, ""))
        begun: list[Any] = []
        if "correctness" in applies:
            begun.append(start_grading(answer, row["solution"], rewards.strict, rewards.time_limit))
        begun += [begin(answer, reward_columns(row)) for name, begin in begins.items() if name in applies]
        for verdict in begun:
            if verdict is not None:
                verdict.add_done_callback(profiler.begin_concurrent("verdicts"))

    return grade
