"""Short trial of a run in a run folder of its own, for `check --attack` and `check --forecast`.

A trial uses the same driver, workers and records as a run, so that it behaves like one. The user's own run folder is
only read.
"""

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_ray.config.schema import Config, GrpoConfig, RunConfig
from grpo_ray.driver.cluster.connection import WarmStartEnd
from grpo_ray.driver.launch import UNVERIFIABLE_FILE
from grpo_ray.driver.run import prepare
from grpo_ray.errors import GrpoRayError
from grpo_ray.observers.feed import RunObserver
from grpo_ray.storage.run_folder import RunFolder

SCHEDULE_FIELDS = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
"""TRL's fields of a learning rate that changes over the steps of a run."""


@dataclass(frozen=True)
class Trial:
    """Trial that has ended."""

    folder: RunFolder
    stopped: str | None
    """Name of the signal that stopped the trial; None if it took all its steps or reached its time limit."""


class StoppedTrialError(GrpoRayError):
    """A signal stopped a trial before it had taken its steps."""

    def __init__(self, stopped: str, folder: RunFolder) -> None:
        super().__init__(f"stopped by {stopped}; the steps so far are in {folder.uri}")
        self.signal = stopped


def trial_run(config: Config, kind: Literal["attack", "forecast"]) -> RunConfig:
    """Return the section `run` of a trial: a new folder beside the run's, without trackers and notifications."""
    names = (f"{config.run.name}-{kind}-{number}" for number in itertools.count(1))
    folders = (RunFolder(config.run.storage_path, name, config.run.storage_retry_seconds) for name in names)
    free = next(folder for folder in folders if not folder.exists())
    return replace(
        config.run,
        name=free.name,
        resume="latest",
        takeover=None,
        pause_at=None,
        max_failures=0,
        best_metric=RunConfig.best_metric,  # another may need the run's own `grpo.logging_steps`
        keep_checkpoints=1,
        trackers=(),
        trace=False,
        stop_on=(),
        notify=None,
    )


def constant_rate(grpo: GrpoConfig) -> dict[str, Any]:
    """Return TRL's fields of a config, with a learning rate that is the same in all steps of a trial."""
    kept = {name: value for name, value in grpo.trl.items() if name not in SCHEDULE_FIELDS}
    return kept | {"lr_scheduler_type": "constant"}


class TimeLimit(RunObserver):
    """Observer that requests a stop some seconds after the first step has begun.

    Args:
        seconds: duration of the training.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.request_stop: Callable[[], None] = lambda: None
        """Makes the workers finish their step, save it and end; set before training begins."""
        self._timer: threading.Timer | None = None

    def event(self, entry: Mapping[str, Any]) -> None:
        """Start the timer when training begins."""
        if entry["event"] == "training" and self._timer is None:
            self._timer = threading.Timer(self.seconds, lambda: self.request_stop())
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()


def run_trial(config: Config, of: RunConfig, seconds: float | None = None) -> Trial:
    """Train a trial's config to its last step, or for some seconds; nothing is measured afterwards.

    Args:
        config: with the section of `trial_run`.
        of: section `run` of the run itself; problems that its folder lists as unverifiable are left out here too.
        seconds: duration of the training, after which the current step is finished and saved; None: no limit.

    Raises:
        GrpoRayError: preflight refused the run, or the workers failed.
    """
    original = RunFolder(of.storage_path, of.name, of.storage_retry_seconds)
    if original.exists(UNVERIFIABLE_FILE):
        folder = RunFolder(config.run.storage_path, config.run.name, config.run.storage_retry_seconds)
        folder.write_text(original.read_text(UNVERIFIABLE_FILE), UNVERIFIABLE_FILE)
    observers: list[RunObserver] = []
    if config.rollout.has_conversations:
        # `prepare` adds this observer only if it starts the cluster itself. Here the cluster is already running.
        observers.append(WarmStartEnd())
    limit = TimeLimit(0.0 if seconds is None else seconds)
    if seconds is not None:
        observers.append(limit)
    with prepare(config, observers=observers) as run:
        limit.request_stop = run.request_stop
        run.fit(run.trainer())
        return Trial(run.folder, run.stopped_by)
