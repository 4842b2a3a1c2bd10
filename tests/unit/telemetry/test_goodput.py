"""Tests of goodput accounting. Expected seconds are worked by hand, beside the events they follow from."""

import random
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.telemetry.goodput import Goodput, compute_goodput, goodput_rows

NOTHING = Goodput(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

Event = dict[str, Any]


def launched(at: float) -> Event:
    return {"event": "launched", "at": at}


def began(at: float, step: int, workers: int = 2) -> Event:
    name = f"checkpoint-{step:06d}" if step else None
    return {"event": "began", "at": at, "step": step, "checkpoint": name, "workers": workers}


def training(at: float, step: int) -> Event:
    return {"event": "training", "at": at, "step": step}


def step(at: float, step: int) -> Event:
    return {"event": "step", "at": at, "step": step}


def failed(at: float) -> Event:
    return {"event": "failed", "at": at, "rank": 0, "what": "it died"}


def ended(at: float) -> Event:
    return {"event": "ended", "at": at}


def steps(begun: float, first: int, last: int, seconds: float = 2) -> list[Event]:
    """Return the reports of steps of equal length; `begun` is the time when the first of them began."""
    return [step(begun + seconds * (number + 1), first + number) for number in range(last - first + 1)]


def account(*events: Event) -> Goodput:
    return compute_goodput(events, [], use_gpu=True)


START = [launched(100), began(110, 0), training(120, 0)]
"""20 s until training."""


# Whole runs


def test_goodput_undisturbed_run_has_startup_only() -> None:
    assert account(*START, *steps(120, 1, 10), ended(150)) == replace(NOTHING, startup_seconds=20.0)


def test_goodput_no_events_is_zero() -> None:
    assert compute_goodput([], [], use_gpu=True) == NOTHING


def test_goodput_killed_worker_loses_steps_since_checkpoint() -> None:
    goodput = account(
        *START,
        *steps(120, 1, 7),  # step 4 at 128, step 7 at 134
        failed(135),
        began(140, 4),
        training(147, 4),
        *steps(147, 5, 10),
        ended(160),
    )
    assert (goodput.failures, goodput.redone_steps) == (1, 3)  # steps 5, 6 and 7
    assert goodput.redone_seconds == 7.0  # 135 - 128: the eighth step was under way
    assert goodput.restart_seconds == 12.0  # 147 - 135
    assert goodput.startup_seconds == 20.0
    assert goodput.gpu_seconds_lost == 38.0  # (7 + 12) x 2 workers


def test_goodput_failure_before_checkpoint_loses_all_steps() -> None:
    goodput = account(*START, *steps(120, 1, 2), failed(125), began(130, 0), training(140, 0), ended(200))
    assert (goodput.redone_steps, goodput.redone_seconds) == (2, 5.0)  # from 120, when training began
    assert goodput.restart_seconds == 15.0


def test_goodput_failure_after_checkpoint_loses_part_of_step() -> None:
    goodput = account(*START, *steps(120, 1, 4), failed(129), began(135, 4), training(139, 4), ended(200))
    assert (goodput.redone_steps, goodput.redone_seconds) == (0, 1.0)  # 129 - 128


def test_goodput_step_lost_twice_counts_twice() -> None:
    goodput = account(
        *START,
        *steps(120, 1, 5),  # step 4 at 128
        failed(131),
        began(135, 4),
        training(140, 4),
        *steps(140, 5, 6),  # from 4 again, to 144
        failed(145),
        began(150, 4),
        training(156, 4),
        *steps(156, 5, 10),
        ended(170),
    )
    assert (goodput.failures, goodput.redone_steps) == (2, 3)  # 5, then 5 and 6
    assert goodput.redone_seconds == 8.0  # 131 - 128, and 145 - 140
    assert goodput.restart_seconds == 20.0  # 140 - 131, and 156 - 145


def test_goodput_failure_while_starting_loses_no_training() -> None:
    goodput = account(
        launched(100), began(110, 0), failed(115), began(120, 0), failed(126), began(130, 0), training(140, 0)
    )
    assert goodput == replace(
        NOTHING,
        failures=2,
        startup_seconds=15.0,  # to the first failure
        restart_seconds=25.0,  # 140 - 115: the second attempt never trained
        gpu_seconds_lost=50.0,
    )


def test_goodput_failed_restart_extends_the_restart() -> None:
    goodput = account(
        *START, *steps(120, 1, 4), failed(130), began(135, 4), failed(137), began(140, 4, 1), training(150, 4)
    )
    assert (goodput.failures, goodput.redone_steps, goodput.redone_seconds) == (2, 0, 2.0)  # 130 - 128
    assert goodput.restart_seconds == 20.0  # 150 - 130
    assert goodput.gpu_seconds_lost == 31.0  # 2 x 2 workers, 7 x 2 (until 137), 13 x 1


def test_goodput_run_ended_by_failure_repeats_no_step() -> None:
    goodput = account(*START, *steps(120, 1, 4), failed(130))
    assert goodput == replace(NOTHING, failures=1, startup_seconds=20.0)


# Several launches


def test_goodput_killed_driver_counts_until_next_training() -> None:
    goodput = account(
        *START,
        *steps(120, 1, 6),  # step 4 at 128, step 6 at 132: the last event
        launched(1000),
        began(1010, 4),
        training(1025, 4),
        *steps(1025, 5, 10),
        ended(1040),
    )
    assert (goodput.failures, goodput.redone_steps) == (1, 2)
    assert goodput.redone_seconds == 4.0  # 132 - 128
    assert goodput.restart_seconds == 25.0  # from 1000: nothing ran before
    assert goodput.startup_seconds == 20.0
    assert goodput.gpu_seconds_lost == 58.0  # (4 + 25) x 2


def test_goodput_failure_that_ended_the_launch_counts_once() -> None:
    goodput = account(
        *START, *steps(120, 1, 4), failed(130), launched(200), began(210, 4), training(215, 4), ended(220)
    )
    assert goodput.failures == 1
    assert goodput.restart_seconds == 15.0  # 215 - 200
    assert goodput.redone_seconds == 2.0  # 130 - 128


def test_goodput_driver_killed_while_starting_counts_known_time() -> None:
    goodput = account(launched(100), began(110, 0), launched(300), began(308, 0), training(320, 0))
    assert goodput == replace(
        NOTHING,
        failures=1,
        startup_seconds=10.0,  # until 110; nothing is known of the time after
        restart_seconds=20.0,  # 320 - 300
        gpu_seconds_lost=40.0,
    )


def test_goodput_launch_after_ended_one_is_no_failure() -> None:
    goodput = account(*START, *steps(120, 1, 4), ended(140), launched(500), began(510, 4), training(530, 4), ended(600))
    assert goodput == replace(NOTHING, startup_seconds=50.0)  # 20 + 30


def test_goodput_launch_of_finished_run_adds_nothing() -> None:
    assert account(*START, *steps(120, 1, 4), ended(140), launched(500), ended(510)) == replace(
        NOTHING, startup_seconds=20.0
    )


def test_goodput_dead_launch_before_last_counts_once() -> None:
    goodput = account(*START, launched(200), began(205, 0), training(210, 0), ended(250), launched(300), began(305, 0))
    assert (goodput.failures, goodput.restart_seconds) == (1, 10.0)
    assert goodput.startup_seconds == 25.0  # 20, and 5 of the third launch so far


# Resuming from an earlier checkpoint


def test_goodput_resume_from_best_loses_steps_of_attempts() -> None:
    goodput = account(
        *START,
        *steps(120, 1, 8),  # step 4 at 128, step 6 at 132, step 8 at 136
        failed(137),
        began(140, 6),  # loses 7 and 8, and 137 - 132 = 5 s
        training(150, 6),
        *steps(150, 7, 9),  # to 156
        failed(158),
        began(160, 4),  # loses 7, 8, 9 and 158 - 150 = 8 s; of the first attempt 5, 6 and 132 - 128 = 4 s
        training(170, 4),
        *steps(170, 5, 10),
        ended(190),
    )
    assert (goodput.failures, goodput.redone_steps) == (2, 2 + 3 + 2)
    assert goodput.redone_seconds == 5.0 + 8.0 + 4.0
    assert goodput.restart_seconds == 25.0  # 150 - 137, and 170 - 158


def test_goodput_second_rollback_counts_no_step_twice() -> None:
    goodput = account(
        *START,
        *steps(120, 1, 8),  # step 2 at 124, step 4 at 128, step 8 at 136
        failed(136),
        began(140, 4),  # 5 to 8, 8 s
        failed(141),
        began(142, 2),  # 3 and 4, 4 s
        training(150, 2),
        ended(160),
    )
    assert (goodput.redone_steps, goodput.redone_seconds) == (6, 12.0)


def test_goodput_finished_run_resumed_at_best_repeats_steps() -> None:
    goodput = account(*START, *steps(120, 1, 8), ended(170), launched(300), began(310, 6), training(315, 6), ended(400))
    assert (goodput.failures, goodput.redone_steps) == (0, 2)
    assert goodput.redone_seconds == 4.0  # 136 - 132: the evaluation until 170 is not repeated
    assert goodput.restart_seconds == 0.0


def test_goodput_checkpoint_without_reported_step_is_kept() -> None:
    # Killed after checkpoint 4 was written and before step 4 was reported.
    goodput = account(
        *START, *steps(120, 1, 3), failed(129), began(135, 4), training(140, 4), *steps(140, 5, 6), ended(150)
    )
    assert (goodput.redone_steps, goodput.redone_seconds) == (0, 0.0)


def test_goodput_steps_reported_by_fives_are_lost_by_number() -> None:
    goodput = account(
        *START, step(130, 5), step(140, 10), step(150, 15), failed(152), began(155, 10), training(160, 10)
    )
    assert (goodput.redone_steps, goodput.redone_seconds) == (5, 12.0)  # 152 - 140


# Elastic runs


def test_goodput_added_workers_restart_without_failure() -> None:
    goodput = account(
        *START,
        *steps(120, 1, 4),  # step 4 at 128
        began(140, 4, workers=4),
        training(150, 4),
        *steps(150, 5, 8, seconds=1),
        ended(160),
    )
    assert goodput == replace(
        NOTHING,
        startup_seconds=20.0,
        restart_seconds=22.0,  # 150 - 128
        gpu_seconds_lost=88.0,  # times the 4 workers that it starts
    )


def test_goodput_lost_time_counts_workers_of_attempt() -> None:
    goodput = account(
        launched(100),
        began(110, 0, workers=4),
        training(120, 0),
        *steps(120, 1, 4),  # step 2 at 124
        failed(130),
        began(135, 2, workers=1),
        training(140, 2),
        ended(200),
    )
    assert (goodput.redone_seconds, goodput.restart_seconds) == (6.0, 10.0)
    assert goodput.gpu_seconds_lost == 34.0  # 6 x 4, and 10 x 1


def test_goodput_cpu_run_loses_no_gpu_time() -> None:
    events = [*START, *steps(120, 1, 3), failed(130), began(135, 0), training(140, 0)]
    goodput = compute_goodput(events, [], use_gpu=False)
    assert (goodput.redone_seconds, goodput.gpu_seconds_lost) == (10.0, 0.0)


# Incomplete or disordered events


DISTURBED = [
    *START,
    *steps(120, 1, 5),
    failed(131),
    began(135, 4),
    training(140, 4),
    *steps(140, 5, 6),
    launched(300),
    began(310, 2),
    training(320, 2),
    *steps(320, 3, 8),
    ended(340),
]


def test_goodput_doubled_events_count_once() -> None:
    assert account(*(event for event in DISTURBED for _ in range(2))) == account(*DISTURBED)
    assert account(*DISTURBED, *DISTURBED) == account(*DISTURBED)


def test_goodput_other_events_change_nothing() -> None:
    others = [
        {"event": "notice", "at": 139.0, "what": "disk is filling up"},
        {"event": "measured", "at": 999.0, "step": 4, "metrics": {"heldout/accuracy": 0.5}},
        {"event": "checkpoint", "at": 999.0, "step": 4},
    ]
    assert account(*(each for event in DISTURBED for each in (event, *others))) == account(*DISTURBED)


def test_goodput_missing_training_event_uses_first_step() -> None:
    goodput = account(
        launched(100), began(110, 0), step(125, 1), step(127, 2), failed(128), began(130, 1), step(140, 2)
    )
    assert goodput.startup_seconds == 25.0
    assert (goodput.redone_steps, goodput.redone_seconds) == (1, 3.0)  # 128 - 125
    assert goodput.restart_seconds == 12.0  # 140 - 128


def test_goodput_events_after_an_attempts_end_are_ignored() -> None:
    late = account(
        *START, *steps(120, 1, 4), failed(130), step(131, 5), training(132, 0), began(135, 4), training(140, 4)
    )
    assert late == account(*START, *steps(120, 1, 4), failed(130), began(135, 4), training(140, 4))


def test_goodput_missing_launch_events_uses_attempts() -> None:
    goodput = account(began(110, 0), training(120, 0), step(125, 1), failed(126), began(130, 1), training(134, 1))
    assert (goodput.startup_seconds, goodput.redone_seconds, goodput.restart_seconds) == (10.0, 1.0, 8.0)


WITH_STEP = ("began", "training", "step")


@st.composite
def timelines(draw: st.DrawFn) -> list[Event]:
    """Draw events of any kinds in any order, with rising times."""
    kinds = st.sampled_from(["launched", "began", "training", "step", "failed", "ended"])
    events: list[Event] = []
    at = 0.0
    for kind in draw(st.lists(kinds, max_size=30)):
        at += draw(st.integers(0, 500)) / 10
        event = {"event": kind, "at": at}
        if kind in WITH_STEP:
            event["step"] = draw(st.integers(0, 6))
        if kind == "began":
            event |= {"workers": 1, "checkpoint": None}
        events.append(event)
    return events


@given(events=timelines())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_goodput_any_timeline_counts_no_second_twice(events: list[Event]) -> None:
    goodput = account(*events)
    assert all(value >= 0 for value in asdict(goodput).values())
    # Each second is either training time, which may be lost, or startup or restart time.
    spent = goodput.redone_seconds + goodput.restart_seconds + goodput.startup_seconds
    assert spent <= (events[-1]["at"] - events[0]["at"] if events else 0.0) + 0.2  # each is rounded to tenths
    assert goodput.gpu_seconds_lost <= goodput.redone_seconds + goodput.restart_seconds + 0.2
    assert account(*(event for event in events for _ in range(2))) == goodput


@pytest.mark.long
@given(events=timelines(), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_goodput_disordered_times_are_never_negative(events: list[Event], shuffle: random.Random) -> None:
    times = [event["at"] for event in events]
    shuffle.shuffle(times)
    goodput = account(*(event | {"at": at} for event, at in zip(events, times, strict=True)))
    assert all(value >= 0 for value in asdict(goodput).values())


# Wasted samples


ROWS = [
    {"step": 1, "step/seconds": 10.0, "group/equal_share": 0.5, "completion/truncated_share": 0.25},
    {"step": 2, "step/seconds": 20.0, "group/equal_share": 1.0, "reward/unscorable_share": 0.1},
    {"step": 3, "step/seconds": 30.0},  # of the same generation batch as step 2
]


def test_goodput_waste_is_step_seconds_times_share() -> None:
    assert compute_goodput([], ROWS, use_gpu=True) == replace(
        NOTHING,
        trained_seconds=60.0,
        no_signal_seconds=55.0,  # 10 x 0.5 + (20 + 30) x 1
        truncated_seconds=2.5,  # 10 x 0.25
        unscorable_seconds=5.0,  # (20 + 30) x 0.1
    )


def test_goodput_put_aside_seconds_follow_from_rounds() -> None:
    rows = [{"step": n, "step/seconds": 12.0, "group/rounds": rounds} for n, rounds in enumerate((1.0, 2.0, 4.0))]
    goodput = compute_goodput([], [*rows, {"step": 3, "step/seconds": 12.0}], use_gpu=False)
    assert goodput.put_aside_seconds == 15.0  # 12 s each, lost: nothing, a half, three quarters, nothing
    assert ("unused groups", "15 s of training (31 %), generated but not trained on") in goodput_rows(goodput)


# Summary table


def test_goodput_rows_without_losses_are_empty() -> None:
    assert goodput_rows(NOTHING) == []
    assert goodput_rows(replace(NOTHING, trained_seconds=60.0)) == []


def test_goodput_rows_list_every_loss_with_its_unit() -> None:
    assert goodput_rows(Goodput(2, 7, 12.3, 41.0, 22.0, 31.0, 7.2, 0.4, 106.6, 72.0)) == [
        ("startup", "22 s"),
        ("failures", "2"),
        ("steps repeated", "7 steps, 12 s"),
        ("restarts", "41 s"),
        ("GPU time lost", "107 s, all workers together"),
        ("zero-variance groups", "31 s of training (43 %)"),
        ("truncated completions", "7.2 s of training (10 %)"),
        ("unscorable completions", "0.4 s of training (1 %)"),
    ]


def test_goodput_rows_one_step_or_part_of_step() -> None:
    assert goodput_rows(replace(NOTHING, redone_steps=1, redone_seconds=2.0)) == [("steps repeated", "1 step, 2.0 s")]
    assert goodput_rows(replace(NOTHING, redone_seconds=0.5)) == [("steps repeated", "part of a step, 0.5 s")]
