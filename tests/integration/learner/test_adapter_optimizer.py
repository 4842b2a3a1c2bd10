"""PEFT's optimizers for LoRA in our learner: their rates, their updates, and an exact resume."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import narrow_llama
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from problem_stream import STREAM, StreamLearner, train_on_stream

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS: dict[str, Any] = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "ignore_data_skip": True, "optim": "adamw_torch",
    "learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_grad_norm": 1.0,
}  # fmt: skip


def train(folder: Path, optimizer: str, drawn: int = 0, resume: Path | None = None) -> Any:
    class OptimizerLearner(StreamLearner):
        overrides: Sequence[str] = (
            *StreamLearner.overrides, "model.lora={rank: 8, alpha: 16}", f"model.adapter_optimizer={optimizer}",
        )  # fmt: skip

    problems = range(len(STREAM))[drawn:]
    return train_on_stream(
        OptimizerLearner, folder, problems, make_model=partial(narrow_llama, "LORA"), resume=resume, **STEPS
    )


@pytest.mark.parametrize("optimizer", ["{name: loraplus, ratio: 4}", "{name: lorafa}"])
def test_adapter_optimizer_resumes_exactly(tmp_path: Path, optimizer: str) -> None:
    whole = dict(train(tmp_path, optimizer)[1].model.named_parameters())
    again = dict(train(tmp_path, optimizer, 8, tmp_path / "checkpoint-2")[1].model.named_parameters())
    assert all(torch.equal(weight, whole[name]) for name, weight in again.items())


def test_loraplus_takes_the_steps_of_peft(tmp_path: Path) -> None:
    """The gradients of the run are given to PEFT's optimizer by hand."""
    record, trainer = train(tmp_path, "{name: loraplus, ratio: 4}")
    expect(record, trainer, partial(create_loraplus_optimizer, optimizer_cls=torch.optim.AdamW, loraplus_lr_ratio=4))
    rates = {group["initial_lr"] for group in trainer.optimizer.param_groups if group["params"]}
    assert rates == {1e-2, 4e-2}


def test_lorafa_trains_the_second_matrix_as_peft_does(tmp_path: Path) -> None:
    record, trainer = train(tmp_path, "{name: lorafa}")
    expect(record, trainer, partial(create_lorafa_optimizer, r=8, lora_alpha=16))
    moved = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert moved and all("lora_B" in name for name in moved)


def expect(record: Any, trainer: Any, create: Any) -> None:
    """Compare the weights of a run with those that PEFT's optimizer reaches with the same gradients."""
    by_hand = narrow_llama("LORA")
    optimizer = create(by_hand, lr=1e-2)
    weights = dict(by_hand.named_parameters())
    for number, gradients in enumerate(record.gradients):
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("first", group["lr"]) * (1 - number / 4)
        norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients.values()))
        for name, gradient in gradients.items():
            weights[name].grad = (gradient * min(1.0, 1.0 / float(norm + 1e-6))).to(weights[name].dtype)
        optimizer.step()
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-6, msg=name)
