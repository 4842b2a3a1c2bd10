"""Tests of the warm-up of embedded policies and of the folder that it makes, with a recipe of three steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_ray.models.demonstrations import POLICIES
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.models.warm_up import build_tokenizer, make_policy, warm_up

Weights = dict[str, torch.Tensor]

RECIPE = POLICIES["tiny-arithmetic"].recipe


@pytest.fixture(scope="module", autouse=True)
def short_recipe() -> Iterator[None]:
    """Reduce the warm-up to three steps on small batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPE, "steps", 3)
        patch.setitem(RECIPE, "batch_size", 8)
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def weights(tokenizer: Any) -> Weights:
    return warm_up(tokenizer).state_dict()


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_warm_up_same_seed_gives_same_weights(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    once = weights(tokenizer)
    assert equal(weights(tokenizer), once)
    monkeypatch.setitem(RECIPE, "seed", 1)
    assert not equal(weights(tokenizer), once)


def test_warm_up_weights_ignore_threads_and_random_state(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPE, "batch_size", 96)  # large enough for several threads
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        once = weights(tokenizer)
        torch.manual_seed(123)
        torch.rand(7)
        torch.set_num_threads(2)
        assert equal(weights(tokenizer), once)
    finally:
        torch.set_num_threads(threads)


def test_warm_up_restores_random_state_and_threads(tokenizer: Any) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        weights(tokenizer)
        assert torch.equal(torch.rand(3), expected) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_warm_up_more_steps_change_weights_and_stay_finite(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    short = weights(tokenizer)
    monkeypatch.setitem(RECIPE, "steps", 12)
    long = weights(tokenizer)
    assert not equal(long, short)
    assert all(torch.isfinite(weight).all() for weight in long.values())


def test_make_policy_rounds_weights_and_replaces_the_folder(tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "left.txt").touch()
    make_policy("tiny-arithmetic", folder)
    assert {path.name for path in folder.iterdir()} == {path.name for path in embedded_policy().iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert equal(loaded, {name: weight.half().float() for name, weight in weights(tokenizer).items()})
