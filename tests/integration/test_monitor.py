"""Numbers that are not finite, on a real trainer: they never reach the weights, and too many of them stop the run."""

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from grpo_ray.errors import BadNumbersError, GrpoRayError
from grpo_ray.monitor import BadNumbers, Group


class Line(torch.nn.Module):
    """y = w x, with the squared error as its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - y).square().mean()}


class Spoiled(Trainer):
    """A trainer that shows its losses to BadNumbers, as the learner does, after what `spoil` does to a micro-batch."""

    spoil: Callable[[int, torch.Tensor, torch.nn.Module], torch.Tensor]
    bad_numbers: BadNumbers

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(model, *args, **kwargs)
        loss = self.spoil(self.state.global_step + 1, loss, model)
        self.bad_numbers.see_loss(loss)
        return loss


class Diary(TrainerCallback):
    """The weights, the optimizer's own step count and the learning rate after each step."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.steps: list[float] = []
        self.rates: list[float] = []

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs) -> None:
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        states = optimizer.state.values()
        self.steps.append(float(next(iter(states))["step"]) if states else 0.0)
        self.rates.append(lr_scheduler.get_last_lr()[0])


def nan_loss_at(*steps: int) -> Callable[..., torch.Tensor]:
    """The loss is NaN and its gradient with it, as backward of a NaN gives them."""

    def spoil(step: int, loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        if step not in steps:
            return loss
        for parameter in model.parameters():
            parameter.grad.fill_(math.nan)
        return torch.full_like(loss, math.nan)

    return spoil


def one_infinite_gradient_at(*steps: int) -> Callable[..., torch.Tensor]:
    def spoil(step: int, loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        if step in steps:
            model.layer.weight.grad[0, 1] = math.inf
        return loss

    return spoil


def trainer(
    folder: Path,
    spoil: Callable[..., torch.Tensor],
    *,
    max_in_a_row: int = 3,
    groups: Callable[[], list[Group]] = list,
    saved: list[tuple[list[Group], int]] | None = None,
    **arguments: Any,
) -> tuple[Spoiled, Diary]:
    def save(chosen: list[Group], step: int) -> str:
        if saved is not None:
            saved.append((chosen, step))
        return f"bad/step-{step}.json"

    rows = [{"x": torch.tensor([float(n), 1.0]), "y": torch.tensor(float(n))} for n in range(32)]
    bad_numbers, diary = BadNumbers(max_in_a_row, groups, save), Diary()
    settings = dict(
        max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.1, weight_decay=0.1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, lr_scheduler_type="linear",
    )  # fmt: skip
    made = Spoiled(
        model=Line(),
        args=TrainingArguments(output_dir=str(folder), **(settings | arguments)),
        train_dataset=rows,
        callbacks=[bad_numbers, diary],
    )
    made.spoil, made.bad_numbers = spoil, bad_numbers
    return made, diary


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("spoil", [nan_loss_at(3), one_infinite_gradient_at(3)], ids=["nan loss", "inf gradient"])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_a_bad_step_leaves_weights_and_optimizer_as_they_were(
    tmp_path: Path, spoil: Callable[..., torch.Tensor], optim: str, max_grad_norm: float
) -> None:
    made, diary = trainer(tmp_path, spoil, optim=optim, max_grad_norm=max_grad_norm)
    made.train()
    assert torch.equal(diary.weights[2], diary.weights[1])
    assert not torch.equal(diary.weights[3], diary.weights[2])
    assert all(weights.isfinite().all() for weights in diary.weights)
    assert diary.steps == [1, 2, 2, 3, 4, 5]
    assert diary.rates == pytest.approx([0.1 * (6 - step) / 6 for step in range(1, 7)])  # the schedule goes on
    assert (made.bad_numbers.skipped, made.bad_numbers.in_a_row) == (1, 0)


def test_good_steps_are_not_touched(tmp_path: Path) -> None:
    made, diary = trainer(tmp_path, lambda step, loss, model: loss)
    made.train()
    plain, expected = trainer(tmp_path, lambda step, loss, model: loss)
    plain.remove_callback(BadNumbers)
    plain.train()
    assert torch.equal(torch.stack(diary.weights), torch.stack(expected.weights))


def test_a_loss_is_bad_although_only_one_micro_batch_of_the_step_was(tmp_path: Path) -> None:
    seen: list[int] = []

    def spoil(step: int, loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        seen.append(step)
        return torch.full_like(loss, math.inf) if len(seen) == 3 else loss  # the first of step 2's two

    made, diary = trainer(tmp_path, spoil)
    made.train()
    assert seen[2:4] == [2, 2]
    assert diary.steps == [1, 1, 2, 3, 4, 5]


def test_more_bad_steps_in_a_row_than_allowed_stop_the_run(tmp_path: Path) -> None:
    saved: list[tuple[list[Group], int]] = []
    groups = [{"problem": "a", "finite": True}, {"problem": "b", "finite": False}]
    made, diary = trainer(tmp_path, nan_loss_at(2, 3, 4), max_in_a_row=2, groups=lambda: groups, saved=saved)
    with pytest.raises(BadNumbersError, match=r"step 4: loss and gradient not finite, 3 times.*bad/step-4\.json"):
        made.train()
    assert saved == [([groups[1]], 4)]
    assert made.bad_numbers.skipped == 3
    assert len(diary.weights) == 3 and torch.equal(diary.weights[2], diary.weights[0])


def test_an_infinite_gradient_of_a_finite_loss_is_named_alone_and_all_groups_are_saved(tmp_path: Path) -> None:
    saved: list[tuple[list[Group], int]] = []
    groups = [{"problem": "a"}, {"problem": "b", "finite": True}]
    made, _ = trainer(tmp_path, one_infinite_gradient_at(1), max_in_a_row=0, groups=lambda: groups, saved=saved)
    with pytest.raises(BadNumbersError, match="step 1: gradient not finite, 1 times"):
        made.train()
    assert saved == [(groups, 1)]


def test_the_count_begins_again_after_a_good_step(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, nan_loss_at(1, 2, 4, 5), max_in_a_row=2)
    made.train()
    assert (made.bad_numbers.skipped, made.bad_numbers.in_a_row) == (4, 0)


def test_groups_that_cannot_be_saved_do_not_hide_the_error(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, nan_loss_at(1), max_in_a_row=0, groups=lambda: [{"problem": "a"}])

    def full(groups: list[Group], step: int) -> str:
        raise OSError("no space left")

    made.bad_numbers.save = full
    with pytest.raises(BadNumbersError, match=r"nowhere \(no space left\)"):
        made.train()


def test_the_count_survives_a_checkpoint(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, nan_loss_at(1, 3), max_steps=3, save_strategy="steps", save_steps=3)
    made.train()
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["BadNumbers"]["attributes"] == {"skipped": 2, "in_a_row": 1}

    again, _ = trainer(tmp_path, nan_loss_at(4), max_in_a_row=1, groups=lambda: [{"problem": "a"}])
    with pytest.raises(BadNumbersError, match=r"step 4: .* 2 times in a row"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.bad_numbers.skipped == 3


def test_a_checkpoint_from_before_there_was_a_count_can_be_gone_on_from(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, nan_loss_at(), max_steps=2, save_strategy="steps", save_steps=2)
    made.remove_callback(BadNumbers)
    made.train()
    file = tmp_path / "checkpoint-2" / "trainer_state.json"
    assert "BadNumbers" not in json.loads(file.read_text())["stateful_callbacks"]

    again, _ = trainer(tmp_path, nan_loss_at(3), max_steps=4, save_strategy="steps", save_steps=4)
    again.train(resume_from_checkpoint=str(file.parent))
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["BadNumbers"]["attributes"] == {"skipped": 1, "in_a_row": 0}


class Scaler:
    """A scaler of float16 losses that stands at some scale."""

    def __init__(self, scale: float):
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


def look(bad_numbers: BadNumbers, loss: float, gradient: list[float], scaler: Scaler | None = None) -> torch.Tensor:
    """Let it look at one step of one parameter, and give that parameter."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor(gradient)
    optimizer = torch.optim.AdamW([weight])
    optimizer.scaler = scaler  # accelerate's optimizer has one, or None
    bad_numbers.see_loss(torch.tensor(loss))
    args = TrainingArguments(use_cpu=True, report_to="none")
    bad_numbers.on_pre_optimizer_step(args, TrainerState(), TrainerControl(), optimizer=optimizer)
    return weight


def test_float16_looking_for_its_scale_is_not_a_bad_step() -> None:
    bad_numbers = BadNumbers(0, list, lambda groups, step: "")
    assert look(bad_numbers, 1.0, [math.inf, 0.0], Scaler(65536.0)).grad is not None  # the scaler's to skip
    assert bad_numbers.skipped == 0
    with pytest.raises(BadNumbersError):  # no smaller scale will help
        look(bad_numbers, 1.0, [math.inf, 0.0], Scaler(1.0))
    with pytest.raises(BadNumbersError):  # the scale has nothing to do with the loss
        look(bad_numbers, math.nan, [1.0, 0.0], Scaler(65536.0))


def test_a_large_gradient_is_not_a_bad_one() -> None:
    assert look(BadNumbers(0, list, lambda groups, step: ""), 1.0, [3e38, -3e38]).grad is not None


def one_of_two(rank: int, folder: str) -> None:
    """Worker 1 sees a NaN loss, worker 0 an infinite gradient one step later; each tells what it did."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    groups = [{"problem": f"of worker {rank}", "finite": rank == 0}]
    kept: list[Any] = []

    def save(chosen: list[Group], step: int) -> str:
        kept.append(chosen)
        return f"bad/{rank}"

    bad_numbers = BadNumbers(1, lambda: groups, save)
    skipped = look(bad_numbers, [1.0, math.nan][rank], [1.0, 1.0]).grad is None
    try:
        look(bad_numbers, 1.0, [[math.inf, 1.0], [1.0, 1.0]][rank])
        said = "nothing"
    except BadNumbersError as error:
        said = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps([skipped, said, kept]))
    dist.destroy_process_group()


def test_workers_decide_alike_and_only_the_bad_groups_are_saved(tmp_path: Path) -> None:
    mp.start_processes(one_of_two, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    (skipped_0, said_0, kept_0), (skipped_1, said_1, kept_1) = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert skipped_0 and skipped_1
    assert said_0 == said_1 and "step 1: gradient not finite, 2 times" in said_0 and said_0.endswith("lie in bad/1")
    assert (kept_0, kept_1) == ([], [[{"problem": "of worker 1", "finite": False}]])


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(BadNumbersError("step 4: loss not finite")))
    assert isinstance(error, GrpoRayError) and isinstance(error, ArithmeticError)
    assert str(error) == "step 4: loss not finite"
