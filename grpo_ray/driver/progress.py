"""Progress of a run as shown by the driver: one live bar on a terminal, one line per logging step elsewhere.

Workers run on other machines, so they and Ray Train's controller record events with a small actor, the coordinator. A
thread of the driver reads these events, shows them, and writes `metrics.jsonl` and `events.jsonl`.
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
import ray.train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_ray.config.ranking import HELDOUT, heldout_label
from grpo_ray.redaction import redact
from grpo_ray.resilience.error_triage import RepeatedErrorDetector, describe_worker_error, raise_if_fatal, root_cause
from grpo_ray.storage.checkpoints import SCORE
from grpo_ray.storage.jsonl import EventsFile, MetricsFile
from grpo_ray.telemetry.coordinator import NOTICE_EVENTS

POLL_SECONDS = 0.25


class CoordinatorCallback(ray.train.UserCallback):
    """Callback in Ray Train's controller that records rank 0's metrics and the failures of attempts.

    Also ends the run on errors that a new attempt would repeat, such as the same error at the same step twice.

    Args:
        coordinator: handle of the run's `RunCoordinator` actor.
    """

    def __init__(self, coordinator: Any):
        self.coordinator = coordinator
        self._repeated_errors = RepeatedErrorDetector()

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Record the metrics of rank 0."""
        row = {name: value for name, value in metrics[0].items() if name != SCORE}
        # Wait for the actor: the driver's last read at the end of the run has to find every row.
        ray.get(self.coordinator.record_metrics.remote(row))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Record the failure. Raises the error if a new attempt would repeat it; the controller does not retry then."""
        rank, error = root_cause(worker_exceptions)
        ray.get(self.coordinator.record_event.remote("failed", rank=rank, what=describe_worker_error(error)))
        self.coordinator.set_status.remote("starting the workers again")
        raise_if_fatal(error)
        self._repeated_errors.check(worker_exceptions)


def format_step(row: dict[str, Any], max_steps: int) -> str:
    """Format the metrics of one logging step as one line; missing metrics are left out."""
    parts = [f"step {row['step']}/{max_steps}"]
    formats = {
        "reward/mean": "reward {:.3f}",
        "completion/length_mean": "length {:.1f}",
        "step/completions_per_second": "completions/s {:.1f}",
    }
    parts += [text.format(row[key]) for key, text in formats.items() if key in row]
    if heldout := format_heldout(row):
        parts.insert(2 if "reward/mean" in row else 1, heldout)
    return "  ".join(parts)


def format_heldout(row: Mapping[str, Any]) -> str | None:
    """Format the accuracy on each held-out set; None if the row has none."""
    accuracies = {
        heldout_label(prefix): value
        for name, value in row.items()
        for prefix, _, measure in [name.rpartition("/")]
        if measure == "accuracy" and f"{prefix}/".startswith(f"{HELDOUT}/")
    }
    if len(accuracies) > 1:
        accuracies.pop("", None)  # the primary set again
    values = [f"{label} {value:.3f}".strip() for label, value in accuracies.items()]
    return f"held-out {', '.join(values)}" if values else None


class ProgressLine:
    """Display of a run's phases and steps: `with ProgressLine(...)` around all stages of the driver.

    Args:
        max_steps: length of the bar while training.
        console: None: standard output.
    """

    def __init__(self, max_steps: int, console: Console | None = None):
        self.max_steps = max_steps
        self.console = console or Console()
        if self.console.is_jupyter:  # plain lines, since rich would make an HTML block of each
            self.console = Console(force_jupyter=False, force_terminal=False)
        self._is_live = self.console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),  # a path may contain brackets
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            transient=True,
            disable=not self._is_live,
        )
        self._task = self._bar.add_task("starting", total=max_steps, numbers="")
        self._last_phase = ""
        self._heldout: str | None = None

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current phase: in the bar on a terminal, as one printed line elsewhere.

        Args:
            done, total: progress inside the phase, in any unit; None: unknown.
        """
        text = redact(text)
        if self._is_live:
            # Without a total the bar pulses: the length of the phase is unknown.
            self._bar.update(self._task, description=text, completed=done or 0, numbers="")
            self._bar.tasks[0].total = total
        elif text != self._last_phase:
            self._print(text)
        self._last_phase = text

    def notice(self, text: str) -> None:
        """Print a line that stays on a terminal, too."""
        self._print(text)

    def measurement(self, metrics: dict[str, Any]) -> None:
        """Show the metrics of a checkpoint that was measured after its step."""
        self._heldout = format_heldout(metrics) or self._heldout

    def step(self, row: dict[str, Any]) -> None:
        """Show the metrics of one logging step."""
        self._heldout = format_heldout(row) or self._heldout
        if not self._is_live:
            self._print(format_step(row, self.max_steps))
            return
        numbers = f"reward {row.get('reward/mean', float('nan')):.3f}"
        if self._heldout is not None:
            numbers += f"  {self._heldout}"
        numbers += f"  {row['step/completions_per_second']:.0f} completions/s"
        self._bar.update(
            self._task, description="training", completed=row["step"], total=self.max_steps, numbers=numbers
        )

    def _print(self, text: str) -> None:
        self.console.print(redact(text), markup=False, highlight=False, soft_wrap=True)


class ProgressFollower:
    """Thread that carries the coordinator's events to the progress line, `metrics.jsonl` and `events.jsonl`.

    Args:
        coordinator: handle of the run's `RunCoordinator` actor.
    """

    def __init__(self, coordinator: Any, progress: ProgressLine, metrics: MetricsFile, events: EventsFile):
        self.coordinator, self.progress, self.metrics, self.events = coordinator, progress, metrics, events
        self.is_training = False
        """True while the workers take steps."""
        self.can_read = True
        """False once the cluster, and the coordinator with it, is lost."""
        self.may_write = True
        """False once another driver has taken the run folder."""
        self._resumed: tuple[int, list[dict[str, Any]]] | None = None
        """Step that an attempt began with, and the latest rows up to it; applied to the file at its first step,
        or at once if no step is left."""
        self._entries_read = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "ProgressFollower":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self.can_read:  # otherwise the thread waits for a response that does not come
            self._thread.join()
            with contextlib.suppress(ray.exceptions.RayError):  # the cluster was lost, and the coordinator with it
                self._poll()
        if not self.may_write:
            return
        for file in (self.metrics, self.events):
            try:
                file.flush()
            except OSError as error:  # no metrics are lost: the latest checkpoint holds those up to its step
                self.progress.notice(f"{file.NAME} could not be written: {error}")

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self._poll()
            except ray.exceptions.RayError:
                return  # the cluster was lost; `trainer.fit` raises an error that names the cause
            time.sleep(POLL_SECONDS)

    def _poll(self) -> None:
        status, entries = ray.get(self.coordinator.read.remote(self._entries_read))
        self._entries_read += len(entries)
        for entry in entries:
            self._handle(entry)
        if not entries and status != "training":
            self.progress.phase(status)

    def _apply_resume(self) -> None:
        """Bring the rows of the metrics file to those that the attempt began with, once per attempt."""
        if self._resumed is not None:
            self.metrics.resume(*self._resumed)
            self._resumed = None

    def _handle(self, entry: dict[str, Any]) -> None:
        event = entry["event"]
        if event in ("training", "began", "failed"):
            self.is_training = event == "training"
        if event in ("step", "measured"):  # not earlier: an attempt that fails before leaves the rows as they are
            self._apply_resume()
        if event == "step":
            self.metrics.add(entry["row"])
            self.progress.step(entry["row"])
            self.events.add({"event": event, "at": entry["at"], "step": entry["row"]["step"]})
            return
        if event == "began":
            self._resumed = entry["step"], entry.pop("rows")
            if entry["step"] >= self.progress.max_steps:  # no step is left to take
                self._apply_resume()
        elif event == "measured":
            self.metrics.merge(entry["step"], entry["metrics"])
            self.progress.measurement(entry["metrics"])
        elif event in NOTICE_EVENTS:
            self.progress.notice(entry["what"])
        elif event == "failed":
            self.progress.notice(f"a worker failed: worker {entry['rank']}: {entry['what']}")
        self.events.add(entry)
