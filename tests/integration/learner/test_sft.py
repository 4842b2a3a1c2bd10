"""Tests of supervised fine-tuning: its gradient against TRL's in float64, and the methods of TRL that it overrides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from library_digest import digest
from stock_trl import NEAR, TOKENIZER, Record, largest_difference
from taught_steps import DEMONSTRATIONS, STEP, train_ours, train_trl
from trl import SFTTrainer
from trl_methods import SFT_METHODS
from worker_group import run_workers

from grpo_ray.data.problem import Problem
from grpo_ray.learner import sft
from grpo_ray.learner.sft import SftLearner, encode_demonstrations

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("function", SFT_METHODS, ids=lambda function: function.__qualname__)
def test_trl_method_we_rely_on_unchanged(function: Callable[..., Any]) -> None:
    assert digest(function) == SFT_METHODS[function]


def test_sft_learner_overrides_only_named_trl_methods() -> None:
    assert SftLearner.__bases__ == (SFTTrainer,)
    overridden = {name for name in vars(SftLearner) if callable(getattr(SFTTrainer, name, None))} - {"__init__"}
    assert overridden == {
        "get_train_dataloader",
        "training_step",
        "_save_checkpoint",
        "_save",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "create_model_card",
    }
    assert overridden <= {function.__name__ for function in SFT_METHODS}
    assert all(f"`{name}`" in sft.__doc__ for name in overridden)


def record_of(taught: dict[str, Any]) -> Record:
    """Return the gradients of a worker as a record."""
    return Record([{name: torch.from_numpy(each) for name, each in step.items()} for step in taught["gradients"]])


def test_gradient_equals_trl_with_any_micro_batches_and_workers(tmp_path: Path) -> None:
    """TRL tokenizes the demonstrations itself, so that equal gradients also show equal tokens and labels."""
    stock = train_trl(tmp_path)
    for per_pass in (8, 4, 1):
        ours = train_ours(0, str(tmp_path), per_pass, 1)
        assert largest_difference(record_of(ours), stock) < NEAR, f"{per_pass} demonstrations in a pass"
    both = run_workers(train_ours, 2, str(tmp_path), 2, 2)
    for taught in both:
        assert largest_difference(record_of(taught), stock) < NEAR, "2 workers"
    drawn = sorted((step, problem) for taught in both for step, problem, _ in taught["groups"])
    assert drawn == [(step, each.id) for step in (1, 2) for each in DEMONSTRATIONS]
    assert [log["completions/mean_length"] for log in ours["logs"]] == [
        sum(length for step, _, (length,) in ours["groups"] if step == number) / STEP for number in (1, 2)
    ]


def test_encoded_demonstration_beyond_limit_is_cut_off() -> None:
    text = "12 = 12"
    problem = Problem(
        id="0" * 16, prompt=[{"role": "user", "content": "7 + 5"}], solution="", columns={"completion": text}
    )
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    [whole] = encode_demonstrations(TOKENIZER, [problem], len(ids) + 1, {})
    assert list(whole.completion_ids) == [*ids, TOKENIZER.eos_token_id] and not whole.truncated
    assert whole.as_row()["labels"] == [-100] * len(whole.prompt_ids) + [*ids, TOKENIZER.eos_token_id]
    [cut] = encode_demonstrations(TOKENIZER, [problem], len(ids), {})
    assert list(cut.completion_ids) == ids and cut.truncated
