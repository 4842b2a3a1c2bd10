"""Tests of the order in which trials are launched: rungs, turns, free places."""

import dataclasses
from typing import Any

import pytest

from grpo_ray.sweep.schedule import TrialLaunch, TrialProgress, is_due, next_rung, plan_launches


def trials(*steps: int, running: str = "", max_steps: int = 10) -> list[TrialProgress]:
    """Return trials a, b, ... with these steps."""
    return [
        TrialProgress(name=name, step=step, max_steps=max_steps, is_running=name in running)
        for name, step in zip("abcdef", steps, strict=False)
    ]


def planned(*arguments: Any) -> dict[str, int | None]:
    return {launch.name: launch.pause_at for launch in plan_launches(*arguments)}


def test_next_rung_follows_the_last_decision() -> None:
    assert next_rung([2, 4, 8], []) == 2
    assert next_rung([2, 4, 8], [2]) == 4
    assert next_rung([2, 4, 8], [2, 4, 8]) is None
    assert next_rung([3, 6], [4]) == 6  # the sweep file has other rungs now


@pytest.mark.parametrize(
    ("steps", "running", "due"),
    [
        ((4, 4), "", True),
        ((4, 3), "", False),
        ((4, 4), "b", False),  # b is still ending
        ((10, 4), "", True),  # a had passed the rung before the user resumed b
        ((10, 10), "", False),  # nothing is left to save
        ((), "", False),
    ],
)
def test_comparison_is_due_once_all_trials_wait(steps: tuple[int, ...], running: str, due: bool) -> None:
    assert is_due(4, trials(*steps, running=running)) is due
    assert not is_due(None, trials(*steps, running=running))


def test_trial_without_a_value_at_a_rung_is_launched_for_its_measurement() -> None:
    a, b = trials(4, 4)
    unmeasured = [dataclasses.replace(a, is_unmeasured=True), b]
    assert planned(unmeasured, 4, None, None) == {"a": 4}
    assert planned(unmeasured, 4, 3, 1) == {"a": 4}
    assert not is_due(4, unmeasured)
    running = [dataclasses.replace(unmeasured[0], is_running=True), b]
    assert planned(running, 4, None, None) == {} and not is_due(4, running)
    # Before the rung it is measured after its next steps.
    assert planned(unmeasured, 6, None, None) == {"a": 6, "b": 6}


def test_trial_without_a_value_beyond_a_rung_is_launched_for_its_measurement() -> None:
    a, b = trials(5, 4)  # the sweep file had no rung when a was stopped at step 5
    unmeasured = [dataclasses.replace(a, is_unmeasured=True), b]
    assert planned(unmeasured, 4, None, None) == {"a": 4}
    assert planned(unmeasured, 4, 3, 1) == {"a": 4}
    assert not is_due(4, unmeasured)


@pytest.mark.parametrize("rung", [4, 6, None])
def test_trial_without_a_value_at_its_end_is_launched_for_its_measurement(rung: int | None) -> None:
    ended = TrialProgress(name="a", step=4, max_steps=4, is_unmeasured=True)
    (b,) = [dataclasses.replace(each, name="b") for each in trials(rung or 10)]
    assert planned([ended, b], rung, None, None) == {"a": None}
    assert not is_due(rung, [ended, b])
    measured = dataclasses.replace(ended, is_unmeasured=False)
    assert planned([measured, b], rung, None, None) == {}
    assert is_due(rung, [measured, b]) is (rung is not None)


def test_shorter_trial_waits_at_its_own_end() -> None:
    short = [*trials(3, max_steps=3), TrialProgress(name="b", step=4, max_steps=10)]
    assert is_due(4, short)
    assert planned(short, 4, None, None) == {}


def test_trials_pause_at_the_rung_and_not_at_their_end() -> None:
    assert planned(trials(0, 2, 4), 4, None, None) == {"a": 4, "b": 4}
    assert planned(trials(4, 4), None, None, None) == {"a": None, "b": None}
    assert planned(trials(4, 4), 10, None, None) == {"a": None, "b": None}
    assert planned(trials(4, 10), None, None, None) == {"a": None}


def test_trial_with_the_fewest_steps_comes_first() -> None:
    assert plan_launches(trials(3, 1, 2, 1), None, None, 2) == [
        TrialLaunch(name="b", pause_at=None),
        TrialLaunch(name="d", pause_at=None),
    ]
    assert planned(trials(3, 1, 2, 1), None, None, 0) == {}


def test_turns_are_taken_only_while_trials_wait() -> None:
    # Three trials in one place: each goes to the end of its turn of 3 steps.
    assert planned(trials(0, 0, 0), None, 3, 1) == {"a": 3}
    assert planned(trials(3, 3, 0), None, 3, 1) == {"c": 3}
    assert planned(trials(4, 5, 5), None, 3, 1) == {"a": 6}  # a stop has ended its turn early
    assert planned(trials(9, 9, 10), None, 3, 1) == {"a": None}  # 12 is beyond the last step
    assert planned(trials(0, 0), None, 3, 2) == {"a": None, "b": None}  # all have a place
    assert planned(trials(0, 0, 0), 2, 3, 1) == {"a": 2}  # a rung before the end of the turn


def test_turns_advance_all_trials_to_their_last_step() -> None:
    """One place, turns of 3 steps, trials of 7: the order of all launches."""
    at, order = {"a": 0, "b": 0}, []
    while launches := plan_launches(trials(*at.values(), max_steps=7), None, 3, 1):
        (launch,) = launches
        at[launch.name] = launch.pause_at or 7
        order.append((launch.name, at[launch.name]))
    # Once a has taken its last step, b is alone and needs no pause.
    assert order == [("a", 3), ("b", 3), ("a", 6), ("b", 6), ("a", 7), ("b", 7)]
