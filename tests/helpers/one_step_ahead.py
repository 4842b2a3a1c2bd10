"""Trainers that generate one step ahead: ours, and TRL's with the same schedule and without our code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from stock_trl import NEAR, ScriptedLearner, largest_difference, reference_steps, train_steps
from trl import GRPOTrainer


class OneStepOffPolicyLearner(ScriptedLearner):
    """Our learner, one step off-policy."""

    overrides: Sequence[str] = ("grpo.generate_ahead=true",)


class SequentialTrainer(GRPOTrainer):
    """TRL's trainer on the same batches, in sequence: it makes the next batch before each optimizer step."""

    def get_train_dataloader(self) -> list[Any]:
        self.ready: dict[int, Any] = {}
        self.batches = list(super().get_train_dataloader())
        return self.batches

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return self.ready.pop(self.state.global_step, None) or self.make(inputs)

    def make(self, inputs: Any) -> Any:
        return super()._generate_and_score_completions(inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        step = self.state.global_step + 1
        ends = self._step % self.args.steps_per_generation == 0
        if ends and step % self.state.save_steps and step < self.state.max_steps:
            self.ready[step] = self.make(self.batches[self._step])
        return loss


def compare_ahead(folder: Path, **settings: Any) -> OneStepOffPolicyLearner:
    """Train both for four steps, compare their gradients and return our trainer.

    The third step ends with a checkpoint, so the fourth is taken on completions of its own weights.
    """
    settings = {"max_steps": 4, "save_steps": 3, "epsilon": 0.02} | settings
    sequential = reference_steps(SequentialTrainer, folder, **settings)
    ahead, trainer = train_steps(OneStepOffPolicyLearner, folder, **settings)
    assert len(ahead.gradients) == 4
    assert largest_difference(ahead, sequential) < NEAR
    return trainer
