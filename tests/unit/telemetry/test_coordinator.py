"""Tests of the actor that holds status, epoch plan and events of a run."""

import itertools

import pytest

from grpo_ray.telemetry import coordinator as coordinator_module
from grpo_ray.telemetry.coordinator import RunCoordinator, Status


class Clock:
    """A `time` module whose clock advances by one second per reading."""

    def __init__(self) -> None:
        self.seconds = itertools.count(1000)

    def time(self) -> int:
        return next(self.seconds)


def test_coordinator_new_is_starting_without_entries() -> None:
    assert RunCoordinator().read(0) == (Status("starting the workers"), [])


def test_coordinator_read_returns_status_and_new_entries() -> None:
    coordinator = RunCoordinator()
    coordinator.set_status("loading libraries")
    coordinator.set_status("measuring", 3, 10)
    coordinator.record_event("began", step=0, workers=2)
    coordinator.record_metrics({"step": 1})
    coordinator.record_event("failed", rank=1, what="it died")
    status, entries = coordinator.read(0)
    assert status == Status("measuring", 3, 10)
    assert [entry["event"] for entry in entries] == ["began", "step", "failed"]
    assert entries[0]["workers"] == 2 and entries[1]["row"] == {"step": 1} and entries[2]["rank"] == 1
    assert [entry["event"] for entry in coordinator.read(2)[1]] == ["failed"]
    assert coordinator.read(3) == (status, [])


def test_coordinator_entries_have_arrival_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "time", Clock())
    coordinator = RunCoordinator()
    coordinator.record_metrics({"step": 0})
    coordinator.record_event("checkpoint")
    coordinator.record_metrics({"step": 1})
    assert [entry["at"] for entry in coordinator.read(0)[1]] == [1000, 1001, 1002]


def test_coordinator_unacknowledged_entries_are_read_again() -> None:
    coordinator = RunCoordinator()
    coordinator.record_metrics({"step": 1})
    assert coordinator.read(0) == coordinator.read(0)


def test_coordinator_acknowledged_entries_are_dropped() -> None:
    coordinator = RunCoordinator()
    for step in range(1, 6):
        coordinator.record_metrics({"step": step})
        assert [entry["row"]["step"] for entry in coordinator.read(step - 1)[1]] == [step]
    assert len(coordinator._entries) == 1
    assert coordinator.read(5) == (Status("starting the workers"), []) and not coordinator._entries


def test_coordinator_epoch_plan_is_the_one_set_last() -> None:
    coordinator = RunCoordinator()
    assert coordinator.epoch_plan() is None
    coordinator.set_epoch_plan("first")
    coordinator.set_epoch_plan("second")
    assert coordinator.epoch_plan() == coordinator.epoch_plan() == "second"


def test_coordinator_stop_request_is_kept() -> None:
    coordinator = RunCoordinator()
    assert not coordinator.stop_requested()
    coordinator.request_stop()
    assert coordinator.stop_requested() and coordinator.stop_requested()


def test_coordinator_exchange_returns_progress_of_all_workers() -> None:
    coordinator = RunCoordinator()
    assert coordinator.exchange_progress(1, (5, 0)) == {1: (5, 0)}
    assert coordinator.exchange_progress(0, (2, 0)) == {0: (2, 0), 1: (5, 0)}
    assert coordinator.exchange_progress(1, (6, 0)) == {0: (2, 0), 1: (6, 0)}
