"""Thread that carries a run's events from the coordinator to the driver's observers.

Workers run on other machines, so they and Ray Train's controller record events with a small actor, the coordinator. A
thread of the driver reads these events and feeds them to the observers: the run's files, the terminal, and others.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from grpo_ray.observers.feed import RunFeed, RunObserver
from grpo_ray.storage.jsonl import EventsFile, MetricsFile
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.events import TAKES_STEPS

POLL_SECONDS = 0.25


class RunFiles(RunObserver):
    """Writer of `metrics.jsonl` and `events.jsonl`.

    Args:
        notice: called with a line for the user.
    """

    def __init__(self, folder: RunFolder, notice: Callable[[str], None]):
        self.metrics, self.events, self._notice = MetricsFile(folder), EventsFile(folder), notice
        self.may_write = True
        """False once another driver has taken the run folder."""
        self._measured: dict[int, Mapping[str, Any]] = {}
        """Step -> its held-out metrics that were measured in this launch. The file of a driver that was killed may lack
        the row, which comes from the checkpoint when the run resumes."""

    def event(self, entry: Mapping[str, Any]) -> None:
        self.events.add(entry)

    def resumed(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._measured = {each: metrics for each, metrics in self._measured.items() if each <= step}
        self.metrics.resume(step, [{**row, **self._measured.get(row["step"], {})} for row in rows])

    def step(self, row: Mapping[str, Any], at: float) -> None:
        self.metrics.add(row)
        self.events.add({"event": "step", "at": at, "step": row["step"]})

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._measured[step] = metrics
        self.metrics.merge(step, metrics)

    def flush(self) -> None:
        """Write the rows that could not be written so far, and print a notice if storage still fails."""
        if not self.may_write:
            return
        for file in (self.metrics, self.events):
            try:
                file.flush()
            except OSError as error:  # no metrics are lost: the latest checkpoint holds those up to its step
                self._notice(f"{file.NAME} could not be written: {error}")


class RunFollower:
    """Thread that carries the coordinator's events to the observers.

    Args:
        coordinator: handle of the run's `RunCoordinator` actor.
        max_steps: last step of the run.
    """

    def __init__(self, coordinator: Any, feed: RunFeed, max_steps: int):
        self.coordinator, self.feed, self.max_steps = coordinator, feed, max_steps
        self.is_training = False
        """True while the workers take steps."""
        self.can_read = True
        """False once the cluster, and the coordinator with it, is lost."""
        self._resumed: tuple[int, list[dict[str, Any]]] | None = None
        """Step that an attempt began with, and the latest rows up to it. Passed on when the attempt takes its first
        step, or at once if no step is left, so that an attempt that fails before its first step discards nothing."""
        self._entries_read = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "RunFollower":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self.can_read:  # otherwise the thread waits for a response that never comes
            self._thread.join()
            with contextlib.suppress(ray.exceptions.RayError):  # the cluster was lost, and the coordinator with it
                self._poll()
        self.feed.flush()

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self._poll()
            except ray.exceptions.RayError:
                return  # the cluster was lost; `trainer.fit` raises an error that names the cause
            time.sleep(POLL_SECONDS)

    def _poll(self) -> None:
        status, entries = ray.get(self.coordinator.read.remote(self._entries_read))
        self._entries_read += len(entries)
        for entry in entries:
            self._handle(entry)
        if not entries and status.text != "training":
            self.feed.phase(*status)

    def _pass_on_resume(self) -> None:
        """Pass on the step that the attempt began with, once per attempt."""
        if self._resumed is not None:
            self.feed.resumed(*self._resumed)
            self._resumed = None

    def _handle(self, entry: dict[str, Any]) -> None:
        event = entry["event"]
        self.is_training = TAKES_STEPS.get(event, self.is_training)
        if event in ("step", "measured"):
            self._pass_on_resume()
        if event == "step":
            self.feed.step(entry["row"], entry["at"])
            return
        if event == "began":
            self._resumed = entry["step"], entry.pop("rows")
            if entry["step"] >= self.max_steps:  # no step is left to take
                self._pass_on_resume()
        elif event == "measured":
            self.feed.measured(entry["step"], entry["metrics"])
        self.feed.event(entry)
