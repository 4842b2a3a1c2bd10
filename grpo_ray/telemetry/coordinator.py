"""The actor between workers, reading tasks, controller and driver. Light, since it is a process of its own."""

import time
from typing import Any


class RunCoordinator:
    """An actor between the workers, the tasks that read problems, the controller and the driver.

    It holds the run's present phase, the round that is being dealt, and an entry for all that happens, each with the
    time of its arrival (seconds since 1970, one clock for all machines) until the driver has read it.
    """

    def __init__(self) -> None:
        self._phase = "starting"
        self._round: Any = None
        self._stopping = False
        self._entries: list[dict[str, Any]] = []

    def phase(self, text: str) -> None:
        self._phase = text

    def row(self, row: dict[str, Any]) -> None:
        """Take down the metrics of a step."""
        self._entries.append({"event": "step", "at": time.time(), "row": row})

    def happened(self, event: str, **what: Any) -> None:
        """Take down an event: `began`, `training`, `checkpoint`, `failed`, `notice`, `measured`."""
        self._entries.append({"event": event, "at": time.time()} | what)

    def read(self, start: int) -> tuple[str, list[dict[str, Any]]]:
        """The present phase, and the entries from number `start` on."""
        return self._phase, self._entries[start:]

    def stop(self) -> None:
        """Ask the workers to finish their step, save it, and end."""
        self._stopping = True

    def stopping(self) -> bool:
        return self._stopping

    def begin_round(self, round: Any) -> None:
        """Show the round that the reading tasks deal next, by its reference."""
        self._round = round

    def round(self) -> Any:
        return self._round
