"""Actor between a sweep and the drivers of its trials, which are processes of their own.

Ray starts the actor anew if it dies. It is then empty: lines are lost, the sweep repeats its requests to stop, and a
trial of which nothing is known is one that may be taking a step.

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
    takes_no_steps: bool = False
    """True while the workers of the launch have not begun to take steps, or have failed; False if that is not known."""


class SweepBoard:
    """Activity of the trials, and requests to stop them."""

    def __init__(self) -> None:
        self._activities: dict[str, TrialActivity] = {}
        self._lines: deque[tuple[str, str]] = deque(maxlen=KEPT_LINES)
        self._stops: set[str] = set()

    def begin(self, trial: str) -> None:
        """Forget a request to stop a trial, before it is launched again."""
        self._stops.discard(trial)
        known = self._activities.get(trial, TrialActivity())
        self._activities[trial] = known._replace(line="starting", takes_no_steps=True)

    def add_line(self, trial: str, line: str) -> None:
        """Record a line that the driver of a trial has printed."""
        self._activities[trial] = self._activities.get(trial, TrialActivity())._replace(line=line)
        self._lines.append((trial, line))

    def add_step(self, trial: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record the latest step of a trial and metrics of it."""
        known = self._activities.get(trial, TrialActivity())
        self._activities[trial] = known._replace(step=step, metrics={**known.metrics, **metrics})

    def set_takes_steps(self, trial: str, takes_steps: bool) -> None:
        """Record that the workers of a trial take steps from now on, or that they do not."""
        known = self._activities.get(trial, TrialActivity())
        self._activities[trial] = known._replace(takes_no_steps=not takes_steps)

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
