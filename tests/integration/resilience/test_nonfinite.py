"""Tests of `NonFiniteMonitor` with a real trainer: non-finite numbers do not reach the weights."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_costs import cheap_trainers
from transformers import Trainer, TrainerCallback, TrainingArguments
from worker_cases import skip_together
from worker_group import run_workers

from grpo_ray.errors import NonFiniteError
from grpo_ray.resilience.nonfinite import JsonGroup, NonFiniteMonitor


@pytest.fixture(autouse=True)
def quick_trainers(one_thread: None) -> Iterator[None]:
    with cheap_trainers():
        yield


class LinearModel(torch.nn.Module):
    """Linear regression with a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - y).square().mean()}


class CorruptingTrainer(Trainer):
    """Trainer that passes its losses to the monitor, like the learner, after `corrupt` changed a micro-batch."""

    corrupt: Callable[[int, torch.Tensor, torch.nn.Module], torch.Tensor]
    monitor: NonFiniteMonitor

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(model, *args, **kwargs)
        loss = self.corrupt(self.state.global_step + 1, loss, model)
        self.monitor.observe_loss(loss)
        return loss


class StepRecorder(TrainerCallback):
    """Callback that records weights, the optimizer's step count and the learning rate after each step."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.steps: list[float] = []
        self.rates: list[float] = []

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        states = optimizer.state.values()
        self.steps.append(float(next(iter(states))["step"]) if states else 0.0)
        self.rates.append(lr_scheduler.get_last_lr()[0])


def nan_loss_at(*steps: int) -> Callable[..., torch.Tensor]:
    """Make the loss and its gradient NaN, as the backward pass of a NaN loss does."""

    def corrupt(step: int, loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        if step not in steps:
            return loss
        for parameter in model.parameters():
            parameter.grad.fill_(math.nan)
        return torch.full_like(loss, math.nan)

    return corrupt


def infinite_gradient_at(*steps: int) -> Callable[..., torch.Tensor]:
    def corrupt(step: int, loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        if step in steps:
            model.layer.weight.grad[0, 1] = math.inf
        return loss

    return corrupt


def make_trainer(
    folder: Path,
    corrupt: Callable[..., torch.Tensor],
    *,
    max_in_a_row: int = 3,
    groups: Callable[[], list[JsonGroup]] = list,
    saved: list[tuple[list[JsonGroup], int]] | None = None,
    **arguments: Any,
) -> tuple[CorruptingTrainer, StepRecorder]:
    def save(chosen: list[JsonGroup], step: int) -> str:
        if saved is not None:
            saved.append((chosen, step))
        return f"bad/step-{step}.json"

    rows = [{"x": torch.tensor([float(n), 1.0]), "y": torch.tensor(float(n))} for n in range(32)]
    monitor, record = NonFiniteMonitor(max_in_a_row, groups, save), StepRecorder()
    settings = dict(
        max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.1, weight_decay=0.1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, lr_scheduler_type="linear",
    )  # fmt: skip
    trainer = CorruptingTrainer(
        model=LinearModel(),
        args=TrainingArguments(output_dir=str(folder), **(settings | arguments)),
        train_dataset=rows,
        callbacks=[monitor, record],
    )
    trainer.corrupt, trainer.monitor = corrupt, monitor
    return trainer, record


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("corrupt", [nan_loss_at(3), infinite_gradient_at(3)], ids=["nan loss", "inf gradient"])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_monitor_bad_step_keeps_weights_and_optimizer(
    tmp_path: Path, corrupt: Callable[..., torch.Tensor], optim: str, max_grad_norm: float
) -> None:
    trainer, record = make_trainer(tmp_path, corrupt, optim=optim, max_grad_norm=max_grad_norm)
    trainer.train()
    assert torch.equal(record.weights[2], record.weights[1])
    assert not torch.equal(record.weights[3], record.weights[2])
    assert all(weights.isfinite().all() for weights in record.weights)
    assert record.steps == [1, 2, 2, 3, 4, 5]
    assert record.rates == pytest.approx([0.1 * (6 - step) / 6 for step in range(1, 7)])  # the schedule advances
    assert (trainer.monitor.skipped, trainer.monitor.in_a_row) == (1, 0)


def test_monitor_good_steps_unchanged(tmp_path: Path) -> None:
    trainer, record = make_trainer(tmp_path, lambda step, loss, model: loss)
    trainer.train()
    plain, expected = make_trainer(tmp_path, lambda step, loss, model: loss)
    plain.remove_callback(NonFiniteMonitor)
    plain.train()
    assert torch.equal(torch.stack(record.weights), torch.stack(expected.weights))


def test_monitor_one_bad_micro_batch_skips_step(tmp_path: Path) -> None:
    seen: list[int] = []

    def corrupt(step: int, loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        seen.append(step)
        return torch.full_like(loss, math.inf) if len(seen) == 3 else loss  # the first of step 2's two

    trainer, record = make_trainer(tmp_path, corrupt)
    trainer.train()
    assert seen[2:4] == [2, 2]
    assert record.steps == [1, 1, 2, 3, 4, 5]


def test_monitor_too_many_in_a_row_raises_and_saves(tmp_path: Path) -> None:
    saved: list[tuple[list[JsonGroup], int]] = []
    groups = [{"problem": "a", "finite": True}, {"problem": "b", "finite": False}]
    trainer, record = make_trainer(tmp_path, nan_loss_at(2, 3, 4), max_in_a_row=2, groups=lambda: groups, saved=saved)
    with pytest.raises(
        NonFiniteError, match=r"step 4: loss and gradient not finite in 3 consecutive steps.*bad/step-4\.json"
    ):
        trainer.train()
    assert saved == [([groups[1]], 4)]
    assert trainer.monitor.skipped == 3
    assert len(record.weights) == 3 and torch.equal(record.weights[2], record.weights[0])


def test_monitor_finite_groups_saves_all(tmp_path: Path) -> None:
    saved: list[tuple[list[JsonGroup], int]] = []
    groups: list[JsonGroup] = [{"problem": "a"}, {"problem": "b", "finite": True}]
    trainer, _ = make_trainer(tmp_path, infinite_gradient_at(1), max_in_a_row=0, groups=lambda: groups, saved=saved)
    with pytest.raises(NonFiniteError, match="step 1: gradient not finite in 1 consecutive"):
        trainer.train()
    assert saved == [(groups, 1)]


def test_monitor_good_step_resets_count(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, nan_loss_at(1, 2, 4, 5), max_in_a_row=2)
    trainer.train()
    assert (trainer.monitor.skipped, trainer.monitor.in_a_row) == (4, 0)


def test_monitor_save_fails_still_raises(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, nan_loss_at(1), max_in_a_row=0, groups=lambda: [{"problem": "a"}])

    def full(groups: list[JsonGroup], step: int) -> str:
        raise OSError("no space left")

    trainer.monitor.save = full
    with pytest.raises(NonFiniteError, match=r"nowhere \(no space left\)"):
        trainer.train()


def test_monitor_checkpoint_keeps_count(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, nan_loss_at(1, 3), max_steps=3, save_strategy="steps", save_steps=3)
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["NonFiniteMonitor"]["attributes"] == {"skipped": 2, "in_a_row": 1}

    resumed, _ = make_trainer(tmp_path, nan_loss_at(4), max_in_a_row=1, groups=lambda: [{"problem": "a"}])
    with pytest.raises(NonFiniteError, match=r"step 4: .* in 2 consecutive steps"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.monitor.skipped == 3


def test_monitor_checkpoint_without_count_resumes(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, nan_loss_at(), max_steps=2, save_strategy="steps", save_steps=2)
    trainer.remove_callback(NonFiniteMonitor)
    trainer.train()
    file = tmp_path / "checkpoint-2" / "trainer_state.json"
    assert "NonFiniteMonitor" not in json.loads(file.read_text())["stateful_callbacks"]

    resumed, _ = make_trainer(tmp_path, nan_loss_at(3), max_steps=4, save_strategy="steps", save_steps=4)
    resumed.train(resume_from_checkpoint=str(file.parent))
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["NonFiniteMonitor"]["attributes"] == {"skipped": 1, "in_a_row": 0}


def test_monitor_workers_skip_together_and_save_bad_groups() -> None:
    (skipped_0, error_0, saved_0), (skipped_1, error_1, saved_1) = run_workers(skip_together, 2)
    assert skipped_0 and skipped_1
    assert error_0 == error_1 and "step 1: gradient not finite in 2 consecutive" in error_0
    assert error_0.endswith("saved to bad/1")
    assert (saved_0, saved_1) == ([], [[{"problem": "of worker 1", "finite": False}]])
