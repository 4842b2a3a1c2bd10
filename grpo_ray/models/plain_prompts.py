"""Prompts of policies without a chat template, such as base models: plain text, as in TRL's standard format."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainPrompts:
    """Replacement for the `apply_chat_template` of a tokenizer without a chat template.

    A prompt's tokens are those of its plain text, with the special tokens that the tokenizer adds to a text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        ids = tokenizer("a")["input_ids"]
        begins = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
        self._beginning = str(tokenizer.bos_token) if begins else ""

    def __deepcopy__(self, memo: Any) -> "PlainPrompts":
        return self  # a copied tokenizer has the same vocabulary

    def __call__(
        self, conversation: Sequence[Any], *, tokenize: bool = True, return_dict: bool = True, **others: Any
    ) -> Any:
        """Render one conversation, or several, as plain text. All other arguments are for templates.

        Returns:
            As `apply_chat_template` of transformers: tokens, with `return_dict` in a mapping; texts if `tokenize` is
            False, with the tokenizer's token for the beginning of a text.
        """
        is_single = not isinstance(conversation[0], list | tuple)
        texts = [plain_text(each) for each in ([conversation] if is_single else conversation)]
        if not tokenize:
            texts = [self._beginning + text for text in texts]
            return texts[0] if is_single else texts
        encoded = self._tokenizer(texts[0] if is_single else texts)
        return encoded if return_dict else encoded["input_ids"]


def uses_plain_prompts(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return True if prompts and completions of this policy are plain text, in rewards too."""
    return isinstance(getattr(tokenizer, "apply_chat_template", None), PlainPrompts)


def plain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of messages, with a blank line between two of them."""
    return "\n\n".join(message["content"] for message in messages)
