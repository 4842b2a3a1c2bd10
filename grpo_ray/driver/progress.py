"""What the driver shows: one live bar on a terminal, one line for each logging step elsewhere.

Workers run on other machines, so they and the controller leave word with a small actor, the board; a thread of the
driver reads it, draws, and writes `metrics.jsonl` and `events.jsonl`.
"""

import contextlib
import threading
import time
from typing import Any

import ray
import ray.train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_ray.resilience.error_triage import RepeatedErrorDetector, describe_worker_error, raise_if_fatal, root_cause
from grpo_ray.storage.checkpoints import SCORE
from grpo_ray.storage.jsonl import EventsFile, MetricsFile

POLL_SECONDS = 0.25


class CoordinatorCallback(ray.train.UserCallback):
    """Leaves rank 0's metrics of each report on the board; runs in Ray Train's controller.

    It also ends the run when trying again would not help, as when the same error comes at the same step twice.
    """

    def __init__(self, board: Any):
        self.board = board
        self._same_bug = RepeatedErrorDetector()

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        row = {name: value for name, value in metrics[0].items() if name != SCORE}
        # Waits: when the run ends, the driver's last reading must find every row.
        ray.get(self.board.row.remote(row))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        rank, error = root_cause(worker_exceptions)
        ray.get(self.board.happened.remote("failed", rank=rank, what=describe_worker_error(error)))
        self.board.phase.remote("starting again")
        raise_if_fatal(error)
        self._same_bug.after_exception(worker_exceptions)


def format_step(row: dict[str, Any], max_steps: int) -> str:
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
        if self.console.is_jupyter:  # plain lines: rich would make a block of HTML of each
            self.console = Console(force_jupyter=False, force_terminal=False)
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

    def notice(self, text: str) -> None:
        """Say what the user should know, in a line that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def measured(self, metrics: dict[str, Any]) -> None:
        """Show what was measured of a checkpoint after its step."""
        self._heldout = metrics.get("heldout/accuracy", self._heldout)

    def row(self, row: dict[str, Any]) -> None:
        """Show one logging step."""
        self._heldout = row.get("heldout/accuracy", self._heldout)
        if not self._live:
            self.console.print(format_step(row, self.max_steps), markup=False, highlight=False, soft_wrap=True)
            return
        numbers = f"reward {row.get('reward/mean', float('nan')):.3f}"
        if self._heldout is not None:
            numbers += f"  held-out {self._heldout:.3f}"
        numbers += f"  {row['step/completions_per_second']:.0f} completions/s"
        self._bar.update(
            self._task, description="training", completed=row["step"], total=self.max_steps, numbers=numbers
        )


class ProgressFollower:
    """A thread that carries what is on the board to the progress line, into `metrics.jsonl` and `events.jsonl`."""

    def __init__(self, board: Any, line: ProgressLine, metrics: MetricsFile, events: EventsFile):
        self.board, self.line, self.metrics, self.events = board, line, metrics, events
        self.training = False
        """Whether the workers are taking steps."""
        self._read = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "ProgressFollower":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(ray.exceptions.RayError):  # the cluster is gone, and with it the board
            self._carry()
        for file in (self.metrics, self.events):
            try:
                file.flush()
            except OSError as error:  # nothing is lost: the latest checkpoint holds the metrics up to its step
                self.line.notice(f"{file.NAME} could not be written: {error}")

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self._carry()
            except ray.exceptions.RayError:
                return  # the cluster is gone; what `fit` raises says so
            time.sleep(POLL_SECONDS)

    def _carry(self) -> None:
        phase, entries = ray.get(self.board.read.remote(self._read))
        self._read += len(entries)
        for entry in entries:
            self._take(entry)
        if not entries and phase != "training":
            self.line.phase(phase)

    def _take(self, entry: dict[str, Any]) -> None:
        event = entry["event"]
        if event in ("training", "began", "failed"):
            self.training = event == "training"
        if event == "step":
            self.metrics.add(entry["row"])
            self.line.row(entry["row"])
            self.events.add({"event": event, "at": entry["at"], "step": entry["row"]["step"]})
            return
        if event == "began":
            self.metrics.replace(entry.pop("rows"))
        elif event == "measured":
            self.metrics.merge(entry["step"], entry["metrics"])
            self.line.measured(entry["metrics"])
        elif event == "notice":
            self.line.notice(entry["what"])
        elif event == "failed":
            self.line.notice(f"a worker failed: worker {entry['rank']}: {entry['what']}")
        self.events.add(entry)
