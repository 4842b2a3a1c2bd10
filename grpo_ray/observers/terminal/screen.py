"""Output of the driver on a terminal, written by a thread of its own: lines that stay, and the live view below them.

The driver and everything that follows the run only hand over texts and state. A terminal that is slow, paused or lost
delays nobody but this thread.
"""

import contextlib
import functools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from grpo_ray.observers.terminal.live_view import Line
from grpo_ray.text.redaction import redact_stream

MIN_SECONDS_BETWEEN_FRAMES = 0.25
SECONDS_BETWEEN_TICKS = 2.0
"""Time after which a frame is drawn even if nothing was reported, since it shows durations."""
MAX_WAITING_LINES = 1000
"""Lines that wait for a terminal that does not take them; further ones are dropped, as they are in `events.jsonl`."""
LINES_KEPT = 50
"""Latest lines that are printed again after a change of the terminal's size."""
SECONDS_TO_FINISH = 5.0
"""Time given to the terminal to take the remaining lines at the end."""

DEATH_NOTICE = "A worker died or was killed while executing a task"
"""Beginning of Ray's notice of ten lines that a worker process has died. The run prints one line instead, with the
worker, the reason and the next action; Ray's logs keep the notice."""

DrawFrame = Callable[[int, int], Sequence[Line]]
"""Draws a frame for a width and a height, columns and lines."""


class Frame:
    """Lines of segments as a renderable of rich."""

    def __init__(self, lines: Sequence[Line] = ()):
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for index, line in enumerate(self.lines):
            if index:
                yield Segment.line()
            yield from line


class Screen:
    """Thread that writes lines, and repaints a frame below them; a context manager.

    Args:
        draw: None: there are only lines.
    """

    def __init__(self, console: Console, draw: DrawFrame | None = None):
        self.console = console
        self._draw = draw
        # put() of this queue may be interrupted by a signal handler that calls it again.
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_woken = False
        self._is_closing = False
        self._latest: deque[str] = deque(maxlen=LINES_KEPT)
        self._live = self._new_live()
        self._size = (0, 0)
        self._shown: Sequence[Line] = ()
        self._drawn_at = -MIN_SECONDS_BETWEEN_FRAMES
        self._thread = threading.Thread(target=self._write, daemon=True, name="screen")

    def __enter__(self) -> "Screen":
        if self._draw is not None:
            self._size = self.console.size
            self._start_live()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self, last: Sequence[str] = ()) -> None:
        """Remove the frame, and write the remaining lines; give up on a terminal that does not take them.

        Args:
            last: further lines.
        """
        self._is_closing = True
        for entry in (*last, None):
            self._waiting.put(entry)
        self._thread.join(SECONDS_TO_FINISH)
        if self._thread.is_alive():
            self.console.quiet = True
            self._restore_streams()

    def print(self, text: str) -> None:
        """Write a line that stays; it must be free of secrets and control characters."""
        if self._waiting.qsize() < MAX_WAITING_LINES:
            self._waiting.put(text)

    def refresh(self) -> None:
        """Have the frame drawn again soon."""
        if self._draw is not None and not self._is_woken:
            self._is_woken = True
            self._waiting.put(None)

    def _write(self) -> None:
        try:
            while True:
                lines = self._take()
                if self._is_closing:
                    break
                self._is_woken = False
                if self._draw is not None:
                    self._repaint_after_resize()
                self._print(lines)
                if self._draw is not None:
                    self._paint()
        finally:  # an error in drawing must not leave a terminal without a cursor
            self._live.stop()
        # Printed in place of the frame: a low terminal has no space for both.
        self._print([*lines, *self._take_waiting()])

    def _take(self) -> list[str]:
        """Wait for a line, a request to draw, or the next tick; return all lines that wait."""
        try:
            first = self._waiting.get(timeout=None if self._draw is None else SECONDS_BETWEEN_TICKS)
        except queue.Empty:
            return []
        pause = self._drawn_at + MIN_SECONDS_BETWEEN_FRAMES - time.monotonic()
        if self._draw is not None and pause > 0 and not self._is_closing:
            time.sleep(pause)
        return [*([] if first is None else [first]), *self._take_waiting()]

    def _take_waiting(self) -> list[str]:
        """Return all lines that wait."""
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                if (entry := self._waiting.get_nowait()) is not None:
                    lines.append(entry)
        return lines

    def _print(self, lines: Sequence[str]) -> None:
        for text in lines:
            self._latest.append(text)
            if self._draw is None:
                self.console.print(Text(text), soft_wrap=True)
            else:  # between words; a path is left to the terminal, so that it can be copied
                self.console.print(Text(text, overflow="ignore"))

    def _paint(self) -> None:
        assert self._draw is not None
        lines = self._draw(*self._size)
        self._drawn_at = time.monotonic()
        if lines != self._shown:
            self._shown = lines
            self._live.update(Frame(lines), refresh=True)

    def _repaint_after_resize(self) -> None:
        """Begin again on a clear screen if the terminal's size has changed.

        The terminal has wrapped or cut the lines of the frame in its own way, so the frame's first line cannot be found
        any more.
        """
        size = self.console.size
        if size == self._size:
            return
        self._size = size
        self._live.stop()
        self.console.clear()
        self._shown = ()
        latest = list(self._latest)[-max(0, size.height // 2) :]
        self._latest.clear()
        self._live = self._new_live()
        self._start_live()
        self._print(latest)

    def _new_live(self) -> Live:
        return Live(Frame(), console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def _start_live(self) -> None:
        self._live.start()
        for stream in (sys.stdout, sys.stderr):  # now rich's, which print the output of other code on the console
            redact_stream(stream)
            drop_death_notices(stream)

    def _restore_streams(self) -> None:
        """Give the process its own output streams back, without waiting for the terminal."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


def drop_death_notices(stream: TextIO) -> None:
    """Drop Ray's notices of dead workers from everything that Python code of this process writes to a stream."""
    write = stream.write
    is_dropping = False

    @functools.wraps(write)
    def write_rest(text: str) -> int:
        nonlocal is_dropping
        dropped, is_dropping = is_dropping, DEATH_NOTICE in text
        if is_dropping or (dropped and text == "\n"):  # print() writes the end of its line in a call of its own
            return len(text)
        return write(text)

    stream.write = write_rest  # type: ignore[method-assign]
