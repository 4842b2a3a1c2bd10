"""What a run folder says of its run, read so that anything may be missing, cut short or strange; nothing is written.

The run may be going on. What cannot be read is left out and named in `Run.notes`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from grpo_ray.errors import ConfigError, DataError
from grpo_ray.report.text import counted
from grpo_ray.storage.checkpoints import CheckpointInfo, stored_checkpoints
from grpo_ray.storage.jsonl import EventsFile, MetricsFile
from grpo_ray.storage.rollouts import groups_table, read_rollouts, read_texts
from grpo_ray.storage.run_folder import RunFolder, split_path

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds that storage may be out of reach."""
MOST_CONFIG = 1 << 18
"""Bytes of a `config.yaml` that is read."""
SPOILT = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError)
"""What reading a file raises that is not what it should be, or that the run deletes meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run."""

    folder: RunFolder
    config: Mapping[str, Any]
    """`config.yaml`: section -> fields; `versions` among them."""
    rows: list[dict[str, float]]
    """`metrics.jsonl`: the numbers of each logging step, finite or not, in order of steps; each has `step`."""
    saved: dict[str, int]
    """Checkpoints ever written -> their steps."""
    events: list[dict[str, Any]]
    """`events.jsonl`: each has `event` and a finite `at`; those that the price reads have what it reads."""
    before: Mapping[str, Any]
    """`heldout_before.json`."""
    summary: Mapping[str, Any]
    """`summary.json`; of a run that goes on again, the one of the launch before."""
    stored: list[CheckpointInfo]
    """The checkpoints that are there."""
    groups: "pa.Table"
    """`rollouts/`, without texts."""
    texts: list[dict[str, Any]]
    """The groups of the first and of the last steps whose texts were kept."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, each in a line."""

    def fields(self, section: str) -> Mapping[str, Any]:
        """A section of the config; empty where there is none."""
        found = self.config.get(section)
        return found if isinstance(found, Mapping) else {}

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Step and value of a metric, wherever it was measured."""
        return [(int(row["step"]), row[metric]) for row in self.rows if metric in row]

    def last(self, metric: str) -> float | None:
        """The newest finite value of a metric."""
        return next((value for _, value in reversed(self.values(metric)) if math.isfinite(value)), None)


def read_run(path: str) -> Run:
    """Read the run folder at a local path or URI. ConfigError if there is none."""
    if "://" not in path:
        path = str(Path(path).expanduser().resolve())
    folder = RunFolder(*split_path(path), PATIENCE)
    if not any(folder.exists(name) for name in ("config.yaml", MetricsFile.NAME, EventsFile.NAME)):
        raise ConfigError(f"{folder.uri}: is no run folder; it has no config.yaml, metrics.jsonl or events.jsonl")
    notes: list[str] = []

    def attempt(name: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except FileNotFoundError:
            return otherwise
        except (*SPOILT, DataError, yaml.YAMLError) as error:
            notes.append(f"{name} cannot be read: {type(error).__name__}: {error}")
            return otherwise

    rows, saved = _rows(_lines(folder, MetricsFile.NAME, notes), notes)
    return Run(
        folder=folder,
        config=attempt("config.yaml", lambda: _config(folder), {}),
        rows=rows,
        saved=saved,
        events=_events(_lines(folder, EventsFile.NAME, notes), notes),
        before=attempt("heldout_before.json", lambda: _mapping(folder, "heldout_before.json"), {}),
        summary=attempt("summary.json", lambda: _mapping(folder, "summary.json"), {}),
        stored=attempt("a checkpoint", lambda: _stored(folder), []),
        groups=attempt("rollouts", lambda: read_rollouts(folder), groups_table([])),
        texts=attempt("rollouts", lambda: read_texts(folder).to_pylist(), []),
        notes=notes,
    )


def number(value: object) -> float:
    """A number as a float; NaN for what is none, or is too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _config(folder: RunFolder) -> Mapping[str, Any]:
    data = folder.read_bytes("config.yaml")
    if len(data) > MOST_CONFIG:
        raise ValueError(f"it has {len(data)} bytes")
    config = yaml.safe_load(data)
    if not isinstance(config, Mapping):
        raise ValueError("it holds no sections")
    return config


def _mapping(folder: RunFolder, name: str) -> Mapping[str, Any]:
    found = json.loads(folder.read_text(name))
    if not isinstance(found, Mapping):
        raise ValueError("it holds no fields")
    return found


def _stored(folder: RunFolder) -> list[CheckpointInfo]:
    """The checkpoints that are there and say of which step they are."""
    found = stored_checkpoints(folder)
    return [each for each in found if 0 <= number(dict(each.metrics).get("step")) < 1e15]


def _lines(folder: RunFolder, name: str, notes: list[str]) -> list[Any]:
    """The JSON of each line that holds some. Not with `RowsFile`, which is the writer: it mends the file."""
    try:
        lines = folder.read_bytes(name).split(b"\n")
    except FileNotFoundError:
        notes.append(f"there is no {name} yet")
        return []
    except OSError as error:
        notes.append(f"{name} cannot be read: {error}")
        return []
    found, spoilt = [], []
    for number_, line in enumerate(lines, 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError):
            spoilt.append(number_)
    if spoilt == [len(lines)]:  # the newline is missing: whoever writes it is not done, or died
        notes.append(f"the last line of {name} is cut short")
    elif spoilt:
        notes.append(f"{counted(len(spoilt), 'line')} of {name} not JSON, the first is line {spoilt[0]}")
    if not found and not spoilt:
        notes.append(f"{name} is empty")
    return found


def _rows(lines: list[Any], notes: list[str]) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Each step's numbers, and the checkpoints that were written."""
    by_step: dict[int, dict[str, float]] = {}
    saved: dict[str, int] = {}
    bad = 0
    for line in lines:
        step = number(line.get("step")) if isinstance(line, dict) else math.nan
        if not (0 <= step < 1e15):
            notes.append("metrics.jsonl has lines without a step")
            continue
        values = {name: number(value) for name, value in line.items() if isinstance(value, int | float)}
        bad += sum(not math.isfinite(value) for value in values.values())
        by_step[int(step)] = values | {"step": float(int(step))}
        if isinstance(line.get("checkpoint"), str):
            saved[line["checkpoint"]] = int(step)
    if bad:
        notes.append(f"{counted(bad, 'number')} of metrics.jsonl not finite; the curves leave them out")
    notes[:] = dict.fromkeys(notes)
    return [by_step[step] for step in sorted(by_step)], saved


def _events(lines: list[Any], notes: list[str]) -> list[dict[str, Any]]:
    """The events that are whole."""
    whole = []
    for event in lines:
        known = isinstance(event, dict) and isinstance(event.get("event"), str)
        if (
            known
            and math.isfinite(number(event.get("at")))
            and all(0 <= number(event.get(name)) < 1e15 for name in _NEEDED.get(event["event"], ()))
        ):
            whole.append(event)
    if len(whole) < len(lines):
        notes.append(f"{counted(len(lines) - len(whole), 'line')} of events.jsonl without an event")
    return whole


_NEEDED = {"began": ("step", "workers"), "step": ("step",)}
"""Event -> the numbers in it that its price is reckoned from."""
