"""Table of the trackers: the class and the packages of each."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ray.errors import ConfigError
from grpo_ray.observers.trackers.tracker import Tracker


@dataclass(frozen=True)
class TrackerSpec:
    """Class of a tracker, and the packages that it imports when the run is opened."""

    location: str
    """`module:class` below this package."""
    packages: tuple[str, ...]


TRACKERS: Mapping[str, TrackerSpec] = {
    # tensorboardX writes the files, and Ray Train requires it anyway; the tensorboard package only displays them.
    "tensorboard": TrackerSpec("tensorboard:TensorBoardTracker", ("tensorboardX",)),
    "wandb": TrackerSpec("wandb:WandbTracker", ("wandb",)),
    "mlflow": TrackerSpec("mlflow:MlflowTracker", ("mlflow",)),
    "trackio": TrackerSpec("trackio:TrackioTracker", ("trackio",)),
}
"""Value of `run.trackers` -> the tracker."""


def create_tracker(name: str) -> Tracker:
    """Create a tracker that is not open yet; opening it imports its package."""
    tracker: Tracker = _tracker_class(name)()
    return tracker


def check_trackers(names: Sequence[str], storage_path: str) -> None:
    """Check that the trackers of a run can be used.

    Raises:
        ConfigError: a package is missing, or the tracker needs an address or a key that it does not have.
    """
    for name in names:
        if missing := [each for each in TRACKERS[name].packages if importlib.util.find_spec(each) is None]:
            raise ConfigError(
                f"run.trackers: {', '.join(missing)} is not installed; pip install 'grpo-ray[{name}]', or leave "
                f"{name} out"
            )
        if reason := _tracker_class(name).missing_setting(storage_path):
            raise ConfigError(f"run.trackers: {name}: {reason}")


def _tracker_class(name: str) -> Any:
    module, _, cls = TRACKERS[name].location.partition(":")
    return getattr(importlib.import_module(f"grpo_ray.observers.trackers.{module}"), cls)
