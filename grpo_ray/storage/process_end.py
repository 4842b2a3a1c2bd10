"""Safe end of a process whose threads may still call storage.

`RetryingFilesystem` is Python code that pyarrow's C++ code calls. If a daemon thread needs the interpreter while the
process ends, Python before 3.14 unwinds the thread's stack. With a frame of pyarrow on it, this is a fatal error of the
whole process (status 134), although all its work is done. So no thread may run this code at that moment: the end of the
process waits for calls that are under way, and blocks every other thread that calls storage until the process is gone.
"""

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_WAIT = 10.0
"""Seconds for which the end of the process waits for calls that are under way; a request to S3 takes no longer."""
SECONDS_TO_FALL_ASLEEP = 0.05


class ProcessEnd:
    """Gate for the storage calls of all threads, closed when the process ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed_by: threading.Thread | None = None
        self._is_registered = False

    def register(self) -> None:
        """Register `close` to be called at the end of the process."""
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self.close)

    def close(self, seconds: float = LONGEST_WAIT) -> None:
        """Block every other thread that begins or finishes a call; wait up to `seconds` until no call is under way."""
        with self._changed:
            self._closed_by = threading.current_thread()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._under_way == 0, seconds)
        time.sleep(SECONDS_TO_FALL_ASLEEP)  # time for threads that have just finished a call to block

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call of this thread as under way inside the block; wait here for ever once the process ends."""
        with self._changed:
            self._stay_if_closed()
            self._under_way += 1
        try:
            yield
        finally:
            self._count_down()

    def pause(self, seconds: float) -> None:
        """Wait inside a call, for this many seconds; wait here for ever once the process ends."""
        with self._changed:
            is_closed = self._changed.wait_for(lambda: self._is_closed, seconds)
        if is_closed:
            self._count_down()

    def _count_down(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()
            self._stay_if_closed()

    @property
    def _is_closed(self) -> bool:
        return self._closed_by not in (None, threading.current_thread())

    def _stay_if_closed(self) -> None:
        while self._is_closed:
            self._changed.wait()


process_end = ProcessEnd()
"""Gate of this process."""
