"""Table of a sweep on the terminal, redrawn in place; elsewhere, lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_ray.text.display import one_line, safe_text

if TYPE_CHECKING:  # imports Ray
    from grpo_ray.sweep.runner import SweepSummary

PLAIN_WIDTH = 200
"""Characters per line of the ranking where the output is not a terminal."""
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
        name,
        justify="right" if name in ("step", "steps", "metric", "reward") else "left",
        no_wrap=name not in ("settings", "standing", "latest"),
        max_width=width * 2 // 5 if name == "trial" else None,
    )


def _name(name: str) -> Text:
    """Return a trial's name, folded and not cut off where it is too long: its end may be all that differs."""
    return Text(safe_text(name), no_wrap=False, overflow="fold")


def _long_text(text: str, style: str = "") -> Text:
    """Return a text of one line, which is cut off at the width of its column."""
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def print_results(summary: "SweepSummary", console: Console | None = None) -> None:
    """Print the ranking of a sweep, its best checkpoint and its page."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PLAIN_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "trial", "settings", "standing", "steps", "metric", "best minus this", "p"):
        _add_column(table, name, console.width)
    for place, result in enumerate(summary.results, 1):
        record = summary.records[result.name]
        table.add_row(
            str(place),
            _name(result.name),
            _long_text(record.trial.text),
            _long_text("" if record.standing == "active" else f"{record.standing} {record.reason}"),
            str(result.steps),
            str(result.measure) if result.measure is not None else format_number(result.value),
            "-" if result.paired is None else str(result.paired.difference),
            "-" if result.p_value is None else f"{result.p_value:.2g}",
        )
    console.print(table)
    lines = [f"p: exact paired test on the held-out problems, corrected for {summary.comparisons} pairs of trials"]
    best = summary.results[0] if summary.results else None
    if best is not None and best.checkpoint is not None:
        lines.append(f"best trial       {best.name}  {summary.records[best.name].trial.text}")
        lines.append(f"best checkpoint  {best.checkpoint.uri}")
    if summary.page is not None:
        lines.append(f"curves           {summary.page}")
    has_pairs = any(result.paired is not None for result in summary.results)
    for line in lines if has_pairs else lines[1:]:
        console.print(safe_text(line), markup=False, highlight=False, soft_wrap=True)


def format_number(value: float | None) -> str:
    """Format a metric; "-" if it is unknown."""
    return "-" if value is None else f"{value:.3f}"
