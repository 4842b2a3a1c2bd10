"""Is this run healthy? A loss or gradient that is not a finite number never reaches the weights.

What else goes wrong with a run, hangs and errors that come again, is in `failures.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from grpo_ray.errors import NonFiniteError

Group = dict[str, Any]
"""A group in JSON's types. `finite`, if there, says whether all of its numbers are."""


class NonFiniteMonitor(TrainerCallback, ExportableState):
    """Skips an optimizer step whose loss or gradient is not finite; too many of them in a row stop the run.

    Workers decide together: what one of them finds bad, all of them skip. The counts are part of a checkpoint.
    """

    def __init__(self, max_in_a_row: int, groups: Callable[[], list[Group]], save: Callable[[list[Group], int], str]):
        """
        max_in_a_row: how many steps in a row may be skipped; one more raises BadNumbersError.
        groups: gives this worker's groups of the present step.
        save: keeps groups of a step and says where; an OSError of it does not hide the error that they belong to.
        """
        self.max_in_a_row = max_in_a_row
        self.groups = groups
        self.save = save
        self.skipped = 0
        """Steps skipped in the whole life of the run."""
        self.in_a_row = 0
        """Steps skipped since the last good one."""
        self._bad_loss: torch.Tensor | None = None

    def state(self) -> dict[str, Any]:
        """What transformers writes into a checkpoint's `trainer_state.json`."""
        return {"args": {}, "attributes": {"skipped": self.skipped, "in_a_row": self.in_a_row}}

    def see_loss(self, loss: torch.Tensor) -> None:
        """Look at a micro-batch's loss, of any shape, without waiting for the device."""
        bad = ~torch.isfinite(loss.detach()).all()
        self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Put back here and not by transformers' `restore_callback_states_from_checkpoint`: that would replace this
        # object by a new one, which nobody else knows. The default is for a checkpoint from before there was a state:
        # without an entry transformers fails to write the next one.
        stored = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.skipped, self.in_a_row = stored["attributes"]["skipped"], stored["attributes"]["in_a_row"]

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
        bad_loss, bad_gradient = self._look([p.grad for p in parameters], args.device)
        if not (bad_loss or bad_gradient):
            self.in_a_row = 0
            return
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None and not bad_loss and scaler.get_scale() > 1:
            return  # float16's loss scaling is still looking for its scale; the scaler skips such a step by itself
        for parameter in parameters:
            parameter.grad = None  # an optimizer passes over it: no update, no decay, no change of its moments
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row > self.max_in_a_row:
            names = [name for name, bad in (("loss", bad_loss), ("gradient", bad_gradient)) if bad]
            self._stop(state.global_step + 1, " and ".join(names))

    def _look(self, gradients: list[torch.Tensor], device: torch.device) -> tuple[bool, bool]:
        """Whether any worker's loss, and any worker's gradient, is bad. The only wait for the device."""
        shards = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]  # each worker looks at its own
        # The largest magnitude: unlike a sum of squares it cannot overflow, and a NaN shows in it.
        largest = torch.nn.utils.get_total_norm([g for g in shards if g.numel()], norm_type=float("inf"))
        loss = self._bad_loss if self._bad_loss is not None else torch.tensor(False)
        self._bad_loss = None
        bad = torch.stack([loss.to(device), ~torch.isfinite(largest).to(device)]).int()
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        bad_loss, bad_gradient = bad.tolist()
        return bool(bad_loss), bool(bad_gradient)

    def _stop(self, step: int, what: str) -> None:
        """Save the groups with bad numbers, or all if none is known to have them, and raise."""
        groups = self.groups()
        bad = [group for group in groups if group.get("finite") is False]
        chosen = bad if any(_of_all_workers(bool(bad))) else groups
        try:
            place = self.save(chosen, step) if chosen else ""
        except OSError as error:
            place = f"nowhere ({error})"
        # No worker raises before all have saved: the first error ends the others.
        places = ", ".join(dict.fromkeys(filter(None, _of_all_workers(place)))) or "nowhere: there are none"
        raise NonFiniteError(
            f"step {step}: {what} not finite, {self.in_a_row} times in a row where run.max_bad_steps="
            f"{self.max_in_a_row} may be skipped; the groups lie in {places}"
        )


def _of_all_workers(value: Any) -> list[Any]:
    """Every worker's value; waits for all of them."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
