"""Files of a run folder, and of a checkpoint, that hold one JSON object per line: metrics and events.

A run may take 10^5 steps and more, so no class or function here holds a whole file: rows are appended, removed from the
end, or read one by one.
"""

import json
import logging
import os
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ray.errors import CheckpointError
from grpo_ray.storage.numbers import is_plausible
from grpo_ray.storage.retry import describe_error, retry_transient, single_attempt
from grpo_ray.storage.run_folder import LINE_BYTES, SMALL_FILE_BYTES, RunFolder
from grpo_ray.text.redaction import redact_row

log = logging.getLogger(__name__)

HISTORY_ROWS = 1000
"""Latest rows of `metrics.jsonl` that a checkpoint holds, so that its size does not grow with the steps. They restore
rows that a driver had not written when it died: at most `REMOTE_INTERVALS[1]`, and as many for each failed upload."""
REMOTE_INTERVALS = (20, 500)
"""Fewest and most rows between two uploads to an object store, which can only replace whole files; in between, a file
is uploaded when it has grown by a twentieth."""
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class _StoredRow:
    """Row of a file on disk, with the offsets of its line."""

    row: dict[str, Any]
    start: int
    end: int


class JsonlFile(ABC):
    """File of a run folder with one JSON object per line, written by the driver alone.

    A row that cannot be written now is kept in memory and written with a later row or by `flush`. The kept rows are
    few: while storage cannot be written no checkpoint can either, which ends the run after `run.storage_retry_seconds`.
    """

    NAME: str

    @staticmethod
    @abstractmethod
    def is_row(value: Any) -> bool:
        """Return True if a value read from the file has the fields that every row has."""

    def __init__(self, folder: RunFolder):
        """Open the file, and keep its rows.

        Raises:
            DamagedFileError: it is larger than any that grpo_ray writes.
        """
        folder.require_readable_lines(self.NAME)
        self.folder = folder
        self._pending: list[bytes] = []
        """Lines that the file on disk does not have yet."""
        self._not_uploaded = self._bytes_not_uploaded = 0
        self._has_failed = False
        if folder.local is not None:
            self._path = folder.local / self.NAME
        else:  # appended to on this machine's disk, from which it is uploaded
            self._spool = tempfile.TemporaryDirectory(prefix="grpo_ray-")
            self._path = Path(self._spool.name, self.NAME)
            if folder.exists(self.NAME):
                folder.download_file(self._path, self.NAME)
        self._bytes = _end_of_last_line(self._path)
        last = next(self._rows_from_end(), None)
        self._bytes = last.end if last else 0
        """Size of the file up to its last complete row; a crash or a failed write may have left bytes after it."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row. Raises no OSError."""
        self._pending.append(_to_line(row))
        self._try_write()

    def flush(self) -> None:
        """Write all rows, with retries. Raises OSError if they fail."""

        def write() -> None:
            self._write(sync=True)
            if self.folder.local is None and self._path.exists():
                self._upload()

        retry_transient(write, self.folder.retry_seconds)

    def _try_write(self, upload_now: bool = False) -> None:
        """Write without retries. The first failure is logged; a later write includes the missing rows."""
        try:
            with single_attempt():  # the caller also updates the progress line, which must not wait
                self._write()
                if self.folder.local is None and (upload_now or self._is_upload_due()):
                    self._upload()
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("%s; the rows of %s are kept in memory", describe_error(error), self.NAME)
            self._has_failed = True

    def _write(self, sync: bool = False) -> None:
        """Write the pending lines after the last valid row."""
        if not self._pending and not self._path.exists():
            return
        lines = b"".join(self._pending)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            # Somebody may have cut or deleted the file.
            start = min(self._bytes, file.seek(0, os.SEEK_END))
            file.truncate(start)
            file.seek(start)
            file.write(lines)
            file.flush()
            if sync:
                os.fsync(file.fileno())  # some file systems report a full disk only here
        self._bytes = start + len(lines)
        self._not_uploaded += len(self._pending)
        self._bytes_not_uploaded += len(lines)
        self._pending.clear()

    def _rows_from_end(self) -> Iterator["_StoredRow"]:
        """Yield the rows on disk, the last one first; lines that are not rows are skipped."""
        if not self._bytes or not self._path.exists():
            return
        with open(self._path, "rb") as file:
            start, rest = self._bytes, b""
            while start > 0:
                size = min(_BLOCK_BYTES, start)
                start -= size
                file.seek(start)
                lines = (file.read(size) + rest).split(b"\n")
                ends = [start + len(lines[0]) + 1]
                for line in lines[1:]:
                    ends.append(ends[-1] + len(line) + 1)
                # The first line may begin in the block before.
                first = 1 if start else 0
                for line, end in zip(reversed(lines[first:]), reversed(ends[first:]), strict=True):
                    if line and self.is_row(row := _parse(line)):
                        yield _StoredRow(row, end - len(line) - 1, end)
                rest = lines[0] if first else b""
                if len(rest) > LINE_BYTES:
                    rest = b"\0"  # too long for a row, whatever the beginning of the line is

    def _is_upload_due(self) -> bool:
        # Not at every row after a failure: one attempt may block until its request times out.
        fewest, most = REMOTE_INTERVALS
        has_grown = 20 * self._bytes_not_uploaded >= self._bytes or self._not_uploaded >= most
        return self._not_uploaded > 0 and self._not_uploaded % fewest == 0 and has_grown

    def _upload(self) -> None:
        self.folder.upload_file(self._path, self.NAME)
        self._not_uploaded = self._bytes_not_uploaded = 0


class MetricsFile(JsonlFile):
    """`metrics.jsonl` of a run folder: one row per logged step, in the order of steps.

    A step that is taken again after a restart replaces its old row and all later rows, so no step has two rows.
    """

    NAME = "metrics.jsonl"

    @staticmethod
    def is_row(value: Any) -> bool:
        """Return True for a mapping with a step."""
        return isinstance(value, dict) and is_plausible(value.get("step"))

    def __init__(self, folder: RunFolder):
        super().__init__(folder)
        self._last_step = self._last_step_on_disk()
        self._drop_after: int | None = None
        """Step after which the rows on disk are not valid any more; None if all are valid."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, after removing all rows of the same or a later step. Raises no OSError."""
        if replaces := row["step"] <= self._last_step:
            self._remove_after(row["step"] - 1)
        self._last_step = row["step"]
        self._pending.append(_to_line(row))
        self._try_write(upload_now=replaces)

    def resume(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Remove the rows after a step that training resumes from, and add those that are missing. Raises no OSError.

        Args:
            rows: latest rows up to the step, from the checkpoint. Rows that the file has stay: they may have metrics
                that were measured after the checkpoint was written.
        """
        self._remove_after(step)
        try:
            self._apply_removal()
            on_disk = self._last_step_on_disk()
        except OSError:  # the rows cannot be read; the next write removes the later ones
            on_disk = min(self._last_step, step)
        last = next((_step(line) for line in reversed(self._pending)), on_disk)
        missing = [row for row in rows if row["step"] > last]
        self._pending += map(_to_line, missing)
        self._last_step = missing[-1]["step"] if missing else last
        self._try_write(upload_now=True)

    def merge(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics that were measured later to the row of a step, if there still is one. Raises no OSError."""
        with suppress(OSError):  # the rows cannot be read; the metrics are in `events.jsonl` too
            self._take_back(step)
        for index, line in enumerate(self._pending):
            if _step(line) == step:
                self._pending[index] = _to_line(json.loads(line) | metrics)
        self._try_write()

    def _last_step_on_disk(self) -> float:
        return next((stored.row["step"] for stored in self._rows_from_end()), -1)

    def _remove_after(self, step: int) -> None:
        self._pending = [line for line in self._pending if _step(line) <= step]
        self._drop_after = step if self._drop_after is None else min(step, self._drop_after)

    def _write(self, sync: bool = False) -> None:
        self._apply_removal()
        super()._write(sync)

    def _apply_removal(self) -> None:
        """Find the end of the valid rows; the next write cuts the file there."""
        if self._drop_after is not None:
            end = 0
            for stored in self._rows_from_end():
                if stored.row["step"] <= self._drop_after:
                    end = stored.end
                    break
            self._bytes, self._drop_after = end, None

    def _take_back(self, step: int) -> None:
        """Move the rows of a step and of all later steps from the file to the pending lines."""
        self._apply_removal()
        taken: list[bytes] = []
        for stored in self._rows_from_end():
            if stored.row["step"] < step:
                break
            taken.insert(0, _to_line(stored.row))
            self._bytes = stored.start
        self._pending[:0] = taken


class EventsFile(JsonlFile):
    """`events.jsonl` of a run folder: all events with their time, in order, over all launches of the run."""

    NAME = "events.jsonl"

    @staticmethod
    def is_row(value: Any) -> bool:
        """Return True for a mapping with an event's name, its time, and the numbers in `EVENT_NUMBERS`."""
        if not isinstance(value, dict) or not isinstance(event := value.get("event"), str):
            return False
        return all(is_plausible(value.get(name)) for name in ("at", *EVENT_NUMBERS.get(event, ())))


EVENT_NUMBERS = {"began": ("step", "workers"), "step": ("step",)}
"""Event -> numbers that the goodput computation reads from it."""


def read_metrics(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Read the rows of a run's `metrics.jsonl` one by one; lines that are truncated or not rows are skipped."""
    return _read_rows(folder, MetricsFile)


def read_events(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Read the rows of a run's `events.jsonl` one by one; lines that are truncated or not rows are skipped."""
    return _read_rows(folder, EventsFile)


def save_metrics_history(checkpoint: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the metrics of the latest steps into a checkpoint's folder."""
    (checkpoint / MetricsFile.NAME).write_bytes(b"".join(map(_to_line, rows)))


def restore_metrics(folder: RunFolder, checkpoint: str, step: int) -> None:
    """Add the rows of `metrics.jsonl` up to a checkpoint that a killed driver has not written, from the checkpoint.

    For a run that is not launched again; a launch does it itself. Without a readable copy in the checkpoint, nothing is
    added.

    Args:
        checkpoint: name of the run's latest checkpoint.
        step: step of the checkpoint.
    """
    with suppress(OSError, ValueError):  # DamagedFileError is a ValueError
        lines = folder.read_bytes(checkpoint, MetricsFile.NAME).splitlines()
        MetricsFile(folder).resume(step, [row for row in map(json.loads, lines) if MetricsFile.is_row(row)])


def load_metrics_history(checkpoint: Path) -> deque[dict[str, Any]]:
    """Read the metrics of the latest steps up to a checkpoint, at most `HISTORY_ROWS`. Raises CheckpointError."""
    path = checkpoint / MetricsFile.NAME
    if (size := path.stat().st_size) > SMALL_FILE_BYTES:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes; the limit is {SMALL_FILE_BYTES}")
    with open(path, "rb") as file:
        lines = deque(file, maxlen=HISTORY_ROWS)
    return deque(map(json.loads, lines), maxlen=HISTORY_ROWS)


def _to_line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(redact_row(row)).encode() + b"\n"


def _step(line: bytes) -> float:
    step: float = json.loads(line)["step"]
    return step


def _parse(line: bytes) -> Any:
    """Parse a line; None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _read_rows(folder: RunFolder, file: type[JsonlFile]) -> Iterator[dict[str, Any]]:
    for line in folder.read_lines(file.NAME):
        if file.is_row(row := _parse(line)):
            yield row


def _end_of_last_line(path: Path) -> int:
    """Return the size of a file without an incomplete last line; 0 if there is no file."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        size = start = file.seek(0, os.SEEK_END)
        while start > 0:
            start = max(0, start - _BLOCK_BYTES)
            file.seek(start)
            if (newline := file.read(_BLOCK_BYTES).rfind(b"\n")) >= 0:
                return min(size, start + newline + 1)
    return 0
