"""Hang watchdog: ends a worker process whose current activity takes far longer than usual."""

import faulthandler
import os
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HANG_EXIT_CODE = 86
"""Exit code of a worker that its own watchdog ended."""


class HangTimeout:
    """Time limit per kind of activity: a multiple of the median of its last 20 durations, in seconds."""

    def __init__(self, factor: float, floor: float):
        """
        Args:
            factor: limit as a multiple of the median.
            floor: smallest limit, seconds; the limit of an activity without recorded durations.
        """
        self.factor = factor
        self.floor = floor
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))

    def record(self, activity: str, seconds: float) -> None:
        """Add a duration of an activity."""
        self._durations[activity].append(seconds)

    def median(self, activity: str) -> float | None:
        """Return the median duration of an activity, or None if none is recorded."""
        return statistics.median(self._durations[activity]) if self._durations[activity] else None

    def limit(self, activity: str) -> float:
        """Return the seconds after which the activity counts as hanging."""
        return max(self.floor, self.factor * (self.median(activity) or 0.0))


@dataclass(frozen=True)
class _Activity:
    """Current activity of the process. Times are `time.monotonic`, seconds."""

    name: str
    step: int | None
    start: float
    limit: float


class Watchdog:
    """Thread that ends this process when an activity hangs, so that Ray Train restarts the worker group.

    When an activity exceeds its limit, the stacks of all threads are written to a file and `on_hang` is called; `grace`
    seconds after the limit the process ends. The other workers of the group hang in the same step and write their
    stacks in that time. If native code holds the interpreter lock, no Python code can run: then faulthandler's own
    thread, written in C, writes the stacks and ends the process a little later, with exit code 1. A process can have
    only one watchdog, because faulthandler has only one timer.
    """

    def __init__(
        self,
        stacks: Path,
        factor: float,
        floor: float,
        on_hang: Callable[[str, Path], object],
        grace: float = 10.0,
        end: Callable[[], object] = lambda: os._exit(HANG_EXIT_CODE),
    ):
        """
        Args:
            stacks: file that the stacks are appended to. It has to be on a local disk, because storage may hang.
            factor: an activity hangs when it takes this many times its median duration,
            floor: but never before this many seconds, which alone apply to an activity not seen before.
            on_hang: called with a message and the file of stacks; may fail or hang itself.
            grace: seconds from the limit to the end of the process.
            end: ends the process.
        """
        self.stacks = stacks
        self.timeout = HangTimeout(factor, floor)
        self.on_hang = on_hang
        self.grace = grace
        self.end = end
        stacks.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(stacks, "a", encoding="utf-8")  # noqa: SIM115 - faulthandler writes to it until `stop`
        self._activity: _Activity | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def heartbeat(self, activity: str, step: int | None = None) -> None:
        """End the current activity and begin the next one.

        Args:
            activity: kind of activity, with a time limit of its own; named in the message of a hang.
            step: optimizer step, for the message.
        """
        with self._changed:
            self._finish_activity()
            self._activity = _Activity(activity, step, time.monotonic(), self.timeout.limit(activity))
            backstop = self._activity.limit + 2 * self.grace + 1
            faulthandler.dump_traceback_later(backstop, exit=True, file=self._file)
            self._changed.notify()

    def suspend(self) -> None:
        """End the current activity and watch nothing until the next heartbeat."""
        with self._changed:
            self._finish_activity()
            faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        """Stop watching for good. A hang that was detected before still ends the process."""
        with self._changed:
            self._finish_activity()
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if self.stacks.exists() and self.stacks.stat().st_size == 0:
            self.stacks.unlink()

    def _finish_activity(self) -> None:
        if self._activity is not None:
            self.timeout.record(self._activity.name, time.monotonic() - self._activity.start)
        self._activity = None

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped:
                activity = self._activity
                if activity is None:
                    self._changed.wait()
                elif (left := activity.start + activity.limit - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    break
            else:
                return
        self._report_hang(activity)

    def _report_hang(self, activity: _Activity) -> None:
        """Write the stacks, call `on_hang`, and end the process after the grace period."""
        median = self.timeout.median(activity.name)
        message = (
            f"{activity.name}{'' if activity.step is None else f' (step {activity.step})'} hangs: not finished after "
            f"{time.monotonic() - activity.start:.1f} s; usual duration "
            f"{'unknown' if median is None else f'{median:.1f} s'}"
        )
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {message}\n")
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)
            self.on_hang(message, self.stacks)
        finally:  # a hanging process must end even if the report fails
            time.sleep(max(0.0, activity.start + activity.limit + self.grace - time.monotonic()))
            self.end()
