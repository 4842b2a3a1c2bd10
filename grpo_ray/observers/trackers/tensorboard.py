"""TensorBoard: event files in `tensorboard/` of the run folder.

They are written with tensorboardX, which imports neither torch nor TensorFlow. A step that is taken again replaces its
first metrics: the mark START in a file makes readers drop everything from its step on.

Every tracker object writes a file of its own; readers process the files in the order of their numbers. With object
storage the file is written on this machine and uploaded whole, as `metrics.jsonl` is.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_ray.observers.trackers.tracker import (
    Position,
    StepEntry,
    TrackedRun,
    Tracker,
    as_code,
    flatten,
    format_samples,
)
from grpo_ray.storage.run_folder import RunFolder

FOLDER = "tensorboard"
HPARAM_METRICS = ("reward/mean", "heldout/accuracy")
"""Metrics that TensorBoard's page HPARAMS shows beside the settings."""


class TensorBoardTracker(Tracker):
    """Writer of event files."""

    def __init__(self) -> None:
        self._folder: RunFolder | None = None
        self._name = ""
        self._is_uploaded = True
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def open(self, run: TrackedRun, saved: Position) -> Position:
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import hparams

        self._folder = run.folder
        # The number orders the files even if the run continues on a machine whose clock differs.
        number = 1 + max(map(_number_of, run.folder.file_sizes(FOLDER)), default=0)
        self._name = f"events.out.tfevents.{number:010d}.grpo_ray"
        if run.folder.local is not None:
            parent = run.folder.local / FOLDER
            parent.mkdir(parents=True, exist_ok=True)
        else:
            self._scratch = tempfile.TemporaryDirectory(prefix="grpo_ray-")
            parent = Path(self._scratch.name)
        self._path = parent / self._name
        self._writer = RecordWriter(str(self._path))
        self._write(time.time(), file_version="brain.Event:2")
        self._mark_start(saved.step)
        experiment, session, _ = hparams(dict(run.config), dict.fromkeys(HPARAM_METRICS))
        for summary in (experiment, session):
            self._write(time.time(), step=0, summary=summary)
        return saved

    def _mark_start(self, step: int) -> None:
        """Write the mark that makes readers drop everything after a step."""
        from tensorboardX.proto.event_pb2 import SessionLog

        self._write(time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def _write(self, at: float, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=at, **fields).SerializeToString())
        self._is_uploaded = False

    def _write_scalars(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(at, step=step, summary=Summary(value=values))

    def _write_text(self, step: int, tag: str, text: str) -> None:
        from tensorboardX.summary import text as text_summary

        self._write(time.time(), step=step, summary=text_summary(tag, as_code(text)))

    def log(self, entry: StepEntry) -> None:
        self._write_scalars(entry.step, entry.metrics, entry.at)
        if entry.samples:
            self._write_text(entry.step, "completions", format_samples(entry.samples))

    def log_heldout(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._write_scalars(step, metrics, at)

    def rewind(self, step: int) -> bool:
        self._mark_start(step)
        return True

    def log_events(self, step: int, events: Sequence[str]) -> None:
        self._write_text(step, "run/events", "\n".join(events))

    def finish(self, step: int, summary: Mapping[str, Any]) -> None:
        self._write_text(step, "run/summary", "\n".join(f"{name}: {value}" for name, value in flatten(summary)))

    def flush(self) -> None:
        self._writer.flush()
        assert self._folder is not None
        if self._folder.local is None and not self._is_uploaded:
            self._folder.upload_file(self._path, FOLDER, self._name)
        self._is_uploaded = True

    def close(self, *, is_complete: bool) -> None:
        self._writer.close()
        if self._scratch is not None:
            self._scratch.cleanup()


def _number_of(name: str) -> int:
    """Return the number in the name of an event file; 0 for other files."""
    parts = name.split(".")
    return int(parts[3]) if len(parts) == 5 and parts[3].isdecimal() else 0
