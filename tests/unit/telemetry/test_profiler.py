"""Tests of phase times, measured with a clock that the tests advance, and of the Chrome trace."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.driver.summary import phase_breakdown
from grpo_ray.telemetry import profiler as profiler_module
from grpo_ray.telemetry.profiler import (
    PHASE_CATEGORIES,
    PHASES,
    PRODUCTIVE_PHASES,
    PhaseProfiler,
    in_phase,
    seconds_by_category,
    seconds_by_phase,
)


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
def profiler(clock: Clock) -> PhaseProfiler:
    return PhaseProfiler(trace=True, clock=clock)


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def complete_events(profiler: PhaseProfiler, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in json.loads(profiler.chrome_trace(rank))["traceEvents"] if event["ph"] == "X"]


def test_profiler_nested_span_counts_for_inner_phase(clock: Clock, profiler: PhaseProfiler) -> None:
    with profiler.span("forward_backward"):
        clock.advance(1)
        with profiler.span("prepare"):
            clock.advance(2)
            with profiler.span("generate"):
                clock.advance(4)
            clock.advance(8)
        clock.advance(16)
    clock.advance(32)
    taken = profiler.take_metrics()
    assert taken["phase/forward_backward"] == 17  # 1 + 16
    assert taken["phase/prepare"] == 10  # 2 + 8
    assert taken["phase/generate"] == 4
    assert taken["phase/other"] == 32
    assert taken["step/seconds"] == 63
    assert taken["step/overhead_share"] == pytest.approx(42 / 63)  # all but 17 + 4


def test_profiler_metrics_taken_in_open_span_sum_to_step_seconds(clock: Clock, profiler: PhaseProfiler) -> None:
    with profiler.span("checkpoint"):
        clock.advance(3)
        first = profiler.take_metrics()
        clock.advance(5)
    second = profiler.take_metrics()
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
def test_profiler_any_nesting_sums_to_step_seconds(actions: list[tuple[str, Any]]) -> None:
    clock = Clock()
    profiler = PhaseProfiler(clock=clock)
    expected = dict.fromkeys(PHASES, 0)
    open_phases: list[str] = []
    for action, argument in [*actions, ("take", None)]:
        if action == "advance":
            clock.advance(argument)
            expected[open_phases[-1] if open_phases else "other"] += argument  # the innermost phase
        elif action == "begin":
            profiler.begin(argument)
            open_phases.append(argument)
        elif action == "end" and open_phases:
            profiler.end()
            open_phases.pop()
        elif action == "take":
            taken = profiler.take_metrics()
            assert {name: taken[f"phase/{name}"] for name in PHASES} == expected
            assert taken["step/seconds"] == sum(expected.values())
            expected = dict.fromkeys(PHASES, 0)


def test_profiler_metrics_include_every_phase(profiler: PhaseProfiler, clock: Clock) -> None:
    clock.advance(1)
    assert {name for name in profiler.take_metrics() if name.startswith("phase/")} == {
        f"phase/{phase}" for phase in PHASES
    }


def test_profiler_span_in_same_phase_counts_once(clock: Clock, profiler: PhaseProfiler) -> None:
    with profiler.span("forward_backward"), profiler.span("forward_backward"):
        clock.advance(2)
    assert profiler.take_metrics()["phase/forward_backward"] == 2
    assert [event["name"] for event in complete_events(profiler)] == ["forward_backward"]


def test_profiler_exception_ends_span(clock: Clock, profiler: PhaseProfiler) -> None:
    with pytest.raises(KeyError), profiler.span("score"):
        clock.advance(1)
        raise KeyError
    clock.advance(1)
    taken = profiler.take_metrics()
    assert (taken["phase/score"], taken["phase/other"]) == (1, 1)


def test_in_phase_method_is_timed_and_keeps_docstring(clock: Clock, profiler: PhaseProfiler) -> None:
    class Scorer:
        def __init__(self) -> None:
            self.profiler = profiler

        @in_phase("score")
        def score(self, seconds: float, *, more: float) -> str:
            """Score."""
            clock.advance(seconds + more)
            return "done"

    assert Scorer().score(1, more=2) == "done"
    assert profiler.take_metrics()["phase/score"] == 3
    assert Scorer.score.__doc__ == "Score."


def test_timed_iterator_charges_producer_not_consumer(clock: Clock, profiler: PhaseProfiler) -> None:
    def problems() -> Any:
        for number in range(3):
            clock.advance(1)
            yield number

    got = []
    for problem in profiler.timed_iterator("wait", problems()):
        clock.advance(10)
        got.append(problem)
    taken = profiler.take_metrics()
    assert got == [0, 1, 2]
    assert (taken["phase/wait"], taken["phase/other"]) == (3, 30)


def test_profiler_throughput_is_tokens_per_phase_second(clock: Clock, profiler: PhaseProfiler) -> None:
    with profiler.span("generate"):
        clock.advance(2)
        profiler.count_tokens("engine", 300)
        profiler.count_tokens("engine", 100)
    with profiler.span("forward_backward"):
        clock.advance(4)
    taken = profiler.take_metrics()
    assert taken["engine/tokens_per_second"] == 200  # 400 / 2
    assert "learner/tokens_per_second" not in taken  # unknown, not zero
    clock.advance(1)
    assert "engine/tokens_per_second" not in profiler.take_metrics()


def test_profiler_other_thread_adds_no_step_seconds(clock: Clock, profiler: PhaseProfiler) -> None:
    def generate() -> None:
        with profiler.span("generate"):
            clock.advance(4)
            profiler.count_tokens("engine", 200)

    with profiler.span("forward_backward"):
        in_thread(generate)
    taken = profiler.take_metrics()
    assert taken["phase/generate"] == 0 and taken["phase/forward_backward"] == taken["step/seconds"] == 4
    assert taken["engine/tokens_per_second"] == 50
    lanes = {event["name"]: event["tid"] for event in complete_events(profiler)}
    assert lanes["generate"] != lanes["forward_backward"]


def test_profiler_throughput_excludes_waiting_for_thread(clock: Clock, profiler: PhaseProfiler) -> None:
    def generate() -> None:
        with profiler.span("generate"):
            clock.advance(4)
            profiler.count_tokens("engine", 200)

    with profiler.span("generate"):  # the learner waits for the other thread
        in_thread(generate)
    with profiler.span("generate"):  # then the learner generates itself
        clock.advance(1)
        profiler.count_tokens("engine", 50)
    taken = profiler.take_metrics()
    assert taken["phase/generate"] == 5
    assert taken["engine/tokens_per_second"] == 50  # 250 / (4 + 1)


def test_profiler_progress_counts_spans_and_notes(profiler: PhaseProfiler) -> None:
    with profiler.span("generate"):
        assert profiler.progress == 1
        profiler.note_progress()
    assert profiler.progress == 3
    profiler.reset()
    assert profiler.progress == 3


def test_profiler_reset_clears_seconds(clock: Clock, profiler: PhaseProfiler) -> None:
    with profiler.span("wait"):
        clock.advance(7)
    profiler.reset()
    clock.advance(1)
    taken = profiler.take_metrics()
    assert taken["step/seconds"] == 1 and taken["phase/wait"] == 0


def test_chrome_trace_has_event_format(clock: Clock, profiler: PhaseProfiler) -> None:
    with profiler.span("prepare"):
        clock.advance(1)
        with profiler.span("generate"):
            clock.advance(2)
    profiler.mark_instant("end of step 1")
    trace = json.loads(profiler.chrome_trace(rank=3))
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


def test_begin_concurrent_overlapping_tasks_are_merged(clock: Clock, profiler: PhaseProfiler) -> None:
    first = profiler.begin_concurrent("verdicts")
    clock.advance(1)
    second = profiler.begin_concurrent("verdicts")
    clock.advance(1)
    first("argument of a future's callback")
    clock.advance(1)
    in_thread(second)
    clock.advance(5)
    profiler.begin_concurrent("verdicts")()  # no time passes: not in the trace
    third = profiler.begin_concurrent("verdicts")
    clock.advance(2)
    third()
    assert [(e["name"], e["dur"]) for e in complete_events(profiler)] == [("verdicts", 3e6), ("verdicts", 2e6)]
    assert profiler.take_metrics()["phase/other"] == 10


def test_chrome_trace_keeps_newest_and_counts_dropped(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_module, "MAX_TRACE_EVENTS", 10)
    profiler = PhaseProfiler(trace=True, clock=clock)
    for number in range(25):
        with profiler.span(f"part {number}"):
            clock.advance(1)
    trace = json.loads(profiler.chrome_trace(0))
    kept = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert kept == [f"part {number}" for number in range(15, 25)]
    assert trace["otherData"] == {"older_events_left_out": 15}


def test_chrome_trace_disabled_is_empty(clock: Clock) -> None:
    profiler = PhaseProfiler(clock=clock)
    with profiler.span("wait"):
        clock.advance(1)
    profiler.begin_concurrent("verdicts")()
    profiler.mark_instant("end of step 1")
    assert [event["ph"] for event in json.loads(profiler.chrome_trace(0))["traceEvents"]] == ["M", "M", "M"]


def test_phase_categories_hold_every_phase_once() -> None:
    assert sorted(phase for phases in PHASE_CATEGORIES.values() for phase in phases) == sorted(PHASES)
    assert set(PRODUCTIVE_PHASES) <= set(PHASES)


def test_phase_breakdown_lists_largest_category_first() -> None:
    row = {f"phase/{phase}": 0.0 for phase in PHASES}
    rows: list[dict[str, Any]] = [
        {"step": 1},  # a row without phases
        row | {"phase/generate": 1.0, "phase/optimizer": 2.0, "phase/forward_backward": 4.0},
        row | {"phase/generate": 1.0, "phase/other": 0.98, "phase/wait": 0.02},
    ]
    seconds = seconds_by_phase(rows)
    assert seconds["generate"] == 2 and sum(seconds.values()) == pytest.approx(9)
    assert seconds_by_category(seconds)["learning"] == 6
    assert phase_breakdown(seconds) == "learning 67 %, generating 22 %, all else 11 %"
    assert seconds_by_phase(rows[:1]) == {} and phase_breakdown({}) == "-"
