"""Tests of the embedded policies' tokenizers, training batches and cache folders (with a fake warm-up)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_ray.data.arithmetic import list_tasks
from grpo_ray.models import toy_policy
from grpo_ray.models.demonstrations import ASSISTANT, END, PAD, POLICIES, SYSTEM, USER, ask, call, result, say
from grpo_ray.models.toy_policy import build_tokenizer, build_toy_policy

OnProgress = Callable[[int, int], None]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


# The tokenizer


@pytest.mark.parametrize("number", ["7", "42", "198", "1234567890", "007"])
def test_tokenizer_each_digit_is_one_token(tokenizer: Any, number: str) -> None:
    assert tokenizer.tokenize(number) == list(number)


def test_tokenizer_digits_stay_single_inside_words(tokenizer: Any) -> None:
    tokens = tokenizer.tokenize("What is 47 + 35? 7+5=12 \\boxed{82}x3y")
    assert not [token for token in tokens if len(token) > 1 and any(c.isdigit() for c in token)]


@given(text=st.text(max_size=60))
@example("What is 47 + 35?")
@example("7+5=12, 4+3+1=8 \\boxed{82}")
@example("  two  spaces \t and\n\nlines\r\n ")
@example("🧮 é ñ 数学の問題 \u2028")
@example("$\\frac{1}{2} \\le x^{2}$ & \\boxed{\\text{Yes}}")
@example("\\boxed{")
@example("a\\boxed{ b\\boxed{")
@example("don't . , ! ?")
@example("\x00\x7f")
@example("".join(map(chr, range(0x250))))  # all one-byte and many two-byte characters of UTF-8
@settings(max_examples=100, deadline=None, derandomize=True)
def test_tokenizer_any_text_is_decoded_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_every_solution_fits_the_jobs_completions(tokenizer: Any) -> None:
    # jobs/configs/arithmetic.yaml truncates completions at 40 tokens, the end token included.
    for task in list_tasks("heldout"):
        for text in (task.worked_solution(), task.mistaken_solution()):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) < 40 and tokenizer.decode(ids) == text


def test_chat_template_renders_a_conversation(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|end|><|user|>What is 1 + 1?<|end|><|assistant|>"
    whole = [*messages, {"role": "assistant", "content": "2"}]
    assert tokenizer.apply_chat_template(whole, tokenize=False) == f"{text}2<|end|>"


def test_tokenizer_chat_markers_are_single_special_tokens(tokenizer: Any) -> None:
    for marker in (PAD, END, SYSTEM, USER, ASSISTANT):
        (token,) = tokenizer(marker)["input_ids"]
        assert tokenizer.decode([token]) == marker
        assert tokenizer.decode([token], skip_special_tokens=True) == ""
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)


def test_build_tokenizer_twice_gives_same_vocabulary(tokenizer: Any) -> None:
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_training_batch_labels_completion_tokens_only(tokenizer: Any) -> None:
    completions = ["2", "0+0=0, 1+1=2 \\boxed{20}"]
    ids, labels = toy_policy._training_batch(tokenizer, [[ask("What is 1 + 1?"), say(text)] for text in completions])
    for row, labelled, completion in zip(ids, labels, completions, strict=True):
        assert tokenizer.decode(row[labelled != -100]) == f"{completion}<|end|>"
        assert torch.equal(row[labelled != -100], labelled[labelled != -100])


def test_training_batch_labels_calls_but_no_results() -> None:
    tokenizer = build_tokenizer("tiny-tools")
    demonstration = [ask("What is 37 * 48?"), call("multiply", a=37, b=48), result("1776"), say("\\boxed{1776}")]
    (row,), (labelled,) = toy_policy._training_batch(tokenizer, [demonstration])
    own = '<|call|>{"name": "multiply", "arguments": {"a": 37, "b": 48}}<|end|>\\boxed{1776}<|end|>'
    assert tokenizer.decode(row[labelled != -100]) == own
    assert tokenizer.decode(row) == "".join(text for text, _ in demonstration)


# The cache folder


class FakeModel:
    """A model that is saved as one file."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


@pytest.fixture
def fake_warm_up(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the warm-up by one of three steps without a model."""

    def warm_up(tokenizer: Any, seed: int, on_progress: OnProgress, name: str) -> FakeModel:
        for step in (1, 2, 3):
            on_progress(step, 3)
        return FakeModel()

    monkeypatch.setattr(toy_policy, "warm_up", warm_up)
    monkeypatch.setattr(toy_policy, "build_tokenizer", lambda name: tokenizer)


def test_build_toy_policy_second_call_reuses_the_folder(tmp_path: Path, fake_warm_up: None) -> None:
    steps = []
    folder = build_toy_policy(0, tmp_path, lambda step, count: steps.append(step))
    assert build_toy_policy(0, tmp_path, lambda step, count: steps.append(step)) == folder
    assert steps == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert {"config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o755  # a cache may be shared


def test_build_toy_policy_seed_and_recipe_select_the_folder(
    tmp_path: Path, fake_warm_up: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [build_toy_policy(0, tmp_path), build_toy_policy(1, tmp_path)]
    folders += [build_toy_policy(0, tmp_path, name=name) for name in ("tiny-tools", "tiny-guess")]
    monkeypatch.setitem(POLICIES["tiny-arithmetic"].recipe, "steps", 4)
    folders.append(build_toy_policy(0, tmp_path))
    assert len(set(folders)) == 5


def test_build_toy_policy_arithmetic_keeps_its_folder(tmp_path: Path, fake_warm_up: None) -> None:
    # Another name would make every user warm the policy up again.
    assert build_toy_policy(0, tmp_path).name == "tiny-policy-924906223a"


def test_build_toy_policy_environment_variable_sets_the_cache(
    tmp_path: Path, fake_warm_up: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_RAY_CACHE", str(tmp_path / "cache"))
    assert build_toy_policy().parent == tmp_path / "cache"


class Interrupted(Exception):
    """Interruption of the warm-up."""


def test_build_toy_policy_interrupted_leaves_no_folder(tmp_path: Path, fake_warm_up: None) -> None:
    def interrupt(step: int, steps: int) -> None:
        if step == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        build_toy_policy(0, tmp_path, interrupt)
    assert list(tmp_path.iterdir()) == []
    assert build_toy_policy(0, tmp_path).is_dir()


def test_build_toy_policy_lost_race_keeps_the_winners_folder(tmp_path: Path, fake_warm_up: None) -> None:
    def overtake(step: int, steps: int) -> None:
        if step == 1:
            build_toy_policy(0, tmp_path)
            (next(tmp_path.glob("*/config.json")).parent / "winner").touch()

    folder = build_toy_policy(0, tmp_path, overtake)
    assert (folder / "winner").exists()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
