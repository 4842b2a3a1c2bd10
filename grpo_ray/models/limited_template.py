"""Chat template of a policy that may be a stranger's, rendered in a process with limits (`template_process.py`)."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from grpo_ray.errors import ConfigError
from grpo_ray.models.template_process import CPU_SECONDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS_PER_REQUEST = 256
"""Conversations rendered at once."""
ANSWER_BYTES = 1 << 28
"""Largest answer."""
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "HOME")
"""Environment variables of the process: no secrets."""
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables that keep libraries from reserving memory for each processor; templates compute no matrices."""


class ChatTemplateError(ConfigError, TemplateError):
    """A chat template fails, or exceeds the limits of its process."""


class LimitedTemplate:
    """Replacement of a tokenizer's `apply_chat_template`, with the same tokens.

    Only the template runs in the process; this one tokenizes what it has rendered.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", path: str):
        """
        Args:
            path: where the tokenizer is from, for messages.
        """
        self._tokenizer, self._path = tokenizer, path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

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
            self._end()

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.kill()
        return process.wait()

    def _render(self, request: dict[str, Any]) -> list[str]:
        with self._lock:
            process = self._process = self._process or _start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(request, default=_to_json).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline(ANSWER_BYTES)
            except BrokenPipeError:
                line = b""
            if not line.endswith(b"\n"):
                status = process.wait() if not line else 0
                self._end()
                if status == -signal.SIGXCPU:
                    raise self._error(f"takes more than {CPU_SECONDS} s of processor time")
                raise self._error("renders too long a text, or has ended its process")
        answer = json.loads(line)
        if "error" in answer:
            raise self._error(answer["error"])
        texts: list[str] = answer["texts"]
        return texts

    def _error(self, what: str) -> ChatTemplateError:
        return ChatTemplateError(f"{self._path}: its chat template {what}")


def _to_json(value: Any) -> Any:
    """Convert a setting of another mapping's or list's type for JSON."""
    return dict(value) if isinstance(value, Mapping) else list(value)


def _start() -> "subprocess.Popen[bytes]":
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | SINGLE_THREADED
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_ray.models.template_process"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the command
    )
