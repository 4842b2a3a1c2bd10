"""Chat template of a policy that may be untrusted, rendered in a process with limits (`template_process.py`)."""

import json
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from grpo_ray.errors import ConfigError
from grpo_ray.models.template_process import CPU_SECONDS
from grpo_ray.processes.request_client import RequestClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS_PER_REQUEST = 256
"""Maximum number of conversations in a request."""
ANSWER_BYTES = 1 << 28
"""Maximum size of an answer, bytes."""
ENVIRONMENT = frozenset({"PATH", "LD_LIBRARY_PATH", "LANG", "HOME"})
"""Environment variables that the process gets: no secrets."""


class ChatTemplateError(ConfigError, TemplateError):
    """Chat template that failed, or exceeded the limits of its process."""


class LimitedTemplate:
    """Replacement for a tokenizer's `apply_chat_template` that returns the same tokens.

    Only the template runs in the process; the calling process tokenizes the rendered text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", path: str):
        """
        Args:
            path: origin of the tokenizer, for messages.
        """
        self._tokenizer, self._path = tokenizer, path
        self._lock = threading.Lock()
        self._client = RequestClient("grpo_ray.models.template_process", ENVIRONMENT.__contains__)

    def __deepcopy__(self, memo: Any) -> "LimitedTemplate":
        return self  # a copied tokenizer has the same vocabulary, and passes its own template

    def __call__(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Render one conversation, or several, as `apply_chat_template` of transformers does.

        Raises:
            ChatTemplateError: the template fails, or exceeds a limit.
        """
        is_single = not isinstance(conversation[0], list | tuple)
        conversations = [conversation] if is_single else list(conversation)
        request = {
            **self._tokenizer.special_tokens_map,
            **variables,
            "tools": tools,
            "documents": documents,
            "chat_template": self._tokenizer.get_chat_template(chat_template, tools),
            "add_generation_prompt": add_generation_prompt,
        }
        texts: list[str] = []
        for first in range(0, len(conversations), PROMPTS_PER_REQUEST):
            part = conversations[first : first + PROMPTS_PER_REQUEST]
            texts += self._render(request | {"conversations": part})
        if not tokenize:
            return texts[0] if is_single else texts
        encoded = self._tokenizer(texts[0] if is_single else texts, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]

    def close(self) -> None:
        """End the process; the next call starts another one."""
        with self._lock:
            self._client.stop()

    def _render(self, request: dict[str, Any]) -> list[str]:
        with self._lock:
            data, code = self._client.ask(json.dumps(request, default=_to_json).encode(), ANSWER_BYTES)
        if data is None and code == -signal.SIGXCPU:
            raise self._error(f"takes more than {CPU_SECONDS} s of processor time")
        if data is None:
            raise self._error("renders too long a text, or has ended its process")
        answer = json.loads(data)
        if "error" in answer:
            raise self._error(answer["error"])
        texts: list[str] = answer["texts"]
        return texts

    def _error(self, what: str) -> ChatTemplateError:
        return ChatTemplateError(f"{self._path}: its chat template {what}")


def _to_json(value: Any) -> Any:
    """Convert a mapping to a dict, and any other collection to a list, for `json.dumps`."""
    return dict(value) if isinstance(value, Mapping) else list(value)
