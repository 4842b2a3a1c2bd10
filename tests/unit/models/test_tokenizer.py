"""Tests of prompt lengths (the shortcut for short prompts), the tokenizer's digest, and the texts of tokens."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.models.tokenizer import (
    decode_texts,
    load_tokenizer,
    overlong_lengths,
    token_texts,
    tokenize_prompts,
    tokenizer_digest,
)
from grpo_ray.models.warm_up import build_tokenizer
from grpo_ray.tools.template import assistant_messages

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


# Texts of tokens


def test_token_texts_join_to_the_text(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = toy_tokenizer
    for text in ("12 + 7 = 19, so \\boxed{19}", "é👩\u200d🔬 naïve\n", "", "  two  spaces "):
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        texts = token_texts(tokenizer, ids)
        assert len(texts) == len(ids) and "".join(texts) == text
        assert texts[-1] == ""  # a special token has no text


def test_token_texts_character_of_several_tokens_is_in_the_last(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = toy_tokenizer
    ids = tokenizer("é")["input_ids"]
    assert len(ids) == 2 and token_texts(tokenizer, ids) == ["", "é"]
    assert token_texts(tokenizer, ids[:1]) == ["\ufffd"]  # cut off inside of a character, as decoding shows it
    cut = [*ids[:1], *tokenizer("a")["input_ids"]]
    assert "".join(token_texts(tokenizer, cut)) == tokenizer.decode(cut)


def test_token_texts_any_tokens_join_to_the_decoded_text(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    for length in [1, 2, 3, 40] * 30:  # most of the sequences are no text in UTF-8
        ids = [rng.randrange(384) for _ in range(length)]
        assert "".join(token_texts(toy_tokenizer, ids)) == toy_tokenizer.decode(ids, skip_special_tokens=True)


def test_token_texts_python_tokenizer_decodes_each_alone() -> None:
    class PythonTokenizer:
        is_fast = False

        def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
            return [f"<{token}>" for (token,) in ids]

    assert token_texts(PythonTokenizer(), [3, 4]) == ["<3>", "<4>"]


@pytest.mark.parametrize("name", ["tiny-arithmetic", "tiny-tools"])  # plain text, and a grammar of turns
def test_no_completions_have_no_texts_and_no_messages(name: str) -> None:
    tokenizer = load_tokenizer(str(embedded_policy(name)))
    assert decode_texts(tokenizer, []) == [] == assistant_messages(tokenizer, [], [])
    ids = tokenizer(["1 + 2"])["input_ids"]
    assert decode_texts(tokenizer, ids) == ["1 + 2"] == tokenizer.batch_decode(ids, skip_special_tokens=True)
