"""Actor that connects the driver, the controller, the workers and the tasks that read problems.

Imports no heavy library, because the actor is a process of its own.
"""

import time
from collections import deque
from typing import Any, NamedTuple


class Status(NamedTuple):
    """Current activity of the workers."""

    text: str
    done: int | None = None
    total: int | None = None
    """Progress inside the activity, in any unit; None: unknown."""


class RunCoordinator:
    """Shared state of a run, held in one Ray actor.

    Workers run on other machines than the driver, so all state that crosses processes goes through here: the status
    line, the plan of the current epoch, the stop request, and a list of events. Each event gets the actor's time
    (seconds since 1970), so that all machines share one clock.
    """

    def __init__(self) -> None:
        self._status = Status("starting the workers")
        self._epoch_plan: Any = None
        self._stop_requested = False
        self._progress: dict[int, Any] = {}
        self._entries: deque[dict[str, Any]] = deque()
        self._num_dropped = 0
        """Entries that the driver has written to the run's files and that are no longer held here."""

    def set_status(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Replace the status, which the driver shows until training reports its first step.

        Args:
            done, total: progress inside the activity, in any unit; None: unknown.
        """
        self._status = Status(text, done, total)

    def record_metrics(self, row: dict[str, Any]) -> None:
        """Append the metrics of one step."""
        self._entries.append({"event": "step", "at": time.time(), "row": row})

    def record_event(self, event: str, **fields: Any) -> None:
        """Append an event of a kind in `events.EVENTS`."""
        self._entries.append({"event": event, "at": time.time()} | fields)

    def read(self, start: int) -> tuple[Status, list[dict[str, Any]]]:
        """Return the status and the entries from number `start` on, and drop those before it.

        The driver is the only reader, and requests an entry again until it has received it.
        """
        while self._entries and self._num_dropped < start:
            self._entries.popleft()
            self._num_dropped += 1
        return self._status, list(self._entries)

    def exchange_progress(self, rank: int, progress: Any) -> dict[int, Any]:
        """Set the progress of a worker, any value; return that of all workers so far, by rank."""
        self._progress[rank] = progress
        return self._progress

    def request_stop(self) -> None:
        """Ask the workers to finish their step, save a checkpoint, and end."""
        self._stop_requested = True

    def stop_requested(self) -> bool:
        """Return True once a stop was requested."""
        return self._stop_requested

    def set_epoch_plan(self, plan: Any) -> None:
        """Publish the plan that the reading tasks follow from now on.

        Args:
            plan: list with the object reference of an `EpochPlan`. The reference is wrapped in a list because Ray
                replaces a bare reference argument by its value.
        """
        self._epoch_plan = plan

    def epoch_plan(self) -> Any:
        """Return the plan published last, or None."""
        return self._epoch_plan
