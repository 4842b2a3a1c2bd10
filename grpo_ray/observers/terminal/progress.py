"""Progress of a run as shown by the driver: a live view on a terminal, one line per logging step elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from grpo_ray.config.schema import Config
from grpo_ray.observers.feed import RunObserver
from grpo_ray.observers.terminal.live_view import ASCII, COLOURLESS, UNICODE, Line, draw, duration
from grpo_ray.observers.terminal.run_view import RunView, Stage
from grpo_ray.observers.terminal.screen import Screen
from grpo_ray.resilience.hangup import UnbufferedOutput
from grpo_ray.telemetry.events import event_line
from grpo_ray.telemetry.measures import format_heldout
from grpo_ray.text.display import one_line, safe_text

STAGES_LISTED = 3
"""Longest stages that are listed when training begins."""


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


class ProgressLine(RunObserver):
    """Display of a run's stages and steps: `with ProgressLine(...)` around all stages of the driver.

    On a terminal, a thread draws the live view. Elsewhere each stage and each logging step is one line.

    Args:
        max_steps: last step of the run.
        console: None: standard output.
        name: of the run.
        workers: number of workers at the start.
        uses_gpus: each worker has a GPU.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        max_steps: int,
        console: Console | None = None,
        *,
        name: str = "",
        workers: int = 1,
        uses_gpus: bool = False,
        clock: Callable[[], float] = time.time,
    ):
        self.max_steps = max_steps
        self.console = console or Console(file=_unbuffered_stdout())
        if self.console.is_jupyter:  # plain lines, since rich would make an HTML block of each
            self.console = Console(force_jupyter=False, force_terminal=False)
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may give a notice while its thread is in a method
        self._view = RunView(max_steps, clock(), name=safe_text(name, 80), workers=workers, uses_gpus=uses_gpus)
        options = self.console.options
        self._glyphs = ASCII if options.ascii_only else COLOURLESS if self.console.no_color else UNICODE
        self._is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._screen: Screen | None = None
        self._last_phase = ""

    def __enter__(self) -> "ProgressLine":
        if self._is_live:
            self._screen = Screen(self.console, self.draw).__enter__()
        elif isinstance(self.console.file, UnbufferedOutput):
            self._screen = Screen(self.console).__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._screen is not None:
            screen, self._screen = self._screen, None
            # Until now the view has shown the warnings.
            lines = [event_line(warning, "terminal") or "" for warning in self._view.warnings]
            screen.close(lines if self._is_live else ())

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current stage: in the view on a terminal, as one printed line elsewhere.

        Args:
            done, total: progress inside the stage, in any unit; None: unknown.
        """
        if self._is_live:
            with self._changes():
                self._view.begin_stage(text, done, total, self._clock())
        elif text != self._last_phase:
            self._print(text)
        self._last_phase = text

    def notice(self, text: str) -> None:
        """Print a permanent line, and show it as the latest event in the view."""
        self._print(text)
        with self._changes():
            self._view.last_event = (self._clock(), one_line(text))

    def baseline(self, metrics: Mapping[str, Any]) -> None:
        """Show the held-out metrics of the initial policy, as measured in an earlier launch."""
        self._view_event({"event": "baseline", "at": self._clock(), "metrics": metrics})

    def event(self, entry: Mapping[str, Any]) -> None:
        """Show an event in the view, and print its line if it has one; a live view prints warnings only at the end."""
        line = event_line(entry, "terminal")
        if line is not None and not (self._is_live and entry["event"] == "warning"):
            self.notice(line)
        self._view_event(entry)

    def resumed(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Go back to the step that an attempt continues from."""
        with self._changes():
            self._view.resume(step, rows)

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a checkpoint that was measured after its step."""
        with self._changes():
            self._view.add_measures(step, metrics)
        if not self._is_live and (heldout := format_heldout(metrics)):
            self._print(f"checkpoint of step {step}  {heldout}")

    def step(self, row: Mapping[str, Any], at: float) -> None:
        """Show the metrics of one logging step."""
        with self._changes():
            self._view.add_step(row, self._clock())
        if not self._is_live:
            self._print(format_step(row, self.max_steps))

    def _view_event(self, entry: Mapping[str, Any]) -> None:
        with self._changes():
            self._view.add_event(entry, self._clock())
        if self._is_live and entry["event"] == "training" and (line := format_start(self._view.stages)):
            self._print(line)

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """Hold the lock while the view is changed, then request a redraw."""
        with self._lock:
            yield
        if self._screen is not None:
            self._screen.refresh()

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw the live view for a terminal of `width` columns and `height` rows."""
        with self._lock:
            return draw(self._view, self._clock(), width, height, self._glyphs)

    def _print(self, text: str) -> None:
        text = safe_text(text)
        if self._screen is not None:
            self._screen.print(text)
        else:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def build_progress(
    config: Config, console: Console | None = None, clock: Callable[[], float] = time.time
) -> ProgressLine:
    """Create the display of a run; its other arguments are those of `ProgressLine`."""
    return ProgressLine(
        config.grpo.max_steps,
        console,
        name=config.run.name,
        workers=config.cluster.max_workers,
        uses_gpus=config.cluster.use_gpu,
        clock=clock,
    )


def format_start(stages: Sequence[Stage]) -> str | None:
    """Format the time before the first step and its longest stages; None if there are none."""
    seconds = {stage.text: stage.seconds(stage.begun) for stage in stages if stage.ended is not None}
    longest = sorted(seconds, key=lambda text: -seconds[text])[:STAGES_LISTED]
    parts = [f"{text} {duration(seconds[text], decimals=True)}" for text in longest]
    return f"started in {duration(sum(seconds.values()), decimals=True)}: {', '.join(parts)}" if parts else None


def _unbuffered_stdout() -> Any:
    """Return an unbuffered file over standard output; None where it was replaced, as in a notebook or a test."""
    try:
        stream = sys.__stdout__
        return UnbufferedOutput(stream) if stream is not None and stream is sys.stdout else None
    except (OSError, ValueError):  # it is closed
        return None
