"""Sources of the completions that a step is trained on: on-policy, or generated one step ahead.

Both let TRL generate, score and pad a batch (`RollOut`). They differ in the number of batches that a step draws
(dynamic sampling), and in the weights and the moment at which completions are generated.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from transformers import TrainerState

from grpo_ray.learner.batch import CompletionRows
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.dynamic_sampling import DynamicSampler
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.one_step_off_policy import (
    AheadGenerator,
    Generation,
    PrefetchedBatches,
    ReadyCompletions,
    Rows,
)
from grpo_ray.learner.sync_check import ImportanceSampling, compare_logps, sampling_metrics
from grpo_ray.storage.rollouts import GroupRecord


class RollOut(Protocol):
    """Function that generates and scores one batch with TRL."""

    def __call__(self, inputs: Rows, *, score_logps: bool = True) -> CompletionRows:
        """Generate and score; without `score_logps` TRL computes no log-probabilities of the learner."""


class Record(Protocol):
    """Function that converts scored completions to group records."""

    def __call__(self, rows: CompletionRows) -> list[GroupRecord]:
        """Return the records, with texts and tokens of the step's samples."""


@dataclass(frozen=True)
class StepRollouts:
    """Completions that a step is trained on."""

    rows: CompletionRows
    """This worker's part of the step."""
    groups: list[GroupRecord]
    """All groups that this worker drew for the step, trained on or not."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class RolloutSource(Protocol):
    """Source of a learner's completions. All methods but `generation_for` are collective."""

    def attach(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Take the dataloader's batches, and return those that the trainer iterates over."""

    def collect(self, inputs: Rows) -> StepRollouts:
        """Return the completions of a step, whose first batch is `inputs`."""

    def generation_for(self, prompt_ids: list[list[int]]) -> Generation | None:
        """Return completions for a batch's prompts that are there already; None if the engine has to generate."""

    def start_ahead(self, state: TrainerState) -> None:
        """Start generating for the next step; called when the first micro-batch of a batch is given out."""

    def finish_ahead(self) -> None:
        """Wait for completions of the next step; called after the last micro-batch, before the weights move."""


class OnPolicySource:
    """Source that generates with the newest weights, in one round or several (dynamic sampling)."""

    def __init__(self, roll_out: RollOut, record: Record, sampler: DynamicSampler | None = None) -> None:
        """
        Args:
            sampler: fills steps up with groups that have signal; None to take a step on the groups first drawn.
        """
        self.roll_out = roll_out
        self.record = record
        self.sampler = sampler
        self.batches: Iterable[Any] = ()

    def attach(self, batches: Iterable[Any]) -> Iterable[Any]:
        self.batches = batches
        return batches

    def collect(self, inputs: Rows) -> StepRollouts:
        first = self.roll_out(inputs)
        if self.sampler is None:
            return StepRollouts(first, self.record(first))
        drawn = [self.record(first)]

        def draw_round() -> CompletionRows:
            assert isinstance(self.batches, GroupBatches), "dynamic sampling draws further groups from GroupBatches"
            rows = self.roll_out(self.batches.draw())
            drawn.append(self.record(rows))
            return rows

        step = self.sampler.fill_step(first, draw_round)
        groups = [
            replace(group, trained=trained)
            for records, flags in zip(drawn, step.trained, strict=True)
            for group, trained in zip(records, flags, strict=True)
        ]
        return StepRollouts(step.rows, groups, step.metrics)

    def generation_for(self, prompt_ids: list[list[int]]) -> Generation | None:
        return None

    def start_ahead(self, state: TrainerState) -> None:
        pass

    def finish_ahead(self) -> None:
        pass


class OneStepOffPolicySource:
    """Source that generates the next step's completions while the learner works on this step's."""

    def __init__(
        self,
        roll_out: RollOut,
        record: Record,
        make_generator: Callable[[Callable[[], Rows]], AheadGenerator],
        importance: ImportanceSampling | None,
        workers: Workers,
    ) -> None:
        """
        Args:
            make_generator: builds the generator, from the function that returns the next batch without drawing it.
            importance: TRL's correction of the loss; None if it is off.
        """
        self.roll_out = roll_out
        self.record = record
        self.importance = importance
        self.workers = workers
        self.generator = make_generator(lambda: self.batches.peek())
        self.batches: PrefetchedBatches[Rows] = PrefetchedBatches(())

    def attach(self, batches: Iterable[Any]) -> Iterable[Any]:
        self.batches = PrefetchedBatches(batches)
        return self.batches

    def collect(self, inputs: Rows) -> StepRollouts:
        ready = self.generator.ready
        if ready is None:
            rows = self.roll_out(inputs)
            return StepRollouts(rows, self.record(rows))
        try:
            rows = self.roll_out(inputs, score_logps=False)  # TRL would score with the weights of now
        finally:
            self.generator.ready = None
        metrics = self._add_logps(rows, ready)
        return StepRollouts(rows, self.record(rows), metrics)

    def _add_logps(self, rows: CompletionRows, ready: ReadyCompletions) -> Mapping[str, float]:
        """Add the log-probabilities under the weights that the completions come from, and the importance ratio."""
        missing = rows.output["completion_ids"].size(1) - ready.learner_logps.size(1)  # TRL may pad to a multiple
        logps = torch.nn.functional.pad(ready.learner_logps, (0, missing))
        rows.output["old_per_token_logps"] = logps
        tokens = compare_logps(rows.output, logps, self.importance)
        return {} if tokens is None else sampling_metrics(tokens, self.workers)

    def generation_for(self, prompt_ids: list[list[int]]) -> Generation | None:
        return self.generator.generation_for(prompt_ids)

    def start_ahead(self, state: TrainerState) -> None:
        if not is_followed_by_checkpoint(state):
            self.generator.start()

    def finish_ahead(self) -> None:
        self.generator.finish()


def is_followed_by_checkpoint(state: TrainerState) -> bool:
    """Return True if the step under way ends with a checkpoint, or is the last: then nothing is generated ahead."""
    step = state.global_step + 1
    return step % state.save_steps == 0 or step >= state.max_steps
