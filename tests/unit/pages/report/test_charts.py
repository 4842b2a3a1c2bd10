"""Tests of the geometry of charts."""

import math
import re

import pytest

from grpo_ray.pages.report.charts import BOTTOM, TOP, Chart, Curve, Point, layout_chart


def layout(points: list[Point], *, smooth: bool = True, logarithmic: bool = False) -> Chart | None:
    """Lay out a chart with one curve."""
    return layout_chart("", "", [Curve(label="", colour=0, points=points)], smooth=smooth, logarithmic=logarithmic)


def y_values(path: str) -> list[float]:
    """Return the y coordinates of an SVG path's points; they grow downwards."""
    return [float(point.split()[1]) for point in re.split("[ML]", path)[1:]]


def test_chart_thinned_curve_keeps_outlier() -> None:
    chart = layout([(step, 5.0 if step == 7_777 else 1.0) for step in range(10_000)], smooth=False)
    assert chart is not None
    line = chart.curves[0].line
    assert len(line) < 5000
    heights = y_values(line)
    assert min(heights) < min(y for y, _ in chart.y_ticks) + 30 and heights.count(max(heights)) == len(heights) - 1


def test_chart_non_finite_value_breaks_line() -> None:
    chart = layout([(1, 1.0), (2, 2.0), (3, math.nan), (4, 2.0)])
    assert chart is not None and re.sub("[^ML]", "", chart.curves[0].line) == "MLM"


def test_chart_line_is_moving_average() -> None:
    # The span of 20 points is 5, so each new value has a weight of one third.
    chart = layout([(step, 0.0 if step == 1 else 1.0) for step in range(1, 21)])
    assert chart is not None and chart.smoothing_span == 5
    line = y_values(chart.curves[0].line)
    raw_low, raw_high, *_ = y_values(chart.curves[0].raw)
    assert line[0] == raw_low
    assert (raw_low - line[1]) / (raw_low - raw_high) == pytest.approx(0.6, abs=0.01)  # 1 / (1 + 2/3)
    assert line[19] == pytest.approx(raw_high, abs=0.3)


def test_chart_log_scale_recovers_after_outlier() -> None:
    chart = layout([(step, 1000.0 if step == 10 else 1.0) for step in range(1, 31)], logarithmic=True)
    assert chart is not None
    heights = y_values(chart.curves[0].line)
    # The span of 30 points is 5. The outlier moves the average by a third of three powers of ten; five steps later
    # (2/3)^5 of that is left, less than half a power of ten.
    assert heights[9] < heights[14] and heights[14] > heights[0] - (BOTTOM - TOP) / 6


def test_chart_without_finite_value_is_none() -> None:
    assert layout_chart("", "", []) is None
    assert layout([(1, math.nan), (2, 1e200)]) is None


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0.0, 1.0), ["0", "0.5", "1"]),
        ((0.2, 0.9), ["0", "0.2", "0.4", "0.6", "0.8"]),
        ((1e-3, 10.0), ["0.001", "0.01", "0.1", "1", "10"]),
        ((1.0, 1.0000002), ["0.9999", "0.99995", "1", "1.00005", "1.0001"]),
        ((5.0, 5.0), None),
        ((0.0, 0.0), None),
        ((-1e99, 1e99), None),
        ((1e-300, 1e-300), None),
    ],
)
def test_chart_ticks_fit_values(values: tuple[float, float], ticks: list[str] | None) -> None:
    chart = layout(list(enumerate(values)), logarithmic=True)
    assert chart is not None and 1 <= len(chart.y_ticks) <= 12
    assert all(TOP <= y <= BOTTOM for y, _ in chart.y_ticks)
    assert ticks is None or [label for _, label in chart.y_ticks] == ticks
