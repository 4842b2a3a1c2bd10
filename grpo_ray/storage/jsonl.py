"""The files of a run folder that grow by a row: metrics and events."""

import json
import logging
from collections.abc import Callable
from typing import Any

from grpo_ray.storage.retry import describe_error, retry_transient, single_attempt
from grpo_ray.storage.run_folder import RunFolder

log = logging.getLogger(__name__)


class JsonlFile:
    """A file of a run folder with one JSON object in each line, written by the driver alone.

    The rows in memory are what counts: what cannot be written now is written with a later row, or when flushed.
    """

    NAME: str
    REMOTE_INTERVAL = 20
    """Lines between two writes to an object store, which can only replace whole files."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.rows: list[dict[str, Any]] = _read_rows(folder, self.NAME)
        self._unwritten = 0
        self._whole = True
        """Whether the file holds all older rows and ends with a whole line, so that one can be appended."""
        if folder.exists(self.NAME):
            self._try(self._rewrite)  # without a line that a crash cut short: the next one would be joined to it

    def add(self, row: dict[str, Any]) -> None:
        """Put a row at the end. No OSError is raised."""
        self.rows.append(row)
        self._unwritten += 1
        if self.folder.local is not None:
            self._try(self._append if self._whole else self._rewrite)
        elif self._unwritten % self.REMOTE_INTERVAL == 0:
            # Not with every row after a failure: a try may last until the storage has been silent for long enough.
            self._try(self._rewrite)

    def flush(self) -> None:
        """Write the whole file, patiently. Raises OSError when patience is over."""
        retry_transient(self._rewrite, self.folder.patience)

    def _try(self, write: Callable[[], None]) -> None:
        """Write once; the first failure is logged, and a later write mends it."""
        try:
            with single_attempt():  # the progress line waits
                write()
        except OSError as error:
            if self._whole:
                log.warning("%s; the rows of %s are kept in memory", describe_error(error), self.NAME)
            self._whole = False

    def _append(self) -> None:
        line = json.dumps(self.rows[-1]) + "\n"
        with open(self.folder.path(self.NAME), "a", encoding="utf-8") as file:
            file.write(line)
        self._unwritten = 0

    def _rewrite(self) -> None:
        self.folder.write_text("".join(json.dumps(row) + "\n" for row in self.rows), self.NAME)
        self._unwritten, self._whole = 0, True


class MetricsFile(JsonlFile):
    """`metrics.jsonl` of a run folder: one line for each logging step, in the order of steps.

    A step that is taken again after a restart replaces what stood there, so no step has two lines.
    """

    NAME = "metrics.jsonl"

    def add(self, row: dict[str, Any]) -> None:
        """Put a row at the end, after dropping all rows of the same or a later step. No OSError is raised."""
        kept = [r for r in self.rows if r["step"] < row["step"]]
        if len(kept) < len(self.rows):
            self.replace([*kept, row])
        else:
            super().add(row)

    def replace(self, rows: list[dict[str, Any]]) -> None:
        """Put other rows in place of all. No OSError is raised."""
        self.rows = list(rows)
        self._try(self._rewrite)

    def merge(self, step: int, metrics: dict[str, Any]) -> None:
        """Add to the row of a step what was measured later; nothing if the run has gone back behind that step."""
        for row in self.rows:
            if row["step"] == step:
                row |= metrics
                self._try(self._rewrite)


class EventsFile(JsonlFile):
    """`events.jsonl` of a run folder: what happened and when, in that order, over all launches of the run."""

    NAME = "events.jsonl"


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`; a line that a crash cut short is left out."""
    return _read_rows(folder, MetricsFile.NAME)


def _read_rows(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    if not folder.exists(name):
        return []
    rows = []
    for line in folder.read_text(name).splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
