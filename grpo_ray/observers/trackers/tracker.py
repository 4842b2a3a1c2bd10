"""Interface of the experiment trackers: one run in each, continued under the same id for as long as the run exists."""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.heldout_keys import HELDOUT
from grpo_ray.storage.numbers import to_finite
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.display import safe_text

DEFAULT_PROJECT = "grpo_ray"
CONFIG_CHARS = 500
"""Longest value of a setting sent to trackers; MLflow accepts 6000 characters, W&B shows fewer."""
HELDOUT_STEP = f"{HELDOUT}/step"
"""Metric with the step of held-out metrics, in a tracker whose own steps cannot go back or cannot be listed."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run as trackers show it; secrets are hidden in all of it."""

    id: str
    """Id in every tracker, unique among all runs."""
    name: str
    project: str | None
    """`run.project`; None: see `project_in`."""
    config: Mapping[str, Any]
    """The settings by dotted name: numbers, booleans, texts."""
    tags: Mapping[str, str]
    folder: RunFolder
    group: str | None = None
    """`run.group`."""

    def project_in(self, variable: str = "") -> str:
        """Return `run.project`, else the tracker's own environment variable, else `DEFAULT_PROJECT`."""
        return self.project or os.environ.get(variable) or DEFAULT_PROJECT


@dataclass(frozen=True)
class Position:
    """The steps up to which a tracker has everything."""

    step: int = 0
    """Last step whose metrics it has; 0: none."""
    heldout: int = -1
    """Last step whose held-out metrics it has, 0 for the initial policy; -1: none."""


@dataclass(frozen=True, kw_only=True)
class CompletionSample:
    """One completion as it is shown; all texts are safe to show and bounded."""

    step: int
    problem: str
    reward: float
    correct: float | None
    """Verdict, 1 or 0; None if it is unknown."""
    tokens: int
    prompt: str
    completion: str


SAMPLE_COLUMNS = ("step", "problem", "reward", "correct", "tokens", "prompt", "completion")


@dataclass(frozen=True, kw_only=True)
class StepEntry:
    """One logging step: its metrics, and at a checkpoint samples of its completions."""

    step: int
    at: float
    """Time of the step, seconds since 1970."""
    metrics: Mapping[str, float]
    samples: Sequence[CompletionSample] = ()


class Tracker(ABC):
    """One run in one tracker, used by one thread. Every method may be slow and may raise any error of the library.

    After an error the tracker is closed and replaced by a new one, which continues the same run.
    """

    flush_seconds = 1.0
    """Time in seconds between two calls of `flush` while steps are logged."""

    @staticmethod
    def missing_setting(storage_path: str) -> str | None:
        """Return the reason why the installed tracker cannot be used, with the remedy; None if it can.

        Args:
            storage_path: of the run.
        """
        return None

    @abstractmethod
    def open(self, run: TrackedRun, saved: Position) -> Position:
        """Begin the run in the tracker, or continue it.

        Args:
            saved: the position at the last `flush`.

        Returns:
            The position that the tracker itself has recorded, or else `saved`; if the tracker can remove metrics,
            later ones are removed.
        """

    @abstractmethod
    def log(self, entry: StepEntry) -> None:
        """Add the metrics of a step that is later than all logged ones."""

    @abstractmethod
    def log_heldout(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Add held-out metrics of an earlier step, or of step 0, the initial policy."""

    def rewind(self, step: int) -> bool:
        """Remove all metrics after a step; the later steps are taken again.

        Returns:
            False if the tracker cannot remove metrics: a step that is taken again then keeps its first ones.
        """
        return False

    @abstractmethod
    def log_events(self, step: int, events: Sequence[str]) -> None:
        """Replace the list of the run's events: launches, restarts, failures, warnings; one line each."""

    @abstractmethod
    def finish(self, step: int, summary: Mapping[str, Any]) -> None:
        """Add the contents of `summary.json`, with the URI of the best checkpoint."""

    def flush(self) -> None:  # noqa: B027 -- most trackers have nothing to do
        """Make everything that was logged durable."""

    @abstractmethod
    def close(self, *, is_complete: bool) -> None:
        """Release all resources; `is_complete` is False if the launch failed."""


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings by dotted name; None, lists and other values as bounded text."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            yield name, value
        else:
            yield name, safe_text(value, CONFIG_CHARS)


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row that are finite numbers, without the step."""
    return {name: number for name, value in row.items() if name != "step" and (number := to_finite(value)) is not None}


def as_code(text: str) -> str:
    """Return a text as a code block of Markdown, whatever it contains: each line is indented by four columns."""
    return "\n".join(f"    {line.expandtabs(4)}" for line in text.split("\n"))


def format_samples(samples: Sequence[CompletionSample]) -> str:
    """Format samples as plain text, for trackers without tables of text."""
    return "\n\n".join(
        f"step {sample.step}  problem {sample.problem}  reward {sample.reward:.3f}  {sample.tokens} tokens\n"
        f"--- prompt\n{sample.prompt}\n--- completion\n{sample.completion}"
        for sample in samples
    )


def format_time(at: float) -> str:
    """Format seconds since 1970 as UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
