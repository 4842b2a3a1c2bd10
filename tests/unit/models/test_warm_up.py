"""Tests of the making of embedded policies: tokenizers, training batches and the command."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_ray.data.arithmetic import list_tasks
from grpo_ray.models import warm_up
from grpo_ray.models.demonstrations import ASSISTANT, END, PAD, SYSTEM, USER, ask, call, result, say
from grpo_ray.models.warm_up import build_tokenizer


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
    # The example `arithmetic` truncates completions at 40 tokens, the end token included.
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
    ids, labels = warm_up._training_batch(tokenizer, [[ask("What is 1 + 1?"), say(text)] for text in completions])
    for row, labelled, completion in zip(ids, labels, completions, strict=True):
        assert tokenizer.decode(row[labelled != -100]) == f"{completion}<|end|>"
        assert torch.equal(row[labelled != -100], labelled[labelled != -100])


def test_training_batch_labels_calls_but_no_results() -> None:
    tokenizer = build_tokenizer("tiny-tools")
    demonstration = [ask("What is 37 * 48?"), call("multiply", a=37, b=48), result("1776"), say("\\boxed{1776}")]
    (row,), (labelled,) = warm_up._training_batch(tokenizer, [demonstration])
    own = '<|call|>{"name": "multiply", "arguments": {"a": 37, "b": 48}}<|end|>\\boxed{1776}<|end|>'
    assert tokenizer.decode(row[labelled != -100]) == own
    assert tokenizer.decode(row) == "".join(text for text, _ in demonstration)


# The command


def test_main_unknown_name_makes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        warm_up.main(["tiny-arithmetics"])
    shown = capsys.readouterr().err.replace("'", "")  # Python 3.12 and later quote no choices
    assert "choose from tiny-arithmetic, tiny-tools, tiny-guess, tiny-mixture" in shown
