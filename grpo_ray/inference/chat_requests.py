"""The subset of OpenAI's chat completions requests that the engine's endpoint supports.

A field that would change how tokens are sampled, or that has no meaning here, is refused by name instead of ignored,
because the log-probabilities of a trajectory must be those of the run's own sampling.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.sampling import DEFAULTS
from grpo_ray.inference.trajectories import Message

MODEL = "policy"
"""Name of the only model."""
ROLES = ("system", "user", "assistant")
IGNORED = frozenset({
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "stream_options", "user",
})  # fmt: skip
"""Fields that are ignored, because they do not affect sampling."""
FIXED: Mapping[str, tuple[Any, str]] = {
    "n": (1, "each request has one completion; a group's completions are rows of their own"),
    "stream": (False, "answers are not streamed"),
    "logprobs": (False, "the trajectory has the log-probabilities, and the answer has none"),
    "top_logprobs": (0, "the trajectory has the log-probabilities, and the answer has none"),
    "response_format": ({"type": "text"}, "a grammar would change the probabilities of tokens"),
    "tool_choice": ("none", "tool calls are not parsed; describe tools in a message, and parse the calls in the text"),
    "tools": ([], "tool calls are not parsed; describe tools in a message, and parse the calls in the text"),
    "seed": (None, "the seed follows from the run, the problem and the number of the row's earlier requests"),
}
"""Field -> the only value accepted, and the reason."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a request that leaves no space for an answer."""


class RefusedRequest(Exception):
    """Error that refuses a request; `body` is the response, in the form of OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        """
        Args:
            param: field of the request that is wrong.
            status: HTTP status; clients retry a request by themselves after some statuses, but not after 400.
            code: OpenAI's error code.
        """
        super().__init__(message)
        self.status = status
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        self.body: dict[str, Any] = {"error": error}


@dataclass(frozen=True)
class ChatRequest:
    """Request for the policy's next turn."""

    messages: list[Message]
    """All messages so far, with role and text."""
    max_tokens: int | None
    """Maximum number of tokens of the turn; None: as many as there is space for."""


def read_chat_request(body: bytes, sampling: Mapping[str, Any]) -> ChatRequest:
    """Read the body of a request.

    Args:
        sampling: arguments of `vllm.SamplingParams` with which the run samples.

    Raises:
        RefusedRequest: the request is malformed, or has a field or value that is not supported.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedRequest("the body is not valid JSON") from None
    if not isinstance(fields, dict):
        raise RefusedRequest("the body must be a JSON object")
    fields = {name: value for name, value in fields.items() if not _is_empty(value)}
    if fields.pop("model", None) != MODEL:
        raise RefusedRequest(f"the only model is {MODEL!r}", "model", status=404, code="model_not_found")
    messages = _messages(fields.pop("messages", None))
    limits = [_limit(name, fields.pop(name)) for name in ("max_tokens", "max_completion_tokens") if name in fields]
    own = {name: sampling.get(name, default) for name, default in vars(DEFAULTS).items()}
    for name in sorted(fields.keys() - IGNORED):
        value = fields[name]
        if name in own:
            expected, reason = own[name], f"the run samples with {own[name]!r}, and trains on these probabilities"
        elif name in FIXED:
            expected, reason = FIXED[name]
        else:
            raise RefusedRequest(f"{name[:60]} is not a field of this endpoint; leave it out", name[:60])
        if value != expected:
            raise RefusedRequest(f"{name}={value!r:.60} is refused: {reason}; leave it out", name)
    return ChatRequest(messages, min(limits, default=None))


def require_continuation(messages: Sequence[Message], history: Sequence[Message]) -> Message:
    """Return the message that a request appends to the conversation so far.

    White space around the policy's own turns is not compared, since some programs strip it; the policy reads the tokens
    that it sampled in any case.

    Args:
        messages: messages of the request.
        history: messages of the last request, and the policy's answer.

    Raises:
        RefusedRequest: the messages are not the history followed by one user message.
    """
    for place, (given, expected) in enumerate(zip(messages, history, strict=False)):
        if _comparable(given) != _comparable(expected):
            raise RefusedRequest(
                f"messages[{place}] differs from the last request of this key: a row's requests are one "
                "conversation, whose earlier messages cannot be changed, left out or summarized",
                f"messages[{place}]",
            )
    if len(messages) != len(history) + 1 or messages[-1]["role"] != "user":
        raise RefusedRequest(
            f"messages must be the {len(history)} of the conversation so far and one of the role user after them; "
            f"got {len(messages)}. A request cannot be repeated, since the last one has been answered",
            "messages",
        )
    return messages[-1]


def _comparable(message: Message) -> Message:
    return {**message, "content": message["content"].strip()} if message["role"] == "assistant" else message


def _is_empty(value: Any) -> bool:
    """Return True for a value that clients send in place of an unset field."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def _limit(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise RefusedRequest(f"{name} must be a whole number of at least 1; got {value!r:.60}", name)
    return value


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list):
        raise RefusedRequest("messages must be a list with at least one message", "messages")
    messages = [_message(each, f"messages[{place}]") for place, each in enumerate(given)]
    if messages[-1]["role"] != "user":
        raise RefusedRequest("the last message must have the role user", "messages")
    return messages


def _message(given: Any, name: str) -> Message:
    """Return a message as role and text; a list of text parts is joined."""
    if not isinstance(given, dict):
        raise RefusedRequest(f"{name} must be an object", name)
    if given.get("role") not in ROLES:
        raise RefusedRequest(f"{name}.role must be one of {', '.join(ROLES)}", f"{name}.role")
    for field, value in given.items():
        if field not in ("role", "content") and not _is_empty(value):
            raise RefusedRequest(f"{name}.{field[:60]} is refused: a message has role and content only", name)
    content = given.get("content") or ""
    if isinstance(content, list):
        texts = [each.get("text") for each in content if isinstance(each, dict) and each.get("type") == "text"]
        content = "".join(map(str, texts)) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise RefusedRequest(f"{name}.content must be text", f"{name}.content")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise RefusedRequest(f"{name}.content has half of a surrogate pair", f"{name}.content") from None
    return {"role": given["role"], "content": content}
