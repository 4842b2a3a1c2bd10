"""Settings of a resumed run: the config's, where transformers would restore those of the checkpoint."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

NOT_SETTINGS = ("params", "lr")
"""Entries of an optimizer's parameter group that are not settings: the schedule computes `lr`."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of an optimizer and its schedule, such as betas, weight decay and the peak learning rate.

    torch's `load_state_dict` overwrites them with the checkpoint's, together with the moments and the position in the
    schedule.
    """

    groups: list[dict[str, Any]]
    """Settings of each parameter group."""
    peak_rates: list[float]
    """Peak learning rate of each group, which the schedule scales."""

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, schedule: LRScheduler) -> "OptimizerSettings":
        """Return the settings of an optimizer that has not loaded a state yet."""
        groups = [{key: each[key] for key in each if key not in NOT_SETTINGS} for each in optimizer.param_groups]
        return OptimizerSettings(groups, list(schedule.base_lrs))

    def apply(self, optimizer: torch.optim.Optimizer, schedule: LRScheduler) -> None:
        """Give an optimizer these settings, and each group the learning rate at the schedule's position."""
        for group, settings in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(settings)
        schedule.base_lrs = list(self.peak_rates)
        if isinstance(schedule, LambdaLR):  # all schedules that the config accepts
            factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
            rates = [peak * factor for peak, factor in zip(self.peak_rates, factors, strict=True)]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def move_named_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state that an optimizer keeps under names to a device; torch moves only that of parameters.

    PEFT's optimizer for LoRA-FA has such names.
    """
    for key, state in optimizer.state.items():
        if isinstance(key, str):
            state.update({name: each.to(device) for name, each in state.items() if isinstance(each, torch.Tensor)})


class ResumedSettings(TrainerCallback):
    """Callback that restores the config's intervals of reports and checkpoints, which a checkpoint overwrites."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)
