"""Tokenizers and the tokenization of chat prompts."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer for generation: left padding, and a padding token even if the policy has none.

    Args:
        path: local folder or hub id.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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
