"""Messages between the pool, its supervisor and the processes of episodes: JSON in frames (`processes/messages.py`).

JSON only, since a tool's return value is untrusted: it may be anything, and must not be unpickled.
"""

import json
import math
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from grpo_ray.processes.messages import frame, receive_frame, receive_frames, unpack_frames

MAX_BYTES = 4 << 20
"""Largest message of a process that runs tools; results are cut to far less."""
MAX_RESULT_CHARS = 1 << 16
"""Characters of a result; the middle of a longer one is cut in the sandbox."""
MARK_CHARS = 64
"""Characters kept free for the mark in place of the text that is cut."""

Status = Literal["ok", "error", "timeout", "memory", "crash", "processes", "disk", "skipped", "unreachable"]


@dataclass(frozen=True)
class CallResult:
    """Result of a request to an episode."""

    status: Status
    """`error`: an exception; `timeout`, `memory`, `processes`, `disk`: a limit; `crash`: the process ended; `skipped`:
    the process ended with an earlier request, or the episode was closed; `unreachable`: the remote sandbox gave no
    result."""
    text: str | None = None
    """Returned value as text; None if it was None."""
    value: float | None = None
    """Reward of an environment."""
    done: bool = False
    """True if the environment is done."""
    seconds: float = 0.0
    """Time of the request."""


class CallError(Exception):
    """Failure of a call with a status of its own; any other exception of a tool has the status `error`."""

    def __init__(self, status: Status, text: str):
        super().__init__(status, text)
        self.status, self.text = status, text

    def __str__(self) -> str:
        return self.text


def pack(message: dict[str, Any]) -> bytes:
    """Pack a message; values that JSON does not have become text."""
    return frame(json.dumps(message, default=str).encode("utf-8", "replace"))


def unpack(buffer: bytearray, max_bytes: float = math.inf) -> Iterator[dict[str, Any]]:
    """Remove the complete messages from the start of a buffer and yield them.

    Args:
        max_bytes: largest message of a sender that is not trusted.

    Raises:
        ValueError: a message is malformed, or larger.
    """
    return map(_to_message, unpack_frames(buffer, max_bytes))


def receive_first(sock: socket.socket) -> dict[str, Any]:
    """Return the first message of a blocking socket; later ones stay in it. Raises ConnectionError if it closes."""
    return _to_message(receive_frame(sock))


def receive(sock: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages of a blocking socket until it closes."""
    return map(_to_message, receive_frames(sock))


def _to_message(body: bytes) -> dict[str, Any]:
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError("a message is not an object")
    return message


def result_to_json(result: CallResult) -> dict[str, Any]:
    return asdict(result)


def result_of(message: dict[str, Any], seconds: float) -> CallResult:
    """Convert the message of an episode's process, which is not trusted, to a result.

    Args:
        seconds: time of the request, as the supervisor measured it.
    """
    status, text, value = (message.get(name) for name in ("status", "text", "value"))
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    return CallResult(
        status=cast(Status, status) if status in get_args(Status) else "error",
        text=cut_middle(text) if isinstance(text, str) else None,
        value=float(cast(float, value)) if is_number else None,
        done=message.get("done") is True,
        seconds=round(seconds, 6),
    )


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def cut_middle(text: str) -> str:
    """Return a text without its middle if it exceeds `MAX_RESULT_CHARS`, with the number of omitted characters."""
    if len(text) <= MAX_RESULT_CHARS:
        return text
    # Room for the mark: a result is cut in its process and again by the supervisor, which must keep the first mark.
    half = (MAX_RESULT_CHARS - MARK_CHARS) // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters omitted ...] {text[-half:]}"
