"""Drawing of the live view: from the state of a run and the size of a terminal to lines of styled text.

Pure functions. A line is a list of rich's segments, since a frame is drawn up to four times a second: tables and
markup would cost ten times as much.
"""

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from grpo_ray.observers.terminal.run_view import RunView, Stage
from grpo_ray.telemetry.measures import Measure

Line = list[Segment]

LABEL_WIDTH = 12
"""Columns of the labels at the left."""
NARROW_LABEL_WIDTH = 11
NARROW = 60
"""Width below which units and explanations are left out."""
RIGHT_MARGIN = 2
"""Columns left free at the right. Terminals echo Ctrl-C as two characters, which must not wrap to a new line."""
MAX_WIDTH = 118
"""Largest width of the view; wider lines are hard to read."""
CURVE_WIDTH = 40
"""Largest number of characters of a sparkline."""
WARNINGS_SHOWN = 3
WARNING_LINES = 4
STAGES_SHOWN = 12
MIN_LEGEND_SHARE = 0.005
"""Smallest share of time that has an entry in the legend."""

PLAIN = Style()
BOLD = Style(bold=True)
DIM = Style(dim=True)
GOOD = Style(color="green")
HELDOUT = Style(color="cyan")
WARNING = Style(color="yellow")
FAILURE = Style(color="red")

CATEGORY_STYLES = {
    "generating": Style(color="blue"),
    "learning": Style(color="green"),
    "scoring": Style(color="magenta"),
    "syncing": Style(color="cyan"),
    "waiting": Style(color="red"),
    "checkpoints": Style(color="yellow"),
    "all else": Style(color="bright_black"),
}
"""Category of `profiler.PHASE_CATEGORIES` -> colour in the bar."""


FAILED_CALLS = tuple(
    f"rollout/call_{kind}_share" for kind in ("error", "timeout", "killed", "unknown", "unparsed", "skipped")
)
"""Metrics whose sum is the share of calls that gave no result."""


@dataclass(frozen=True)
class Glyphs:
    """Characters that the view is drawn with."""

    curve: str
    """Heights of a sparkline, lowest first."""
    bar: str
    rest: str
    """Done and remaining part of a progress bar."""
    rule: str
    done: str
    spinner: str
    """Frames of the mark beside the current stage."""
    shares: str
    """Fill of each category in the bar of phases; repeated where there are more categories."""
    legend: str
    """Mark of each category in the legend, in the same order."""
    cut: str
    """End of a shortened text."""


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "━", "─", "─", "✓", "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "█", "■", "…")
COLOURLESS = Glyphs("▁▂▃▄▅▆▇█", "━", "─", "─", "✓", "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "█░▓▒", "█░▓▒", "…")
ASCII = Glyphs("_.,-~=+#", "#", "-", "-", "x", "|/-\\", "#=+:o*.", "#=+:o*.", "~")


def draw(view: RunView, now: float, width: int, height: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """Draw the state of a run.

    Args:
        now: seconds since 1970.
        width, height: size of the terminal.

    Returns:
        Less than `height` lines of at most `width - RIGHT_MARGIN` columns.
    """
    columns = max(1, min(width - RIGHT_MARGIN, MAX_WIDTH))
    rows = max(1, height - 1)
    sketch = _Sketch(view, now, columns, glyphs)
    if rows < 4 or columns < 20:  # nothing but the position fits
        return [_cut(sketch.position(), columns, glyphs)]
    blocks = sketch.training() if view.step or view.is_training else sketch.start(rows)
    return [_cut(line, columns, glyphs) for line in _select(blocks, rows)]


@dataclass(frozen=True)
class _Block:
    """Lines that are shown or left out together."""

    rank: int
    """Blocks of high rank are left out first if the terminal has too few rows."""
    lines: list[Line]


def _select(blocks: Sequence[_Block], rows: int) -> list[Line]:
    """Return the lines of the blocks that fit, in their order."""
    kept, used = set(), 0
    for index in sorted(range(len(blocks)), key=lambda index: blocks[index].rank):
        if used + len(blocks[index].lines) <= rows:
            kept.add(index)
            used += len(blocks[index].lines)
    return [line for index, block in enumerate(blocks) if index in kept for line in block.lines]


@dataclass(frozen=True)
class _Sketch:
    """Drawing of one state at one width."""

    view: RunView
    now: float
    columns: int
    glyphs: Glyphs

    @property
    def is_narrow(self) -> bool:
        return self.columns < NARROW

    @property
    def label_width(self) -> int:
        return NARROW_LABEL_WIDTH if self.is_narrow else LABEL_WIDTH

    @property
    def value_width(self) -> int:
        return self.columns - self.label_width

    def training(self) -> list[_Block]:
        """Draw the steps of a run."""
        view = self.view
        phases = self.phases()
        news = [
            *([_Block(4, [self.failures()])] if view.failures else []),
            *self.warnings(),
            *([_Block(8, [self.last_event()])] if view.last_event else []),
        ]
        return [
            _Block(10, [[]]),
            _Block(0, [self.title()]),
            _Block(0, [self.steps()]),
            *([_Block(1, [self.stage(view.stages[-1])])] if self.has_open_stage else []),
            _Block(12, [[]]),
            _Block(2, [self.reward()]),
            *(_Block(3 if not index else 8, [line]) for index, line in enumerate(self.heldout())),
            _Block(6, [self.signal()]),
            *([_Block(6, [self.tools()])] if "rollout/turns_mean" in view.latest else []),
            _Block(5, [self.speed()]),
            _Block(7, phases[:2]),
            *(_Block(9, [line]) for line in phases[2:]),
            *([_Block(11, [[]])] if news else []),
            *news,
        ]

    def start(self, rows: int) -> list[_Block]:
        """Draw the stages before the first step."""
        shown = self.view.stages[-min(STAGES_SHOWN, max(1, rows - 2)) :]
        return [
            _Block(10, [[]]),
            _Block(0, [self.title()]),
            *(_Block(1, [self.stage(stage)]) for stage in shown),
            *self.warnings(),
        ]

    @property
    def has_open_stage(self) -> bool:
        return not self.view.is_training and bool(self.view.stages) and self.view.stages[-1].ended is None

    def position(self) -> Line:
        """Draw the step, or the current stage, alone."""
        view = self.view
        if not view.step and view.stages:
            return [Segment(view.stages[-1].text)]
        return [Segment(f"step {view.step}/{view.max_steps}")]

    def title(self) -> Line:
        view = self.view
        name = [Segment(self.glyphs.rule * 2 + " ", DIM), Segment(view.name or "run", BOLD), Segment(" ")]
        right = [duration(self.now - view.started)]
        if view.attempts and not self.is_narrow:
            right.insert(0, ", ".join(self.processes()))
        end = f" {'  '.join(right)} {self.glyphs.rule * 2}"
        space = self.columns - _length(name) - len(end)
        return [*name, Segment(self.glyphs.rule * max(0, space) + end, DIM)]

    def processes(self) -> list[str]:
        """Return the number of workers, and of dedicated engines if there are any, as texts."""
        counts = {self.unit: self.view.workers, "engine": self.view.engines}
        return [f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count]

    @property
    def unit(self) -> str:
        """Name of the unit that throughput is given per: "GPU" or "worker"."""
        return "GPU" if self.view.uses_gpus else "worker"

    def steps(self) -> Line:
        """Draw the progress bar with the speed of the steps and the time left."""
        view = self.view
        position = f"{view.step}/{view.max_steps}"
        left = "" if view.seconds_left is None else f"{duration(view.seconds_left)} left"
        per_step = "" if view.seconds_per_step is None else f"{amount(view.seconds_per_step)} s/step"
        after = [each for each in ([left] if self.is_narrow else [per_step, left]) if each]
        share = min(1.0, view.step / view.max_steps) if view.max_steps else 0.0
        if not self.is_narrow:
            after.insert(0, f"{share:4.0%}".replace("%", " %"))
        end = "".join(f"  {text}" for text in after)
        label = [Segment(_pad("step", self.label_width), DIM), Segment(position, BOLD), Segment("  ")]
        return [*label, *self.bar(share, max(4, self.columns - _length(label) - len(end))), Segment(end)]

    def bar(self, share: float, width: int) -> Line:
        done = round(share * width)
        return [Segment(self.glyphs.bar * done, GOOD), Segment(self.glyphs.rest * (width - done), DIM)]

    def stage(self, stage: Stage) -> Line:
        """Draw one stage with its mark, its progress and its duration."""
        taken = duration(stage.seconds(self.now), decimals=True)
        if stage.ended is not None:
            mark, style = Segment(f"{self.glyphs.done} ", GOOD), DIM
        else:
            frame = int(self.now * 4) % len(self.glyphs.spinner)
            mark, style = Segment(f"{self.glyphs.spinner[frame]} ", HELDOUT), PLAIN
        progress: Line = []
        if stage.total and stage.ended is None:
            count = f"  {stage.done or 0}/{stage.total}"
            progress = [Segment(count)]
            if not self.is_narrow:
                progress = [Segment("  "), *self.bar(min(1.0, (stage.done or 0) / stage.total), 20), *progress]
        space = self.columns - 2 - _length(progress) - len(taken) - 2
        text = _cut([Segment(stage.text, style)], max(1, space), self.glyphs)
        gap = max(0, space - _length(text))
        return [mark, *text, Segment(" " * gap), *progress, Segment(f"  {taken}", DIM)]

    def row(self, label: str, parts: Sequence[Line], style: Style = DIM) -> Line:
        """Draw a label and as many of the parts as fit beside it, two columns apart."""
        line: Line = [Segment(_pad(label, self.label_width), style)]
        for part in parts[: self.fitting(parts)]:
            line += [*part, Segment("  ")]
        return line[:-1] if parts else line

    def fitting(self, parts: Sequence[Line]) -> int:
        """Return how many of the parts fit beside a label, two columns apart; at least one."""
        ends = accumulate(_length(part) + 2 for part in parts)
        return max(1, sum(end - 2 <= self.value_width for end in ends))

    def curve(self, values: Sequence[float], style: Style, low: float, high: float) -> Line:
        """Draw a sparkline of values from `low` to `high`; at half height if these are equal."""
        top = len(self.glyphs.curve) - 1
        heights = [round((value - low) / (high - low) * top) if high > low else top // 2 for value in values]
        return [Segment("".join(self.glyphs.curve[each] for each in heights), style)]

    @property
    def curve_width(self) -> int:
        """Columns of a sparkline beside its latest value."""
        return min(CURVE_WIDTH, self.value_width - 8)

    def reward(self) -> Line:
        latest = self.view.latest.get("reward/mean")
        if latest is None:
            return self.row("reward", [[Segment("-", DIM)]])
        parts: list[Line] = [[Segment(f"{latest:.3f}", BOLD)]]
        if values := self.view.rewards.means(self.curve_width):
            low, high = min(values), max(values)
            parts += [self.curve(values, GOOD, low, high), [Segment(f"{low:.3f} to {high:.3f}", DIM)]]
        return self.row("reward", parts)

    def heldout(self) -> list[Line]:
        """Draw the latest measure of each held-out set beside that of the initial policy."""
        view = self.view
        labels = list(view.heldout) or list(view.baseline)
        if not labels:
            return [self.row("held-out", [[Segment("-", DIM)]])]
        return [self.heldout_set(label, number) for number, label in enumerate(labels)]

    def heldout_set(self, label: str, number: int) -> Line:
        view = self.view
        now, before, best = (measures.get(label) for measures in (view.heldout, view.baseline, view.best))
        parts: list[Line] = [[Segment(label)]] if label else []
        if now is not None:
            parts.append([_value(now.accuracy, HELDOUT + BOLD), *_interval(now.accuracy)])
            parts.append([Segment(f"step {now.step}", DIM)])
        if before is not None:
            parts.append([Segment("before ", DIM), _value(before.accuracy), *_interval(before.accuracy)])
        if best is not None and best != now:
            parts.append([Segment("best ", DIM), _value(best.accuracy), Segment(f" step {best.step}", DIM)])
        return self.row("held-out" if not number else "", parts)

    def signal(self) -> Line:
        values = self.view.signal.means(self.curve_width)
        if not values:
            return self.row("signal", [[Segment("-", DIM)]])
        share = f"{values[-1]:.0%}".replace("%", " %")
        curve = self.curve(values, HELDOUT, 0.0, 1.0)
        return self.row("signal", [[Segment(_pad(share, 5))], curve, [Segment("of groups", DIM)]])

    def tools(self) -> Line:
        """Draw the latest step's turns and calls per completion, and their failures."""
        latest = self.view.latest
        failed = sum(latest.get(name, 0.0) for name in FAILED_CALLS)
        parts = [
            [Segment(amount(latest.get("rollout/turns_mean", 0.0))), Segment(" turns", DIM)],
            [Segment(amount(latest.get("rollout/calls_mean", 0.0))), Segment(" calls", DIM)],
            [Segment(f"{failed:.0%}".replace("%", " %"), WARNING if failed else PLAIN), Segment(" failed", DIM)],
            [Segment(amount(latest.get("rollout/call_seconds_mean", 0.0))), Segment(" s a call", DIM)],
        ]
        return self.row("tools", parts)

    def speed(self) -> Line:
        completions, tokens = self.view.completions_per_second, self.view.tokens_per_second
        if completions is None:
            return self.row(f"per {self.unit}", [[Segment("-", DIM)]])
        parts = [[Segment(amount(completions)), Segment(" completions/s", DIM)]]
        if tokens is not None:
            parts.append([Segment(amount(tokens)), Segment(" tokens/s", DIM)])
        if self.is_narrow:
            parts = [[part[0], Segment(part[1].text.replace("completions", "compl."), DIM)] for part in parts]
        return self.row(f"per {self.unit}", parts)

    def phases(self) -> list[Line]:
        """Draw the shares of time as one bar, with a legend below it."""
        shares = self.view.time_shares
        if not shares:
            return []
        glyphs = self.glyphs
        fills = {name: glyphs.shares[number % len(glyphs.shares)] for number, name in enumerate(shares)}
        marks = {name: glyphs.legend[number % len(glyphs.legend)] for number, name in enumerate(shares)}
        bar = [
            Segment(fills[name] * cells, CATEGORY_STYLES.get(name, PLAIN))
            for name, cells in _divide(shares, max(4, self.value_width)).items()
        ]
        entries: list[Line] = [
            [
                Segment(f"{marks[name]} ", CATEGORY_STYLES.get(name, PLAIN)),
                Segment(f"{name} "),
                Segment(f"{share:.0%}".replace("%", " %"), DIM),
            ]
            for name, share in sorted(shares.items(), key=lambda item: -item[1])
            if share >= MIN_LEGEND_SHARE
        ]
        return [self.row("time", [bar]), *self.wrapped(entries)]

    def wrapped(self, parts: Sequence[Line]) -> list[Line]:
        """Draw parts without a label, as many in each line as fit."""
        lines, rest = [], list(parts)
        while rest:
            lines.append(self.row("", rest))
            rest = rest[self.fitting(rest) :]
        return lines

    def failures(self) -> Line:
        view = self.view
        last = [Segment(f"last: {view.last_failure}", DIM)]
        width = max(1, self.value_width - len(str(view.failures)) - 2)
        return self.row("failures", [[Segment(str(view.failures), FAILURE)], _cut(last, width, self.glyphs)], FAILURE)

    def warnings(self) -> list[_Block]:
        """Draw the newest warnings, newest first; with few rows, the first line of the newest one is kept longest."""
        blocks = []
        for index, warning in enumerate(list(self.view.warnings)[-WARNINGS_SHOWN:][::-1]):
            at = f"step {warning['step']}  "
            first, *rest = textwrap.wrap(
                f"{warning['name']}: {warning['what']}",
                max(10, self.value_width - len(at)),
                max_lines=WARNING_LINES,
                placeholder=f" {self.glyphs.cut}",
            )
            label = "warnings" if not index else ""
            row = self.row(label, [[Segment(at, WARNING), Segment(first)]], WARNING)
            blocks.append(_Block(8 if index else 4, [row]))
            blocks += [_Block(13 if index else 9, [self.row("", [[Segment(" " * len(at) + line)]])]) for line in rest]
        return blocks

    def last_event(self) -> Line:
        assert self.view.last_event is not None
        at, text = self.view.last_event
        return self.row("last event", [[Segment(f"{time.strftime('%H:%M', time.localtime(at))}  {text}", DIM)]])


def duration(seconds: float, *, decimals: bool = False) -> str:
    """Format a duration: `4:12`, `1:04:12`, `2 d 03:10`; with decimals `4.2 s` below a minute."""
    if decimals and seconds < 60:
        return f"{seconds:.1f} s"
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24:02}:{minutes % 60:02}"
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def amount(value: float) -> str:
    """Format a rate with three digits or more: `0.42`, `7.31`, `78.1`, `1,234`."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _value(measure: Measure, style: Style = PLAIN) -> Segment:
    return Segment(f"{measure.value:.3f}", style)


def _interval(measure: Measure) -> Line:
    return [Segment(f" {measure.interval()}")] if measure.has_interval else []


def _divide(shares: Mapping[str, float], cells: int) -> dict[str, int]:
    """Divide the cells of a bar in proportion to shares that sum to 1, by the largest remainder method."""
    exact = {name: share * cells for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    rest = cells - sum(counts.values())
    for name in sorted(exact, key=lambda name: counts[name] - exact[name])[: max(0, rest)]:
        counts[name] += 1
    return counts


def _pad(text: str, width: int) -> str:
    return text + " " * max(0, width - cell_len(text))


def _length(line: Line) -> int:
    return sum(segment.cell_length for segment in line)


def _cut(line: Line, columns: int, glyphs: Glyphs) -> Line:
    """Shorten a line to a number of columns, with a mark at its end."""
    if _length(line) <= columns:
        return line
    kept = Segment.adjust_line_length(line, columns - 1, pad=False)
    return [*kept, Segment(glyphs.cut, kept[-1].style if kept else None)]
