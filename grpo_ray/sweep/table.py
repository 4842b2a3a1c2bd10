"""Table of a sweep on the terminal, redrawn in place; elsewhere, lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_ray.sweep.trials import format_value
from grpo_ray.text.display import one_line, safe_text

if TYPE_CHECKING:  # imports Ray
    from grpo_ray.sweep.runner import SweepSummary

PLAIN_WIDTH = 200
"""Characters per line of the ranking where the output is not a terminal."""
GAP = 2
"""Spaces between two columns of a table."""
MIN_SETTINGS, MIN_REASON = 16, 60
"""Characters of settings, and of a reason, that a ranking shows before it moves other columns below the table."""
PAIRED = ("best minus this", "p")
"""Columns of the paired test of a trial with the best one."""
REASON = "standing and reason"
VALUE = "value"
"""Column of the metric without its interval."""
LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("", "trial", "settings", REASON, "steps", "metric", *PAIRED),
    ("", "trial", "settings", "standing", "steps", "metric", *PAIRED),
    ("", "trial", "settings", "standing", "steps", "metric"),
    ("", "trial", "settings", "standing", "steps", VALUE),
)
"""Columns of the ranking, for ever narrower terminals."""
HEADERS = {REASON: "standing", VALUE: "metric"}
"""Header of a column, if it is not its name."""
STYLES = {"running": "bold", "finished": "green", "failed": "red", "dropped": "dim", "stopped": "yellow"}


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One trial in the table."""

    name: str
    settings: str
    standing: str
    step: int
    max_steps: int
    value: float | None
    """Metric that trials are compared by."""
    reward: float | None
    """Mean training reward of the latest step."""
    line: str
    """Latest line of the trial's driver, or the reason of its standing."""


class SweepScreen:
    """Output of a sweep: `with SweepScreen() as screen`.

    Args:
        console: None: standard output.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self._live: Live | None = None
        self._shown: dict[str, str] = {}
        """Trial -> its standing when a line about it was last printed."""

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def notice(self, text: str) -> None:
        """Print a permanent line."""
        self.console.print(safe_text(text), markup=False, highlight=False, soft_wrap=True)

    def line(self, trial: str, text: str) -> None:
        """Print a line of a trial's driver; a live table shows it in the trial's row."""
        if self._live is None:
            self.notice(f"{trial}: {one_line(text)}")

    def show(self, rows: Sequence[TableRow]) -> None:
        """Redraw the table; elsewhere than on a terminal, print a line for each trial whose standing has changed."""
        if self._live is not None:
            visible = order_rows(rows, self.console.height)
            self._live.update(Group(build_table(visible, self.console.width)), refresh=True)
            return
        for row in rows:
            if self._shown.get(row.name, "waiting") != row.standing:
                self.notice(f"{row.name} {row.standing} at step {row.step}/{row.max_steps}  {row.settings}")
            self._shown[row.name] = row.standing


def order_rows(rows: Sequence[TableRow], height: int) -> Sequence[TableRow]:
    """Return the rows in the order of the sweep, or those with a driver first if not all fit on the terminal.

    Args:
        height: lines of the terminal; the table is cut off below.
    """
    if len(rows) < height:  # beside the header
        return rows
    return sorted(rows, key=lambda row: row.standing not in ("running", "stopping"))  # stable


def build_table(rows: Sequence[TableRow], width: int) -> Table:
    """Return the table of a sweep, at most `width` characters wide."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("trial", "settings", "", "step", "metric", "reward", "latest"):
        _add_column(table, name, width)
    for row in rows:
        table.add_row(
            _name(row.name),
            _long_text(row.settings),
            Text(row.standing, style=STYLES.get(row.standing, "")),
            f"{row.step}/{row.max_steps}",
            format_number(row.value),
            format_number(row.reward),
            _long_text(row.line, style="dim"),
        )
    return table


def _add_column(table: Table, name: str, width: int) -> None:
    """Add a column to a table of this width; only those of long texts become narrower for the others."""
    table.add_column(
        HEADERS.get(name, name),
        justify="right" if name in ("step", "steps", "metric", VALUE, "reward") else "left",
        no_wrap=name not in ("settings", REASON, "latest"),
        max_width=_most(name, width),
    )


def _most(name: str, width: int) -> int | None:
    """Return the largest width of a column in a table of this width; None if there is no limit."""
    return width * 2 // 5 if name == "trial" else None


def _name(name: str) -> Text:
    """Return a trial's name, folded and not cut off where it is too long: its end may be all that differs."""
    return Text(safe_text(name), no_wrap=False, overflow="fold")


def _long_text(text: str, style: str = "") -> Text:
    """Return a text of one line, which is cut off at the width of its column."""
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def print_results(summary: "SweepSummary", console: Console | None = None) -> None:
    """Print the ranking of a sweep, its best checkpoint and its page.

    On a narrow terminal, reasons of standings and paired tests follow below the ranking, and settings are shortened.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PLAIN_WIDTH)
    columns = _ranking(summary)
    layout, left = choose_layout(columns, console.width)
    trials = [summary.records[result.name].trial for result in summary.results]
    columns["settings"] = list(map(_long_text, shorten_settings([each.overrides for each in trials], left)))
    console.print(_ranking_table(columns, layout, console.width))
    best = summary.results[0] if summary.results else None
    has_pairs = any(result.paired is not None for result in summary.results)
    if has_pairs and PAIRED[0] not in layout:
        console.print(_ranking_table(columns, ("trial", *PAIRED), console.width))
    lines = [
        f"{name.plain}: {reason.plain}"
        for name, reason in zip(columns["trial"], columns[REASON], strict=True)
        if reason.plain and REASON not in layout
    ]
    if has_pairs:
        pairs = f"{summary.comparisons} pairs of trials"
        lines.append(f"p: exact paired test on the held-out problems, corrected for {pairs}")
    if best is not None and best.checkpoint is not None:
        lines.append(f"best trial       {best.name}  {summary.records[best.name].trial.text}")
        lines.append(f"best checkpoint  {best.checkpoint.uri}")
    if summary.page is not None:
        lines.append(f"curves           {summary.page}")
    for line in lines:
        console.print(safe_text(line), markup=False, highlight=False, soft_wrap=True)


def _ranking(summary: "SweepSummary") -> dict[str, list[Text]]:
    """Return the columns of the ranking, all but the settings: name -> a cell for each trial."""
    columns: dict[str, list[Text]] = {name: [] for name in dict.fromkeys(name for each in LAYOUTS for name in each)}
    for place, result in enumerate(summary.results, 1):
        record = summary.records[result.name]
        value = format_number(result.value if result.measure is None else result.measure.value)
        cells = {
            "": str(place),
            "standing": "" if record.standing == "active" else record.standing,
            "steps": str(result.steps),
            "metric": value if result.measure is None else str(result.measure),
            VALUE: value,
            PAIRED[0]: "-" if result.paired is None else str(result.paired.difference),
            PAIRED[1]: "-" if result.p_value is None else f"{result.p_value:.2g}",
        }
        for name, cell in cells.items():
            columns[name].append(Text(cell))
        columns["trial"].append(_name(result.name))
        columns[REASON].append(_long_text("" if record.standing == "active" else f"{record.standing} {record.reason}"))
    return columns


def choose_layout(columns: Mapping[str, Sequence[Text]], width: int) -> tuple[Sequence[str], int]:
    """Return the columns of the first of `LAYOUTS` in which settings can be read, and the width of the settings.

    Args:
        columns: name -> cells, without the settings.
        width: characters of a line.
    """
    for layout in LAYOUTS:
        left = width - GAP * (len(layout) - 1)
        for name in layout:
            if name == "settings":
                continue
            longest = max((cell.cell_len for cell in columns[name]), default=0)
            most = MIN_REASON if name == REASON else _most(name, width) or longest
            left -= max(len(HEADERS.get(name, name)), min(longest, most))
        if left >= MIN_SETTINGS:
            break
    return layout, max(left, 1)


def _ranking_table(columns: Mapping[str, Sequence[Text]], layout: Sequence[str], width: int) -> Table:
    """Return the table of some columns of the ranking."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in layout:
        _add_column(table, name, width)
    for cells in zip(*(columns[name] for name in layout), strict=True):
        table.add_row(*cells)
    return table


def shorten_settings(trials: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Return the settings of each trial in one line, shortened until all lines fit, if that is possible.

    Settings that all trials share are left out first; then names are cut, to 2 characters at last, but never so far
    that one could be another one's beginning: `lear=0.0003 beta=0.04`.

    Args:
        trials: overrides of each trial: key of the config -> value.
        width: characters of a line.
    """
    keys = list(dict.fromkeys(key for trial in trials for key in trial))
    values = {key: {repr(trial[key]) if key in trial else None for trial in trials} for key in keys}
    varied = [key for key in keys if len(values[key]) > 1] or keys
    names = {key: key.partition(".")[2] for key in keys}
    texts = _settings(trials, names)
    for length in (None, 8, 6, 4, 3, 2):
        if max(map(len, texts), default=0) <= width:
            break
        texts = _settings(trials, shorten_names({key: names[key] for key in varied}, length))
    return texts


def shorten_names(names: Mapping[str, str], length: int | None) -> dict[str, str]:
    """Return names cut to a length; a name that another one begins with keeps as much as tells them apart."""
    shortened = {}
    for key, name in names.items():
        others = [other for each, other in names.items() if each != key]
        sizes = range(min(length or len(name), len(name)), len(name))
        size = next((size for size in sizes if not any(each.startswith(name[:size]) for each in others)), len(name))
        shortened[key] = name[:size]
    return shortened


def _settings(trials: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    """Return the named settings of each trial in one line."""
    return [
        one_line(" ".join(f"{name}={format_value(trial[key])}" for key, name in names.items() if key in trial))
        for trial in trials
    ]


def format_number(value: float | None) -> str:
    """Format a metric; "-" if it is unknown."""
    return "-" if value is None else f"{value:.3f}"
