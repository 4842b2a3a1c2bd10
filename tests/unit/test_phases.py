"""The clock of a step's phases, on a clock that the tests turn, and the trace that comes of it."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from grpo_ray import phases as phases_module
from grpo_ray.phases import GROUPS, NEEDED, PHASES, Phases, grouped, in_phase, spent
from grpo_ray.summary import where_time_went


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def phases(clock: Clock) -> Phases:
    return Phases(trace=True, clock=clock)


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def drawn_events(phases: Phases, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in json.loads(phases.trace_file(rank))["traceEvents"] if event["ph"] == "X"]


def test_what_is_timed_inside_a_phase_is_taken_out_of_it(clock: Clock, phases: Phases) -> None:
    with phases("forward_backward"):
        clock.passes(1)
        with phases("prepare"):
            clock.passes(2)
            with phases("generate"):
                clock.passes(4)
            clock.passes(8)
        clock.passes(16)
    clock.passes(32)
    taken = phases.take()
    assert taken["phase/forward_backward"] == 17  # 1 + 16
    assert taken["phase/prepare"] == 10  # 2 + 8
    assert taken["phase/generate"] == 4
    assert taken["phase/other"] == 32
    assert taken["step/seconds"] == 63
    assert taken["step/overhead_share"] == pytest.approx(42 / 63)  # all but 17 + 4


def test_the_phases_sum_to_the_step_whatever_is_open_when_they_are_taken(clock: Clock, phases: Phases) -> None:
    with phases("checkpoint"):
        clock.passes(3)
        first = phases.take()
        clock.passes(5)
    second = phases.take()
    for taken, seconds in ((first, 3), (second, 5)):
        assert taken["phase/checkpoint"] == taken["step/seconds"] == seconds
        assert sum(value for name, value in taken.items() if name.startswith("phase/")) == seconds


def test_every_phase_is_in_every_row_so_that_means_are_true(phases: Phases, clock: Clock) -> None:
    clock.passes(1)
    assert {name for name in phases.take() if name.startswith("phase/")} == {f"phase/{phase}" for phase in PHASES}


def test_a_phase_inside_of_itself_counts_once(clock: Clock, phases: Phases) -> None:
    with phases("forward_backward"), phases("forward_backward"):
        clock.passes(2)
    assert phases.take()["phase/forward_backward"] == 2
    assert [event["name"] for event in drawn_events(phases)] == ["forward_backward"]


def test_a_phase_ends_with_an_error_too(clock: Clock, phases: Phases) -> None:
    with pytest.raises(KeyError), phases("score"):
        clock.passes(1)
        raise KeyError
    clock.passes(1)
    taken = phases.take()
    assert (taken["phase/score"], taken["phase/other"]) == (1, 1)


def test_a_method_may_be_a_phase(clock: Clock, phases: Phases) -> None:
    class Scorer:
        def __init__(self) -> None:
            self.phases = phases

        @in_phase("score")
        def score(self, seconds: float, *, more: float) -> str:
            """Scores."""
            clock.passes(seconds + more)
            return "done"

    assert Scorer().score(1, more=2) == "done"
    assert phases.take()["phase/score"] == 3
    assert Scorer.score.__doc__ == "Scores."


def test_the_time_that_items_take_to_come_is_counted_and_not_that_of_their_use(clock: Clock, phases: Phases) -> None:
    def problems() -> Any:
        for number in range(3):
            clock.passes(1)
            yield number

    got = []
    for problem in phases.drawn("wait", problems()):
        clock.passes(10)
        got.append(problem)
    taken = phases.take()
    assert got == [0, 1, 2]
    assert (taken["phase/wait"], taken["phase/other"]) == (3, 30)


def test_speed_is_tokens_over_the_seconds_of_their_phase(clock: Clock, phases: Phases) -> None:
    with phases("generate"):
        clock.passes(2)
        phases.count("engine", 300)
        phases.count("engine", 100)
    with phases("forward_backward"):
        clock.passes(4)
    taken = phases.take()
    assert taken["engine/tokens_per_second"] == 200  # 400 / 2
    assert "learner/tokens_per_second" not in taken  # unknown is not zero
    clock.passes(1)
    assert "engine/tokens_per_second" not in phases.take()


def test_another_thread_takes_no_seconds_of_the_step(clock: Clock, phases: Phases) -> None:
    def generate() -> None:
        with phases("generate"):
            clock.passes(4)
            phases.count("engine", 200)

    with phases("forward_backward"):
        in_thread(generate)
    taken = phases.take()
    assert taken["phase/generate"] == 0 and taken["phase/forward_backward"] == taken["step/seconds"] == 4
    assert taken["engine/tokens_per_second"] == 50
    lanes = {event["name"]: event["tid"] for event in drawn_events(phases)}
    assert lanes["generate"] != lanes["forward_backward"]


def test_waiting_for_an_engine_in_another_thread_is_no_second_of_its_work(clock: Clock, phases: Phases) -> None:
    def generate() -> None:
        with phases("generate"):
            clock.passes(4)
            phases.count("engine", 200)

    with phases("generate"):  # the learner waits for it
        in_thread(generate)
    with phases("generate"):  # and generates itself
        clock.passes(1)
        phases.count("engine", 50)
    taken = phases.take()
    assert taken["phase/generate"] == 5
    assert taken["engine/tokens_per_second"] == 50  # 250 / (4 + 1)


def test_restarting_forgets_seconds(clock: Clock, phases: Phases) -> None:
    with phases("wait"):
        clock.passes(7)
    phases.restart()
    clock.passes(1)
    taken = phases.take()
    assert taken["step/seconds"] == 1 and taken["phase/wait"] == 0


def test_the_trace_is_what_chrome_reads(clock: Clock, phases: Phases) -> None:
    with phases("prepare"):
        clock.passes(1)
        with phases("generate"):
            clock.passes(2)
    phases.mark("end of step 1")
    trace = json.loads(phases.trace_file(rank=3))
    assert {event["pid"] for event in trace["traceEvents"]} == {3}
    names = {event["args"].get("name") for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"worker 3", "learner"} <= names
    inner, outer = (event for event in trace["traceEvents"] if event["ph"] == "X")
    assert (inner["name"], inner["dur"]) == ("generate", 2e6)
    assert (outer["name"], outer["dur"]) == ("prepare", 3e6)
    assert inner["ts"] - outer["ts"] == pytest.approx(1e6)
    assert inner["tid"] == outer["tid"]
    (mark,) = (event for event in trace["traceEvents"] if event["ph"] == "i")
    assert mark["name"] == "end of step 1" and mark["ts"] == pytest.approx(outer["ts"] + 3e6)


def test_what_overlaps_is_one_stretch_of_a_lane_of_its_own(clock: Clock, phases: Phases) -> None:
    first = phases.beside("verdicts")
    clock.passes(1)
    second = phases.beside("verdicts")
    clock.passes(1)
    first("what a future hands over")
    clock.passes(1)
    in_thread(second)
    clock.passes(5)
    phases.beside("verdicts")()  # no time
    third = phases.beside("verdicts")
    clock.passes(2)
    third()
    assert [(e["name"], e["dur"]) for e in drawn_events(phases)] == [("verdicts", 3e6), ("verdicts", 2e6)]
    assert phases.take()["phase/other"] == 10


def test_a_trace_keeps_the_newest_and_says_how_many_it_left_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases_module, "MOST_EVENTS", 10)
    phases = Phases(trace=True, clock=clock)
    for number in range(25):
        with phases(f"part {number}"):
            clock.passes(1)
    trace = json.loads(phases.trace_file(0))
    kept = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert kept == [f"part {number}" for number in range(15, 25)]
    assert trace["otherData"] == {"older_events_left_out": 15}


def test_without_a_trace_nothing_is_kept(clock: Clock) -> None:
    phases = Phases(clock=clock)
    with phases("wait"):
        clock.passes(1)
    phases.beside("verdicts")()
    phases.mark("end of step 1")
    assert [event["ph"] for event in json.loads(phases.trace_file(0))["traceEvents"]] == ["M", "M", "M"]


def test_every_phase_is_in_one_group() -> None:
    assert sorted(phase for group in GROUPS.values() for phase in group) == sorted(PHASES)
    assert set(NEEDED) <= set(PHASES)


def test_where_the_time_went_is_said_largest_first() -> None:
    row = {f"phase/{phase}": 0.0 for phase in PHASES}
    rows = [
        {"step": 1},  # from before there was a profile
        row | {"phase/generate": 1.0, "phase/optimizer": 2.0, "phase/forward_backward": 4.0},
        row | {"phase/generate": 1.0, "phase/other": 0.98, "phase/wait": 0.02},
    ]
    seconds = spent(rows)
    assert seconds["generate"] == 2 and sum(seconds.values()) == pytest.approx(9)
    assert grouped(seconds)["learning"] == 6
    assert where_time_went(seconds) == "learning 67 %, generating 22 %, all else 11 %"
    assert spent(rows[:1]) == {} and where_time_went({}) == "-"
