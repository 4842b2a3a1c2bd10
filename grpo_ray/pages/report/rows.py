"""Lines of `metrics.jsonl` and `events.jsonl`, parsed one by one while the files grow, in bounded memory.

Lines with any content are accepted; unusable ones are counted and noted.
"""

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from grpo_ray.storage.jsonl import EventsFile, MetricsFile
from grpo_ray.storage.numbers import to_float
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.tail import LineTail
from grpo_ray.text.display import pluralize

MAX_ROWS, MAX_NUMBERS, MAX_LAYOUT_CHARS = 2_000_000, 100_000_000, 50_000_000
"""Most rows of metrics, most numbers in them (8 bytes each), and most characters in the names of rows with distinct
metrics, where each name counts as `NAME_CHARS` more. Rows beyond these limits are left out; grpo_ray writes fewer."""
NAME_CHARS = 100
MAX_EVENT_VALUES = 8_000_000
"""Most values in the events of a run; each 100 characters of text count as one more value."""


class MetricsRow(Mapping[str, float]):
    """Numbers of one logging step. Rows with the same metrics share their names, since a long run has 10^5 rows."""

    __slots__ = ("_values", "columns")

    def __init__(self, columns: dict[str, int], values: Iterable[float]):
        """
        Args:
            columns: metric -> position of its value.
        """
        self.columns, self._values = columns, array("d", values)

    def __getitem__(self, name: str) -> float:
        return self._values[self.columns[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


class MetricsLines:
    """Parsed lines of `metrics.jsonl`, added one by one."""

    def __init__(self) -> None:
        self.rows: list[MetricsRow] = []
        """Rows by rising step; only the latest row of a repeated step."""
        self.checkpoint_steps: dict[str, int] = {}
        """Name -> step of every checkpoint that was ever written."""
        self._columns_of: dict[tuple[str, ...], dict[str, int]] = {}
        self._num_non_finite = 0
        self._has_lines_without_step = False
        self._num_numbers = self._layout_chars = self._num_left_out = 0

    def add(self, line: Any) -> None:
        """Add a line, parsed from JSON."""
        if not MetricsFile.is_row(line):
            self._has_lines_without_step = True
            return
        step = line["step"]
        values = {
            name: value if type(value) is float else to_float(value)
            for name, value in line.items()
            if type(value) is float or isinstance(value, int | float)
        }
        values["step"] = float(int(step))
        self._num_numbers += len(values)
        names = tuple(values)
        if names not in self._columns_of:
            self._layout_chars += NAME_CHARS * len(names) + sum(map(len, names))
        if (
            len(self.rows) >= MAX_ROWS
            or self._num_numbers > MAX_NUMBERS
            or self._layout_chars > MAX_LAYOUT_CHARS
            or len(self.checkpoint_steps) >= MAX_ROWS
        ):
            self._num_left_out += 1
            return
        self._num_non_finite += len(values) - sum(map(math.isfinite, values.values()))
        columns = self._columns_of.setdefault(names, {name: index for index, name in enumerate(names)})
        row = MetricsRow(columns, values.values())
        if not self.rows or self.rows[-1]["step"] < values["step"]:
            self.rows.append(row)
        else:
            at = bisect_left(self.rows, values["step"], key=lambda each: each["step"])
            replaces = self.rows[at]["step"] == values["step"] if at < len(self.rows) else False
            self.rows[at : at + replaces] = [row]
        if isinstance(line.get("checkpoint"), str):
            self.checkpoint_steps[line["checkpoint"]] = int(step)

    def notes(self) -> list[str]:
        """Return one line for each kind of fault."""
        notes = ["metrics.jsonl has lines without a step"] if self._has_lines_without_step else []
        if self._num_non_finite:
            count = pluralize(self._num_non_finite, "non-finite number")
            notes.append(f"metrics.jsonl: {count}, omitted from the curves")
        if self._num_left_out:
            notes.append(f"metrics.jsonl: too many rows or metrics; {self._num_left_out} rows are left out")
        return notes


class EventLines:
    """Parsed lines of `events.jsonl`, added one by one."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        """Events that `EventsFile.is_row` accepts."""
        self._num_invalid = self._num_values = self._num_left_out = 0

    def add(self, line: Any) -> None:
        """Add a line, parsed from JSON."""
        if not EventsFile.is_row(line):
            self._num_invalid += 1
            return
        self._num_values += _count_values(line)
        if self._num_values > MAX_EVENT_VALUES:
            self._num_left_out += 1
        else:
            self.events.append(line)

    def notes(self) -> list[str]:
        """Return one line for each kind of fault."""
        count = self._num_invalid
        notes = [f"events.jsonl: {pluralize(count, 'line')} without a valid event"] if count else []
        if self._num_left_out:
            notes.append(f"events.jsonl: too many events; {self._num_left_out} are left out")
        return notes


def _count_values(value: Any) -> int:
    """Return the number of values in parsed JSON; each 100 characters of text count as one more value."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        count += 1
        if isinstance(each, dict):
            left.extend(each.values())
            count += sum(map(len, each)) // 100
        elif isinstance(each, list):
            left.extend(each)
        elif isinstance(each, str):
            count += len(each) // 100
    return count


L = TypeVar("L", MetricsLines, EventLines)


class GrowingFile(Generic[L]):
    """File of a run that is read repeatedly; each call reads only the new lines.

    Args:
        name: of the file in the run folder.
        kind: parser of its lines.
    """

    def __init__(self, folder: RunFolder, name: str, kind: type[L]):
        self._tail, self._name = LineTail(folder, name), name
        self._kind: type[L] = kind
        self._begin()

    def _begin(self) -> None:
        self.lines: L = self._kind()
        """Contents so far."""
        self._num_lines = self._num_blank = self._num_invalid = 0
        self._first_invalid = 0
        """Number of the first line that is not valid JSON, from 1; 0: none."""

    def refresh(self) -> bool:
        """Read the new lines; return True if the contents have changed.

        Raises:
            OSError: The file cannot be read.
            DamagedFileError: It is larger than any that grpo_ray writes.
        """
        changed, has_more = False, True
        while has_more:
            new = self._tail.read()
            if new.is_reset:
                self._begin()
            for line in new.lines:
                self._add(line)
            changed |= bool(new.lines) or new.is_reset
            has_more = new.has_more
        return changed

    def _add(self, line: bytes) -> None:
        self._num_lines += 1
        if not line.strip():
            self._num_blank += 1
            return
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            self._num_invalid += 1
            self._first_invalid = self._first_invalid or self._num_lines
        else:
            self.lines.add(value)

    def notes(self) -> list[str]:
        """Return one line for each kind of fault."""
        notes = self.lines.notes()
        if self._num_invalid:
            count = pluralize(self._num_invalid, "invalid line")
            notes.insert(0, f"{self._name}: {count}, the first is line {self._first_invalid}")
        return notes

    def ending(self) -> list[str]:
        """Return a line if the file is missing, empty, or ends in the middle of a line.

        All three are normal in a run in progress.
        """
        if not self._tail.exists:
            return [f"{self._name} does not exist yet"]
        if self._tail.has_half_line:
            return [f"the last line of {self._name} is incomplete"]
        return [f"{self._name} is empty"] if self._num_lines == self._num_blank else []
