"""Tests of the toy policy's warm-up and of its saved folder, with a real model and a recipe of three steps."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_ray.data.arithmetic import list_tasks
from grpo_ray.models.demonstrations import END, POLICIES, USER
from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts
from grpo_ray.models.toy_policy import build_tokenizer, build_toy_policy, warm_up

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


@pytest.fixture(scope="module")
def folder(short_recipe: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the policy of seed 0."""
    return build_toy_policy(0, tmp_path_factory.mktemp("policy"))


def weights(
    tokenizer: Any, seed: int = 0, on_progress: Callable[[int, int], None] = lambda step, steps: None
) -> Weights:
    return warm_up(tokenizer, seed, on_progress).state_dict()


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_warm_up_same_seed_gives_same_weights(tokenizer: Any) -> None:
    steps: list[tuple[int, int]] = []
    once = weights(tokenizer, on_progress=lambda step, count: steps.append((step, count)))
    assert equal(weights(tokenizer), once)
    assert not equal(weights(tokenizer, seed=1), once)
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_warm_up_weights_ignore_threads_and_random_state(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPE, "batch_size", 96)  # large enough for several threads
    threads = torch.get_num_threads()
    once = weights(tokenizer)
    try:
        torch.manual_seed(123)
        torch.rand(7)
        torch.set_num_threads(1)
        assert equal(weights(tokenizer), once)
    finally:
        torch.set_num_threads(threads)


def test_warm_up_restores_random_state_and_threads(tokenizer: Any) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    weights(tokenizer)
    assert torch.equal(torch.rand(3), expected) and torch.get_num_threads() == threads


def test_warm_up_more_steps_change_weights_and_stay_finite(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    short = weights(tokenizer)
    monkeypatch.setitem(RECIPE, "steps", 12)
    long = weights(tokenizer)
    assert not equal(long, short)
    assert all(torch.isfinite(weight).all() for weight in long.values())


def test_toy_policy_loads_as_hugging_face_folder(folder: Path, tokenizer: Any) -> None:
    model, loaded = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == loaded.eos_token_id == loaded.convert_tokens_to_ids(END)
    assert equal(model.state_dict(), weights(tokenizer))


def test_toy_policy_loaded_tokenizer_equals_the_built_one(folder: Path, tokenizer: Any) -> None:
    # transformers may load another tokenizer class, selected by the model type.
    loaded = load_tokenizer(str(folder))
    texts = ["What is 47 + 35? 🧮", "\\boxed{82}", "4711 words don't\n\n matter", "  x ", "日本語", f"{USER}q{END}"]
    for text in (*texts, *(task.worked_solution() for task in list_tasks("heldout")[:100])):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    assert tokenize_prompts(loaded, [messages], {}) == tokenize_prompts(tokenizer, [messages], {})


def test_toy_policy_every_token_has_an_embedding_row(folder: Path) -> None:
    loaded = load_tokenizer(str(folder))
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert max(loaded("What is 1 + 1?<|endoftext|><|im_end|><s></s>")["input_ids"]) < rows
    assert len(loaded) <= rows
