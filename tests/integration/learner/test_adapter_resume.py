"""Exact resume of a learner with an adapter of every type, with TRL's own training loop."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import narrow_llama, tried
from problem_stream import STREAM, StreamLearner, train_on_stream

from grpo_ray.models.adapters import merged_weights

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("LORA", "OFT", "LN_TUNING")
"""Tried in each run of the tests."""

STEPS: dict[str, Any] = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "ignore_data_skip": True, "optim": "adamw_torch",
    "learning_rate": 1e-2, "lr_scheduler_type": "linear", "weight_decay": 0.1, "max_grad_norm": 1.0,
}  # fmt: skip


class AdapterLearner(StreamLearner):
    """Our learner, which expects checkpoints of an adapter."""

    overrides: Sequence[str] = (*StreamLearner.overrides, "model.peft={type: LORA}")


@tried(QUICK)
def test_resumed_adapter_ends_with_the_same_weights(tmp_path: Path, name: str) -> None:
    def train(drawn: int, resume: Path | None = None) -> Any:
        # A restarted worker builds the adapter with the run's seed before it loads the checkpoint.
        problems = range(len(STREAM))[drawn:]
        make_model = partial(narrow_llama, name)
        return train_on_stream(AdapterLearner, tmp_path, problems, make_model=make_model, resume=resume, **STEPS)[1]

    whole = {each: weight.clone() for each, weight in merged_weights(train(0).model)}
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").exists() and not (checkpoint / "model.safetensors").exists()
    resumed = dict(merged_weights(train(8, checkpoint).model))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(weight, whole[each]) for each, weight in resumed.items())
    started = dict(merged_weights(narrow_llama(name)))
    assert any(not torch.equal(weight, whole[each]) for each, weight in started.items())
