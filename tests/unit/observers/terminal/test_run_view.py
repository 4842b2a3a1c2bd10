"""Tests of the state behind the live view."""

from typing import Any

import pytest

from grpo_ray.observers.terminal.run_view import Curve, PolicyMeasure, RunView, policy_measures, signal_share
from grpo_ray.telemetry.measures import Measure


def row(step: int, **metrics: float) -> dict[str, Any]:
    """Metrics of a step of 2 s with 64 completions per second of 20 tokens each."""
    speed = {"step/seconds": 2.0, "step/completions_per_second": 64.0, "completion/length_mean": 20.0}
    return {"step": step, **speed, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def view_after(*rows: dict[str, Any], max_steps: int = 100, workers: int = 2) -> RunView:
    view = RunView(max_steps, started=0.0, workers=workers)
    for each in rows:
        view.add_step(each, now=10.0)
    return view


def test_curve_means_cover_equal_intervals() -> None:
    curve = Curve()
    for step, value in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], start=1):
        curve.add(step, value)
    assert curve.means(6) == [1, 2, 3, 4, 5, 6]
    assert curve.means(3) == [1.5, 3.5, 5.5]
    assert curve.means(4) == [1.5, 3.5, 5.5]  # two steps each; three intervals are enough
    assert Curve().means(4) == [] and curve.means(0) == []


def test_curve_long_run_keeps_bounded_points_and_all_values() -> None:
    curve = Curve(max_points=8)
    for step in range(1000):
        curve.add(step, float(step))
    assert len(curve._points) <= 8
    assert sum(count for _, _, count in curve._points) == 1000
    assert sum(total for _, total, _ in curve._points) == 999 * 1000 / 2
    means = curve.means(4)
    assert means == sorted(means) and means[0] < 130 and means[-1] > 800


def test_curve_forgets_later_steps() -> None:
    curve = Curve()
    for step in range(1, 11):
        curve.add(step, float(step))
    curve.forget_after(3)
    curve.add(4, 40.0)
    assert curve.means(10) == [1, 2, 3, 40]


def test_curve_leaves_out_values_that_are_not_finite() -> None:
    curve = Curve()
    for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0]):
        curve.add(step, value)
    assert curve.means(9) == [1, 2]


def test_view_speed_is_that_of_one_worker_weighted_by_time() -> None:
    slow = row(2) | {"step/seconds": 6.0, "step/completions_per_second": 16.0}
    view = view_after(row(1), slow)
    # (2 s x 64 + 6 s x 16) / 8 s = 28 completions per second of two workers
    assert view.completions_per_second == 14.0 and view.tokens_per_second == 280.0


def test_view_tokens_of_a_batch_have_one_length() -> None:
    """Only the first of three rows has the length, 30 tokens; 64 completions/s of two workers."""
    rows = [row(step) for step in (1, 2, 3)]
    for each in rows:
        del each["completion/length_mean"]
    rows[0]["completion/length_mean"] = 30.0
    assert view_after(*rows).tokens_per_second == 64 * 30 / 2
    assert view_after(*rows[1:]).tokens_per_second is None


def test_view_time_left_follows_from_recent_steps() -> None:
    view = view_after(row(5) | {"step/seconds": 10.0}, row(10) | {"step/seconds": 20.0})
    assert view.seconds_per_step == 3.0 and view.seconds_left == 90 * 3.0  # 30 s for 10 steps
    assert RunView(100, started=0.0).seconds_left is None
    assert view_after(row(100)).seconds_left == 0.0


def test_view_resume_forgets_later_steps_and_adds_missed_rows() -> None:
    view = view_after(row(1, reward__mean=0.1), row(2, reward__mean=0.2, heldout__accuracy=0.5))
    view.resume(1, [row(1, reward__mean=0.9)])
    assert view.step == 1 and view.rewards.means(9) == [0.1] and not view.heldout and view.seconds_left is None
    new = RunView(100, started=0.0)
    new.resume(2, [row(1, reward__mean=0.1), row(2, reward__mean=0.2, heldout__accuracy=0.5)])
    assert new.step == 2 and new.rewards.means(9) == [0.1, 0.2] and new.heldout[""].accuracy.value == 0.5
    new.add_step(row(4) | {"step/seconds": 8.0}, now=0.0)
    assert new.seconds_per_step == 4.0  # two steps


def test_view_best_measure_is_kept_beside_the_latest() -> None:
    view = view_after(row(1, heldout__accuracy=0.7), row(2, heldout__accuracy=0.6))
    assert (view.heldout[""].step, view.best[""].step) == (2, 1)


def test_view_measure_before_older_rows_stays_the_latest() -> None:
    view = view_after()
    view.add_measures(20, {"heldout/accuracy": 0.5})
    view.resume(20, [row(10, heldout__accuracy=0.25), row(20)])
    assert view.heldout[""] == PolicyMeasure(Measure(0.5), 20)


def test_policy_measures_named_sets_have_their_names() -> None:
    metrics = {"heldout/accuracy": 0.5, "heldout/low": 0.4, "heldout/high": 0.6}
    assert policy_measures(metrics, 3) == {"": PolicyMeasure(Measure(0.5, 0.4, 0.6), 3)}
    named = metrics | {"heldout/math/accuracy": 0.5, "heldout/gsm8k/accuracy": 0.7, "heldout/gsm8k/low": 0.6}
    assert policy_measures(named) == {
        "math": PolicyMeasure(Measure(0.5)),
        "gsm8k": PolicyMeasure(Measure(0.7, 0.6)),
    }


@pytest.mark.parametrize(
    ("metrics", "share"), [({"group/equal_share": 0.75}, 0.25), ({"group/signal_share": 1.0}, 1.0), ({}, None)]
)
def test_signal_share_of_trained_groups(metrics: dict[str, float], share: float | None) -> None:
    assert signal_share(metrics) == share


def test_view_stages_end_when_the_next_begins() -> None:
    view = RunView(10, started=0.0)
    view.begin_stage("starting Ray", None, None, now=0.0)
    view.begin_stage("reading the problems", 0, 4, now=3.0)
    view.begin_stage("reading the problems", 3, 4, now=5.0)
    assert [(each.text, each.seconds(6.0)) for each in view.stages] == [
        ("starting Ray", 3.0),
        ("reading the problems", 3.0),
    ]
    assert (view.stages[1].done, view.stages[1].total, view.stages[1].ended) == (3, 4, None)
    view.begin_training(now=8.0)
    assert view.is_training and view.stages[1].ended == 8.0
    view.begin_stage("starting the workers again", None, None, now=9.0)  # after a failure
    assert not view.is_training and len(view.stages) == 1


def test_view_events_count_failures_and_keep_the_newest_warnings() -> None:
    view = RunView(10, started=0.0)
    view.add_event({"event": "began", "at": 1.0, "workers": 4, "step": 0, "checkpoint": None}, 1.0)
    view.add_event({"event": "failed", "at": 2.0, "rank": 3, "what": "killed\nat once"}, 2.0)
    for step in range(30):
        view.add_event({"event": "warning", "at": 3.0, "step": step, "name": "n", "what": "x" * 1000}, 3.0)
    assert view.workers == 4 and view.failures == 1 and view.last_failure == "worker 3: killed at once"
    assert len(view.warnings) == 20 and view.warnings[-1]["step"] == 29 and len(view.warnings[-1]["what"]) < 400
    assert view.last_event == (2.0, "worker 3 failed: killed at once")


def test_view_baseline_event_is_shown_apart() -> None:
    view = RunView(10, started=0.0)
    view.add_event({"event": "baseline", "at": 1.0, "metrics": {"heldout/accuracy": 0.25, "heldout/low": 0.2}}, 1.0)
    assert view.baseline == {"": PolicyMeasure(Measure(0.25, 0.2))} and not view.heldout


def test_view_unknown_event_is_ignored() -> None:
    view = RunView(10, started=0.0)
    view.add_event({"event": "of a later version", "at": 1.0}, 1.0)
    assert view.last_event is None
