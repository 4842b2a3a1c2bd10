"""Gradients of adapters of every type equal unmodified TRL's with PEFT, in float64."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from adapters import Prepare, ignore, move, narrow_policy, tried
from stock_trl import LONGEST, NEAR, ScriptedLearner, accumulated, exact_llama, largest_difference, train_steps
from trl import GRPOTrainer

from grpo_ray.models.quantized import QUANTIZERS, quantize_policy, quantized_layers, round_policy

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("LORA", "OFT", "LN_TUNING", "DoRA")
"""Tried in each run of the tests; the others are slow in sum."""

IN_FLOAT32 = {"C3A", "DEFT", "FOURIERFT"}
"""Types that compute a part of the update in float32."""


class BudgetLearner(ScriptedLearner):
    """Our learner, with a limit of tokens."""

    overrides = ("grpo.max_completion_length=12", f"grpo.tokens_per_micro_batch={2 * (31 + LONGEST)}")


def policy(name: str, prepare: Prepare = ignore) -> Any:
    """Return a model with an adapter in float64 that was trained for a while, always the same."""
    adapted = narrow_policy(exact_llama(), name, prepare=prepare).double()
    move(adapted, size=0.05)
    return adapted


@tried(QUICK)
def test_gradient_equals_that_of_trl(tmp_path: Path, name: str) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 2} | accumulated(8)
    stock = train_steps(GRPOTrainer, tmp_path, make_model=partial(policy, name), **settings)[0]
    ours, trainer = train_steps(BudgetLearner, tmp_path, make_model=partial(policy, name), **settings)
    assert trainer.savings.layout == "shifted"
    assert any(each.abs().max() > 0 for each in ours.gradients[0].values())
    difference = largest_difference(ours, stock)
    assert difference < (1e-5 if name in IN_FLOAT32 else NEAR), difference


@pytest.mark.parametrize("method", sorted(QUANTIZERS))
@pytest.mark.parametrize("name", ["LORA", pytest.param("OFT", marks=pytest.mark.slow)])
def test_gradient_of_a_policy_in_four_bits_equals_that_of_trl(tmp_path: Path, name: str, method: str) -> None:
    """TRL trains the same adapter on the dequantized policy."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 2} | accumulated(8)
    rounded = partial(policy, name, partial(round_policy, method=method))
    four_bits = partial(policy, name, partial(quantize_policy, method=method))
    stock = train_steps(GRPOTrainer, tmp_path, make_model=rounded, **settings)[0]
    ours, trainer = train_steps(BudgetLearner, tmp_path, make_model=four_bits, **settings)
    assert any(quantized_layers(trainer.model))
    assert any(each.abs().max() > 0 for each in ours.gradients[0].values())
    difference = largest_difference(ours, stock)
    assert difference < NEAR, difference
