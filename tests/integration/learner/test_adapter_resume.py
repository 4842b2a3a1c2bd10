"""Exact resume of a learner with an adapter of every type, with TRL's own training loop."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import narrow_llama, tried
from problem_stream import STREAM, StreamLearner, train_on_stream

from grpo_ray.config.loader import load_config
from grpo_ray.errors import CheckpointError
from grpo_ray.learner.checkpoint_kind import check_checkpoint_kind
from grpo_ray.models.adapters import merged_weights
from grpo_ray.models.quantized import QUANTIZERS, Quantization, quantize_policy, read_quantization

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
    resume_and_compare(tmp_path, AdapterLearner, partial(narrow_llama, name))


@pytest.mark.parametrize("method", sorted(QUANTIZERS))
def test_resumed_adapter_of_a_policy_in_four_bits_ends_with_the_same_weights(tmp_path: Path, method: str) -> None:
    class FourBitLearner(AdapterLearner):
        overrides = (*AdapterLearner.overrides, f"model.quantization={method}", "model.dtype=bfloat16")

    make_model = partial(narrow_llama, "LORA", partial(quantize_policy, method=method))
    resume_and_compare(tmp_path, FourBitLearner, make_model)
    checkpoint = str(tmp_path / "checkpoint-2")
    assert read_quantization(checkpoint) == Quantization(method, "bfloat16")
    with pytest.raises(
        CheckpointError, match=f"belongs to a policy in {method} of bfloat16, and the config names a pol"
    ):
        check_checkpoint_kind(checkpoint, load_config(None, AdapterLearner.overrides))


def resume_and_compare(tmp_path: Path, learner: type[StreamLearner], make_model: Callable[[], Any]) -> None:
    """Train for four steps, and for the last two again from a checkpoint; compare the merged weights."""

    def train(drawn: int, resume: Path | None = None) -> Any:
        # A restarted worker builds the adapter with the run's seed before it loads the checkpoint.
        problems = range(len(STREAM))[drawn:]
        return train_on_stream(learner, tmp_path, problems, make_model=make_model, resume=resume, **STEPS)[1]

    whole = {each: weight.clone() for each, weight in merged_weights(train(0).model)}
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").exists() and not (checkpoint / "model.safetensors").exists()
    resumed = dict(merged_weights(train(8, checkpoint).model))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(weight, whole[each]) for each, weight in resumed.items())
    started = dict(merged_weights(make_model()))
    assert any(not torch.equal(weight, whole[each]) for each, weight in started.items())
