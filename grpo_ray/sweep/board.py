"""Actor between a sweep and the drivers of its trials, which are processes of their own.

Imports no heavy library, because the actor is a process of its own.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

KEPT_LINES = 200
"""Latest lines of all trials that wait for the sweep to read them."""


class TrialActivity(NamedTuple):
    """Current activity of a trial."""

    line: str = ""
    """Latest line that its driver has printed."""
    step: int = 0
    """Latest reported step."""
    metrics: Mapping[str, float] = {}
    """Latest value of each metric that the sweep shows."""


class SweepBoard:
    """Activity of the trials, and requests to stop them."""

    def __init__(self) -> None:
        self._activities: dict[str, TrialActivity] = {}
        self._lines: deque[tuple[str, str]] = deque(maxlen=KEPT_LINES)
        self._stops: set[str] = set()

    def begin(self, trial: str) -> None:
        """Forget a request to stop a trial, before it is launched again."""
        self._stops.discard(trial)
        self._activities[trial] = self._activities.get(trial, TrialActivity())._replace(line="starting")

    def add_line(self, trial: str, line: str) -> None:
        """Record a line that the driver of a trial has printed."""
        self._activities[trial] = self._activities.get(trial, TrialActivity())._replace(line=line)
        self._lines.append((trial, line))

    def add_step(self, trial: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record the latest step of a trial and metrics of it."""
        known = self._activities.get(trial, TrialActivity())
        self._activities[trial] = known._replace(step=step, metrics={**known.metrics, **metrics})

    def request_stop(self, trial: str) -> None:
        """Ask the driver of a trial to finish the current step, save it and end."""
        self._stops.add(trial)

    def stop_requested(self, trial: str) -> bool:
        """Return True once a trial was asked to stop."""
        return trial in self._stops

    def read(self) -> tuple[dict[str, TrialActivity], list[tuple[str, str]]]:
        """Return the activity of all trials, and the (trial, line) printed since the last call."""
        lines = list(self._lines)
        self._lines.clear()
        return self._activities, lines


def numbers(metrics: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    """Return those of the named metrics that are numbers."""
    return {name: float(metrics[name]) for name in names if isinstance(metrics.get(name), int | float)}
