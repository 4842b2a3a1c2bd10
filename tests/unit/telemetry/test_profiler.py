"""The timing of a step's phases, on a clock that the tests advance, and its Chrome trace."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.driver.summary import phase_breakdown
from grpo_ray.telemetry import profiler as phases_module
from grpo_ray.telemetry.profiler import GROUPS, NEEDED, PHASES, PhaseProfiler, in_phase, seconds_by_group, total_seconds


class Clock:
    """A clock that advances only when a test advances it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def phases(clock: Clock) -> PhaseProfiler:
    return PhaseProfiler(trace=True, clock=clock)


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def drawn_events(phases: PhaseProfiler, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in json.loads(phases.trace_file(rank))["traceEvents"] if event["ph"] == "X"]


def test_phases_inner_phase_is_taken_out_of_outer(clock: Clock, phases: PhaseProfiler) -> None:
    with phases("forward_backward"):
        clock.advance(1)
        with phases("prepare"):
            clock.advance(2)
            with phases("generate"):
                clock.advance(4)
            clock.advance(8)
        clock.advance(16)
    clock.advance(32)
    taken = phases.take()
    assert taken["phase/forward_backward"] == 17  # 1 + 16
    assert taken["phase/prepare"] == 10  # 2 + 8
    assert taken["phase/generate"] == 4
    assert taken["phase/other"] == 32
    assert taken["step/seconds"] == 63
    assert taken["step/overhead_share"] == pytest.approx(42 / 63)  # all but 17 + 4


def test_phases_taken_while_open_sum_to_step_seconds(clock: Clock, phases: PhaseProfiler) -> None:
    with phases("checkpoint"):
        clock.advance(3)
        first = phases.take()
        clock.advance(5)
    second = phases.take()
    for taken, seconds in ((first, 3), (second, 5)):
        assert taken["phase/checkpoint"] == taken["step/seconds"] == seconds
        assert sum(value for name, value in taken.items() if name.startswith("phase/")) == seconds


ACTIONS = st.one_of(
    st.tuples(st.just("advance"), st.integers(0, 9)),
    st.tuples(st.just("begin"), st.sampled_from(sorted(set(PHASES) - {"other"}))),
    st.tuples(st.sampled_from(["end", "take"]), st.none()),
)


@given(actions=st.lists(ACTIONS, max_size=40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_phases_any_nesting_sums_to_step_seconds(actions: list[tuple[str, Any]]) -> None:
    clock = Clock()
    phases = PhaseProfiler(clock=clock)
    expected = dict.fromkeys(PHASES, 0)
    open_phases: list[str] = []
    for action, argument in [*actions, ("take", None)]:
        if action == "advance":
            clock.advance(argument)
            expected[open_phases[-1] if open_phases else "other"] += argument  # the innermost phase
        elif action == "begin":
            phases.begin(argument)
            open_phases.append(argument)
        elif action == "end" and open_phases:
            phases.end()
            open_phases.pop()
        elif action == "take":
            taken = phases.take()
            assert {name: taken[f"phase/{name}"] for name in PHASES} == expected
            assert taken["step/seconds"] == sum(expected.values())
            expected = dict.fromkeys(PHASES, 0)


def test_phases_take_has_every_phase_in_every_row(phases: PhaseProfiler, clock: Clock) -> None:
    clock.advance(1)
    assert {name for name in phases.take() if name.startswith("phase/")} == {f"phase/{phase}" for phase in PHASES}


def test_phases_phase_inside_itself_counts_once(clock: Clock, phases: PhaseProfiler) -> None:
    with phases("forward_backward"), phases("forward_backward"):
        clock.advance(2)
    assert phases.take()["phase/forward_backward"] == 2
    assert [event["name"] for event in drawn_events(phases)] == ["forward_backward"]


def test_phases_error_ends_the_phase(clock: Clock, phases: PhaseProfiler) -> None:
    with pytest.raises(KeyError), phases("score"):
        clock.advance(1)
        raise KeyError
    clock.advance(1)
    taken = phases.take()
    assert (taken["phase/score"], taken["phase/other"]) == (1, 1)


def test_in_phase_method_is_timed_and_keeps_its_docstring(clock: Clock, phases: PhaseProfiler) -> None:
    class Scorer:
        def __init__(self) -> None:
            self.phases = phases

        @in_phase("score")
        def score(self, seconds: float, *, more: float) -> str:
            """Scores."""
            clock.advance(seconds + more)
            return "done"

    assert Scorer().score(1, more=2) == "done"
    assert phases.take()["phase/score"] == 3
    assert Scorer.score.__doc__ == "Scores."


def test_phases_drawn_times_the_source_and_not_the_use(clock: Clock, phases: PhaseProfiler) -> None:
    def problems() -> Any:
        for number in range(3):
            clock.advance(1)
            yield number

    got = []
    for problem in phases.drawn("wait", problems()):
        clock.advance(10)
        got.append(problem)
    taken = phases.take()
    assert got == [0, 1, 2]
    assert (taken["phase/wait"], taken["phase/other"]) == (3, 30)


def test_phases_speed_is_tokens_over_seconds_of_phase(clock: Clock, phases: PhaseProfiler) -> None:
    with phases("generate"):
        clock.advance(2)
        phases.count("engine", 300)
        phases.count("engine", 100)
    with phases("forward_backward"):
        clock.advance(4)
    taken = phases.take()
    assert taken["engine/tokens_per_second"] == 200  # 400 / 2
    assert "learner/tokens_per_second" not in taken  # unknown, not zero
    clock.advance(1)
    assert "engine/tokens_per_second" not in phases.take()


def test_phases_other_thread_adds_no_step_seconds(clock: Clock, phases: PhaseProfiler) -> None:
    def generate() -> None:
        with phases("generate"):
            clock.advance(4)
            phases.count("engine", 200)

    with phases("forward_backward"):
        in_thread(generate)
    taken = phases.take()
    assert taken["phase/generate"] == 0 and taken["phase/forward_backward"] == taken["step/seconds"] == 4
    assert taken["engine/tokens_per_second"] == 50
    lanes = {event["name"]: event["tid"] for event in drawn_events(phases)}
    assert lanes["generate"] != lanes["forward_backward"]


def test_phases_waiting_for_other_threads_engine_is_no_work(clock: Clock, phases: PhaseProfiler) -> None:
    def generate() -> None:
        with phases("generate"):
            clock.advance(4)
            phases.count("engine", 200)

    with phases("generate"):  # the learner waits for that thread
        in_thread(generate)
    with phases("generate"):  # and then generates in its own thread
        clock.advance(1)
        phases.count("engine", 50)
    taken = phases.take()
    assert taken["phase/generate"] == 5
    assert taken["engine/tokens_per_second"] == 50  # 250 / (4 + 1)


def test_phases_restart_forgets_seconds(clock: Clock, phases: PhaseProfiler) -> None:
    with phases("wait"):
        clock.advance(7)
    phases.restart()
    clock.advance(1)
    taken = phases.take()
    assert taken["step/seconds"] == 1 and taken["phase/wait"] == 0


def test_trace_file_has_chromes_event_format(clock: Clock, phases: PhaseProfiler) -> None:
    with phases("prepare"):
        clock.advance(1)
        with phases("generate"):
            clock.advance(2)
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


def test_phases_beside_overlapping_spans_are_one_stretch(clock: Clock, phases: PhaseProfiler) -> None:
    first = phases.beside("verdicts")
    clock.advance(1)
    second = phases.beside("verdicts")
    clock.advance(1)
    first("argument of a future's callback")
    clock.advance(1)
    in_thread(second)
    clock.advance(5)
    phases.beside("verdicts")()  # no time passes: not drawn
    third = phases.beside("verdicts")
    clock.advance(2)
    third()
    assert [(e["name"], e["dur"]) for e in drawn_events(phases)] == [("verdicts", 3e6), ("verdicts", 2e6)]
    assert phases.take()["phase/other"] == 10


def test_trace_file_keeps_newest_and_counts_left_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases_module, "MOST_EVENTS", 10)
    phases = PhaseProfiler(trace=True, clock=clock)
    for number in range(25):
        with phases(f"part {number}"):
            clock.advance(1)
    trace = json.loads(phases.trace_file(0))
    kept = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert kept == [f"part {number}" for number in range(15, 25)]
    assert trace["otherData"] == {"older_events_left_out": 15}


def test_trace_file_without_trace_is_empty(clock: Clock) -> None:
    phases = PhaseProfiler(clock=clock)
    with phases("wait"):
        clock.advance(1)
    phases.beside("verdicts")()
    phases.mark("end of step 1")
    assert [event["ph"] for event in json.loads(phases.trace_file(0))["traceEvents"]] == ["M", "M", "M"]


def test_groups_hold_every_phase_once() -> None:
    assert sorted(phase for group in GROUPS.values() for phase in group) == sorted(PHASES)
    assert set(NEEDED) <= set(PHASES)


def test_where_time_went_lists_largest_group_first() -> None:
    row = {f"phase/{phase}": 0.0 for phase in PHASES}
    rows = [
        {"step": 1},  # a row of a version without phases
        row | {"phase/generate": 1.0, "phase/optimizer": 2.0, "phase/forward_backward": 4.0},
        row | {"phase/generate": 1.0, "phase/other": 0.98, "phase/wait": 0.02},
    ]
    seconds = total_seconds(rows)
    assert seconds["generate"] == 2 and sum(seconds.values()) == pytest.approx(9)
    assert seconds_by_group(seconds)["learning"] == 6
    assert phase_breakdown(seconds) == "learning 67 %, generating 22 %, all else 11 %"
    assert total_seconds(rows[:1]) == {} and phase_breakdown({}) == "-"
