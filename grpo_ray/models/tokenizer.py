"""Tokenizers and the tokenization of chat prompts."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo_ray.errors import ConfigError
from grpo_ray.models.plain_prompts import PlainPrompts


def load_tokenizer(
    path: str, trust_remote_code: bool = False, limits_template: bool = False
) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer for generation: left padding, and a padding token even if the policy has none.

    Without a chat template, prompts are plain text (`plain_prompts`).

    Args:
        path: local folder or hub id.
        limits_template: render its chat template, a program that may be untrusted, in a process with limits.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        tokenizer.apply_chat_template = PlainPrompts(tokenizer)
    elif limits_template:
        from grpo_ray.models.limited_template import LimitedTemplate

        tokenizer.apply_chat_template = LimitedTemplate(tokenizer, path)
    return tokenizer


def require_end_token(tokenizer: PreTrainedTokenizerBase, model_path: str) -> None:
    """Raise ConfigError if a policy's tokenizer has no end token, which demonstrations end with."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path={model_path}: its tokenizer has no end token, with which run.kind=sft ends each completion; "
            "set eos_token in its tokenizer_config.json"
        )


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[dict[str, str]]],
    chat_template_kwargs: Mapping[str, Any],
) -> list[list[int]]:
    """Apply the chat template to prompts of chat messages.

    Training, held-out measuring and `grpo-ray check` all render their prompts with this function.

    Args:
        prompts: (B,) lists of messages.
        chat_template_kwargs: further variables of the template, such as {enable_thinking: false}; the run's are
            `Config.chat_template_kwargs`.

    Returns:
        (B,) lists of token ids.
    """
    if not prompts:
        return []
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True, **chat_template_kwargs)[
        "input_ids"
    ]


def decode_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each completion, (B,), without special tokens.

    For no completions transformers' `batch_decode` returns one empty text, as if there were one without tokens.

    Args:
        token_ids: (B,) token ids; none on a worker that has no problem of a small held-out set.
    """
    return tokenizer.batch_decode(list(token_ids), skip_special_tokens=True) if token_ids else []


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token, "" for special tokens; joined, they are the text of all tokens.

    If a character is split over several tokens, the last of them has all of it, and the others have no text. With a
    tokenizer that is written in Python, each token is decoded alone, and such parts become replacement characters.
    """
    if not getattr(tokenizer, "is_fast", False):
        return decode_texts(tokenizer, [[token] for token in token_ids])
    core, stream = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)
    texts = []
    for token in token_ids:
        try:
            text = stream.step(core, token)
        except Exception as error:  # the library raises no narrower one
            if "Invalid prefix" not in str(error):
                raise
            # This token changes the text before it, as tokens in a completion of any model may.
            stream = DecodeStream(skip_special_tokens=True)
            text = stream.step(core, token)
        texts.append(text or "")
    # The stream withholds the beginning of a character that was cut off.
    whole, joined = core.decode(list(token_ids), skip_special_tokens=True), "".join(texts)
    if texts and whole.startswith(joined):
        texts[-1] += whole[len(joined) :]
    return texts


def overlong_lengths(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[dict[str, str]]],
    limit: int,
    chat_template_kwargs: Mapping[str, Any],
) -> dict[int, int]:
    """Find prompts of more than `limit` tokens.

    Most prompts are far shorter than the limit, and rendering them takes a tenth of the time of tokenizing: a prompt
    with at most `limit` bytes is not tokenized if no token of the tokenizer is shorter than a byte.

    Args:
        prompts: (B,) lists of chat messages.
        limit: maximum length, tokens.
        chat_template_kwargs: further variables of the chat template.

    Returns:
        Index of each longer prompt -> its length in tokens.
    """
    if not prompts:
        return {}
    texts = tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, tokenize=False, **chat_template_kwargs
    )
    bounds = _is_byte_level(tokenizer)
    candidates = [index for index, text in enumerate(texts) if not bounds or _most_bytes(text) > limit]
    tokens = tokenize_prompts(tokenizer, [prompts[index] for index in candidates], chat_template_kwargs)
    return {index: len(ids) for index, ids in zip(candidates, tokens, strict=True) if len(ids) > limit}


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if each token stands for at least one byte of the text, which NFC may have normalized."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return False
    parts = json.loads(backend.to_str())
    normalizer, pre_tokenizer = parts["normalizer"], parts["pre_tokenizer"]
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    # A prefix space would add a byte to the text.
    is_plain = any(step and step["type"] == "ByteLevel" and not step["add_prefix_space"] for step in steps)
    return is_plain and parts["model"]["type"] == "BPE" and (normalizer is None or normalizer["type"] == "NFC")


def _most_bytes(text: str) -> int:
    """Return the maximum number of bytes of a text after NFC, which at most triples its length (UAX 15)."""
    return len(text) if text.isascii() else 3 * len(text.encode("utf-8", "surrogatepass"))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of vocabulary, rules and chat template, which determine a prompt's tokens; 16 hex digits."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps([tokenizer.name_or_path, tokenizer.get_vocab()])
    return hashlib.sha256(f"{rules}\n{tokenizer.chat_template}".encode()).hexdigest()[:16]
