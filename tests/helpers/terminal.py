"""A process on a terminal of its own: a pseudo-terminal, and an emulator (pyte) that shows what a user would see."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyte

SECONDS = 600.0
"""Limit of every wait; a condition normally holds much earlier."""
POLL_SECONDS = 0.02
"""Time after which the reader looks whether the connection is to be cut."""


class Terminal:
    """Process on a pseudo-terminal; a context manager that kills it at the end.

    Args:
        command: program and arguments.
        columns, rows: size.
        options: further arguments of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], columns: int, rows: int, **options: Any):
        self._emulator = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self._emulator)
        self._lock = threading.Lock()
        self.output = bytearray()
        """All bytes that the process has written."""
        self._master: int | None
        self._master, slave = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            **options,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.hang_up()

    def _read(self) -> None:
        while (master := self._master) is not None:
            if not select.select([master], [], [], POLL_SECONDS)[0]:
                continue
            try:
                data = os.read(master, 65536)
            except OSError:  # the process has ended
                return
            with self._lock:
                self.output += data
                self._stream.feed(data)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a user does with the mouse: the terminal cuts or moves its lines, and sends SIGWINCH."""
        assert self._master is not None
        with self._lock:
            if (columns, rows) != (self._emulator.columns, self._emulator.lines):
                self._emulator.resize(rows, columns)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        """Send key strokes."""
        assert self._master is not None
        os.write(self._master, keys)

    def hang_up(self) -> None:
        """Cut the connection: the process gets SIGHUP, and each later write fails."""
        if self._master is not None:
            master, self._master = self._master, None
            self._reader.join()  # the connection is cut only once no thread reads from it
            os.close(master)

    @property
    def lines(self) -> list[str]:
        """Lines on the screen, without spaces at their ends and without empty lines at the end."""
        with self._lock:
            lines = [line.rstrip() for line in self._emulator.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def shows(self, text: str) -> bool:
        """Return True if the text is on the screen."""
        return text in self.text

    @property
    def shows_cursor(self) -> bool:
        return not self._emulator.cursor.hidden

    def settings(self) -> list[Any]:
        """Return the terminal's settings, such as echo, as of `termios.tcgetattr`."""
        assert self._master is not None
        return termios.tcgetattr(self._master)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds."""
        wait_for(condition, lambda: f"{what}; the screen shows:\n{self.text}")


def wait_for(condition: Callable[[], object], describe: Callable[[], str]) -> None:
    """Wait until a condition holds, or fail with a description."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, describe()
        time.sleep(0.02)
