"""Hang watchdog: ends a worker process once no worker of its group has made progress for a time limit.

A limit on whole steps would not work: a step of 32,000 tokens, the first measurement of a large held-out set or a
checkpoint of a large model may take an hour without a fault. The limit therefore applies to the time without any
progress: a step of the engine (one token of each running completion), a micro-batch, the start or end of a phase, bytes
of a checkpoint on the local disk. It does not depend on the number of tokens, problems and bytes, and a hang is
detected as early in a long step as in a short one.

A worker that has finished its part waits in a collective for the others, without progress of its own. Progress of any
worker of the group therefore counts for all of them. A hang of one worker is detected once the others wait for it,
which they do within the step.
"""

import faulthandler
import logging
import os
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

HANG_EXIT_CODE = 86
"""Exit code of a worker that its own watchdog ended."""
POLLS_PER_LIMIT, MAX_POLL_SECONDS = 20, 5.0
"""Readings of the progress within one limit, and longest time between two of them, in seconds."""


class HangTimeout:
    """Time limit without progress per kind of activity: a multiple of its usual longest pause, in seconds."""

    def __init__(self, factor: float, floor: float):
        """
        Args:
            factor: limit as a multiple of the median of the longest pauses of the last 20 activities of a kind.
            floor: smallest limit, seconds; the limit of an activity without recorded pauses.
        """
        self.factor = factor
        self.floor = floor
        self._pauses: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))

    def record(self, activity: str, seconds: float) -> None:
        """Add the longest pause of an activity that has ended."""
        self._pauses[activity].append(seconds)

    def usual_pause(self, activity: str) -> float:
        """Return the median of the longest pauses; 0 if none is recorded."""
        return statistics.median(self._pauses[activity]) if self._pauses[activity] else 0.0

    def limit(self, activity: str) -> float:
        """Return the seconds without progress after which the activity counts as hanging."""
        return max(self.floor, self.factor * self.usual_pause(activity))

    def derivation(self, activity: str) -> str:
        """Describe the setting that determines the limit, and its value."""
        if self.limit(activity) == self.floor:
            return f"run.hang_seconds={self.floor:g}"
        return f"run.hang_factor={self.factor:g} times the usual longest pause of {self.usual_pause(activity):.1f} s"


@dataclass
class Activity:
    """Current activity of a worker and its latest progress. Times are seconds of one monotonic clock."""

    name: str
    step: int | None
    limit: float
    """Seconds without progress after which it hangs."""
    progressed_at: float
    progress: object = None
    """Latest reading of the progress; a reading that differs from it counts as progress."""
    longest_pause: float = 0.0

    def observe(self, progress: object, now: float) -> bool:
        """Record a reading of the progress; return True if it differs from the last one."""
        if progress == self.progress:
            return False
        self.longest_pause = max(self.longest_pause, now - self.progressed_at)
        self.progress, self.progressed_at = progress, now
        return True

    def end(self, now: float) -> float:
        """Return the longest pause of the activity, including the one that ends now."""
        return max(self.longest_pause, now - self.progressed_at)

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the activity counts as hanging."""
        return self.progressed_at + self.limit - now


class Watchdog:
    """Thread that ends this process when an activity hangs, so that Ray Train restarts the worker group.

    After the limit without progress, the stacks of all threads are written to a file and `on_hang` is called; `grace`
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
        read_progress: Callable[[], object] = lambda: None,
        grace: float = 10.0,
        end: Callable[[], object] = lambda: os._exit(HANG_EXIT_CODE),
    ):
        """
        Args:
            stacks: file that the stacks are appended to. It has to be on a local disk, because storage may hang.
            factor, floor: see `HangTimeout`; `run.hang_factor` and `run.hang_seconds`.
            on_hang: called with a message and the file of stacks; may fail or hang itself.
            read_progress: returns a value that differs from the last one if any worker has made progress since. Called
                every few seconds in the watchdog's thread.
            grace: seconds from the limit to the end of the process.
            end: ends the process.
        """
        self.stacks = stacks
        self.timeout = HangTimeout(factor, floor)
        self.on_hang = on_hang
        self.read_progress = read_progress
        self.grace = grace
        self.end = end
        stacks.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(stacks, "a", encoding="utf-8")  # noqa: SIM115 - faulthandler writes to it until `stop`
        self._activity: Activity | None = None
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
            self._activity = Activity(activity, step, self.timeout.limit(activity), time.monotonic())
            self._set_backstop(self._activity)
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
            self.timeout.record(self._activity.name, self._activity.end(time.monotonic()))
        self._activity = None

    def _set_backstop(self, activity: Activity) -> None:
        """Make faulthandler end the process some time after the limit, in case no Python code can run."""
        backstop = activity.limit + 2 * self.grace + 1
        faulthandler.dump_traceback_later(backstop, exit=True, file=self._file)

    def _watch(self) -> None:
        while True:
            with self._changed:
                while self._activity is None and not self._stopped:
                    self._changed.wait()
                activity = self._activity
                if self._stopped or activity is None:
                    return
                self._changed.wait(min(activity.limit / POLLS_PER_LIMIT, MAX_POLL_SECONDS))
            try:
                progress = self.read_progress()  # without the lock: it may take seconds
            except Exception as error:  # a failed reading counts as no progress, and must not end this thread
                log.warning("the progress of the workers cannot be read: %r", error)
                progress = activity.progress
            with self._changed:
                if activity is not self._activity:
                    continue  # the next activity began, which is progress too
                now = time.monotonic()
                if activity.observe(progress, now):
                    self._set_backstop(activity)
                elif activity.seconds_left(now) <= 0:
                    break
        self._report_hang(activity)

    def _report_hang(self, activity: Activity) -> None:
        """Write the stacks, call `on_hang`, and end the process after the grace period."""
        message = describe_hang(activity, self.timeout, time.monotonic())
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {message}\n")
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)
            self.on_hang(message, self.stacks)
        finally:  # a hanging process must end even if the report fails
            time.sleep(max(0.0, activity.seconds_left(time.monotonic()) + self.grace))
            self.end()


def describe_hang(activity: Activity, timeout: HangTimeout, now: float) -> str:
    """Describe a hang, the origin of its limit, and the setting that raises the limit."""
    step = "" if activity.step is None else f" (step {activity.step})"
    return (
        f"{activity.name}{step} hangs: no worker made progress (a token, a micro-batch, bytes of a checkpoint) for "
        f"{now - activity.progressed_at:.1f} s; the limit is {activity.limit:.1f} s, from "
        f"{timeout.derivation(activity.name)}; if nothing was wrong, raise run.hang_seconds"
    )
