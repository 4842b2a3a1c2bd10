"""Tests of what the embedded policies can do before training: the shipped ones, and those that the recipes make."""

from pathlib import Path

import pytest
import torch
from greedy_policy import measure_greedily
from transformers import AutoModelForCausalLM

from grpo_ray.config.loader import load_config
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.examples import example_path
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.models.warm_up import make_policy

EXAMPLES = {
    "tiny-arithmetic": "arithmetic", "tiny-tools": "multiply-tool", "tiny-guess": "guessing-game",
    "tiny-mixture": "mixture",
}  # fmt: skip

SHIPPED = {
    "tiny-arithmetic": (0.215, 0.255), "tiny-tools": (0.14, 0.18), "tiny-guess": (0.125, 0.165),
    "tiny-mixture": (0.235, 0.295),
}  # fmt: skip
"""Policy -> interval of its held-out score. Measured: 0.233 of 600 problems, 0.160 of 500 problems, 0.145 in 100
games, scored by the environment, and 0.265 of 200 problems of arithmetic, the first source of the mixture. Another
processor rounds differently, which may change a few answers."""

MADE = {
    "tiny-arithmetic": (0.15, 0.35), "tiny-tools": (0.1, 0.3), "tiny-guess": (0.1, 0.2), "tiny-mixture": (0.15, 0.35),
}  # fmt: skip
"""The same for a policy made here. Another processor ends with other weights, as another seed does: with three seeds
tiny-tools had 0.160 to 0.210, and tiny-guess 0.145 to 0.149."""


def score_of(name: str, folder: Path) -> float:
    """Return the greedy score of a policy on the held-out set of its example."""
    result = measure_greedily(folder, load_config(example_path(EXAMPLES[name])))
    assert result.unscorable == 0 and result.truncated_share == 0
    return result.pass_at_1.value


@pytest.mark.parametrize("name", EMBEDDED_POLICIES)
def test_shipped_policy_has_its_score(one_thread: None, name: str) -> None:
    low, high = SHIPPED[name]
    assert low < score_of(name, embedded_policy(name)) < high


@pytest.mark.parametrize("name", EMBEDDED_POLICIES)
def test_shipped_policy_loads_in_float32(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_policy(name))
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDED_POLICIES)
def test_recipe_makes_a_policy_of_the_same_kind(name: str, one_thread: None, tmp_path: Path) -> None:
    make_policy(name, tmp_path / name)
    shipped = {path.name: path.stat().st_size for path in embedded_policy(name).iterdir()}
    assert {path.name: path.stat().st_size for path in (tmp_path / name).iterdir()} == shipped
    low, high = MADE[name]
    assert low < score_of(name, tmp_path / name) < high
