"""Interface of the driver's observers of a run: run files, terminal, trackers, health warnings.

Imports no heavy library.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any


class RunObserver:
    """Receiver of a run's progress in the driver; each method does nothing unless a subclass overrides it.

    The methods are called one at a time and in order, from several threads of the driver. They must return quickly,
    since the other observers wait meanwhile, and must not raise.
    """

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Receive the current activity outside of the steps, repeatedly while it goes on.

        Args:
            done, total: progress inside the phase, in any unit; None: unknown.
        """

    def event(self, entry: Mapping[str, Any]) -> None:
        """Receive an entry of `events.jsonl`: `event` (its kind), `at` (seconds since 1970) and the kind's own fields.

        `events.EVENTS` has the kinds. Logging steps are passed to `step` instead.
        """

    def resumed(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receive the step that an attempt continues from, before its first step: all later steps are taken again.

        Args:
            step: 0 if the attempt starts from the initial policy.
            rows: latest metrics up to this step, from the checkpoint, for an observer that missed some.
        """

    def step(self, row: Mapping[str, Any], at: float) -> None:
        """Receive the metrics of one logging step.

        Args:
            row: `step` and the metrics by name; `checkpoint` is the name of the checkpoint saved at this step.
            at: time of the report, seconds since 1970.
        """

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Receive held-out metrics of a checkpoint that was measured after the report of its step.

        An event of the kind `measured` follows.
        """

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Receive the contents of `summary.json` at the end of a launch."""

    def aborted(self, error: BaseException) -> None:
        """Receive the error, or the interruption, that ends a launch without a summary."""

    def flush(self) -> None:
        """Write all pending data; called when the workers have ended."""

    def close(self) -> None:
        """Release all resources; called once, after everything else, also if the run failed."""


class RunFeed(RunObserver):
    """Distributor of a run's progress to its observers, in their order.

    An observer may publish events through the feed from inside a method. Other observers may receive them before the
    current event; events never interleave.
    """

    def __init__(self, observers: Sequence[RunObserver]):
        self.observers = tuple(observers)
        self._lock = threading.RLock()

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        with self._lock:
            for observer in self.observers:
                observer.phase(text, done, total)

    def event(self, entry: Mapping[str, Any]) -> None:
        with self._lock:
            for observer in self.observers:
                observer.event(entry)

    def resumed(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._lock:
            for observer in self.observers:
                observer.resumed(step, rows)

    def step(self, row: Mapping[str, Any], at: float) -> None:
        with self._lock:
            for observer in self.observers:
                observer.step(row, at)

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            for observer in self.observers:
                observer.measured(step, metrics)

    def finished(self, summary: Mapping[str, Any]) -> None:
        with self._lock:
            for observer in self.observers:
                observer.finished(summary)

    def aborted(self, error: BaseException) -> None:
        with self._lock:
            for observer in self.observers:
                observer.aborted(error)

    def flush(self) -> None:
        with self._lock:
            for observer in self.observers:
                observer.flush()

    def close(self) -> None:
        with self._lock:
            for observer in self.observers:
                observer.close()
