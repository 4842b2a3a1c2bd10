"""Tests of the distributor of a run's progress to its observers."""

import inspect
from typing import Any

from grpo_ray.observers.feed import RunFeed, RunObserver


class Recorder(RunObserver):
    """Observer that records the kinds of events."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def event(self, entry: Any) -> None:
        self.kinds.append(entry["event"])


class Alarm(RunObserver):
    """Observer that answers each step with an event."""

    feed: RunFeed

    def step(self, row: Any, at: float) -> None:
        self.feed.event({"event": "warning", "at": at})


def test_feed_passes_on_every_method_of_an_observer() -> None:
    methods = [name for name, _ in inspect.getmembers(RunObserver, inspect.isfunction)]
    assert len(methods) == 9 and all(name in vars(RunFeed) for name in methods)


def test_feed_event_of_an_observer_reaches_all_others() -> None:
    first, alarm, last = Recorder(), Alarm(), Recorder()
    alarm.feed = RunFeed([first, alarm, last])
    alarm.feed.step({"step": 1}, 0.0)
    assert first.kinds == last.kinds == ["warning"]
