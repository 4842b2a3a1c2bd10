"""Data of a step: the rows that a worker draws, their sampled completions, and the scored rollout.

A row is a problem with its epoch and the completion's index in its group (`Problem.as_row`). A sampler turns rows into
`Completions` (`sampler.py`), the collector turns these into a `Rollout` (`collector.py`), and the learner trains on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grpo_ray.learner.batch import Batch, move_to, select_rows
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.tools.conversation import Conversation

Rows = list[dict[str, Any]]
"""A batch of the dataloader: one row for each completion to sample, in whole groups."""

Logps = list[list[float | None]]
"""(B, T_b), log-probabilities of each completion's tokens in nats; None where the engine returned none."""


@dataclass(frozen=True)
class Completions:
    """One worker's sampled completions, in the order of their rows. B of them, T_b tokens in completion b."""

    prompt_ids: list[list[int]]
    """(B, P_b), token ids of the prompts."""
    token_ids: list[list[int]]
    """(B, T_b)"""
    logps: Logps
    """Behaviour log-probabilities: those with which the tokens were sampled."""
    unprocessed_logps: Logps | None = None
    """Those before filters and penalties; None if they are the same."""
    own: list[list[int]] | None = None
    """(B, T_b), 1 on tokens of the policy, 0 on results of tools and environments; None if all are the policy's."""
    conversations: Sequence[Conversation] | None = None
    """(B,), the turns of each completion; None in a run of single turns."""
    is_on_policy: bool = True
    """True if all tokens, on all workers, were sampled with the weights that are trained on them."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of the policy in each completion, (B,)."""
        return [len(ids) for ids in self.token_ids] if self.own is None else [sum(row) for row in self.own]


@dataclass(frozen=True)
class Rollout:
    """One worker's scored completions, in whole groups, on which a step is trained."""

    rows: Rows
    """(B,)"""
    token_ids: list[list[int]]
    """(B,) token ids of each completion."""
    rewards: torch.Tensor
    """(B, R), one column for each reward function; NaN where it does not apply."""
    batch: Batch
    """Columns that the loss reads: token ids, masks, log-probabilities and advantages with B rows, and scalars."""
    conversations: Sequence[Conversation] | None = None
    """(B,) the turns of each completion; None in a run of single turns."""
    is_on_policy: bool = True
    """True if all tokens, on all workers, were sampled with the weights that are trained on them."""
    groups: Sequence[GroupRecord] = field(default=(), compare=False)
    """Records of all groups that this worker drew for the step, trained on or not."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Metrics of dynamic sampling; empty without it."""

    def take(self, rows: Sequence[int]) -> "Rollout":
        """Copy some rows, so that the memory of the others can be freed."""
        return Rollout(
            [self.rows[row] for row in rows],
            [self.token_ids[row] for row in rows],
            self.rewards[list(rows)],
            select_rows(self.batch, rows),
            None if self.conversations is None else [self.conversations[row] for row in rows],
        )

    def to(self, device: torch.device | str) -> "Rollout":
        """Move all tensors to a device."""
        return replace(self, rewards=self.rewards.to(device), batch=move_to(self.batch, device))
