"""Tests of the actor that carries phase, round and events between the processes of a run."""

import itertools

import pytest

from grpo_ray.telemetry import coordinator as board_module
from grpo_ray.telemetry.coordinator import RunCoordinator


class Clock:
    """A `time` module whose clock advances by one second per reading."""

    def __init__(self) -> None:
        self.seconds = itertools.count(1000)

    def time(self) -> int:
        return next(self.seconds)


def test_board_new_is_starting_without_entries():
    assert RunCoordinator().read(0) == ("starting", [])


def test_board_read_returns_phase_and_new_entries():
    board = RunCoordinator()
    board.phase("loading libraries")
    board.phase("training")
    board.happened("began", step=0, workers=2)
    board.row({"step": 1})
    board.happened("failed", rank=1, what="it died")
    phase, entries = board.read(0)
    assert phase == "training"
    assert [entry["event"] for entry in entries] == ["began", "step", "failed"]
    assert entries[0]["workers"] == 2 and entries[1]["row"] == {"step": 1} and entries[2]["rank"] == 1
    assert [entry["event"] for entry in board.read(2)[1]] == ["failed"]
    assert board.read(3) == ("training", [])


def test_board_entries_have_arrival_times(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(board_module, "time", Clock())
    board = RunCoordinator()
    board.row({"step": 0})
    board.happened("checkpoint")
    board.row({"step": 1})
    assert [entry["at"] for entry in board.read(0)[1]] == [1000, 1001, 1002]


def test_board_read_keeps_entries():
    board = RunCoordinator()
    board.row({"step": 1})
    assert board.read(0) == board.read(0)


def test_board_round_is_the_one_begun_last():
    board = RunCoordinator()
    assert board.round() is None
    board.begin_round("first")
    board.begin_round("second")
    assert board.round() == board.round() == "second"


def test_board_stop_is_kept_until_the_end():
    board = RunCoordinator()
    assert not board.stopping()
    board.stop()
    assert board.stopping() and board.stopping()
