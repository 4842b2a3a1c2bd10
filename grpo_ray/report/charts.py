"""Curves as the geometry of small SVG charts; `page.html` draws them.

A chart is 360 x 190 units: the width of a phone, so that its letters keep their size there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 10, 166
"""The plot's own box."""
MOST_POINTS = 240
"""Points of one curve; more are thinned out so that what stands out stays."""
BANDS = 48
"""Strips of a chart that say their numbers when pointed at."""
LARGEST = 1e100
"""Beyond it a number counts as not finite: the scale's own arithmetic must not overflow."""

Point = tuple[int, float]
"""Step and value."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart, in its units; `low` and `high` are the interval of each value, where there is one."""

    label: str
    colour: int
    """Number of a colour of the page, from 0."""
    points: Sequence[Point]
    intervals: Sequence[tuple[float, float]] = ()
    """Low and high end for each point; such a curve is drawn as points with bars, and not smoothed."""


@dataclass(frozen=True)
class Drawn:
    """A curve as it is drawn."""

    label: str
    colour: int
    line: str
    """Path of the smoothed values, or of all where there are few."""
    raw: str
    """Path of the values as they are, drawn faintly; "" if that is the line itself."""
    dots: list[tuple[float, float]]
    bars: list[tuple[float, float, float]]
    """x, and y of the interval's ends."""


@dataclass(frozen=True)
class Chart:
    """All that is to be drawn."""

    title: str
    note: str
    curves: list[Drawn]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    bands: list[tuple[float, float, str]]
    """x, width and what is said of the steps there."""
    marks: list[tuple[float, str]]
    """x of steps at which something happened, and what."""
    smoothed: int
    """Logging steps that the line averages over; 1 if it does not."""
    legend: bool
    newest: str = ""
    """The newest value of a chart of one curve."""
    box: tuple[int, int, int, int] = field(default=(LEFT, TOP, RIGHT, BOTTOM))


def chart(
    title: str,
    note: str,
    curves: Sequence[Curve],
    *,
    marks: Sequence[tuple[int, str]] = (),
    smooth: bool = True,
    logarithmic: bool = False,
    legend: bool = False,
) -> Chart | None:
    """Lay out a chart; None if there is no finite value to draw.

    marks: steps at which something happened, and what.
    smooth: draw a moving average over the values where there are more than a few.
    logarithmic: use a logarithmic scale where the values span more than two powers of ten.
    """
    curves = [curve for curve in curves if any(_fits(value) for _, value in curve.points)]
    if not curves:
        return None
    steps = sorted({step for curve in curves for step, _ in curve.points})
    values = [value for curve in curves for _, value in curve.points if _fits(value)]
    ends = [end for curve in curves for pair in curve.intervals for end in pair if _fits(end)]
    x = _Scale(steps[0], steps[-1])
    y = _value_scale(min(values + ends), max(values + ends), logarithmic)
    span = max(5, max(len(curve.points) for curve in curves) // 20)
    smooth = smooth and max(len(curve.points) for curve in curves) > 10
    drawn = [_draw(curve, x, y, span if smooth else 1, len(curves) == 1) for curve in curves]
    newest = [value for _, value in curves[0].points if _fits(value)][-1]
    return Chart(
        title=title,
        note=note,
        curves=drawn,
        x_ticks=[(_x(x, tick), label) for tick, label in _labelled(x.ticks(whole=True))],
        y_ticks=[(_y(y, tick), label) for tick, label in _labelled(y.ticks())],
        bands=_bands(curves, steps, x),
        marks=[(_x(x, step), what) for step, what in marks if x.low <= step <= x.high],
        smoothed=span if smooth else 1,
        legend=legend,
        newest=short(newest) if len(curves) == 1 else "",
    )


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return 0.5 if high == low else min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self, whole: bool = False) -> list[float]:
        """Round values inside of the scale, about four."""
        if self.logarithmic:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers][:: max(1, len(powers) // 4)]
        width = self.high - self.low
        if width <= 0:
            return [self.low]
        size = 10.0 ** math.floor(math.log10(width / 4))
        step = next(size * factor for factor in (1, 2, 5, 10, 20) if width / (size * factor) <= 5)
        step = max(1.0, step) if whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)][:12]


def _value_scale(low: float, high: float, logarithmic: bool) -> _Scale:
    if logarithmic and low > 0 and high / low > 100:
        return _Scale(low, high, logarithmic=True)
    if low >= 0 and low < 0.6 * high:
        low = 0.0  # a share of nothing, or no seconds, is what one compares with
    # What differs by less than a ten-thousandth is drawn as the flat line that it is.
    room = max(0.06 * (high - low), 1e-4 * abs(high)) if high > low else abs(high) * 0.1 or 1.0
    return _Scale(low if low == 0 else low - room, high + room)


def _labelled(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Each tick with its label, of as few digits as tell them apart."""
    for digits in range(3, 9):
        labels = [short(tick, digits) for tick in ticks]
        if len(set(labels)) == len(labels):
            break
    return list(zip(ticks, labels, strict=True))


def _draw(curve: Curve, x: _Scale, y: _Scale, span: int, with_raw: bool) -> Drawn:
    points = list(curve.points)
    if curve.intervals:
        kept = [number for number, (_, value) in enumerate(points) if _fits(value)]
        kept = kept[:: 1 + len(kept) // MOST_POINTS]
        bars = [(number, *curve.intervals[number]) for number in kept]
        return Drawn(
            label=curve.label,
            colour=curve.colour,
            line=_path([points[number] for number in kept], x, y),
            raw="",
            dots=[(_x(x, points[number][0]), _y(y, points[number][1])) for number in kept],
            bars=[
                (_x(x, points[n][0]), _y(y, low), _y(y, high)) for n, low, high in bars if _fits(low) and _fits(high)
            ],
        )
    if len(points) < 2 * span:
        span = 1
    line = _smoothed(points, span, y.logarithmic) if span > 1 else points
    dots = [(_x(x, step), _y(y, value)) for step, value in points if _fits(value)] if len(points) <= 20 else []
    raw = _path(_thinned(points), x, y) if span > 1 and with_raw else ""
    return Drawn(curve.label, curve.colour, _path(_thinned(line), x, y), raw, dots, [])


def _smoothed(points: Sequence[Point], span: int, logarithmic: bool) -> list[Point]:
    """Exponential moving average, weighted so that its beginning is not drawn to 0; gaps stay gaps.

    logarithmic: average the logarithms, as the scale has them, or one large value would hide all after it.
    """
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    line = []
    for step, value in points:
        average = math.nan
        if _fits(value):
            total = keep * total + (math.log(value) if logarithmic else value)
            weight = keep * weight + 1
            average = math.exp(total / weight) if logarithmic else total / weight
        line.append((step, average))
    return line


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MOST_POINTS`: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    edges = [round(number * len(points) / (MOST_POINTS // 2)) for number in range(MOST_POINTS // 2 + 1)]
    kept = []
    for begin, end in pairwise(edges):
        stretch = [number for number in range(begin, end) if _fits(points[number][1])] or [begin]
        lowest = min(stretch, key=lambda number: points[number][1])
        highest = max(stretch, key=lambda number: points[number][1])
        kept += sorted({lowest, highest})
    return [points[number] for number in kept]


def _path(points: Sequence[Point], x: _Scale, y: _Scale) -> str:
    """SVG's path through the points; it is lifted where a value is not finite."""
    parts, lifted = [], True
    for step, value in points:
        if _fits(value):
            parts.append(f"{'M' if lifted else 'L'}{_x(x, step):g} {_y(y, value):g}")
        lifted = not _fits(value)
    return "".join(parts)


def _bands(curves: Sequence[Curve], steps: Sequence[int], x: _Scale) -> list[tuple[float, float, str]]:
    """Strips beside each other, each with a step's numbers."""
    chosen = sorted({steps[round(number * (len(steps) - 1) / (BANDS - 1))] for number in range(BANDS)})
    places = [_x(x, step) for step in chosen]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), RIGHT]
    tables = [dict(zip((step for step, _ in curve.points), _said(curve), strict=True)) for curve in curves]
    bands = []
    for number, step in enumerate(chosen):
        said = [f"{curve.label}: {table[step]}" for curve, table in zip(curves, tables, strict=True) if step in table]
        bands.append(
            (round(edges[number], 1), round(edges[number + 1] - edges[number], 1), f"step {step}\n" + "\n".join(said))
        )
    return bands


def _said(curve: Curve) -> list[str]:
    if not curve.intervals:
        return [short(value, 4) for _, value in curve.points]
    return [
        f"{short(value, 4)} [{short(low, 4)}, {short(high, 4)}]"
        for (_, value), (low, high) in zip(curve.points, curve.intervals, strict=True)
    ]


def short(value: float, digits: int = 3) -> str:
    """A number in a few characters."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= 1e6:
        return f"{value:.{digits - 1}g}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.{digits}g}k"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def _fits(value: float) -> bool:
    return abs(value) < LARGEST  # False for NaN


def _x(scale: _Scale, step: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * scale.place(step), 1)


def _y(scale: _Scale, value: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * scale.place(value), 1)
