"""Reading of calls from the policy's turns, in a process with limits.

The grammars of chat templates are regular expressions over text that the policy wrote. For some texts their time grows
with the square or the cube of the length: 1,260 characters took 1.3 s with the grammar of Qwen 3.5, 32,000 over 20 s
with that of LFM 2.5. A thread cannot be stopped inside such a match, so the text is read by a process of its own.

A turn is not read, and counts as one without calls, if its text has more than `MAX_MARKS` of the grammar's opening
marks, or if the process uses more than `CPU_SECONDS` for it. The marks are counted first: the text alone decides, and
each mark costs the parser another pass over it. CPU time decides about the rest; it does not depend on the load of the
machine. If the process is ended otherwise, as by the kernel when memory runs out, the turn is read once more.
"""

import json
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from grpo_ray.errors import ConfinementError, ToolError
from grpo_ray.processes.confinement import Confinement
from grpo_ray.processes.isolation import package_places, readable_places
from grpo_ray.processes.limits import set_soft_limit
from grpo_ray.processes.supervisors import is_needed, supervisor_environment

MAX_MARKS = 128
"""Opening marks in a turn, such as `<think>` and `<tool_call>`; usual turns have one for each thought and call."""
CPU_SECONDS = 1.0
"""CPU time for one turn. A usual one takes less than a millisecond."""
MEMORY_BYTES = 2 << 30

_SIZE = struct.Struct("<I")
_READY = b"+"
"""Sent by the process when it has started."""


class UnreadTurnError(ValueError):
    """A turn was not read, because it exceeded a limit. TRL takes a ValueError for a turn without calls."""


class TurnReader:
    """Client of the process. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: BufferedRWPair | None = None
        """Connection to the process; it ends when this closes."""
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """Process id, None if no process was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, unless it runs; does not wait until it is ready."""
        with self._lock:
            self._start()

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
            UnreadTurnError: it exceeds a limit.
            ValueError: it has a malformed call.
            ToolError: the process cannot run.
        """
        if (marks := count_marks(text, grammar)) > MAX_MARKS:
            raise UnreadTurnError(f"the turn has {marks} opening marks; at most {MAX_MARKS} are read")
        request = json.dumps([text, grammar, prefix, tools]).encode()
        with self._lock:
            answer, code = self._ask(request)
            # Unless its time was over, the process may have been killed for a reason that is not this turn.
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
            self._stop()

    def _ask(self, request: bytes) -> tuple[bytes | None, int | None]:
        """Return the answer to a request, or None and the exit code of the process, which has ended.

        Raises ToolError if it does not start.
        """
        stream = self._start()
        if not self._is_ready and stream.read(len(_READY)) != _READY:
            self._stop()
            raise ToolError(
                "the process that reads calls from turns ended while it started; see its error on stderr, and check "
                f"that transformers is installed for {sys.executable}"
            )
        self._is_ready = True
        answer = _exchange(stream, request)
        return answer, self._stop() if answer is None else None

    def _start(self) -> BufferedRWPair:
        if self._stream is not None:
            return self._stream
        own, other = socket.socketpair()
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from grpo_ray.tools.turn_reader import main; main({other.fileno()})"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(other.fileno(),),
            env=supervisor_environment(root, is_needed),
            cwd=root,
            start_new_session=True,  # Ctrl-C is meant for the trainer
        )
        other.close()
        self._is_ready = False
        self._stream = own.makefile("rwb")
        own.close()
        return self._stream

    def _stop(self) -> int | None:
        """End the process. Returns its exit code, its own if it had ended before; None if there was none."""
        process, stream = self._process, self._stream
        self._process = self._stream = None
        if stream is not None:
            with suppress(OSError):  # what it did not take is written when it closes
                stream.close()
        if process is not None:
            process.kill()  # an exiting process keeps its exit code
            return process.wait()
        return None


def _exchange(stream: BufferedRWPair, request: bytes) -> bytes | None:
    """Send a request and return the answer; None if the process has ended."""
    try:
        stream.write(_SIZE.pack(len(request)) + request)
        stream.flush()
        return _receive(stream)
    except OSError:
        return None


def _receive(stream: BufferedRWPair) -> bytes | None:
    header = stream.read(_SIZE.size)
    if len(header) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else None


def main(descriptor: int) -> None:
    """Answer requests until the connection closes. `descriptor` is the process's end of it."""
    from transformers.utils.chat_parsing import parse_response

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    with socket.socket(fileno=descriptor) as connection:
        stream = connection.makefile("rwb")
    limits = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_NPROC: 0}
    try:
        Confinement([*readable_places(), *package_places()]).apply([], limits)
    except ConfinementError:  # no code of the policy runs here: the limits below are what it is for
        for kind, amount in limits.items():
            set_soft_limit(kind, amount)
    stream.write(_READY)
    stream.flush()
    while (request := _receive(stream)) is not None:
        text, grammar, prefix, tools = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            message = parse_response(text, grammar, prefix=prefix, tools=tools)
            body = json.dumps(["message", message]).encode()
        except (MemoryError, RecursionError) as error:
            body = json.dumps(["unread", type(error).__name__]).encode()
        except Exception as error:  # untrusted text: a parser may raise anything; TRL reads such a turn as text
            body = json.dumps(["malformed", type(error).__name__]).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(_SIZE.pack(len(body)) + body)
        stream.flush()


def count_marks(text: str, grammar: Mapping[str, Any]) -> int:
    """Return how often the opening marks of a grammar that are plain texts occur in a text; takes linear time."""
    opens = [field.get("open") or () for field in grammar.get("fields", {}).values()]
    marks = {mark for each in opens for mark in ([each] if isinstance(each, str) else each)}
    return sum(map(text.count, marks))
