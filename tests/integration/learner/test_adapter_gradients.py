"""Gradients of adapters of every type equal unmodified TRL's with PEFT, in float64."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import SMALL, VARIANTS, move, settings_of
from peft import get_peft_model
from stock_trl import LONGEST, NEAR, ScriptedLearner, accumulated, exact_llama, largest_difference, train_steps
from trl import GRPOTrainer

from grpo_ray.models.adapters import build_config

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("LORA", "OFT", "LN_TUNING", "DoRA")
"""Tried in each run of the tests; the others are slow in sum."""

FITTED: dict[str, dict[str, Any]] = {
    "VBLORA": {"vector_length": 16},
    "SUPERTUNING": {"sparsity": 0.5},
    "ROAD": {"group_size": 16},
    "C3A": {"block_size": 16},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5]},
}
"""Fields for layers of 16 to 64 inputs."""

NARROW = {"C3A", "DEFT", "FOURIERFT"}
"""Types that compute a part of the update in float32."""


class BudgetLearner(ScriptedLearner):
    """Our learner, with a limit of tokens."""

    overrides = ("grpo.max_completion_length=12", f"grpo.tokens_per_micro_batch={2 * (31 + LONGEST)}")


def policy(name: str) -> Any:
    """Return a model with an adapter in float64 that was trained for a while, always the same."""
    model = exact_llama()
    if name in ("BEFT", "biases", "bias of the adapter"):  # of layers that have a bias
        for module in list(model.modules()):
            if isinstance(module, torch.nn.Linear) and module.out_features in (16, 32):
                module.bias = torch.nn.Parameter(torch.zeros(module.out_features, dtype=torch.float64))
    torch.manual_seed(1)
    settings = settings_of(name)
    # Some types begin with a decomposition that takes no float64.
    adapted = get_peft_model(model.float(), build_config(settings | FITTED.get(settings["type"], {}))).double()
    move(adapted, size=0.05)
    return adapted


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*SMALL, *VARIANTS)]
)
def test_gradient_equals_that_of_trl(tmp_path: Path, name: str) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 2} | accumulated(8)
    stock = train_steps(GRPOTrainer, tmp_path, make_model=partial(policy, name), **settings)[0]
    ours, trainer = train_steps(BudgetLearner, tmp_path, make_model=partial(policy, name), **settings)
    assert trainer.savings.layout == "shifted"
    assert any(each.abs().max() > 0 for each in ours.gradients[0].values())
    difference = largest_difference(ours, stock)
    assert difference < (1e-5 if name in NARROW else NEAR), difference
