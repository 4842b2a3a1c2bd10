"""Timelines of runs, worked by hand: times are seconds, and every number expected is reckoned beside its events."""

import random
from dataclasses import asdict, replace
from typing import Any

import pytest

from grpo_ray.price import Price, lines, price

NOTHING = Price(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

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
    """The reports of steps of equal length, from the time when the first of them began."""
    return [step(begun + seconds * (number + 1), first + number) for number in range(last - first + 1)]


def of(*events: Event) -> Price:
    return price(events, [], use_gpu=True)


START = [launched(100), began(110, 0), training(120, 0)]
"""20 s until training."""


# Whole runs


def test_a_run_that_nothing_happened_to_costs_its_start_alone():
    assert of(*START, *steps(120, 1, 10), ended(150)) == replace(NOTHING, startup_seconds=20.0)


def test_no_events_cost_nothing():
    assert price([], [], use_gpu=True) == NOTHING


def test_a_killed_worker_costs_its_steps_since_the_checkpoint_and_the_restart():
    cost = of(
        *START,
        *steps(120, 1, 7),  # step 4 at 128, step 7 at 134
        failed(135),
        began(140, 4),
        training(147, 4),
        *steps(147, 5, 10),
        ended(160),
    )
    assert (cost.failures, cost.redone_steps) == (1, 3)  # steps 5, 6 and 7
    assert cost.redone_seconds == 7.0  # 135 - 128: the eighth step was under way
    assert cost.restart_seconds == 12.0  # 147 - 135
    assert cost.startup_seconds == 20.0
    assert cost.gpu_seconds_lost == 38.0  # (7 + 12) x 2 workers


def test_a_worker_killed_in_the_first_steps_costs_all_of_them():
    cost = of(*START, *steps(120, 1, 2), failed(125), began(130, 0), training(140, 0), ended(200))
    assert (cost.redone_steps, cost.redone_seconds) == (2, 5.0)  # from 120, when training began
    assert cost.restart_seconds == 15.0


def test_a_worker_killed_right_behind_a_checkpoint_costs_a_part_of_a_step():
    cost = of(*START, *steps(120, 1, 4), failed(129), began(135, 4), training(139, 4), ended(200))
    assert (cost.redone_steps, cost.redone_seconds) == (0, 1.0)  # 129 - 128


def test_a_step_is_counted_each_time_it_was_thrown_away():
    cost = of(
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
    assert (cost.failures, cost.redone_steps) == (2, 3)  # 5, then 5 and 6
    assert cost.redone_seconds == 8.0  # 131 - 128, and 145 - 140
    assert cost.restart_seconds == 20.0  # 140 - 131, and 156 - 145


def test_failing_while_starting_is_no_training_lost():
    cost = of(launched(100), began(110, 0), failed(115), began(120, 0), failed(126), began(130, 0), training(140, 0))
    assert cost == replace(
        NOTHING,
        failures=2,
        startup_seconds=15.0,  # to the first failure
        restart_seconds=25.0,  # 140 - 115: the second attempt never trained
        gpu_seconds_lost=50.0,
    )


def test_a_restart_that_fails_goes_on_being_one():
    cost = of(*START, *steps(120, 1, 4), failed(130), began(135, 4), failed(137), began(140, 4, 1), training(150, 4))
    assert (cost.failures, cost.redone_steps, cost.redone_seconds) == (2, 0, 2.0)  # 130 - 128
    assert cost.restart_seconds == 20.0  # 150 - 130
    assert cost.gpu_seconds_lost == 31.0  # 2 x 2 workers, 7 x 2 (until 137), 13 x 1


def test_a_run_given_up_has_lost_no_step_yet():
    cost = of(*START, *steps(120, 1, 4), failed(130))
    assert cost == replace(NOTHING, failures=1, startup_seconds=20.0)


# Several launches


def test_a_killed_driver_costs_until_the_new_launch_trains():
    cost = of(
        *START,
        *steps(120, 1, 6),  # step 4 at 128, step 6 at 132: the last that is known
        launched(1000),
        began(1010, 4),
        training(1025, 4),
        *steps(1025, 5, 10),
        ended(1040),
    )
    assert (cost.failures, cost.redone_steps) == (1, 2)
    assert cost.redone_seconds == 4.0  # 132 - 128
    assert cost.restart_seconds == 25.0  # from 1000: nobody waited before that
    assert cost.startup_seconds == 20.0
    assert cost.gpu_seconds_lost == 58.0  # (4 + 25) x 2


def test_a_failure_that_ended_the_launch_is_counted_once():
    cost = of(*START, *steps(120, 1, 4), failed(130), launched(200), began(210, 4), training(215, 4), ended(220))
    assert cost.failures == 1
    assert cost.restart_seconds == 15.0  # 215 - 200
    assert cost.redone_seconds == 2.0  # 130 - 128


def test_a_driver_killed_while_starting_had_spent_what_is_known():
    cost = of(launched(100), began(110, 0), launched(300), began(308, 0), training(320, 0))
    assert cost == replace(
        NOTHING,
        failures=1,
        startup_seconds=10.0,  # to 110; then nothing is known
        restart_seconds=20.0,  # 320 - 300
        gpu_seconds_lost=40.0,
    )


def test_a_launch_after_one_that_ended_in_order_is_no_failure():
    cost = of(*START, *steps(120, 1, 4), ended(140), launched(500), began(510, 4), training(530, 4), ended(600))
    assert cost == replace(NOTHING, startup_seconds=50.0)  # 20 + 30


def test_a_launch_of_a_run_that_has_its_steps_costs_nothing():
    assert of(*START, *steps(120, 1, 4), ended(140), launched(500), ended(510)) == replace(
        NOTHING, startup_seconds=20.0
    )


def test_a_death_in_the_launch_before_the_last_is_no_longer_a_price():
    cost = of(*START, launched(200), began(205, 0), training(210, 0), ended(250), launched(300), began(305, 0))
    assert (cost.failures, cost.restart_seconds) == (1, 10.0)
    assert cost.startup_seconds == 25.0  # 20, and 5 of the third launch so far


# Going further back


def test_going_back_to_the_best_throws_away_steps_of_earlier_attempts_too():
    cost = of(
        *START,
        *steps(120, 1, 8),  # step 4 at 128, step 6 at 132, step 8 at 136
        failed(137),
        began(140, 6),  # throws away 7 and 8, and 137 - 132 = 5 s
        training(150, 6),
        *steps(150, 7, 9),  # to 156
        failed(158),
        began(160, 4),  # throws away 7, 8, 9 and 158 - 150 = 8 s; of the first attempt 5, 6 and 132 - 128 = 4 s
        training(170, 4),
        *steps(170, 5, 10),
        ended(190),
    )
    assert (cost.failures, cost.redone_steps) == (2, 2 + 3 + 2)
    assert cost.redone_seconds == 5.0 + 8.0 + 4.0
    assert cost.restart_seconds == 25.0  # 150 - 137, and 170 - 158


def test_going_back_twice_throws_nothing_away_twice():
    cost = of(
        *START,
        *steps(120, 1, 8),  # step 2 at 124, step 4 at 128, step 8 at 136
        failed(136),
        began(140, 4),  # 5 to 8, 8 s
        failed(141),
        began(142, 2),  # 3 and 4, 4 s
        training(150, 2),
        ended(160),
    )
    assert (cost.redone_steps, cost.redone_seconds) == (6, 12.0)


def test_a_finished_run_that_goes_on_from_its_best_does_steps_again():
    cost = of(*START, *steps(120, 1, 8), ended(170), launched(300), began(310, 6), training(315, 6), ended(400))
    assert (cost.failures, cost.redone_steps) == (0, 2)
    assert cost.redone_seconds == 4.0  # 136 - 132: measuring until 170 is not done again
    assert cost.restart_seconds == 0.0


def test_a_checkpoint_whose_step_was_never_reported_is_not_lost():
    # Killed between writing checkpoint 4 and telling of it: the report of step 3 is the last.
    cost = of(*START, *steps(120, 1, 3), failed(129), began(135, 4), training(140, 4), *steps(140, 5, 6), ended(150))
    assert (cost.redone_steps, cost.redone_seconds) == (0, 0.0)


def test_steps_reported_by_fives_are_lost_by_their_number():
    cost = of(*START, step(130, 5), step(140, 10), step(150, 15), failed(152), began(155, 10), training(160, 10))
    assert (cost.redone_steps, cost.redone_seconds) == (5, 12.0)  # 152 - 140


# Elastic runs


def test_growing_in_order_costs_a_restart_and_no_failure():
    cost = of(
        *START,
        *steps(120, 1, 4),  # step 4 at 128
        began(140, 4, workers=4),
        training(150, 4),
        *steps(150, 5, 8, seconds=1),
        ended(160),
    )
    assert cost == replace(
        NOTHING,
        startup_seconds=20.0,
        restart_seconds=22.0,  # 150 - 128
        gpu_seconds_lost=88.0,  # of the 4 workers that it starts
    )


def test_lost_time_is_counted_with_the_workers_of_its_attempt():
    cost = of(
        launched(100),
        began(110, 0, workers=4),
        training(120, 0),
        *steps(120, 1, 4),  # step 2 at 124
        failed(130),
        began(135, 2, workers=1),
        training(140, 2),
        ended(200),
    )
    assert (cost.redone_seconds, cost.restart_seconds) == (6.0, 10.0)
    assert cost.gpu_seconds_lost == 34.0  # 6 x 4, and 10 x 1


def test_a_cpu_run_loses_no_gpu_time():
    events = [*START, *steps(120, 1, 3), failed(130), began(135, 0), training(140, 0)]
    cost = price(events, [], use_gpu=False)
    assert (cost.redone_seconds, cost.gpu_seconds_lost) == (10.0, 0.0)


# Odd sequences


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


def test_doubled_lines_count_once():
    assert of(*(event for event in DISTURBED for _ in range(2))) == of(*DISTURBED)
    assert of(*DISTURBED, *DISTURBED) == of(*DISTURBED)


def test_other_events_do_not_matter():
    others = [
        {"event": "notice", "at": 139.0, "what": "disk is filling up"},
        {"event": "measured", "at": 999.0, "step": 4, "metrics": {"heldout/accuracy": 0.5}},
        {"event": "checkpoint", "at": 999.0, "step": 4},
    ]
    assert of(*(each for event in DISTURBED for each in (event, *others))) == of(*DISTURBED)


def test_a_missing_start_of_training_is_taken_from_the_first_step():
    cost = of(launched(100), began(110, 0), step(125, 1), step(127, 2), failed(128), began(130, 1), step(140, 2))
    assert cost.startup_seconds == 25.0
    assert (cost.redone_steps, cost.redone_seconds) == (1, 3.0)  # 128 - 125
    assert cost.restart_seconds == 12.0  # 140 - 128


def test_what_an_attempt_says_after_its_end_is_not_heard():
    late = of(*START, *steps(120, 1, 4), failed(130), step(131, 5), training(132, 0), began(135, 4), training(140, 4))
    assert late == of(*START, *steps(120, 1, 4), failed(130), began(135, 4), training(140, 4))


def test_a_run_whose_launches_were_not_noted_is_priced_from_its_attempts():
    cost = of(began(110, 0), training(120, 0), step(125, 1), failed(126), began(130, 1), training(134, 1))
    assert (cost.startup_seconds, cost.redone_seconds, cost.restart_seconds) == (10.0, 1.0, 8.0)


@pytest.mark.parametrize("in_order", [True, False], ids=["rising times", "any times"])
def test_no_sequence_of_events_raises_or_costs_less_than_nothing(in_order):
    draw = random.Random(0)
    for _ in range(3000):
        count = draw.randint(0, 30)
        times = [draw.uniform(0, 1000) for _ in range(count)]
        events = []
        for at in sorted(times) if in_order else times:
            number = draw.randint(0, 6)
            chosen = draw.choice(("launched", "began", "training", "step", "step", "step", "failed", "ended"))
            events.append(
                {"event": chosen, "at": at}
                | ({"step": number} if chosen in ("began", "training", "step") else {})
                | ({"workers": 1, "checkpoint": None} if chosen == "began" else {})
            )
        cost = of(*events)
        assert all(value >= 0 for value in asdict(cost).values()), events
        if in_order and events:
            # No second is counted twice: each is trained, and perhaps thrown away, or spent on starting.
            spent = cost.redone_seconds + cost.restart_seconds + cost.startup_seconds
            assert spent <= events[-1]["at"] - events[0]["at"] + 0.2, events  # rounded to tenths
            assert cost.gpu_seconds_lost <= cost.redone_seconds + cost.restart_seconds + 0.2


# Waste


ROWS = [
    {"step": 1, "step/seconds": 10.0, "group/equal_share": 0.5, "completion/truncated_share": 0.25},
    {"step": 2, "step/seconds": 20.0, "group/equal_share": 1.0, "reward/unscorable_share": 0.1},
    {"step": 3, "step/seconds": 30.0},  # nothing is known of its completions
]


def test_waste_is_the_seconds_of_steps_times_its_share():
    assert price([], ROWS, use_gpu=True) == replace(
        NOTHING,
        trained_seconds=60.0,
        no_signal_seconds=25.0,  # 10 x 0.5 + 20 x 1
        truncated_seconds=2.5,  # 10 x 0.25
        unscorable_seconds=2.0,  # 20 x 0.1
    )


def test_what_was_generated_and_put_aside_is_told_from_the_rounds():
    rows = [{"step": n, "step/seconds": 12.0, "group/rounds": rounds} for n, rounds in enumerate((1.0, 2.0, 4.0))]
    cost = price([], [*rows, {"step": 3, "step/seconds": 12.0}], use_gpu=False)
    assert cost.put_aside_seconds == 15.0  # of 12 s each: nothing, a half, three quarters, nothing
    assert ("groups put aside", "15 s of training (31 %), generated and not trained on") in lines(cost)


# The table


def test_nothing_is_said_of_what_cost_nothing():
    assert lines(NOTHING) == []
    assert lines(replace(NOTHING, trained_seconds=60.0)) == []


def test_the_table_says_what_was_lost():
    assert lines(Price(2, 7, 12.3, 41.0, 22.0, 31.0, 7.2, 0.4, 106.6, 72.0)) == [
        ("starting", "22 s"),
        ("failures", "2"),
        ("work done again", "7 steps, 12 s"),
        ("restarts", "41 s"),
        ("GPU time lost", "107 s, all workers together"),
        ("steps without signal", "31 s of training (43 %), groups of equal rewards"),
        ("truncated completions", "7.2 s of training (10 %)"),
        ("unscorable completions", "0.4 s of training (1 %)"),
    ]


def test_one_step_and_less_than_one_are_said_so():
    assert lines(replace(NOTHING, redone_steps=1, redone_seconds=2.0)) == [("work done again", "1 step, 2.0 s")]
    assert lines(replace(NOTHING, redone_seconds=0.5)) == [("work done again", "part of a step, 0.5 s")]
