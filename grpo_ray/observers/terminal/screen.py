"""Terminal output of the driver, written by a dedicated thread: permanent lines, and the live view below them.

The driver and the run's observers only pass lines and state to this thread, so a terminal that is slow, paused or lost
delays no other thread.
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
"""Most lines queued for a slow terminal; further lines are dropped, and their events remain in `events.jsonl`."""
LINES_KEPT = 50
"""Most lines that are printed again after the terminal is resized."""
SECONDS_TO_FINISH = 5.0
"""Longest time to write the remaining lines at the end."""

DEATH_NOTICE = "A worker died or was killed while executing a task"
"""Start of Ray's ten-line notice of a dead worker process. The run prints one line instead, with the
worker, the reason and the next action; Ray's logs keep the notice."""

DrawFrame = Callable[[int, int], Sequence[Line]]
"""Draws a frame for a width and a height, columns and lines."""


class Frame:
    """Rich renderable of lines of segments."""

    def __init__(self, lines: Sequence[Line] = ()):
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for index, line in enumerate(self.lines):
            if index:
                yield Segment.line()
            yield from line


class Screen:
    """Thread that prints lines and repaints a frame below them; a context manager.

    Args:
        draw: draws the frame; None: only lines are printed.
    """

    def __init__(self, console: Console, draw: DrawFrame | None = None):
        self.console = console
        self._draw = draw
        # A SimpleQueue's put() is reentrant: a signal handler may call it while it is running.
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
        """Remove the frame and write the remaining lines; give up after `SECONDS_TO_FINISH`.

        Args:
            last: lines to write after the waiting ones.
        """
        self._is_closing = True
        for entry in (*last, None):
            self._waiting.put(entry)
        self._thread.join(SECONDS_TO_FINISH)
        if self._thread.is_alive():
            self.console.quiet = True
            self._restore_streams()

    def print(self, text: str) -> None:
        """Print a permanent line, which must be free of secrets and control characters."""
        if self._waiting.qsize() < MAX_WAITING_LINES:
            self._waiting.put(text)

    def refresh(self) -> None:
        """Request a redraw of the frame; return at once."""
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
        # Printed after the frame is removed: a terminal with few rows has no space for both.
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
            else:  # wrapped between words; a long path is left to the terminal to wrap, so that it can be copied whole
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
        for stream in (sys.stdout, sys.stderr):  # rich's proxies, which print other code's output
            redact_stream(stream)
            drop_death_notices(stream)

    def _restore_streams(self) -> None:
        """Restore the process's original output streams without waiting for the terminal."""
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
        if is_dropping or (dropped and text == "\n"):  # print() writes the newline in a separate call
            return len(text)
        return write(text)

    stream.write = write_rest  # type: ignore[method-assign]
