"""A run folder that is read again and again, each time only where it has changed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo_ray.report.read import (
    RUN_FILES,
    UNREADABLE,
    EventLines,
    MetricsLines,
    RunData,
    read_checkpoints,
    read_config,
    read_mapping,
    run_heldout_keys,
)
from grpo_ray.storage.checkpoints import MANIFEST, MEASURED, PREFIX
from grpo_ray.storage.heldout_records import baseline_file
from grpo_ray.storage.jsonl import EventsFile, MetricsFile
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.watch.heldout import HeldoutReader, HeldoutSet
from grpo_ray.watch.rollouts import RolloutIndex, RolloutReader
from grpo_ray.watch.tail import LineTail

T = TypeVar("T")
Version = tuple[tuple[str, int, int], ...]
"""Path, size and time of the last change of each existing file."""

JSON_ERRORS = (ValueError, RecursionError)


class FolderGoneError(OSError):
    """The run folder has no file of a run any more."""


@dataclass(frozen=True)
class Snapshot:
    """Contents of the run folder at one time."""

    number: int
    """Number of the state; a later one differs."""
    run: RunData
    rollouts: RolloutIndex
    heldout: list[HeldoutSet]


@dataclass
class _Cached:
    """Value read from files, until one of them changes."""

    value: Any = None
    version: Version | None = None
    note: str = ""


@dataclass
class LiveRun:
    """Reader of a run that goes on. Its methods are called by one thread; a snapshot may be read by others."""

    folder: RunFolder
    _metrics: MetricsLines = field(default_factory=MetricsLines)
    _events: EventLines = field(default_factory=EventLines)
    _num_invalid: dict[str, int] = field(default_factory=dict)
    """File -> lines of it that are no JSON."""
    _cached: dict[str, _Cached] = field(default_factory=dict)
    _number: int = 0

    def __post_init__(self) -> None:
        self._tails = {name: LineTail(self.folder, name) for name in (MetricsFile.NAME, EventsFile.NAME)}
        self._rollouts = RolloutReader(self.folder)
        self._heldout = HeldoutReader(self.folder)

    def refresh(self) -> Snapshot | None:
        """Read what has changed.

        Returns:
            The new state; None if nothing has changed.

        Raises:
            FolderGoneError: The folder was deleted, moved or renamed. Later calls work again once it is back.
            OSError: The storage cannot be read.
        """
        if not self._versions(*RUN_FILES):
            raise FolderGoneError(f"{self.folder.uri} is not there any more: it was deleted, moved or renamed")
        nothing: Mapping[str, Any] = {}
        changed = [self._read_lines()]
        config = self._read_cached("config.yaml", ("config.yaml",), lambda: read_config(self.folder), nothing, changed)
        keys = run_heldout_keys(config)
        baselines = {}
        for key in keys:
            name = baseline_file(key)
            baselines[key] = self._read_mapping(name, changed)
        summary = self._read_mapping("summary.json", changed)
        names = [name for name in self.folder.list_folders(PREFIX)]
        manifests = [f"{name}/{file}" for name in names for file in (MANIFEST, MEASURED)]
        checkpoints = self._read_cached(
            "a checkpoint", manifests, lambda: read_checkpoints(self.folder), list[Any](), changed
        )
        changed += [self._rollouts.refresh(), self._heldout.refresh(keys)]
        if not any(changed) and self._number:
            return None
        self._number += 1
        invalid = [f"{name}: invalid lines: {count}" for name, count in self._num_invalid.items() if count]
        cached = [each.note for each in self._cached.values() if each.note]
        run = RunData(
            folder=self.folder,
            config=config,
            # Copies: other threads read this state while the next one is being read.
            rows=list(self._metrics.rows),
            checkpoint_steps=dict(self._metrics.checkpoint_steps),
            events=list(self._events.events),
            baselines=baselines,
            summary=summary,
            checkpoints=checkpoints,
            groups=self._rollouts.index.groups,
            sample_groups=[],
            notes=[
                *cached,
                *invalid,
                *self._metrics.notes(),
                *self._events.notes(),
                *self._rollouts.index.notes,
                *self._heldout.notes,
            ],
        )
        return Snapshot(self._number, run, self._rollouts.index, self._heldout.sets)

    def _read_lines(self) -> bool:
        """Read the new lines of metrics and events. Returns True if there are any."""
        changed = False
        for name, tail in self._tails.items():
            has_more = True
            while has_more:
                new = tail.read()
                has_more = new.has_more
                changed |= bool(new.lines) or new.is_reset
                if new.is_reset:
                    self._num_invalid[name] = 0
                    if name == MetricsFile.NAME:
                        self._metrics = MetricsLines()
                    else:
                        self._events = EventLines()
                target = self._metrics if name == MetricsFile.NAME else self._events
                for line in new.lines:
                    try:
                        if line.strip():
                            target.add(json.loads(line))
                    except JSON_ERRORS:
                        self._num_invalid[name] = self._num_invalid.get(name, 0) + 1
        return changed

    def _read_mapping(self, name: str, changed: list[bool]) -> Mapping[str, Any]:
        nothing: Mapping[str, Any] = {}
        return self._read_cached(name, (name,), lambda: read_mapping(self.folder, name), nothing, changed)

    def _read_cached(
        self, name: str, files: "tuple[str, ...] | list[str]", read: Callable[[], T], default: T, changed: list[bool]
    ) -> T:
        """Read a value again if one of its files has changed; `changed` then gets True."""
        cached = self._cached.setdefault(name, _Cached(default))
        version = self._versions(*files)
        if version == cached.version:
            return cached.value
        try:
            cached.value, cached.note = (read() if version else default), ""
        except FileNotFoundError:  # deleted in this moment
            cached.value, cached.note = default, ""
        except OSError:  # of the storage, not of the file
            raise
        except UNREADABLE as error:
            cached.value, cached.note = default, f"{name} cannot be read: {type(error).__name__}: {error}"
        cached.version = version
        changed.append(True)
        return cached.value

    def _versions(self, *names: str) -> Version:
        """Return path, size and time of the last change of those files that exist."""
        import pyarrow.fs

        if not names:
            return ()
        infos = self.folder.filesystem.get_file_info([self.folder.path(*name.split("/")) for name in names])
        return tuple(
            (info.path, info.size or 0, info.mtime_ns or 0) for info in infos if info.type == pyarrow.fs.FileType.File
        )
