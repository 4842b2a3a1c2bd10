"""Progress of a run as shown by the driver: one live bar on a terminal, one line per logging step elsewhere."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_ray.config.ranking import HELDOUT, heldout_label
from grpo_ray.redaction import redact
from grpo_ray.telemetry.coordinator import NOTICE_EVENTS
from grpo_ray.telemetry.feed import RunObserver


def format_step(row: Mapping[str, Any], max_steps: int) -> str:
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


class ProgressLine(RunObserver):
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

    def event(self, entry: Mapping[str, Any]) -> None:
        """Print notices, warnings and failures."""
        if entry["event"] in NOTICE_EVENTS:
            self.notice(entry["what"])
        elif entry["event"] == "warning":
            self.notice(f"warning at step {entry['step']}: {entry['what']} ({entry['name']})")
        elif entry["event"] == "failed":
            self.notice(f"a worker failed: worker {entry['rank']}: {entry['what']}")

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a checkpoint that was measured after its step."""
        self._heldout = format_heldout(metrics) or self._heldout

    def step(self, row: Mapping[str, Any], at: float) -> None:
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
