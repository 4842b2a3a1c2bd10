"""Client of a process that answers one request at a time, under limits that it sets on itself (`request_server.py`)."""

import contextlib
import math
import os
import signal
import socket
from collections.abc import Callable

from grpo_ray.processes.child import Child, start_child
from grpo_ray.processes.messages import frame, receive_frame
from grpo_ray.processes.process_tree import descendants, process_state
from grpo_ray.processes.request_server import READY


class RequestClient:
    """Client of one process at a time: a request starts it if none runs, or if the last one has ended.

    Not thread-safe.
    """

    def __init__(self, module: str, passes: Callable[[str], bool]) -> None:
        """
        Args:
            module: full name of the process's module.
            passes: returns True for the name of an environment variable that the process gets.
        """
        self._module, self._passes = module, passes
        self._child: Child | None = None
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """Process id; None if no process was started."""
        return None if self._child is None else self._child.process.pid

    @property
    def has_ended(self) -> bool:
        """True if there is no process, or one that has ended."""
        return self._child is None or process_state(self._child.process.pid) in ("", "Z")

    def start(self) -> Child:
        """Start the process, unless it runs; do not wait until it is ready."""
        if self._child is None:
            self._child, self._is_ready = start_child(self._module, self._passes), False
        return self._child

    def wait_until_ready(self) -> bool:
        """Start the process, unless it runs, and wait; return False if it ended before it accepted requests."""
        child = self.start()
        if not self._is_ready:
            self._is_ready = _receive(child.sock, len(READY)) == READY
        if not self._is_ready:
            self.stop()
        return self._is_ready

    def ask(
        self, request: bytes, max_bytes: float = math.inf, seconds: float | None = None
    ) -> tuple[bytes | None, int | None]:
        """Send a request and wait for its answer.

        Args:
            max_bytes: largest answer; a process that sends a larger one is ended.
            seconds: time limit of each part of the exchange, after which the process is ended; None: no limit.

        Returns:
            The answer, and None; or None, and the exit code of the process, which has ended. The exit code is None too
            if the process ended before it accepted requests.
        """
        if not self.wait_until_ready():
            return None, None
        sock = self.start().sock
        sock.settimeout(seconds)
        answer = _exchange(sock, request, max_bytes)
        return answer, self.stop() if answer is None else None

    def stop(self) -> int | None:
        """Kill the process, and those that it has started, and return its exit code; None without a process.

        A process that was already exiting keeps its own exit code.
        """
        child, self._child = self._child, None
        if child is None:
            return None
        # The process leads a group (`child.py`), but its descendants may have left the group. The connection is closed
        # last: once it is closed, the process exits on its own, with another code.
        for below in descendants(child.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(below, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        code = child.process.wait()
        child.sock.close()
        return code


def _exchange(sock: socket.socket, request: bytes, max_bytes: float) -> bytes | None:
    """Send a request and return the answer; None if the process has ended, or the answer is too large."""
    try:
        sock.sendall(frame(request))
    except OSError:
        return None
    return _receive(sock, max_bytes)


def _receive(sock: socket.socket, max_bytes: float) -> bytes | None:
    try:
        return receive_frame(sock, max_bytes)
    except (OSError, ValueError):
        return None
