"""Lost terminals: a run continues, without output, when its connection breaks or the reader of its output ends.

Writing to a terminal that has hung up fails with EIO, writing to a pipe without a reader with EPIPE. The file
descriptor is then redirected to `/dev/null`, so that no later write fails, from Python, a library or native code.
"""

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

STANDARD_STREAMS = (0, 1, 2)
"""File descriptors of standard input, output and error."""


def terminals() -> tuple[int, ...]:
    """Return the standard streams that are terminals."""
    return tuple(number for number in STANDARD_STREAMS if os.isatty(number))


def discard(*numbers: int) -> None:
    """Redirect file descriptors to `/dev/null`."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(nothing, number)
    os.close(nothing)


@contextmanager
def survives_hangup() -> Iterator[None]:
    """Keep the process alive when its terminal hangs up (SIGHUP): output to the terminal is discarded from then on.

    Does nothing outside the main thread, where Python cannot handle signals, and where the signal is already ignored
    (`nohup`) or handled.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    lost = terminals()  # a terminal that has hung up is no longer recognised as one

    def handle(number: int, frame: FrameType | None) -> None:
        discard(*lost)

    signal.signal(signal.SIGHUP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


class UnbufferedOutput:
    """Text file over the file descriptor of a stream; output is discarded once it has no receiver.

    It bypasses the stream's buffer: a write that blocks, because the terminal is paused (Ctrl-S) or its connection
    hangs, then holds no lock that other threads or Python's shutdown would wait for. Secrets are not hidden here, to
    save time: a frame of the live view is written several times a second.

    Args:
        stream: for example standard output; it is flushed before each write.
    """

    def __init__(self, stream: TextIO):
        self.encoding = stream.encoding
        self._stream, self._number = stream, stream.fileno()
        self._terminals = terminals()

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._number

    def isatty(self) -> bool:
        """Return True if the stream was a terminal at the start."""
        return self._number in self._terminals

    def write(self, text: str) -> int:
        """Write a text without buffering; wait if the receiver is slow."""
        data = memoryview(text.encode(self.encoding, errors="replace"))
        try:
            self._stream.flush()
            while data:
                try:
                    data = data[os.write(self._number, data) :]
                except BlockingIOError:  # another process has set the terminal to non-blocking
                    select.select([], [self._number], [], 1.0)
        except OSError:  # no receiver any more
            self.discard()
        return len(text)

    def flush(self) -> None:
        """Do nothing, since `write` does not buffer."""

    def discard(self) -> None:
        """Discard all further output, and that of the other standard streams if this one was their terminal."""
        discard(self._number, *(self._terminals if self.isatty() else ()))
