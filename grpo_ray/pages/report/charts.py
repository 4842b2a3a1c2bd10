"""Geometry of the small SVG line charts that `contents.html` draws.

A chart is 360 x 190 units, the width of a phone, so its text is readable there without scaling.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

LEFT, RIGHT, TOP, BOTTOM = 46, 350, 10, 166
"""Edges of the plot area inside the chart."""
MAX_POINTS = 240
"""Most points of one line; a longer line is thinned out, but keeps its extremes."""
MAX_BANDS = 48
"""Most vertical strips of a chart; each shows the values of one step as a tooltip."""
MAX_DOTS = 20
"""A line of at most this many points has a dot on each."""
MIN_SMOOTHED_POINTS = 11
"""Fewest points of a chart's longest curve for which curves are smoothed."""
MIN_SMOOTHING_SPAN, POINTS_PER_SPAN = 5, 20
"""Span of the moving average: the number of points divided by `POINTS_PER_SPAN`, but at least `MIN_SMOOTHING_SPAN`."""
MIN_LOG_RATIO = 100
"""Ratio of the largest to the smallest value above which a logarithmic scale is used where it is allowed."""
MAX_ABS_VALUE = 1e100
"""Larger numbers count as not finite, because the arithmetic of the scale would overflow."""

Point = tuple[int, float]
"""Step and value."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart, in the units of its metric."""

    label: str
    colour: int
    """Number of a colour of the page, from 0."""
    points: Sequence[Point]
    intervals: Sequence[tuple[float, float]] = ()
    """Low and high end for each point. A curve with intervals is drawn as points with error bars, not smoothed."""


@dataclass(frozen=True)
class CurveShape:
    """A curve as SVG paths and coordinates."""

    label: str
    colour: int
    line: str
    """Path of the smoothed values, or of the raw values if they are not smoothed."""
    raw: str
    """Path of the raw values, behind the smoothed line; "" if they are not drawn."""
    dots: list[tuple[float, float]]
    bars: list[tuple[float, float, float]]
    """x, and y of the interval's ends."""


@dataclass(frozen=True)
class Chart:
    """A chart ready to be drawn."""

    title: str
    note: str
    curves: list[CurveShape]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    bands: list[tuple[float, float, str]]
    """x, width and tooltip of each strip."""
    marks: list[tuple[float, str]]
    """x and tooltip of each marked step."""
    smoothing_span: int
    """Logging steps that the line averages over; 1 if it is not smoothed."""
    legend: bool
    latest: str = ""
    """Latest value of a chart with one curve."""
    box: tuple[int, int, int, int] = field(default=(LEFT, TOP, RIGHT, BOTTOM))


def layout_chart(
    title: str,
    note: str,
    curves: Sequence[Curve],
    *,
    marks: Sequence[tuple[int, str]] = (),
    smooth: bool = True,
    logarithmic: bool = False,
    legend: bool = False,
) -> Chart | None:
    """Lay out a chart.

    Args:
        title: Title.
        note: Note below the title.
        curves: Curves in the order in which they are drawn; those without a finite value are left out.
        marks: Steps to mark with a vertical line, and its tooltip.
        smooth: Draw a moving average if there are at least `MIN_SMOOTHED_POINTS` points.
        logarithmic: Use a logarithmic scale if the values span more than `MIN_LOG_RATIO`.
        legend: Draw a legend of the curves.

    Returns:
        None if there is no finite value to draw.
    """
    curves = [curve for curve in curves if any(_is_drawable(value) for _, value in curve.points)]
    if not curves:
        return None
    steps = sorted({step for curve in curves for step, _ in curve.points})
    values = [value for curve in curves for _, value in curve.points if _is_drawable(value)]
    ends = [end for curve in curves for pair in curve.intervals for end in pair if _is_drawable(end)]
    x = _Scale(steps[0], steps[-1])
    y = _value_scale(min(values + ends), max(values + ends), logarithmic)
    num_points = max(len(curve.points) for curve in curves)
    smooth = smooth and num_points >= MIN_SMOOTHED_POINTS
    span = max(MIN_SMOOTHING_SPAN, num_points // POINTS_PER_SPAN) if smooth else 1
    shapes = [_draw(curve, x, y, span, with_raw=len(curves) == 1) for curve in curves]
    latest = [value for _, value in curves[0].points if _is_drawable(value)][-1]
    return Chart(
        title=title,
        note=note,
        curves=shapes,
        x_ticks=[(_to_x(x, tick), label) for tick, label in _label_ticks(x.ticks(integers=True))],
        y_ticks=[(_to_y(y, tick), label) for tick, label in _label_ticks(y.ticks())],
        bands=_layout_bands(curves, steps, x),
        marks=[(_to_x(x, step), tooltip) for step, tooltip in marks if x.low <= step <= x.high],
        smoothing_span=span,
        legend=legend,
        latest=short(latest) if len(curves) == 1 else "",
    )


@dataclass(frozen=True)
class _Scale:
    """Range of values of an axis."""

    low: float
    high: float
    logarithmic: bool = False

    def fraction(self, value: float) -> float:
        """Map a value to its position between the ends of the scale, 0 to 1."""
        low, high, position = self.low, self.high, value
        if self.logarithmic:
            low, high, position = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return 0.5 if high == low else min(1.0, max(0.0, (position - low) / (high - low)))

    def ticks(self, integers: bool = False) -> list[float]:
        """Return about four round values inside the scale."""
        if self.logarithmic:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers][:: max(1, len(powers) // 4)]
        width = self.high - self.low
        if width <= 0:
            return [self.low]
        size = 10.0 ** math.floor(math.log10(width / 4))
        distance = next(size * factor for factor in (1, 2, 5, 10, 20) if width / (size * factor) <= 5)
        distance = max(1.0, distance) if integers else distance
        first, last = math.ceil(self.low / distance - 1e-9), math.floor(self.high / distance + 1e-9)
        return [number * distance for number in range(first, last + 1)][:12]


def _value_scale(low: float, high: float, logarithmic: bool) -> _Scale:
    """Choose the scale of the values between `low` and `high`, with a margin."""
    if logarithmic and low > 0 and high / low > MIN_LOG_RATIO:
        return _Scale(low, high, logarithmic=True)
    if low >= 0 and low < 0.6 * high:
        low = 0.0  # shares and seconds are compared with zero
    # The margin of at least 1e-4 keeps values that differ by rounding alone a flat line.
    margin = max(0.06 * (high - low), 1e-4 * abs(high)) if high > low else abs(high) * 0.1 or 1.0
    return _Scale(low if low == 0 else low - margin, high + margin)


def _label_ticks(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Label each tick with the fewest digits that distinguish all ticks, at least 3."""
    for digits in range(3, 9):
        labels = [short(tick, digits) for tick in ticks]
        if len(set(labels)) == len(labels):
            break
    return list(zip(ticks, labels, strict=True))


def _draw(curve: Curve, x: _Scale, y: _Scale, span: int, with_raw: bool) -> CurveShape:
    if curve.intervals:
        return _draw_with_intervals(curve, x, y)
    points = list(curve.points)
    if len(points) < 2 * span:
        span = 1
    line = _smooth(points, span, y.logarithmic) if span > 1 else points
    dotted = points if len(points) <= MAX_DOTS else []
    return CurveShape(
        label=curve.label,
        colour=curve.colour,
        line=_path(_thin_out(line), x, y),
        raw=_path(_thin_out(points), x, y) if span > 1 and with_raw else "",
        dots=[(_to_x(x, step), _to_y(y, value)) for step, value in dotted if _is_drawable(value)],
        bars=[],
    )


def _draw_with_intervals(curve: Curve, x: _Scale, y: _Scale) -> CurveShape:
    drawable = [index for index, (_, value) in enumerate(curve.points) if _is_drawable(value)]
    drawable = drawable[:: 1 + len(drawable) // MAX_POINTS]
    points = [curve.points[index] for index in drawable]
    intervals = [curve.intervals[index] for index in drawable]
    return CurveShape(
        label=curve.label,
        colour=curve.colour,
        line=_path(points, x, y),
        raw="",
        dots=[(_to_x(x, step), _to_y(y, value)) for step, value in points],
        bars=[
            (_to_x(x, step), _to_y(y, low), _to_y(y, high))
            for (step, _), (low, high) in zip(points, intervals, strict=True)
            if _is_drawable(low) and _is_drawable(high)
        ],
    )


def _smooth(points: Sequence[Point], span: int, logarithmic: bool) -> list[Point]:
    """Compute the exponential moving average. Its weights are normalised, so the start is not biased towards 0.

    Args:
        points: Points of a curve; a value that is not finite stays a gap.
        span: Logging steps that it averages over; the weight of a new value is 2 / (span + 1).
        logarithmic: Average the logarithms, as a logarithmic scale shows them; otherwise a single large value would
            dominate the average for many steps.
    """
    decay = 1 - 2 / (span + 1)
    total = weight = 0.0
    line = []
    for step, value in points:
        average = math.nan
        if _is_drawable(value):
            total = decay * total + (math.log(value) if logarithmic else value)
            weight = decay * weight + 1
            average = math.exp(total / weight) if logarithmic else total / weight
        line.append((step, average))
    return line


def _thin_out(points: Sequence[Point]) -> list[Point]:
    """Reduce a line to at most `MAX_POINTS`: the lowest and the highest point of each interval, so no spike is lost."""
    if len(points) <= MAX_POINTS:
        return list(points)
    edges = [round(number * len(points) / (MAX_POINTS // 2)) for number in range(MAX_POINTS // 2 + 1)]
    kept = []
    for begin, end in pairwise(edges):
        drawable = [index for index in range(begin, end) if _is_drawable(points[index][1])] or [begin]
        lowest = min(drawable, key=lambda index: points[index][1])
        highest = max(drawable, key=lambda index: points[index][1])
        kept += sorted({lowest, highest})
    return [points[index] for index in kept]


def _path(points: Sequence[Point], x: _Scale, y: _Scale) -> str:
    """Return the SVG path through the points, interrupted where a value is not finite."""
    commands, interrupted = [], True
    for step, value in points:
        if _is_drawable(value):
            commands.append(f"{'M' if interrupted else 'L'}{_to_x(x, step):g} {_to_y(y, value):g}")
        interrupted = not _is_drawable(value)
    return "".join(commands)


def _layout_bands(curves: Sequence[Curve], steps: Sequence[int], x: _Scale) -> list[tuple[float, float, str]]:
    """Divide the plot area into vertical strips, each with the values of one step as its tooltip."""
    chosen = sorted({steps[round(number * (len(steps) - 1) / (MAX_BANDS - 1))] for number in range(MAX_BANDS)})
    centres = [_to_x(x, step) for step in chosen]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(centres)), RIGHT]
    shown = set(chosen)  # formatting every value would take most of the time of a long run's page
    texts = [
        {step: _value_text(curve, index) for index, (step, _) in enumerate(curve.points) if step in shown}
        for curve in curves
    ]
    bands = []
    for step, (begin, end) in zip(chosen, pairwise(edges), strict=True):
        lines = [f"{curve.label}: {text[step]}" for curve, text in zip(curves, texts, strict=True) if step in text]
        bands.append((round(begin, 1), round(end - begin, 1), f"step {step}\n" + "\n".join(lines)))
    return bands


def _value_text(curve: Curve, index: int) -> str:
    value = short(curve.points[index][1], 4)
    if not curve.intervals:
        return value
    low, high = curve.intervals[index]
    return f"{value} [{short(low, 4)}, {short(high, 4)}]"


def short(value: float, digits: int = 3) -> str:
    """Format a number in a few characters, with about `digits` significant digits."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= 1e6:
        return f"{value:.{digits - 1}g}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.{digits}g}k"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def _is_drawable(value: float) -> bool:
    return abs(value) < MAX_ABS_VALUE  # False for NaN


def _to_x(scale: _Scale, step: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * scale.fraction(step), 1)


def _to_y(scale: _Scale, value: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * scale.fraction(value), 1)
