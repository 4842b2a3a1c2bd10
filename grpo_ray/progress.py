"""What the driver shows: one live bar on a terminal, one line for each logging step elsewhere.

Workers run on other machines, so they and the controller leave word with a small actor, the board; a thread of the
driver reads it, draws, and writes `metrics.jsonl`.
"""

import threading
import time
from typing import Any

import ray
import ray.train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_ray.storage import MetricsFile

POLL_SECONDS = 0.25


class Board:
    """An actor that keeps the run's rows and its present phase until the driver has read them."""

    def __init__(self) -> None:
        self._phase = "starting"
        self._rows: list[dict[str, Any]] = []

    def phase(self, text: str) -> None:
        self._phase = text

    def row(self, row: dict[str, Any]) -> None:
        self._rows.append(row)

    def read(self, start: int) -> tuple[str, list[dict[str, Any]]]:
        """The present phase, and the rows from number `start` on."""
        return self._phase, self._rows[start:]


class BoardCallback(ray.train.UserCallback):
    """Leaves rank 0's metrics of each report on the board; runs in Ray Train's controller."""

    def __init__(self, board: Any):
        self.board = board

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        row = dict(metrics[0])
        if checkpoint is not None:
            row["checkpoint"] = checkpoint.path.rstrip("/").rpartition("/")[2]
        # Waits: when the run ends, the driver's last reading must find every row.
        ray.get(self.board.row.remote(row))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self.board.phase.remote("a worker failed")


def plain_line(row: dict[str, Any], max_steps: int) -> str:
    """One logging step as one line."""
    parts = [f"step {row['step']}/{max_steps}"]
    shown = {
        "reward/mean": "reward {:.3f}",
        "heldout/accuracy": "held-out {:.3f}",
        "completion/length_mean": "length {:.1f}",
        "step/completions_per_second": "completions/s {:.1f}",
    }
    parts += [text.format(row[key]) for key, text in shown.items() if key in row]
    return "  ".join(parts)


class ProgressLine:
    """Follows a run from the driver: `with ProgressLine(...)` around all of its phases."""

    def __init__(self, max_steps: int, console: Console | None = None):
        self.max_steps = max_steps
        self.console = console or Console()
        self._live = self.console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),  # a path may hold brackets
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=max_steps, numbers="")
        self._said = ""
        self._heldout: float | None = None

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Say what is being done; on a terminal in the bar, elsewhere once as a line."""
        if self._live:
            # Without a count the bar pulses: the phase's length is not known.
            self._bar.update(self._task, description=text, completed=done or 0, numbers="")
            self._bar.tasks[0].total = total
        elif text != self._said:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._said = text

    def row(self, row: dict[str, Any]) -> None:
        """Show one logging step."""
        self._heldout = row.get("heldout/accuracy", self._heldout)
        if not self._live:
            self.console.print(plain_line(row, self.max_steps), markup=False, highlight=False, soft_wrap=True)
            return
        numbers = f"reward {row.get('reward/mean', float('nan')):.3f}"
        if self._heldout is not None:
            numbers += f"  held-out {self._heldout:.3f}"
        numbers += f"  {row['step/completions_per_second']:.0f} completions/s"
        self._bar.update(
            self._task, description="training", completed=row["step"], total=self.max_steps, numbers=numbers
        )


class Follower:
    """A thread that carries what is on the board to the progress line and into `metrics.jsonl`."""

    def __init__(self, board: Any, line: ProgressLine, metrics: MetricsFile):
        self.board, self.line, self.metrics = board, line, metrics
        self._read = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._carry()
        self.metrics.flush()

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._carry()
            time.sleep(POLL_SECONDS)

    def _carry(self) -> None:
        phase, rows = ray.get(self.board.read.remote(self._read))
        self._read += len(rows)
        for row in rows:
            self.metrics.add(row)
            self.line.row(row)
        if not rows and phase != "training":
            self.line.phase(phase)
