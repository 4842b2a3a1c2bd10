"""Client of a supervisor: its start, the thread that reads its results, its end, and the count of failed starts.

A pool (`rewards/sandbox/pool.py`, `tools/sandbox/pool.py`) has one, keeps its pending requests beside it, and decides
about them when a supervisor has ended.
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

    `lock` guards the client and the pool's pending requests alike: a request is recorded and sent in one step, so that
    none is lost between a supervisor that ends and the next one. All methods but `close`, which takes
    it, must be called with it.
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
            ended: called with the exit code of a supervisor that has ended, unless this client was closed. It has the
                lock, and may start the next one.
            close_seconds: time in which a supervisor ends its processes before it is killed.
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
        """Note that the supervisor has given a result."""
        self._failed_starts = 0

    def start(self, *arguments: float, clean_up: CleanUp | None = None) -> None:
        """Start a supervisor, and a thread that reads its messages.

        Args:
            arguments: of its `main`, after the descriptor.
            clean_up: called once the supervisor has closed its socket; the process is not reaped before.

        Raises:
            OSError: no process can be started.
        """
        child = self._child = start_child(self._module, self._passes, *arguments)
        name = f"{self._module}-reader"
        self._reader = threading.Thread(target=self._read, args=(child, clean_up), name=name, daemon=True)
        self._reader.start()

    def send(self, message: bytes) -> None:
        """Send a message. If the supervisor has ended, the reader notices it too, and `ended` decides."""
        assert self._child is not None
        try:
            self._child.sock.sendall(message)
        except OSError:
            return

    def close(self, settle: Callable[[], None]) -> None:
        """End the supervisor and its processes, or in a fork of its owner only forget them. A second call does nothing.

        Args:
            settle: settles the pending requests; has the lock.
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

        Returns True if there was one to drop; its requests are the other process's.
        """
        if self._owner_pid == os.getpid():
            return False
        self._owner_pid = os.getpid()
        self._child = self._reader = None
        return True

    def _read(self, child: Child, clean_up: CleanUp | None) -> None:
        """Handle the messages of one supervisor until its socket closes. Runs in a thread of its own."""
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
