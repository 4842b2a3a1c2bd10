"""Reader of a run folder, for the report, the live page and the model card; it writes nothing.

The run may still be running. Missing, truncated and malformed files are tolerated: unreadable data is skipped and
listed in `RunData.notes`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_ray.config.heldout_keys import AUTO, HELDOUT, heldout_keys, heldout_label, primary_key
from grpo_ray.config.schema import RunConfig
from grpo_ray.config.yaml_documents import parse_yaml
from grpo_ray.errors import ConfigError, DamagedFileError, DataError
from grpo_ray.pages.report.rows import EventLines, GrowingFile, MetricsLines, MetricsRow
from grpo_ray.storage.checkpoints import MANIFEST, MEASURED, NAME_PATTERN, PREFIX, CheckpointInfo, list_checkpoints
from grpo_ray.storage.jsonl import EventsFile, MetricsFile
from grpo_ray.storage.numbers import is_plausible
from grpo_ray.storage.records.group_columns import groups_table
from grpo_ray.storage.records.heldout_files import baseline_file
from grpo_ray.storage.records.rollout_files import read_rollouts, read_texts
from grpo_ray.storage.run_folder import RECORD_BYTES, RunFolder
from grpo_ray.storage.stage_folders import STAGES_FILE, stage_folders
from grpo_ray.storage.uris import split_path

if TYPE_CHECKING:
    import pyarrow as pa

Version = tuple[tuple[str, int, int], ...]
"""Path, size and modification time (ns) of each existing file."""

STORAGE_RETRY_SECONDS = 60.0
"""Seconds to retry while the storage cannot be reached."""
MAX_HELDOUT_SETS = 8
"""Held-out sets that are shown."""
HELDOUT_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of held-out sets that are shown."""
MALFORMED_DATA_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError)
"""Errors raised while reading a file that is malformed, or that the run deletes during the reading."""

UNREADABLE = (*MALFORMED_DATA_ERRORS, DataError)
"""Errors that make a file of a run folder count as unreadable."""
RUN_FILES = ("config.yaml", MetricsFile.NAME, EventsFile.NAME)
"""A folder with at least one of these files is a run folder."""


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
    """`events.jsonl`: the events that `EventsFile.is_row` accepts."""
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
    first_step: int = 0
    """Steps of the stages before it, by which its curves are moved."""
    notes: list[str] = field(default_factory=list)
    """One line for each file, or part of one, that could not be read."""

    @property
    def heldout_keys(self) -> list[str]:
        """Keys of the held-out sets, the primary one first."""
        return list(self.baselines)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the config; empty if it is absent or malformed."""
        section = self.config.get(name)
        return section if isinstance(section, Mapping) else {}

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric for every step that has it; steps are counted from `first_step`."""
        return [(self.first_step + int(row["step"]), row[metric]) for row in self.rows if metric in row.columns]

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
        ConfigError: The folder holds no file of a run, or is a checkpoint.
        DamagedFileError: It has links that lead out of it, or files that grpo_ray does not write.
    """
    if "://" not in path:
        path = str(Path(path).expanduser().resolve())
    folder = RunFolder(*split_path(path), retry_seconds)
    if NAME_PATTERN.fullmatch(folder.name):  # it has a file of metrics, and would pass for a run without groups
        raise ConfigError(f"{folder.uri} is a checkpoint; give its run folder")
    # Checked first: links in a folder that is not a run's, such as a virtual environment, must not be reported.
    if not any(folder.has_entry(name) for name in RUN_FILES):
        raise ConfigError(
            f"{folder.uri} is not a run folder: it has no {', '.join(RUN_FILES[:-1])} or {RUN_FILES[-1]}; "
            "give the folder {run.storage_path}/{run.name}"
        )
    folder.require_plain_files()
    return folder


def find_stages(path: str, retry_seconds: float = STORAGE_RETRY_SECONDS) -> tuple[RunFolder, list[str]]:
    """Return a folder, and the addresses of the run folders in it if it is the folder of stages of one YAML.

    Raises:
        ConfigError: No stage has begun.
        DamagedFileError: The list of the stages cannot be read.
    """
    if "://" not in path:
        path = str(Path(path).expanduser().resolve())
    folder = RunFolder(*split_path(path), retry_seconds)
    names = stage_folders(folder)
    begun = [name for name in names if any(folder.has_entry(name, file) for file in RUN_FILES)]
    if folder.has_entry(STAGES_FILE) and not begun:
        raise ConfigError(f"{folder.uri}: no stage has begun; run grpo-ray train first")
    return folder, [folder.address_of(name) for name in begun]


def follow_one_another(runs: Sequence[RunData]) -> list[RunData]:
    """Return runs whose steps are counted from the first step of the first one, for curves of stages."""
    joined: list[RunData] = []
    before = 0
    for run in runs:
        joined.append(replace(run, first_step=before))
        before += int(run.rows[-1]["step"]) if run.rows else 0
    return joined


def read_run(path: str) -> RunData:
    """Read the run folder at a local path or URI once, with sample groups; unreadable data is noted.

    Raises:
        ConfigError: The folder holds no file of a run.
    """
    folder = open_run(path)
    reader = RunReader(folder, once=True)
    reader.refresh()
    notes: list[str] = []

    def read_rollouts_or_note(read: Callable[[RunFolder], "pa.Table"]) -> "pa.Table":
        try:
            return read(folder)
        except UNREADABLE as error:
            notes.append(describe_unreadable("rollouts", error))
            return groups_table([])

    groups, sample_groups = map(read_rollouts_or_note, (read_rollouts, read_texts))
    return reader.contents(groups, sample_groups.to_pylist(), notes)


@dataclass
class _Cached:
    """Value read from files, valid until one of them changes."""

    value: Any
    version: Version | None = None
    note: str = ""


class RunReader:
    """Reader of a run folder that reads only the files changed since its last call, and writes nothing.

    Rollouts and held-out records have separate readers, since pages need different parts of them.

    Args:
        once: True for a single reading, which notes storage errors, and files that are missing, empty or end within a
            line. False for a run in progress, where such files are normal and storage errors are raised.
    """

    def __init__(self, folder: RunFolder, once: bool = False):
        self.folder, self._once = folder, once
        self._metrics = GrowingFile(folder, MetricsFile.NAME, MetricsLines)
        self._events = GrowingFile(folder, EventsFile.NAME, EventLines)
        self._cached: dict[str, _Cached] = {}
        self._line_notes: list[str] = []

    def refresh(self) -> bool:
        """Read the files that have changed; return True if any has.

        Raises:
            OSError: The storage cannot be read, and may be readable later.
            DamagedFileError: A file is larger than any that grpo_ray writes.
        """
        changed = [
            self._refresh_cached("config.yaml", lambda: ["config.yaml"], lambda: read_config(self.folder), {}),
            self._refresh_lines(),
        ]
        for name in (*map(baseline_file, self.heldout_keys), "summary.json"):
            read = partial(read_mapping, self.folder, name)
            changed.append(self._refresh_cached(name, partial(list, [name]), read, {}))
        changed.append(
            self._refresh_cached("a checkpoint", self._checkpoint_files, partial(read_checkpoints, self.folder), [])
        )
        return any(changed)

    def _checkpoint_files(self) -> list[str]:
        return [f"{name}/{file}" for name in self.folder.list_folders(PREFIX) for file in (MANIFEST, MEASURED)]

    def has_files(self) -> bool:
        """Return True if the folder has any of `RUN_FILES` now."""
        return bool(self._versions(*RUN_FILES))

    @property
    def heldout_keys(self) -> list[str]:
        """Keys of the held-out sets as of the last reading, the primary one first."""
        return run_heldout_keys(self._cached["config.yaml"].value)

    def contents(
        self, groups: "pa.Table | None" = None, sample_groups: Sequence[dict[str, Any]] = (), notes: Sequence[str] = ()
    ) -> RunData:
        """Return the contents as of the last reading; a later one does not change them.

        Args:
            groups: groups of the run, without texts; None: no groups.
            sample_groups: groups with texts.
            notes: notes of the readers of rollouts and held-out records.
        """
        config, *others = self._cached.values()
        return RunData(
            folder=self.folder,
            config=config.value,
            # Copies: other threads read these contents while the next ones are being read.
            rows=list(self._metrics.lines.rows),
            checkpoint_steps=dict(self._metrics.lines.checkpoint_steps),
            events=list(self._events.lines.events),
            baselines={key: self._cached[baseline_file(key)].value for key in self.heldout_keys},
            summary=self._cached["summary.json"].value,
            checkpoints=self._cached["a checkpoint"].value,
            groups=groups_table([]) if groups is None else groups,
            sample_groups=list(sample_groups),
            notes=[note for note in (config.note, *self._line_notes, *(each.note for each in others), *notes) if note],
        )

    def _refresh_lines(self) -> bool:
        """Read the new lines of metrics and events; return True if there are any."""
        changed, notes = False, []
        for name, file in ((MetricsFile.NAME, self._metrics), (EventsFile.NAME, self._events)):
            try:
                changed |= file.refresh()
                notes += file.ending() if self._once else []
            except (OSError, DamagedFileError) as error:
                if not self._once:
                    raise
                notes.append(f"{name} cannot be read: {error}")
            notes += file.notes()
        self._line_notes = notes
        return changed

    def _refresh_cached(
        self, name: str, list_files: Callable[[], Sequence[str]], read: Callable[[], Any], default: Any
    ) -> bool:
        """Read a value again if one of its files has changed; return True if it may have changed."""
        cached, version = self._cached.setdefault(name, _Cached(default)), None
        try:
            version = self._versions(*list_files())
            if version == cached.version:
                return False
            cached.value, cached.note = (read() if version else default), ""
        except FileNotFoundError:  # deleted meanwhile
            cached.value, cached.note = default, ""
        except UNREADABLE as error:
            if isinstance(error, OSError) and not self._once:  # of the storage, not of the file
                raise
            cached.value, cached.note = default, describe_unreadable(name, error)
        cached.version = version
        return True

    def _versions(self, *names: str) -> Version:
        """Return path, size and modification time of the files that exist."""
        import pyarrow.fs

        if not names:
            return ()
        infos = self.folder.filesystem.get_file_info([self.folder.path(*name.split("/")) for name in names])
        return tuple(
            (info.path, info.size or 0, info.mtime_ns or 0) for info in infos if info.type == pyarrow.fs.FileType.File
        )


def describe_unreadable(name: str, error: Exception) -> str:
    """Return the note of a file that cannot be read."""
    return f"{name} cannot be read: {type(error).__name__}: {error}"


def run_heldout_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a run's held-out sets, the primary one first; only the first few if there are many.

    Names that the config of a run cannot have are omitted.
    """
    data, run = config.get("data"), config.get("run")
    data = data if isinstance(data, Mapping) else {}
    named, train = data.get("heldout", AUTO), data.get("train")
    keys = [
        key
        for key in heldout_keys(named, train if isinstance(train, Mapping) else "")
        if key == HELDOUT or HELDOUT_NAME.fullmatch(heldout_label(key))
    ] or [HELDOUT]
    best_metric = run.get("best_metric") if isinstance(run, Mapping) else None
    primary = primary_key(best_metric if isinstance(best_metric, str) else RunConfig.best_metric, keys)
    return [primary, *(key for key in keys if key != primary)][:MAX_HELDOUT_SETS]


def read_config(folder: RunFolder) -> Mapping[str, Any]:
    """Read `config.yaml`. Raises one of `UNREADABLE`."""
    config = parse_yaml(folder.read_bytes("config.yaml"), is_trusted=False)
    if not isinstance(config, Mapping):
        raise ValueError("it has no sections")
    return config


def read_mapping(folder: RunFolder, name: str) -> Mapping[str, Any]:
    """Read a file with a JSON object. Raises one of `UNREADABLE`."""
    value = json.loads(folder.read_text(name, limit=RECORD_BYTES))
    if not isinstance(value, Mapping):
        raise ValueError("it is not a JSON object")
    return value


def read_checkpoints(folder: RunFolder) -> list[CheckpointInfo]:
    """List the existing checkpoints that have a plausible step."""
    checkpoints = list_checkpoints(folder)
    return [each for each in checkpoints if is_plausible(dict(each.metrics).get("step"))]
