"""Delivery of a run's progress to its trackers: one thread and one bounded queue for each.

A tracker that is slow, hangs or fails delays neither training nor another tracker. Its queue holds `QUEUE_ITEMS`; steps
that do not fit are dropped and read from `metrics.jsonl` once the queue is empty again. Steps that a tracker lacks when
the driver ends are sent when the run is started again: the tracker's position is compared with `metrics.jsonl`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_ray.observers.feed import RunObserver
from grpo_ray.observers.trackers.history import EventList, TrackerFile, read_samples
from grpo_ray.observers.trackers.registry import create_tracker
from grpo_ray.observers.trackers.tracker import Position, StepEntry, TrackedRun, Tracker, numbers_of
from grpo_ray.storage.jsonl import read_metrics
from grpo_ray.telemetry.measures import heldout_part
from grpo_ray.text.display import safe_text

QUEUE_ITEMS = 2000
"""Most items that wait for one tracker; a step is one item of a few kB."""
CLOSE_SECONDS = 60.0
"""Longest wait at the end of a launch, for all trackers together."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Shortest and longest pause, in seconds, before a failed delivery is repeated; each is twice the one before."""
REMOTE_FLUSH_SECONDS = 60.0
"""Least time between two flushes to a run folder in an object store, apart from checkpoints."""
RECOVERY_PAUSE = 5.0
"""Time between two attempts to read dropped steps that `metrics.jsonl` does not have yet."""


@dataclass(frozen=True)
class _Step:
    row: Mapping[str, Any]
    at: float


@dataclass(frozen=True)
class _Heldout:
    step: int
    metrics: Mapping[str, Any]
    at: float


@dataclass(frozen=True)
class _Resumed:
    step: int
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _Events:
    pass


@dataclass(frozen=True)
class _Finished:
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class _Recover:
    pass


@dataclass(frozen=True)
class _Flush:
    pass


_DROPPABLE = (_Step, _Heldout)
"""Items that may be dropped, since `metrics.jsonl`, or the event `baseline`, has them too."""


class GaveUpError(Exception):
    """The launch has ended and no longer waits for the tracker."""


class TrackerDispatcher(RunObserver):
    """Observer that passes a run's progress on to its trackers.

    Args:
        names: values of `run.trackers`.
        describe: returns the run as trackers show it, given its id.
        notice: called with a line for the user, from several threads.
        create: creates a tracker by its name.
    """

    def __init__(
        self,
        names: Sequence[str],
        file: TrackerFile,
        events: EventList,
        describe: Callable[[str], TrackedRun],
        notice: Callable[[str], None],
        create: Callable[[str], Tracker] = create_tracker,
        queue_items: int = QUEUE_ITEMS,
        close_seconds: float = CLOSE_SECONDS,
    ):
        self._events, self._notice, self._close_seconds = events, notice, close_seconds
        self._has_resumed = False
        self._threads = [
            _TrackerThread(name, partial(create, name), file, events, describe, notice, queue_items) for name in names
        ]

    def event(self, entry: Mapping[str, Any]) -> None:
        if entry["event"] == "baseline":
            self._offer(_Heldout(0, dict(entry.get("metrics") or {}), entry["at"]))
        if self._events.add(entry):
            self._offer(_Events())

    def resumed(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._has_resumed = True
        self._offer(_Resumed(step, tuple(rows)))

    def step(self, row: Mapping[str, Any], at: float) -> None:
        self._events.step_times[int(row["step"])] = at
        self._offer(_Step(dict(row), at))

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        # Before an attempt the driver measures old checkpoints, the newest one first. They are read from
        # `metrics.jsonl` when the attempt begins, in the order of steps and with the steps that a tracker lacks.
        if self._has_resumed:
            self._offer(_Heldout(step, dict(metrics), time.time()))

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._offer(_Finished(dict(summary)))

    def close(self) -> None:
        deadline = time.monotonic() + self._close_seconds
        for thread in self._threads:
            thread.begin_closing()
        late = [thread.name for thread in self._threads if not thread.end(deadline - time.monotonic())]
        if late:
            self._notice(
                f"run.trackers: {', '.join(late)} did not take all metrics within {self._close_seconds:g} s; the rest "
                "is sent when the run is started again"
            )

    def _offer(self, item: Any) -> None:
        for thread in self._threads:
            thread.offer(item)


class _TrackerThread:
    """Thread that delivers items to one tracker, in order. It starts with the first item."""

    def __init__(
        self,
        name: str,
        create: Callable[[], Tracker],
        file: TrackerFile,
        events: EventList,
        describe: Callable[[str], TrackedRun],
        notice: Callable[[str], None],
        queue_items: int,
    ):
        self.name = name
        self._create, self._file, self._events, self._describe = create, file, events, describe
        self._notice, self._queue_items = notice, queue_items
        self._condition = threading.Condition()
        self._items: deque[Any] = deque()
        self._newest_step = 0
        """Last step that was offered."""
        self._has_dropped = False
        """True while dropped or lost steps remain to be read from `metrics.jsonl`; later steps are dropped too."""
        self._is_closing = False
        self._gave_up = threading.Event()
        self._thread: threading.Thread | None = None
        # Only the thread uses the attributes below.
        self._run: TrackedRun | None = None
        self._tracker: Tracker | None = None
        self._position = self._saved_position = Position()
        """Position of the open tracker object, and at its last flush."""
        self._has_lost = False
        """True while steps that a tracker object took, but lost in a failure, remain to be read from `metrics.jsonl`;
        steps in the queue are left to that reading."""
        self._unsaved_since: float | None = None
        self._has_failed = self._is_complete = False

    def offer(self, item: Any) -> None:
        """Append an item, or drop it if the queue is full and `metrics.jsonl` has it too; return at once."""
        with self._condition:
            if isinstance(item, _Step):
                self._newest_step = item.row["step"]
            elif isinstance(item, _Resumed):
                self._newest_step = item.step
            if isinstance(item, _DROPPABLE) and (self._has_dropped or len(self._items) >= self._queue_items):
                self._has_dropped = True
                return
            if isinstance(item, _Events) and self._items and isinstance(self._items[-1], _Events):
                return  # the item that waits sends the whole list
            self._items.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver_all, name=f"tracker-{self.name}", daemon=True)
                self._thread.start()
            self._condition.notify()

    def begin_closing(self) -> None:
        """Make the thread end once it has delivered everything."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()

    def end(self, seconds: float) -> bool:
        """Wait for the end of the thread; return False if it has not delivered everything in time."""
        if self._thread is None:
            return True
        self._thread.join(max(0.0, seconds))
        has_ended = not self._thread.is_alive()
        self._gave_up.set()
        return has_ended

    def _deliver_all(self) -> None:
        is_flushed = False
        try:
            while not is_flushed:
                while (item := self._next()) is not None:
                    self._persist(partial(self._deliver, item))
                self._persist(self._flush)
                is_flushed = not self._has_lost
        except GaveUpError:
            return
        try:
            self._opened.close(is_complete=self._is_complete)
        except Exception as error:  # any error of the tracker's library; everything was delivered and flushed
            self._notice(f"run.trackers: {self.name} could not be closed: {_describe_error(error)}")

    def _next(self) -> Any:
        """Wait for the next item; return None at the end."""
        with self._condition:
            while not self._items:
                if self._has_dropped:
                    return _Recover()
                if self._is_closing:
                    return None
                if (wait := self._seconds_to_flush()) is not None and wait <= 0:
                    return _Flush()
                self._condition.wait(wait)
            return self._items.popleft()

    def _seconds_to_flush(self) -> float | None:
        """Return the time until delivered items have to be flushed; None if all of them are."""
        if self._unsaved_since is None or self._tracker is None or self._run is None:
            return None
        interval = self._tracker.flush_seconds if self._run.folder.local is not None else REMOTE_FLUSH_SECONDS
        return self._unsaved_since + interval - time.monotonic()

    def _persist(self, action: Callable[[], None]) -> None:
        """Run an action, and repeat it with a new tracker object after an error, until it succeeds."""
        pause = FIRST_PAUSE
        while True:
            try:
                self._open()
                action()
            except Exception as error:  # any error of the tracker's library: none may end the run, or be lost
                self._drop_tracker()
                if not self._has_failed:
                    self._notice(
                        f"run.trackers: {self.name} failed: {_describe_error(error)}; training goes on, and the "
                        "metrics are sent again until it works"
                    )
                self._has_failed = True
                if not self._wait_to_repeat(pause):
                    raise GaveUpError from None
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if self._has_failed and not self._has_lost:
                self._notice(f"run.trackers: {self.name} works again")
                self._has_failed = False
            return

    def _wait_to_repeat(self, pause: float) -> bool:
        """Wait before a delivery is repeated, which the end of the launch shortens; return False to give up."""
        if self._is_closing:
            return not self._gave_up.wait(min(pause, FIRST_PAUSE))
        with self._condition:
            self._condition.wait_for(lambda: self._is_closing, pause)
        return True

    def _open(self) -> None:
        """Open a new tracker object if none is open."""
        if self._tracker is not None:
            return
        if self._run is None:
            self._run = self._describe(self._file.run_id())
            self._saved_position = self._file.position(self.name)
        self._events.load()
        tracker = self._create()
        # Set before it is opened, so that the resources of an unfinished `open` are released too.
        self._tracker = tracker
        before, self._position = self._position, tracker.open(self._run, self._saved_position)
        if self._position.step < before.step or self._position.heldout < before.heldout:
            self._has_lost = True
            with self._condition:
                self._has_dropped = True

    def _drop_tracker(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with suppress(Exception):  # the tracker has just failed, which the caller reports
                tracker.close(is_complete=False)

    def _deliver(self, item: Any) -> None:
        """Deliver one item; safe to repeat."""
        if self._has_lost and isinstance(item, _DROPPABLE):
            return
        tracker = self._opened
        match item:
            case _Step():
                self._log_row(item.row, item.at)
            case _Heldout():
                self._log_heldout(item.step, item.metrics, item.at)
            case _Resumed():
                if self._position.step > item.step and tracker.rewind(item.step):
                    self._position = Position(item.step, min(self._position.heldout, item.step))
                self._catch_up(item.step, item.rows)
                tracker.log_events(self._position.step, self._events.lines())
                self._flush()
            case _Events():
                tracker.log_events(self._position.step, self._events.lines())
            case _Finished():
                self._catch_up()
                tracker.log_events(self._position.step, self._events.lines())
                tracker.finish(self._position.step, item.summary)
                self._flush()  # here, so that a failure repeats all of this
                self._is_complete = True
            case _Recover():
                self._recover()
            case _Flush():
                self._flush()
        if not isinstance(item, _Flush) and self._unsaved_since is None:
            self._unsaved_since = time.monotonic()
        if (wait := self._seconds_to_flush()) is not None and wait <= 0:
            self._flush()

    @property
    def _opened(self) -> Tracker:
        assert self._tracker is not None
        return self._tracker

    def _log_row(self, row: Mapping[str, Any], at: float) -> None:
        """Log a row of `metrics.jsonl`, or those of its metrics that the tracker does not have yet."""
        assert self._run is not None
        step, metrics = int(row["step"]), numbers_of(row)
        heldout = heldout_part(metrics)
        if step <= self._position.step:
            self._log_heldout(step, heldout, at)
            return
        samples = read_samples(self._run.folder, step) if "checkpoint" in row else ()
        self._opened.log(StepEntry(step=step, at=at, metrics=metrics, samples=samples))
        self._position = Position(step, step if heldout else self._position.heldout)
        if "checkpoint" in row:
            self._flush()

    def _log_heldout(self, step: int, metrics: Mapping[str, Any], at: float) -> None:
        heldout = heldout_part(numbers_of(metrics))
        if heldout and step > self._position.heldout:
            self._opened.log_heldout(step, heldout, at)
            self._position = Position(self._position.step, step)

    def _catch_up(self, up_to: int | None = None, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Log the measures of the initial policy, and the rows of `metrics.jsonl`, that the tracker lacks.

        Args:
            up_to: last step; None: all.
            rows: latest rows up to that step, in case the file could not be written.
        """
        assert self._run is not None
        self._log_heldout(0, self._events.baseline, time.time())
        last = 0
        for row in read_metrics(self._run.folder):
            if up_to is not None and row["step"] > up_to:
                break
            last = row["step"]
            self._log_row(row, self._events.step_times.get(int(last), time.time()))
        for missing in rows:
            if missing["step"] > last:
                self._log_row(missing, self._events.step_times.get(int(missing["step"]), time.time()))

    def _recover(self) -> None:
        """Read dropped and lost steps from `metrics.jsonl`, which may reach an object store with a delay."""
        self._catch_up()
        with self._condition:
            if self._position.step >= self._newest_step or self._is_closing:
                self._has_dropped = self._has_lost = False
            else:
                self._condition.wait(RECOVERY_PAUSE)

    def _flush(self) -> None:
        """Make everything durable, and save the position."""
        self._opened.flush()
        if self._position != self._saved_position:
            self._file.save(self.name, self._position)
            self._saved_position = self._position
        self._unsaved_since = None


def _describe_error(error: Exception) -> str:
    """Return the first line of an error, bounded, without secrets."""
    return safe_text(" ".join(f"{type(error).__name__}: {error}".split()), 200)
