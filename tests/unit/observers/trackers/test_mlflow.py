"""Tests of the tags of a run in MLflow, with a client that keeps them in memory."""

from types import SimpleNamespace
from typing import Any

from grpo_ray.observers.trackers.mlflow import MlflowTracker


class MemoryClient:
    """The methods of MLflow's client that the end of a launch uses."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}

    def get_run(self, run: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(tags=dict(self.tags)))

    def set_tag(self, run: str, name: str, value: str) -> None:
        self.tags[name] = value

    def delete_tag(self, run: str, name: str) -> None:
        del self.tags[name]

    def log_dict(self, run: str, values: Any, file: str) -> None:
        pass


def test_finish_removes_the_tag_of_an_earlier_stop() -> None:
    tracker, client = MlflowTracker(), MemoryClient()
    tracker.__dict__.update(_client=client, _id="run")
    tracker.finish(20, {"stopped": "SIGTERM", "best_checkpoint": "checkpoint-20", "latest_checkpoint": None})
    assert client.tags == {"grpo_ray.stopped": "SIGTERM", "grpo_ray.best_checkpoint": "checkpoint-20"}
    tracker.finish(40, {"stopped": None, "best_checkpoint": "checkpoint-40", "latest_checkpoint": None})
    assert client.tags == {"grpo_ray.best_checkpoint": "checkpoint-40"}
