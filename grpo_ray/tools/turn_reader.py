"""Parsing of calls in the policy's turns, in a process with limits.

The grammars of chat templates are regular expressions over text that the policy wrote. For some texts their time grows
with the square or the cube of the length: 1,260 characters took 1.3 s with the grammar of Qwen 3.5, 32,000 over 20 s
with that of LFM 2.5. A thread cannot be stopped inside such a match, so the text is read in a separate process.

A turn is not read, and counts as one without calls, if its text has more than `MAX_MARKS` of the grammar's opening
marks, or if the process uses more than `CPU_SECONDS` for it. The marks are checked first: their number depends on the
text alone, and each one costs the parser another pass over it. CPU time limits all other texts; unlike wall time, it
does not depend on the load of the machine. If the process ends in another way, for example killed by the kernel because
memory ran out, the turn is read once more.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_ray.errors import ToolError
from grpo_ray.processes.limited_process import LimitedProcess, StartError, cpu_limit, serve

MAX_MARKS = 128
"""Opening marks in a turn, such as `<think>` and `<tool_call>`; usual turns have one for each thought and call."""
CPU_SECONDS = 1.0
"""CPU time for one turn. A usual one takes less than a millisecond."""
MEMORY_BYTES = 2 << 30


class UnreadTurnError(ValueError):
    """Error for a turn that exceeds a limit. TRL treats a turn that raises a ValueError as one without calls."""


class TurnReader(LimitedProcess):
    """Client of the process that reads turns."""

    def __init__(self) -> None:
        super().__init__("grpo_ray.tools.turn_reader", needs="transformers")

    def read(
        self, text: str, grammar: Mapping[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        """Read a turn.

        Args:
            grammar: transformers' `response_template`.
            prefix: text before the turn.
            tools: JSON schemas of the tools.

        Returns:
            The fields of the message, as transformers' `parse_response` returns them.

        Raises:
            UnreadTurnError: the turn exceeds a limit.
            ValueError: the turn has a malformed call, or the grammar is malformed.
            ToolError: the process cannot run.
        """
        try:
            marks = count_marks(text, grammar)
        except (AttributeError, TypeError):  # the tokenizer of a stranger's policy may have anything in its place
            raise ValueError("the grammar is malformed") from None
        if marks > MAX_MARKS:
            raise UnreadTurnError(f"the turn has {marks} opening marks; at most {MAX_MARKS} are read")
        try:
            answer = self.ask(json.dumps([text, grammar, prefix, tools]).encode())
        except StartError as error:
            raise ToolError(str(error)) from None
        if answer is None:
            raise UnreadTurnError("the turn takes too long to read, or too much memory")
        kind, value = json.loads(answer)
        if kind == "message":
            message: dict[str, Any] = value
            return message
        raise UnreadTurnError(value) if kind == "unread" else ValueError(value)


def main(descriptor: int) -> None:
    """Answer requests until the connection closes. `descriptor` is the process's end of it."""
    from transformers.utils.chat_parsing import parse_response

    serve(descriptor, partial(_answer, parse_response), MEMORY_BYTES)


def _answer(parse: Callable[..., Any], request: bytes) -> bytes:
    """Read the turn of a request; after `CPU_SECONDS` a signal ends the process."""
    text, grammar, prefix, tools = json.loads(request)
    try:
        with cpu_limit(CPU_SECONDS):
            answer = json.dumps(["message", parse(text, grammar, prefix=prefix, tools=tools)])
    except (MemoryError, RecursionError) as error:
        answer = json.dumps(["unread", type(error).__name__])
    except Exception as error:  # untrusted text: a parser may raise anything; TRL reads such a turn as text
        answer = json.dumps(["malformed", type(error).__name__])
    return answer.encode()


def count_marks(text: str, grammar: Mapping[str, Any]) -> int:
    """Count the plain-text opening marks of a grammar in a text, in linear time."""
    opens = [field.get("open") or () for field in grammar.get("fields", {}).values()]
    marks = {mark for each in opens for mark in ([each] if isinstance(each, str) else each)}
    return sum(map(text.count, marks))
