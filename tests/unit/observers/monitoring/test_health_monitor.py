"""Tests of the publication of warnings."""

from typing import Any

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.observers.feed import RunFeed, RunObserver
from grpo_ray.observers.monitoring.health_monitor import HealthMonitor

OVERRIDES = ["health.window=2", "run.stop_on=[truncation]"]


class Recorder(RunObserver):
    """Observer that records events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def event(self, entry: Any) -> None:
        self.events.append(entry)


def monitored(*overrides: str) -> tuple[RunFeed, Recorder, list[str]]:
    """Return a feed with a monitor, the recorder of its events, and the list of requested stops."""
    recorder, stops = Recorder(), list[str]()
    monitor = HealthMonitor(load_config(None, overrides), lambda entry: feed.event(entry), stops.append)
    feed = RunFeed([recorder, monitor])
    return feed, recorder, stops


def test_monitor_publishes_a_warning_and_stops_the_run() -> None:
    feed, recorder, stops = monitored(*OVERRIDES)
    for step in (1, 2, 3, 4):
        feed.step({"step": step, "completion/truncated_share": 0.5}, at=10.0 * step)
    (event,) = recorder.events
    assert event.pop("what").startswith("50 % of the completions are cut off")
    assert event == {"event": "warning", "at": 10.0, "step": 1, "name": "truncation"}
    assert stops == ["truncation"]


def test_monitor_warning_that_is_not_in_stop_on_lets_the_run_go_on() -> None:
    feed, recorder, stops = monitored("health.window=2", "run.stop_on=[no_signal]")
    feed.step({"step": 1, "completion/truncated_share": 0.5}, at=0.0)
    assert len(recorder.events) == 1 and stops == []


def test_monitor_measured_memory_is_judged() -> None:
    feed, recorder, _ = monitored(*OVERRIDES)
    feed.step({"step": 5}, at=1.0)
    feed.event({"event": "memory", "at": 2.0, "measured": {"host_used_share": 0.99}, "estimated": None})
    feed.event({"event": "memory", "at": 3.0})
    assert [(event["event"], event.get("step"), event["at"]) for event in recorder.events] == [
        ("memory", None, 2.0),
        ("warning", 5, 2.0),
        ("memory", None, 3.0),
    ]


def test_monitor_new_attempt_warns_again() -> None:
    feed, recorder, _ = monitored(*OVERRIDES)
    rows = [{"step": step, "completion/truncated_share": 0.5} for step in (1, 2, 3)]
    feed.resumed(0, [])
    for row in rows:
        feed.step(row, at=0.0)
    feed.resumed(2, rows[:2])
    feed.step(rows[2], at=0.0)
    assert [event["step"] for event in recorder.events] == [1, 3]


@pytest.mark.parametrize("overrides", [[], ["health.no_signal=null"]])
def test_monitor_default_config_accepts_any_row(overrides: list[str]) -> None:
    feed, recorder, _ = monitored(*overrides)
    feed.step({"step": 1, "group/equal_share": None}, at=0.0)
    assert recorder.events == []
