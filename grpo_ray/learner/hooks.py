"""Callbacks of a worker's learner, and functions that it calls while it trains."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import TrainerCallback

from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.tokens import LossTokens


def ignore(*args: object) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class LearnerHooks:
    """Callbacks of a learner and functions that it calls while it trains."""

    callbacks: Sequence[TrainerCallback] = ()
    record_groups: Callable[[list[GroupRecord]], None] = ignore
    """Receives this worker's groups of a step, before the step is taken."""
    record_tokens: Callable[[list[LossTokens]], None] = ignore
    """Receives the tokens of recorded completions that this worker has read, after the last micro-batch of a step."""
    observe_loss: Callable[[torch.Tensor], None] = ignore
    """Receives the loss of each micro-batch."""
    notify: Callable[[str], None] = ignore
    """Shows the user a line."""


def no_hooks(learner: object) -> LearnerHooks:
    """Return hooks that do nothing."""
    return LearnerHooks()
