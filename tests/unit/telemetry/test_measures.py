"""Tests of the accuracy on held-out problems as it is recorded and shown."""

import math

import pytest

from grpo_ray.telemetry.measures import (
    ACCURACY_MEASURES,
    BASELINE_MEASURES,
    Measure,
    format_heldout,
    heldout_measures,
    heldout_part,
    heldout_title,
    recorded_measure,
)


def test_measure_unknown_interval_is_left_out() -> None:
    assert str(Measure(0.5, 0.25, 0.75)) == "0.500 [0.250, 0.750]"
    assert str(Measure(0.5)) == str(Measure(0.5, 0.25)) == "0.500"
    assert Measure(-0.25, -0.5, 0.125).format("+.3f") == "-0.250 [-0.500, +0.125]"


def test_measure_intervals_that_touch_overlap() -> None:
    low, middle, high = Measure(0.2, 0.1, 0.3), Measure(0.4, 0.3, 0.5), Measure(0.6, 0.4, 0.8)
    assert low.overlaps(middle) and middle.overlaps(low) and middle.overlaps(high)
    assert not low.overlaps(high) and not high.overlaps(low)


@pytest.mark.parametrize("names", [ACCURACY_MEASURES, BASELINE_MEASURES])
def test_recorded_measure_reads_what_numbers_gives(names: tuple[str, ...]) -> None:
    measure = Measure(0.5, 0.25, 0.75, 12)
    assert recorded_measure(measure.numbers(names), names, count=12) == measure


@pytest.mark.parametrize("values", [None, [], {}, {"value": "0.5"}, {"value": math.nan}, {"value": True}, {"low": 0.5}])
def test_recorded_measure_without_a_finite_mean_is_none(values: object) -> None:
    assert recorded_measure(values, BASELINE_MEASURES) is None


def test_recorded_measure_malformed_end_is_unknown() -> None:
    assert recorded_measure({"value": 1, "low": "x", "high": 10**400}, BASELINE_MEASURES) == Measure(1.0)


def test_measure_is_equal_to_one_with_the_same_unknown_ends() -> None:
    parsed = Measure(0.5, float("nan"), float("nan"))  # other objects than `math.nan`
    assert parsed == Measure(0.5) and len({parsed, Measure(0.5)}) == 1
    assert parsed != Measure(0.5, 0.4) and Measure(0.5, count=3) != Measure(0.5)


def test_heldout_measures_primary_set_is_not_repeated() -> None:
    metrics = {"heldout/accuracy": 0.5, "heldout/b/accuracy": 0.5, "heldout/a/accuracy": 0.75, "heldout/a/low": 0.5}
    assert heldout_measures(metrics) == {"heldout/b": Measure(0.5), "heldout/a": Measure(0.75, 0.5)}
    assert heldout_measures({"heldout/accuracy": 0.5}) == {"heldout": Measure(0.5)}


def test_heldout_measures_other_metrics_are_no_sets() -> None:
    metrics = {"reward/accuracy": 0.5, "heldout/low": 0.4, "heldout/a/accuracy": math.inf, "heldouts/accuracy": 0.5}
    assert heldout_measures(metrics) == {} and format_heldout(metrics) is None
    assert heldout_part(metrics) == {"heldout/low": 0.4, "heldout/a/accuracy": math.inf}


def test_format_heldout_set_named_accuracy_is_shown_by_name() -> None:
    assert format_heldout({"heldout/accuracy": 0.5, "heldout/accuracy/accuracy": 0.5}) == "held-out accuracy 0.500"


def test_heldout_title_names_the_set() -> None:
    assert heldout_title("heldout/math", "accuracy") == "held-out accuracy, math"
    assert heldout_title("heldout", "score") == "held-out score"
