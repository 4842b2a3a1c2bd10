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
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_ray.errors import ConfinementError, ToolError
from grpo_ray.processes.confinement import Confinement
from grpo_ray.processes.isolation import package_places, readable_places
from grpo_ray.processes.limits import set_soft_limit
from grpo_ray.processes.request_client import RequestClient
from grpo_ray.processes.request_server import serve_requests
from grpo_ray.processes.supervisors import is_needed

MAX_MARKS = 128
"""Opening marks in a turn, such as `<think>` and `<tool_call>`; usual turns have one for each thought and call."""
CPU_SECONDS = 1.0
"""CPU time for one turn. A usual one takes less than a millisecond."""
MEMORY_BYTES = 2 << 30


class UnreadTurnError(ValueError):
    """Error for a turn that exceeds a limit. TRL treats a turn that raises a ValueError as one without calls."""


class TurnReader:
    """Client of the process that reads turns. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client = RequestClient("grpo_ray.tools.turn_reader", is_needed)

    @property
    def pid(self) -> int | None:
        """Process id, None if no process was started."""
        return self._client.pid

    def start(self) -> None:
        """Start the process, unless it runs; does not wait until it is ready."""
        with self._lock:
            self._client.start()

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
            ValueError: the turn has a malformed call.
            ToolError: the process cannot run.
        """
        if (marks := count_marks(text, grammar)) > MAX_MARKS:
            raise UnreadTurnError(f"the turn has {marks} opening marks; at most {MAX_MARKS} are read")
        request = json.dumps([text, grammar, prefix, tools]).encode()
        with self._lock:
            answer, code = self._ask(request)
            # Unless it exceeded its CPU time (SIGPROF), the process may have ended for a reason other than this turn.
            if answer is None and code != -signal.SIGPROF:
                answer, _ = self._ask(request)
        if answer is None:
            raise UnreadTurnError("the turn takes too long to read, or too much memory")
        kind, value = json.loads(answer)
        if kind == "message":
            message: dict[str, Any] = value
            return message
        raise UnreadTurnError(value) if kind == "unread" else ValueError(value)

    def close(self) -> None:
        """End the process. The next turn starts another one."""
        with self._lock:
            self._client.stop()

    def _ask(self, request: bytes) -> tuple[bytes | None, int | None]:
        """Return the answer to a request, or None and the exit code of the process, which has ended.

        Raises ToolError if it does not start.
        """
        if not self._client.wait_until_ready():
            raise ToolError(
                "the process that reads calls from turns ended while it started; see its error on stderr, and check "
                f"that transformers is installed for {sys.executable}"
            )
        return self._client.ask(request)


def main(descriptor: int) -> None:
    """Answer requests until the connection closes. `descriptor` is the process's end of it."""
    from transformers.utils.chat_parsing import parse_response

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    with socket.socket(fileno=descriptor) as sock:
        limits = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_NPROC: 0}
        try:
            Confinement([*readable_places(), *package_places()]).apply([], limits)
        except ConfinementError:  # no code of the policy runs here; the process exists for the limits below
            for kind, amount in limits.items():
                set_soft_limit(kind, amount)
        serve_requests(sock, partial(_answer, parse_response))


def _answer(parse: Callable[..., Any], request: bytes) -> bytes:
    """Read the turn of a request; after `CPU_SECONDS` a signal ends the process."""
    text, grammar, prefix, tools = json.loads(request)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        answer = json.dumps(["message", parse(text, grammar, prefix=prefix, tools=tools)])
    except (MemoryError, RecursionError) as error:
        answer = json.dumps(["unread", type(error).__name__])
    except Exception as error:  # untrusted text: a parser may raise anything; TRL reads such a turn as text
        answer = json.dumps(["malformed", type(error).__name__])
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answer.encode()


def count_marks(text: str, grammar: Mapping[str, Any]) -> int:
    """Count the plain-text opening marks of a grammar in a text, in linear time."""
    opens = [field.get("open") or () for field in grammar.get("fields", {}).values()]
    marks = {mark for each in opens for mark in ([each] if isinstance(each, str) else each)}
    return sum(map(text.count, marks))
