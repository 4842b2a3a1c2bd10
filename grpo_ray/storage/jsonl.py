"""Files of a run folder, and of a checkpoint, that hold one JSON object per line: metrics and events."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_ray.redaction import redact
from grpo_ray.storage.retry import describe_error, retry_transient, single_attempt
from grpo_ray.storage.run_folder import RunFolder

log = logging.getLogger(__name__)


class JsonlFile:
    """File of a run folder with one JSON object per line, written by the driver alone.

    The rows in memory are authoritative: a row that cannot be written now is written with a later row or by `flush`.
    """

    NAME: str

    @staticmethod
    def is_row(value: Any) -> bool:
        """Return True if a value read from the file has the fields that every row has."""
        raise NotImplementedError

    REMOTE_INTERVAL = 20
    """Rows between two writes to an object store, which can only replace whole files."""

    def __init__(self, folder: RunFolder):
        """Read the rows that the file already has."""
        self.folder = folder
        self.rows: list[dict[str, Any]] = _read_rows(folder, type(self))
        self._unwritten = 0
        self._can_append = True
        """True if the file holds all older rows and ends with a complete line."""
        if folder.exists(self.NAME):
            # Removes a line that a crash truncated: the next row would be appended to it.
            self._try_write(self._rewrite)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row. Raises no OSError."""
        self.rows.append(row)
        self._unwritten += 1
        if self.folder.local is not None:
            self._try_write(self._append_last if self._can_append else self._rewrite)
        elif self._unwritten % self.REMOTE_INTERVAL == 0:
            # Not at every row after a failure: one attempt may block until its request times out.
            self._try_write(self._rewrite)

    def flush(self) -> None:
        """Write the whole file, with retries. Raises OSError if they fail."""
        retry_transient(self._rewrite, self.folder.retry_seconds)

    def _try_write(self, write: Callable[[], None]) -> None:
        """Write without retries. The first failure is logged; a later write includes the missing rows."""
        try:
            with single_attempt():  # the caller also updates the progress line, which must not wait
                write()
        except OSError as error:
            if self._can_append:
                log.warning("%s; the rows of %s are kept in memory", describe_error(error), self.NAME)
            self._can_append = False

    def _append_last(self) -> None:
        line = _to_lines(self.rows[-1:])
        with open(self.folder.path(self.NAME), "a", encoding="utf-8") as file:
            file.write(line)
        self._unwritten = 0

    def _rewrite(self) -> None:
        self.folder.write_text(_to_lines(self.rows), self.NAME)
        self._unwritten, self._can_append = 0, True


class MetricsFile(JsonlFile):
    """`metrics.jsonl` of a run folder: one row per logged step, in the order of steps.

    A step that is taken again after a restart replaces its old row and all later rows, so no step has two rows.
    """

    NAME = "metrics.jsonl"

    @staticmethod
    def is_row(value: Any) -> bool:
        """Return True for a mapping with a step."""
        return isinstance(value, dict) and _is_number(value.get("step"))

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, after removing all rows of the same or a later step. Raises no OSError."""
        kept = [r for r in self.rows if r["step"] < row["step"]]
        if len(kept) < len(self.rows):
            self.replace([*kept, row])
        else:
            super().add(row)

    def replace(self, rows: list[dict[str, Any]]) -> None:
        """Replace all rows. Raises no OSError."""
        self.rows = list(rows)
        self._try_write(self._rewrite)

    def merge(self, step: int, metrics: dict[str, Any]) -> None:
        """Add metrics that were measured later to the row of a step, if there still is one. Raises no OSError."""
        for row in self.rows:
            if row["step"] == step:
                row |= metrics
                self._try_write(self._rewrite)


class EventsFile(JsonlFile):
    """`events.jsonl` of a run folder: all events with their time, in order, over all launches of the run."""

    NAME = "events.jsonl"

    @staticmethod
    def is_row(value: Any) -> bool:
        """Return True for a mapping with an event's name, its time, and the numbers in `EVENT_NUMBERS`."""
        if not isinstance(value, dict) or not isinstance(event := value.get("event"), str):
            return False
        return all(_is_number(value.get(name)) for name in ("at", *EVENT_NUMBERS.get(event, ())))


EVENT_NUMBERS = {"began": ("step", "workers"), "step": ("step",)}
"""Event -> numbers that the goodput computation reads from it."""


def _is_number(value: Any) -> bool:
    """Return True for a step, a time or a count; False also for NaN and for numbers beyond any of them."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """Read the rows of a run's `metrics.jsonl`, up to a line that a crash truncated."""
    return _read_rows(folder, MetricsFile)


def save_metrics_history(checkpoint: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the metrics of all steps so far into a checkpoint's folder."""
    (checkpoint / MetricsFile.NAME).write_text(_to_lines(rows), encoding="utf-8")


def load_metrics_history(checkpoint: Path) -> list[dict[str, Any]]:
    """Read the metrics of all steps up to a checkpoint."""
    return [json.loads(line) for line in (checkpoint / MetricsFile.NAME).read_text(encoding="utf-8").splitlines()]


def _to_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in redact(list(rows)))


def _read_rows(folder: RunFolder, file: type[JsonlFile]) -> list[dict[str, Any]]:
    """Read the rows of a file, without lines that a crash truncated or that are no rows."""
    if not folder.exists(file.NAME):
        return []
    rows = []
    for line in folder.read_bytes(file.NAME).splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if file.is_row(row):
            rows.append(row)
    return rows
