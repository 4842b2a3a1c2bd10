"""Reader of a run folder for the report. Tolerates missing, truncated and malformed files, and writes nothing.

The run may still be running. Unreadable data is skipped and listed in `RunData.notes`.
"""

import json
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from grpo_ray.config.ranking import HELDOUT, heldout_keys, primary_key
from grpo_ray.config.recorded import PlainLoader
from grpo_ray.config.schema import RunConfig
from grpo_ray.errors import ConfigError, DamagedFileError, DataError
from grpo_ray.storage.checkpoints import CheckpointInfo, list_checkpoints
from grpo_ray.storage.heldout_records import baseline_file
from grpo_ray.storage.jsonl import EventsFile, MetricsFile
from grpo_ray.storage.numbers import to_float
from grpo_ray.storage.rollouts import groups_table, read_rollouts, read_texts
from grpo_ray.storage.run_folder import RECORD_BYTES, RunFolder, split_path
from grpo_ray.text.display import pluralize

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

STORAGE_RETRY_SECONDS = 60.0
"""Seconds to retry while the storage cannot be reached."""
MAX_CONFIG_BYTES = 1 << 18
"""Largest `config.yaml` that is parsed."""
MAX_HELDOUT_SETS = 8
"""Held-out sets that are shown."""
HELDOUT_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of held-out sets that are shown."""
LARGEST_STEP = 1e15
"""Upper bound of plausible steps and durations; larger numbers are treated as malformed."""
MAX_ROWS, MAX_NUMBERS, MAX_LAYOUT_CHARS = 2_000_000, 100_000_000, 50_000_000
"""Most rows of metrics, most numbers in them (8 bytes each), and most characters in the names of distinct rows, with
`NAME_CHARS` more for each name. A stranger's rows beyond them are left out."""
NAME_CHARS = 100
MAX_EVENT_VALUES = 8_000_000
"""Most values in the events of a run, with one more for each 100 characters of text."""
MALFORMED_DATA_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError)
"""Errors raised while reading a malformed file, or one that the run deletes at the same time."""

UNREADABLE = (*MALFORMED_DATA_ERRORS, DataError, yaml.YAMLError)
"""Errors that make a file of a run folder count as unreadable."""
RUN_FILES = ("config.yaml", MetricsFile.NAME, EventsFile.NAME)
"""A folder with at least one of these files is a run folder."""


class MetricsRow(Mapping[str, float]):
    """Numbers of one logging step. Rows with the same metrics share their names: a long run has 10^5 rows."""

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


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Contents of a run folder, as far as they could be read."""

    folder: RunFolder
    config: Mapping[str, Any]
    """`config.yaml`: section -> fields, including the section `versions`."""
    rows: list[MetricsRow]
    """`metrics.jsonl`: the numbers of each logging step, possibly not finite, by rising step; each row has `step`."""
    checkpoint_steps: dict[str, int]
    """Name -> step of every checkpoint that was ever written."""
    events: list[dict[str, Any]]
    """`events.jsonl`: each event has `event`, a finite `at` and the numbers in `REQUIRED_EVENT_NUMBERS`."""
    baselines: Mapping[str, Mapping[str, Any]]
    """Key of each held-out set -> evaluation of the initial policy."""
    summary: Mapping[str, Any]
    """`summary.json`. In a resumed run that is still running: the summary of the previous launch."""
    checkpoints: list[CheckpointInfo]
    """Checkpoints that exist now."""
    groups: "pa.Table"
    """`rollouts/`, one row per group, without texts."""
    sample_groups: list[dict[str, Any]]
    """Groups of the first and last steps that were stored with texts."""
    notes: list[str] = field(default_factory=list)
    """One line for each thing that could not be read."""

    @property
    def heldout_keys(self) -> list[str]:
        """Keys of the held-out sets, the primary one first."""
        return list(self.baselines)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the config; empty if it is absent or malformed."""
        section = self.config.get(name)
        return section if isinstance(section, Mapping) else {}

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric for every step that has it."""
        return [(int(row["step"]), row[metric]) for row in self.rows if metric in row.columns]

    def metric_names(self) -> set[str]:
        """Return the names of all metrics in `rows`, and `step`."""
        distinct = {id(row.columns): row.columns for row in self.rows}  # far fewer than rows
        return {name for columns in distinct.values() for name in columns}

    def latest(self, metric: str) -> float | None:
        """Return the latest finite value of a metric, or None."""
        return next((value for _, value in reversed(self.series(metric)) if math.isfinite(value)), None)


def open_run(path: str, retry_seconds: float = STORAGE_RETRY_SECONDS) -> RunFolder:
    """Open the run folder at a local path or URI.

    Args:
        path: Local path or URI.
        retry_seconds: How long a call to an object store is retried, in seconds.

    Raises:
        ConfigError: The folder holds no file of a run.
        DamagedFileError: It has links that lead out of it, or files that grpo_ray does not write.
    """
    if "://" not in path:
        path = str(Path(path).expanduser().resolve())
    folder = RunFolder(*split_path(path), retry_seconds)
    # First, because the links of a folder that is no run, as in a virtual environment, must not be reported.
    if not any(folder.has_entry(name) for name in RUN_FILES):
        raise ConfigError(
            f"{folder.uri} is not a run folder: it has no {', '.join(RUN_FILES[:-1])} or {RUN_FILES[-1]}; "
            "give the folder {run.storage_path}/{run.name}"
        )
    folder.require_plain_files()
    return folder


def read_run(path: str) -> RunData:
    """Read the run folder at a local path or URI.

    Raises:
        ConfigError: The folder holds no file of a run.
    """
    folder = open_run(path)
    notes: list[str] = []

    def read_or_note(name: str, read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except FileNotFoundError:
            return default
        except UNREADABLE as error:
            notes.append(f"{name} cannot be read: {type(error).__name__}: {error}")
            return default

    nothing: Mapping[str, Any] = {}
    config = read_or_note("config.yaml", lambda: read_config(folder), nothing)
    metrics, events = MetricsLines(), EventLines()
    for name, lines in ((MetricsFile.NAME, metrics), (EventsFile.NAME, events)):
        for line in _read_json_lines(folder, name, notes):
            lines.add(line)
        notes += lines.notes()
    return RunData(
        folder=folder,
        config=config,
        rows=metrics.rows,
        checkpoint_steps=metrics.checkpoint_steps,
        events=events.events,
        baselines={
            key: read_or_note(baseline_file(key), partial(read_mapping, folder, baseline_file(key)), nothing)
            for key in run_heldout_keys(config)
        },
        summary=read_or_note("summary.json", lambda: read_mapping(folder, "summary.json"), {}),
        checkpoints=read_or_note("a checkpoint", lambda: read_checkpoints(folder), []),
        groups=read_or_note("rollouts", lambda: read_rollouts(folder), groups_table([])),
        sample_groups=read_or_note("rollouts", lambda: read_texts(folder).to_pylist(), []),
        notes=notes,
    )


def run_heldout_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a run's held-out sets, the primary one first; only the first few if there are many.

    Names that the config of a run cannot have are omitted.
    """
    data, run = config.get("data"), config.get("run")
    heldout = data.get("heldout") if isinstance(data, Mapping) else None
    if isinstance(heldout, Mapping):
        heldout = [name for name in heldout if isinstance(name, str) and HELDOUT_NAME.fullmatch(name)]
    keys = heldout_keys(dict.fromkeys(heldout)) if isinstance(heldout, list) and heldout else [HELDOUT]
    best_metric = run.get("best_metric") if isinstance(run, Mapping) else None
    primary = primary_key(best_metric if isinstance(best_metric, str) else RunConfig.best_metric, keys)
    return [primary, *(key for key in keys if key != primary)][:MAX_HELDOUT_SETS]


def read_config(folder: RunFolder) -> Mapping[str, Any]:
    """Read `config.yaml`. Raises an error of `UNREADABLE`."""
    data = folder.read_bytes("config.yaml", limit=MAX_CONFIG_BYTES)
    config = yaml.load(data, Loader=PlainLoader)
    if not isinstance(config, Mapping):
        raise ValueError("it has no sections")
    return config


def read_mapping(folder: RunFolder, name: str) -> Mapping[str, Any]:
    """Read a file with a JSON object. Raises an error of `UNREADABLE`."""
    value = json.loads(folder.read_text(name, limit=RECORD_BYTES))
    if not isinstance(value, Mapping):
        raise ValueError("it is not a JSON object")
    return value


def read_checkpoints(folder: RunFolder) -> list[CheckpointInfo]:
    """List the existing checkpoints that have a plausible step."""
    checkpoints = list_checkpoints(folder)
    return [each for each in checkpoints if 0 <= to_float(dict(each.metrics).get("step")) < LARGEST_STEP]


def _read_json_lines(folder: RunFolder, name: str, notes: list[str]) -> Iterator[Any]:
    """Parse each line that is not blank. Not with `JsonlFile`: that class is the writer and repairs the file."""
    if not folder.exists(name):
        notes.append(f"{name} does not exist yet")
        return
    number, last, is_empty, malformed = 0, b"", True, []
    try:
        for number, last in enumerate(folder.read_lines(name), 1):
            try:
                value = json.loads(last) if last.strip() else None
            except (ValueError, RecursionError):
                malformed.append(number)
                continue
            if last.strip():
                is_empty = False
                yield value
    except (OSError, DamagedFileError) as error:
        notes.append(f"{name} cannot be read: {error}")
        return
    if malformed == [number] and not last.endswith(b"\n"):  # the writer is still writing, or died
        notes.append(f"the last line of {name} is incomplete")
    elif malformed:
        notes.append(f"{name}: {pluralize(len(malformed), 'invalid line')}, the first is line {malformed[0]}")
    if is_empty and not malformed:
        notes.append(f"{name} is empty")


class MetricsLines:
    """Parsed lines of `metrics.jsonl`, added one by one."""

    def __init__(self) -> None:
        self.rows: list[MetricsRow] = []
        """Rows by rising step; of a repeated step the latest."""
        self.checkpoint_steps: dict[str, int] = {}
        """Name -> step of every checkpoint that was ever written."""
        self._columns_of: dict[tuple[str, ...], dict[str, int]] = {}
        self._num_non_finite = 0
        self._has_lines_without_step = False
        self._num_numbers = self._layout_chars = self._num_left_out = 0

    def add(self, line: Any) -> None:
        """Add a line, parsed from JSON."""
        step = to_float(line.get("step")) if isinstance(line, dict) else math.nan
        if not (0 <= step < LARGEST_STEP):
            self._has_lines_without_step = True
            return
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
        if not self.rows or self.rows[-1]["step"] < step:
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
        """Events that have a name, a time and the required numbers."""
        self._num_invalid = self._num_values = self._num_left_out = 0

    def add(self, line: Any) -> None:
        """Add a line, parsed from JSON."""
        is_event = (
            isinstance(line, dict)
            and isinstance(line.get("event"), str)
            and math.isfinite(to_float(line.get("at")))
            and all(
                0 <= to_float(line.get(name)) < LARGEST_STEP for name in REQUIRED_EVENT_NUMBERS.get(line["event"], ())
            )
        )
        if not is_event:
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
    """Return the number of values in parsed JSON, with one more for each 100 characters of text."""
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


REQUIRED_EVENT_NUMBERS = {"began": ("step", "workers"), "step": ("step",)}
"""Event -> numbers that the goodput computation reads from it."""
