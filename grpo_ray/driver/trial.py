"""Short trial of a run in a run folder of its own, for `check --attack` and `check --forecast`.

A trial goes through the driver, the workers and the records of any run, so that it shows what a run does. The user's
own run folder is only read.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from grpo_ray.config.schema import Config, RunConfig
from grpo_ray.driver.run import prepare
from grpo_ray.observers.feed import RunObserver
from grpo_ray.storage.run_folder import RunFolder

MAX_TRIALS = 1000
"""Largest number of trial folders of one run."""


def trial_run(config: Config, kind: str) -> RunConfig:
    """Return the section `run` of a trial: a new folder beside the run's, and nothing that leaves the machine.

    Args:
        kind: "attack" or "forecast", a part of the folder's name.
    """
    names = (f"{config.run.name}-{kind}-{number}" for number in range(1, MAX_TRIALS))
    folders = (RunFolder(config.run.storage_path, name, config.run.storage_retry_seconds) for name in names)
    free = next(folder for folder in folders if not folder.exists())
    return replace(
        config.run,
        name=free.name,
        resume="latest",
        takeover=None,
        from_checkpoint=None,
        max_failures=0,
        measure="inline",
        keep_checkpoints=1,
        trackers=(),
        trace=False,
        stop_on=(),
        notify=None,
    )


class TimeLimit(RunObserver):
    """Observer that asks for a stop some seconds after the first step has begun.

    Args:
        seconds: time of training.
        request_stop: asks the workers to finish their step, save it and end; set before training begins.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.request_stop: Callable[[], None] = lambda: None
        self._timer: threading.Timer | None = None

    def event(self, entry: Mapping[str, Any]) -> None:
        """Start the time when training begins."""
        if entry["event"] == "training" and self._timer is None:
            self._timer = threading.Timer(self.seconds, lambda: self.request_stop())
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """End the time."""
        if self._timer is not None:
            self._timer.cancel()


def run_trial(config: Config, seconds: float | None = None) -> tuple[RunFolder, float]:
    """Train a trial's config to its last step, or for some seconds; nothing is measured afterwards.

    Args:
        config: with the section of `trial_run`.
        seconds: time of training, after which the current step is finished and saved; None: no limit.

    Returns:
        The run folder, and the seconds from the command to the end.

    Raises:
        GrpoRayError: preflight refused the run, or the workers failed.
    """
    started = time.monotonic()
    limit = TimeLimit(float("inf") if seconds is None else seconds)
    observers = () if seconds is None else (limit,)
    with prepare(config, observers=observers) as run:
        limit.request_stop = run.request_stop
        run.fit(run.trainer())
        return run.folder, time.monotonic() - started
