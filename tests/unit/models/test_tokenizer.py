"""Tests of prompt lengths: the shortcut for prompts that are surely short enough, and the tokenizer's digest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_ray.models.tokenizer import overlong_lengths, tokenize_prompts, tokenizer_digest
from grpo_ray.models.toy_policy import build_tokenizer

TEMPLATE = "{{ prefix }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def toy_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def byte_tokenizer(normalizer: normalizers.Normalizer | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        core.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE)


@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=5), limit=st.integers(1, 60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_overlong_lengths_are_those_of_tokenized_prompts(
    toy_tokenizer: PreTrainedTokenizerFast, texts: list[str], limit: int
) -> None:
    prompts = [user(text) for text in texts]
    lengths = [len(ids) for ids in tokenize_prompts(toy_tokenizer, prompts, {})]
    assert overlong_lengths(toy_tokenizer, prompts, limit, {}) == {n: x for n, x in enumerate(lengths) if x > limit}


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC()])
def test_overlong_lengths_text_that_grows_when_normalised_is_found(normalizer: normalizers.Normalizer | None) -> None:
    tokenizer = byte_tokenizer(normalizer)
    prompts = [user("\U0001d160"), user("\ufdfa"), user("abc")]  # 4 bytes, 12 in NFC; 3 bytes, 33 in NFKC
    lengths = [len(ids) for ids in tokenize_prompts(tokenizer, prompts, {})]
    for limit in range(1, 40):
        found = overlong_lengths(tokenizer, prompts, limit, {})
        assert found == {number: length for number, length in enumerate(lengths) if length > limit}


def test_overlong_lengths_counts_the_chat_template_with_its_arguments() -> None:
    tokenizer = byte_tokenizer(None)
    assert overlong_lengths(tokenizer, [user("abc")], 5, {"prefix": "xyz"}) == {0: 6}
    assert overlong_lengths(tokenizer, [user("abc")], 5, {"prefix": "xy"}) == {}
    assert overlong_lengths(tokenizer, [], 5, {}) == {}


def test_tokenizer_digest_changes_with_template_and_rules() -> None:
    first, again, other = byte_tokenizer(None), byte_tokenizer(None), byte_tokenizer(normalizers.NFC())
    assert tokenizer_digest(first) == tokenizer_digest(again) != tokenizer_digest(other)
    again.chat_template += " "
    assert tokenizer_digest(first) != tokenizer_digest(again)
