"""Collecting a step: from the rows that a worker draws to the rollout that it trains on.

`Collector.collect` runs all rounds of a step, and `Collector.roll_out` one of them: sample, score, advantages. Both use
only the objects that the collector is composed of, none of which depends on the trainer.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from transformers import TrainerState

from grpo_ray.learner.advantages import Advantage
from grpo_ray.learner.batch import Batch, loss_mask
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.diversity import distinct_share
from grpo_ray.learner.rollouts.dynamic_sampling import DynamicSampler
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.group_recorder import GroupRecorder, find_truncated
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.recorded_samples import SampleChooser
from grpo_ray.learner.rollouts.rollout import Completions, Rollout, Rows
from grpo_ray.learner.rollouts.sampler import Sampler
from grpo_ray.learner.rollouts.scoring import Scorer
from grpo_ray.learner.rollouts.step_metrics import length_metrics, reward_metrics, source_metrics
from grpo_ray.learner.schedule import DrawOrder
from grpo_ray.learner.sync_check import (
    ImportanceSampling,
    TokenLogps,
    anchor_to_behaviour,
    compare_logps,
    sampling_metrics,
)
from grpo_ray.storage.records.groups import GroupRecord


class PolicyPasses(Protocol):
    """Forward passes of the learner over whole batches, without gradient; collective."""

    def logps(self, batch: Batch) -> torch.Tensor:
        """Return the policy's log-probabilities of the completions, (B, T) in nats."""

    def reference_logps(self, batch: Batch) -> torch.Tensor | None:
        """Return the reference's log-probabilities, (B, T) in nats; None if the loss has no KL term."""


@dataclass(frozen=True, kw_only=True)
class LossNeeds:
    """Data that the loss needs in a batch, besides advantages."""

    importance: ImportanceSampling | None
    """Correction for the difference between engine and learner; None if it is off."""
    old_logps: bool
    """True if the policy moves while it trains on the batch, so that the loss needs its earlier log-probabilities."""
    one_pass: bool
    """True if the importance ratio and the proof of the sync use the loss's own forward pass."""
    behaviour_anchor: bool = False
    """True if the engine's log-probabilities are those of TRL's old policy (`rollout.anchor`)."""
    masks_truncated: bool
    """True if completions that were cut off do not count (`grpo.mask_truncated_completions`)."""


@dataclass(kw_only=True)
class Collector:
    """Collector of one worker's steps; collective."""

    sampler: Sampler
    padding: Padding
    scorer: Scorer
    advantage: Advantage
    needs: Callable[[], LossNeeds]
    passes: PolicyPasses
    prove: Callable[[torch.Tensor, Batch], None]
    """Proves the sync from the learner's log-probabilities of a batch, (B, T); raises SyncError."""
    filler: DynamicSampler | None
    """Fills a step with groups that have signal; None to train on the groups of the first round."""
    recorder: GroupRecorder
    chooser: SampleChooser
    order: DrawOrder
    workers: Workers
    state: Callable[[], TrainerState]
    append_metrics: Callable[[Mapping[str, float]], None]
    count_tokens: Callable[[int], None]
    """Takes the number of tokens of prompts and completions of a round, over all workers."""

    def __post_init__(self) -> None:
        self.batches: Iterable[Rows] = ()

    def attach(self, batches: Iterable[Rows]) -> Iterable[Rows]:
        """Take the dataloader's batches, and return those that the trainer iterates over."""
        self.batches = batches
        return self.sampler.attach(batches)

    def collect(self, rows: Rows) -> Rollout:
        """Collect the completions that a step is trained on, in one or several rounds; record them, and prove the sync.

        The proof is left to the loss if it uses the loss's own forward pass (`LossNeeds.one_pass`). Completions that
        were sampled with older weights have been proven by the sampler, while the learner had these weights.

        Args:
            rows: the step's first batch.
        """
        self.chooser.start_step()
        rollout = self._fill(self.roll_out(rows))
        self.append_metrics(rollout.metrics)
        if not self.needs().one_pass and rollout.is_on_policy:
            logps = None if self.needs().behaviour_anchor else rollout.batch.get("old_per_token_logps")
            self.prove(self.passes.logps(rollout.batch) if logps is None else logps, rollout.batch)
        return rollout

    def roll_out(self, rows: Rows) -> Rollout:
        """Sample and score one round: a completion for each row, with its advantage."""
        completions = self.sampler.sample(rows)
        truncated = find_truncated(completions.token_ids, self.recorder.end_tokens, completions.conversations)
        self._measure(completions, truncated)
        batch = self.padding.columns(completions)
        if self.needs().masks_truncated:
            mask_rows(batch, truncated)
        batch["num_items_in_batch"] = self.workers.sum(loss_mask(batch).sum())
        compared = self._add_logps(batch)
        scores = self.scorer.score(rows, completions)
        rewards = self.order.sort(scores.of_all)
        grouped = rewards.view(-1, self.recorder.num_generations, len(self.scorer.rewards))
        advantages = self.advantage(grouped, self.recorder.reward_weights)
        batch["advantages"] = self.order.own_rows(advantages.values.flatten())
        self.append_metrics(reward_metrics(self.recorder.reward_names, rewards, self.recorder.reward_weights))
        self.append_metrics(
            source_metrics(
                rows,
                completions.lengths,
                self.recorder.reward_names,
                scores.own,
                self.recorder.reward_weights,
                self.recorder.num_generations,
                self.workers,
            )
        )
        self.append_metrics({"frac_reward_zero_std": advantages.zero_std.float().mean().item()})
        self.append_metrics(scores.metrics)
        if compared is not None:
            self.append_metrics(sampling_metrics(compared, self.workers))
        self.chooser.mark(batch, rewards)
        diversity = distinct_share(completions.token_ids, self.recorder.num_generations, self.workers)
        self.append_metrics({"group/distinct_share": diversity})
        return Rollout(
            rows,
            completions.token_ids,
            scores.own,
            batch,
            completions.conversations,
            is_on_policy=completions.is_on_policy,
        )

    def _measure(self, completions: Completions, truncated: list[bool]) -> None:
        """Record the lengths of the completions, and count the tokens."""
        lengths = completions.lengths
        tokens = torch.tensor(sum(lengths) + sum(map(len, completions.prompt_ids)), device=self.workers.device)
        self.count_tokens(int(self.workers.sum(tokens)))
        self.append_metrics(length_metrics(lengths, truncated, self.workers))

    def _add_logps(self, batch: Batch) -> TokenLogps | None:
        """Add the log-probabilities of learner and reference that the loss needs and its own pass does not compute.

        Returns:
            The tokens' log-probabilities, if the importance ratio is computed from them here.
        """
        needs, compared = self.needs(), None
        if not needs.one_pass and (needs.old_logps or needs.importance or needs.behaviour_anchor):
            logps = self.passes.logps(batch)
            batch["old_per_token_logps"] = logps
            if needs.importance is not None:
                compared = compare_logps(batch, logps, needs.importance)
            if needs.behaviour_anchor:
                anchor_to_behaviour(batch, logps)
        if (reference := self.passes.reference_logps(batch)) is not None:
            batch["ref_per_token_logps"] = reference
        return compared

    def _fill(self, first: Rollout) -> Rollout:
        """Return the rollout of a step whose first round is given, with the records of all rounds."""
        records = [self._records(first)]
        if self.filler is None:
            return replace(first, groups=records[0])

        def draw_round() -> Rollout:
            assert isinstance(self.batches, GroupBatches), "dynamic sampling draws further groups from GroupBatches"
            rollout = self.roll_out(self.batches.draw())
            records.append(self._records(rollout))
            return rollout

        step = self.filler.fill_step(first, draw_round)
        groups = [
            replace(group, trained=trained)
            for drawn, flags in zip(records, step.trained, strict=True)
            for group, trained in zip(drawn, flags, strict=True)
        ]
        return replace(step.rollout, groups=groups, metrics=step.metrics)

    def _records(self, rollout: Rollout) -> list[GroupRecord]:
        return self.recorder.records(rollout, self.state().global_step + 1)


def mask_rows(batch: Batch, masked: list[bool]) -> None:
    """Exclude the masked rows of a batch from the loss and from the attention."""
    kept = (~torch.tensor(masked, device=batch["completion_mask"].device)).unsqueeze(1).long()
    for column in ("completion_mask", "tool_mask"):
        if column in batch:
            batch[column] = batch[column] * kept
