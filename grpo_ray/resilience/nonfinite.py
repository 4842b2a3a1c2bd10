"""Detection of losses and gradients that are NaN or infinite, so that they never reach the weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from grpo_ray.distributed import all_gather_object
from grpo_ray.errors import NonFiniteError

JsonGroup = dict[str, Any]
"""Group of completions as JSON values. The optional field `finite` is False if any of its numbers is not finite."""


class NonFiniteMonitor(TrainerCallback, ExportableState):
    """Callback that skips an optimizer step whose loss or gradient is not finite, and ends the run after too many.

    The decision is collective: if one worker finds a non-finite number, all workers skip the step. The counters are
    saved in checkpoints. `Learner.training_step` passes each loss to `observe_loss`; `ReportCallback` reports `skipped`
    as `learner/skipped_steps`.
    """

    def __init__(
        self,
        max_in_a_row: int,
        groups: Callable[[], list[JsonGroup]],
        save: Callable[[list[JsonGroup], int], str],
    ):
        """
        Args:
            max_in_a_row: consecutive steps that may be skipped; one more raises NonFiniteError.
            groups: returns this worker's groups of the current step.
            save: stores groups of a step and returns their location. If it raises OSError, the error becomes part of
                the NonFiniteError's message.
        """
        self.max_in_a_row = max_in_a_row
        self.groups = groups
        self.save = save
        self.skipped = 0
        """Steps skipped since the run began, resumes included."""
        self.in_a_row = 0
        """Steps skipped since the last step that was taken."""
        self._loss_is_bad: torch.Tensor | None = None

    def state(self) -> dict[str, Any]:
        """Return the state that transformers writes into a checkpoint's `trainer_state.json`."""
        return {"args": {}, "attributes": {"skipped": self.skipped, "in_a_row": self.in_a_row}}

    def observe_loss(self, loss: torch.Tensor) -> None:
        """Check the loss of a micro-batch, of any shape, without synchronizing with the device."""
        is_bad = ~torch.isfinite(loss.detach()).all()
        self._loss_is_bad = is_bad if self._loss_is_bad is None else self._loss_is_bad | is_bad

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Restored here and not by transformers' `restore_callback_states_from_checkpoint`, which would replace this
        # object by a new one that the learner has no reference to. The default is for checkpoints without this state:
        # without an entry, transformers fails to write the next checkpoint.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.skipped, self.in_a_row = saved["attributes"]["skipped"], saved["attributes"]["in_a_row"]

    @torch.no_grad()
    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer,
        **kwargs: Any,
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        bad_loss, bad_gradient = self._find_non_finite([p.grad for p in parameters], args.device)
        if not (bad_loss or bad_gradient):
            self.in_a_row = 0
            return
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None and not bad_loss and scaler.get_scale() > 1:
            return  # float16 loss scaling is still lowering its scale; the scaler itself skips such a step
        for parameter in parameters:
            parameter.grad = None  # optimizers ignore it then: no update, no weight decay, moments unchanged
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row > self.max_in_a_row:
            names = [name for name, bad in (("loss", bad_loss), ("gradient", bad_gradient)) if bad]
            self._raise(state.global_step + 1, " and ".join(names))

    def _find_non_finite(self, gradients: list[torch.Tensor], device: torch.device) -> tuple[bool, bool]:
        """Return whether any worker's loss, and any worker's gradient, is not finite. Waits for the device, once."""
        shards = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]  # each worker checks its own shard
        # The maximum norm: unlike a sum of squares it cannot overflow, and it is NaN if any element is.
        largest = torch.nn.utils.get_total_norm([g for g in shards if g.numel()], norm_type=float("inf"))
        loss_is_bad = self._loss_is_bad if self._loss_is_bad is not None else torch.tensor(False)
        self._loss_is_bad = None
        flags = torch.stack([loss_is_bad.to(device), ~torch.isfinite(largest).to(device)]).int()
        if dist.is_initialized():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        bad_loss, bad_gradient = flags.tolist()
        return bool(bad_loss), bool(bad_gradient)

    def _raise(self, step: int, names: str) -> None:
        """Save the groups with non-finite numbers, or all groups if no worker has such groups, and raise."""
        groups = self.groups()
        bad = [group for group in groups if group.get("finite") is False]
        chosen = bad if any(all_gather_object(bool(bad))) else groups
        try:
            location = self.save(chosen, step) if chosen else ""
        except OSError as error:
            location = f"nowhere ({error})"
        # No worker raises before all have saved, because the first error ends the other workers.
        locations = ", ".join(dict.fromkeys(filter(None, all_gather_object(location))))
        raise NonFiniteError(
            f"step {step}: {names} not finite in {self.in_a_row} consecutive step{'s' if self.in_a_row > 1 else ''}; "
            f"run.max_bad_steps={self.max_in_a_row} may be skipped; "
            f"the step's groups were saved to {locations or 'nowhere: it has none'}"
        )
