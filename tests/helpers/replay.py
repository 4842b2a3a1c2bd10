"""Replay of a run: passes its `metrics.jsonl` and `events.jsonl` to a feed, in the run's order and at its pace.

    python tests/helpers/replay.py RUN --speed 20           # live view of a recorded run on this terminal
    python tests/helpers/replay.py RUN --svg view.svg       # picture of it after a step

It stands in for the coordinator's entries, which the follower of a real run passes on.
"""

import argparse
import io
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from grpo_ray.config.loader import load_config
from grpo_ray.driver.monitoring.health_monitor import HealthMonitor
from grpo_ray.driver.terminal.progress import build_progress
from grpo_ray.driver.terminal.screen import Frame
from grpo_ray.storage.jsonl import read_events, read_metrics
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.feed import RunFeed

SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "font-family: Fira Code, monospace", "font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace"
)
"""Template of rich's pictures, with fonts of the reader's system in place of one from the web."""


@dataclass(frozen=True)
class Call:
    """One call of a method of the feed."""

    at: float
    """Seconds since 1970."""
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Replay:
    """Recorded progress of a run."""

    folder: RunFolder

    @classmethod
    def of(cls, path: str) -> "Replay":
        """Open a run folder by its path."""
        parent, name = os.path.split(os.path.abspath(path))
        return cls(RunFolder(parent, name))

    @property
    def config(self) -> dict[str, Any]:
        """Recorded config: section -> fields."""
        config: dict[str, Any] = yaml.safe_load(self.folder.read_text("config.yaml"))
        return config

    def calls(self) -> Iterator[Call]:
        """Yield the calls of the feed in the run's order.

        Steps that were taken twice come twice, with the metrics of the second time.
        """
        rows = {row["step"]: row for row in read_metrics(self.folder)}
        for entry in read_events(self.folder):
            at, step = entry["at"], entry.get("step")
            if entry["event"] == "step":
                if step in rows:
                    yield Call(at, "step", (rows[step], at))
                continue
            if entry["event"] == "began":
                yield Call(at, "resumed", (step, [row for row in rows.values() if row["step"] <= step]))
            elif entry["event"] == "measured":
                yield Call(at, "measured", (step, entry["metrics"]))
            yield Call(at, "event", (entry,))
        if self.folder.exists("summary.json"):
            yield Call(at, "finished", (self.folder.read_json("summary.json"),))

    def run(self, feed: RunFeed, speed: float | None = None, until_step: int | None = None) -> None:
        """Pass everything to a feed.

        Args:
            speed: pace as a multiple of the run's; None: without a pause.
            until_step: last step that is passed on; None: the whole run.
        """
        begun, first = time.monotonic(), None
        for call in self.calls():
            first = call.at if first is None else first
            if speed is not None:
                time.sleep(max(0.0, begun + (call.at - first) / speed - time.monotonic()))
            getattr(feed, call.method)(*call.arguments)
            if until_step is not None and call.method == "step" and call.arguments[0]["step"] >= until_step:
                break
        feed.flush()


def picture(replay: Replay, step: int, columns: int, rows: int) -> str:
    """Draw the live view as it is after a step, as an SVG file that loads nothing.

    Warnings are those of the health monitor, and the baseline is that of the summary: older runs have no such events.
    """
    config = load_config(None, text=yaml.safe_dump(replay.config), drop=("versions",))
    calls = [call for call in replay.calls() if call.method != "finished"]
    time_of_call = [calls[0].at]
    console = Console(file=io.StringIO(), record=True, width=columns, height=rows, force_terminal=True)
    progress = build_progress(config, console, clock=lambda: time_of_call[0])
    monitor = HealthMonitor(config, lambda entry: progress.event(entry), lambda reason: None)
    summary = replay.folder.read_json("summary.json")
    progress.baseline(
        {f"{key}/{name}": value for key, each in summary["heldout"].items() for name, value in each["before"].items()}
    )
    for call in calls:
        time_of_call[0] = call.at
        getattr(RunFeed([progress, monitor]), call.method)(*call.arguments)
        if call.method == "step" and call.arguments[0]["step"] >= step:
            break
    console.print(Frame(progress.draw(columns, rows)), end="\n\n")
    text = console.export_svg(title=f"grpo-ray train {config.run.name}.yaml", code_format=SVG, unique_id="view")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="run folder")
    parser.add_argument("--speed", type=float, default=10.0, help="multiple of the run's pace")
    parser.add_argument("--svg", help="write a picture of the view to this file instead")
    parser.add_argument("--step", type=int, default=64, help="step of the picture")
    parser.add_argument("--size", type=int, nargs=2, default=(100, 30), help="columns and rows of the picture")
    options = parser.parse_args()
    replay = Replay.of(options.run)
    if options.svg:
        Path(options.svg).write_text(picture(replay, options.step, *options.size), encoding="utf-8")
        return
    with build_progress(load_config(None, text=yaml.safe_dump(replay.config), drop=("versions",))) as progress:
        replay.run(RunFeed([progress]), options.speed)


if __name__ == "__main__":
    main()
