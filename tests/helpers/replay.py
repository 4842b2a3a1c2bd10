"""Replay of a run: passes its `metrics.jsonl` and `events.jsonl` to a feed, in the run's order and at its pace.

    python tests/helpers/replay.py RUN --speed 20           # live view of a recorded run on this terminal

It stands in for the coordinator's entries, which the follower of a real run passes on.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from grpo_ray.config.loader import load_config
from grpo_ray.observers.feed import RunFeed
from grpo_ray.observers.terminal.progress import build_progress
from grpo_ray.storage.jsonl import read_events, read_metrics
from grpo_ray.storage.run_folder import RunFolder


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="run folder")
    parser.add_argument("--speed", type=float, default=10.0, help="multiple of the run's pace")
    options = parser.parse_args()
    replay = Replay.of(options.run)
    config = load_config("config.yaml", text=replay.folder.read_text("config.yaml"))
    with build_progress(config) as progress:
        replay.run(RunFeed([progress]), options.speed)


if __name__ == "__main__":
    main()
