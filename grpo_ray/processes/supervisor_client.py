"""Client of a supervisor: its start, the thread that reads its results, its end, and the count of failed starts.

Each pool (`rewards/sandbox/pool.py`, `tools/sandbox/pool.py`) has one client. The pool itself keeps its pending
requests, and handles them when a supervisor has ended.
"""

import os
import socket
import subprocess
import threading
from collections.abc import Callable

from grpo_ray.processes.child import Child, start_child

MAX_FAILED_STARTS = 3
"""Supervisors in a row that may end without a result before the pool gives up."""
_CHUNK_BYTES = 1 << 16
CleanUp = Callable[[subprocess.Popen[bytes]], None]


class SupervisorClient:
    """Client of one supervisor at a time.

    `lock` guards both the client and the pool's pending requests: a request is recorded and sent in one step, so that
    none is lost between a supervisor that ends and the next one. All methods except `close`, which acquires the lock
    itself, must be called with it held.
    """

    def __init__(
        self,
        module: str,
        *,
        passes: Callable[[str], bool],
        receive: Callable[[bytearray], None],
        ended: Callable[[int], None],
        close_seconds: float,
    ) -> None:
        """
        Args:
            module: full name of the supervisor's module.
            passes: see `supervisor_environment`.
            receive: removes the complete messages from the start of a buffer and handles them. Called in the reader's
                thread, without the lock.
            ended: called with the exit code of a supervisor that has ended, unless this client was closed. The lock is
                held; the function may start the next supervisor.
            close_seconds: time that a supervisor has to end its processes before it is killed.
        """
        self.lock = threading.Lock()
        self.is_closed = False
        self._module, self._passes = module, passes
        self._receive, self._ended = receive, ended
        self._close_seconds = close_seconds
        self._child: Child | None = None
        self._reader: threading.Thread | None = None
        self._failed_starts = 0
        self._owner_pid = os.getpid()

    @property
    def pid(self) -> int | None:
        """The supervisor's process id; None if none runs."""
        child = self._child
        return None if child is None else child.process.pid

    @property
    def is_running(self) -> bool:
        """True if there is a supervisor to send to."""
        return self._child is not None

    @property
    def has_failed(self) -> bool:
        """True if too many supervisors in a row have ended without a result."""
        return self._failed_starts >= MAX_FAILED_STARTS

    def count_result(self) -> None:
        """Reset the count of failed starts, because the supervisor has sent a result."""
        self._failed_starts = 0

    def start(self, *arguments: float, clean_up: CleanUp | None = None) -> None:
        """Start a supervisor, and a thread that reads its messages.

        Args:
            arguments: of its `main`, after the descriptor.
            clean_up: called once the supervisor has closed its socket, before the process is reaped.

        Raises:
            OSError: no process can be started.
        """
        child = self._child = start_child(self._module, self._passes, *arguments)
        name = f"{self._module}-reader"
        self._reader = threading.Thread(target=self._read, args=(child, clean_up), name=name, daemon=True)
        self._reader.start()

    def send(self, message: bytes) -> None:
        """Send a message; drop it if the supervisor has ended, which the reader notices and passes to `ended`."""
        assert self._child is not None
        try:
            self._child.sock.sendall(message)
        except OSError:
            return

    def close(self, settle: Callable[[], None]) -> None:
        """End the supervisor and its processes; in a fork of the process that started it, only forget it.

        Args:
            settle: settles the pending requests; called with the lock held, also by a second call.
        """
        with self.lock:
            self.forget_after_fork()
            self.is_closed = True
            child, reader = self._child, self._reader
            self._child = self._reader = None
            settle()
            if child is not None:
                child.sock.shutdown(socket.SHUT_RDWR)  # wakes the supervisor, and the reader, which closes the socket
        if child is not None and reader is not None:
            reader.join(self._close_seconds)
            if reader.is_alive():
                child.process.kill()
                reader.join()

    def forget_after_fork(self) -> bool:
        """Drop the supervisor in a fork of the process that started it, such as a data-loading process.

        Returns True at the first call in a fork, where the pending requests belong to the other process.
        """
        if self._owner_pid == os.getpid():
            return False
        self._owner_pid = os.getpid()
        self._child = self._reader = None
        return True

    def _read(self, child: Child, clean_up: CleanUp | None) -> None:
        """Handle the messages of one supervisor until its socket closes, in a dedicated thread."""
        buffer = bytearray()
        while data := _receive(child.sock):
            buffer += data
            self._receive(buffer)
        if clean_up is not None:
            clean_up(child.process)
        code = child.process.wait()
        with self.lock:
            is_current = self._child is child  # not after `close`
            child.sock.close()
            if is_current:
                self._child = self._reader = None
                self._failed_starts += 1
                self._ended(code)


def _receive(sock: socket.socket) -> bytes:
    """Return the bytes received; none if the socket has closed, for any reason."""
    try:
        return sock.recv(_CHUNK_BYTES)
    except OSError:
        return b""
