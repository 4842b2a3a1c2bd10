"""A run in Python: metrics, groups, completions, held-out records and checkpoints as pandas data frames.

    run = Run("~/grpo_ray_runs/arithmetic")
    run.metrics["reward/mean"].plot()
    run.best_checkpoint.metrics["heldout/accuracy"]

The files are read with the bounds of the report (`pages/report/read.py`), so a run folder may be a stranger's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from grpo_ray.config.heldout_keys import ranking_metric
from grpo_ray.config.schema import RunConfig
from grpo_ray.errors import ConfigError, DamagedFileError, DataError
from grpo_ray.pages.report.read import RunData, RunReader, open_run
from grpo_ray.storage.checkpoints import CheckpointInfo, best_checkpoint
from grpo_ray.storage.numbers import is_plausible
from grpo_ray.storage.parquet import MemoryBudget
from grpo_ray.storage.records.group_columns import drop_empty_source
from grpo_ray.storage.records.heldout_files import list_heldout_files, read_heldout
from grpo_ray.storage.records.rollout_files import read_steps

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MAX_CELLS = 200_000_000
"""Largest number of values in the data frame of the metrics, 8 bytes each."""
PER_COMPLETION = {
    "rewards": "reward",
    "correct": "correct",
    "lengths": "length",
    "truncated": "truncated",
    "completions": "completion",
    "advantages": "advantage",
}
"""Column of a group with one value for each completion -> its name in `Run.completions`."""


@dataclass(frozen=True)
class RunCheckpoint:
    """A complete checkpoint of a run."""

    step: int
    path: str
    """Local path, or URI without credentials."""
    metrics: Mapping[str, Any]
    """Metrics of its step, and those that were measured with it."""


class Run:
    """Contents of a run folder; the run may still be running.

    Metrics, events, checkpoints, config and summary are as of the construction. Groups, completions and held-out
    records are read at each call. Files that cannot be read are noted in `notes`.
    """

    def __init__(self, path: str | Path):
        """
        Args:
            path: run folder, local path or URI.

        Raises:
            ConfigError: the folder holds no file of a run, or is a checkpoint.
            DamagedFileError: it has links that lead out of it, or files that grpo_ray does not write.
        """
        self._folder = open_run(str(path))
        reader = RunReader(self._folder, once=True)
        reader.refresh()
        self._data: RunData = reader.contents()

    def __repr__(self) -> str:
        return f"Run({self.path!r}, steps={self.steps})"

    @property
    def path(self) -> str:
        """Local path, or URI without credentials."""
        return self._folder.uri

    @property
    def steps(self) -> int:
        """The last step with metrics; 0 if there is none."""
        return int(self._data.rows[-1]["step"]) if self._data.rows else 0

    @property
    def notes(self) -> Sequence[str]:
        """One line for each file, or part of one, that could not be read."""
        return tuple(self._data.notes)

    @property
    def config(self) -> Mapping[str, Any]:
        """Resolved config of the latest launch: section -> fields, and `versions`; empty if it cannot be read."""
        return self._data.config

    @property
    def summary(self) -> Mapping[str, Any]:
        """`summary.json`; empty before the first launch has ended."""
        return self._data.summary

    @cached_property
    def metrics(self) -> "pd.DataFrame":
        """Metrics of each logged step: one row per step, index `step`, one column of floats per metric, sorted.

        A step that was taken again after a failure has its latest values. NaN where a step has no value of a metric.

        Raises:
            DamagedFileError: there are more values than any run writes.
        """
        import pandas as pd

        rows, names = self._data.rows, sorted(self._data.metric_names() - {"step"})
        if len(rows) * len(names) > MAX_CELLS:
            raise DamagedFileError(
                f"{self._folder.uri_of('metrics.jsonl')} has {len(rows)} steps with {len(names)} metrics; the limit is "
                f"{MAX_CELLS} values"
            )
        values = {name: np.full(len(rows), np.nan) for name in names}
        for place, row in enumerate(rows):
            for name, value in row.items():
                if name != "step":
                    values[name][place] = value
        index = pd.Index([int(row["step"]) for row in rows], name="step", dtype="int64")
        return pd.DataFrame(values, index=index, columns=names)

    @cached_property
    def events(self) -> "pd.DataFrame":
        """Events in their order: `event`, `at` (seconds since 1970), `step` (NaN: none), and `about`.

        `about` has all fields of the event's kind, in a dict.
        """
        import pandas as pd

        events = self._data.events
        return pd.DataFrame(
            {
                "event": [each["event"] for each in events],
                "at": np.array([each["at"] for each in events], dtype=float),
                "step": np.array([_number(each.get("step")) for each in events], dtype=float),
                "about": [
                    {name: value for name, value in each.items() if name not in ("event", "at")} for each in events
                ],
            }
        )

    def groups(self, first: int = 0, last: int | None = None, *, texts: bool = False) -> "pd.DataFrame":
        """Return the recorded groups of some steps, one row each, in the order of steps.

        Args:
            first, last: first and last step, both included; without `last` all steps from the first one on.
            texts: include prompt, completions and advantages, which only sampled groups have; None in all others.

        Returns:
            Columns as in `rollouts/*.parquet` (docs/run-folder.md); values of completions are arrays.

        Raises:
            DataError: a file cannot be read, or the groups take more than 2 GiB.
        """
        return drop_empty_source(self._read_groups(first, last, texts)).to_pandas()

    def completions(self, first: int = 0, last: int | None = None, *, texts: bool = False) -> "pd.DataFrame":
        """Return the recorded completions of some steps, one row each, in the order of steps and groups.

        Args:
            first, last, texts: as for `groups`.

        Returns:
            `step`, `epoch`, `problem`, `source` (of a mixture), `trained`, `index` in the group, from 0, `reward`,
            `correct` (NaN: unknown), `length` in tokens, `truncated`; with `texts` also `sample`, `prompt`,
            `completion` and `advantage`.
        """
        import pyarrow.compute as pc

        table = drop_empty_source(self._read_groups(first, last, texts))
        sizes = pc.list_value_length(table["lengths"]).fill_null(0).to_numpy()
        rows = np.repeat(np.arange(len(table)), sizes)
        own = [name for name in table.column_names if name not in PER_COMPLETION]
        frame = table.select(own).to_pandas().iloc[rows].reset_index(drop=True)
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        frame["index"] = np.arange(len(rows)) - starts
        for column, name in PER_COMPLETION.items():
            if column in table.column_names:
                frame[name] = _values(table[column], sizes, is_number=column != "completions")
        return frame.astype({"length": int, "truncated": bool})

    def _read_groups(self, first: int, last: int | None, texts: bool) -> "pa.Table":
        return read_steps(self._folder, first, last, with_texts=texts)

    @property
    def heldout_keys(self) -> Sequence[str]:
        """Keys of the held-out sets: `heldout`, or `heldout/<name>` of several; the primary one first."""
        return tuple(self._data.heldout_keys)

    def heldout(self, key: str | None = None, first: int = 0, last: int | None = None) -> "pd.DataFrame":
        """Return the held-out records of the measured steps: one row per step and problem.

        Args:
            key: key of the held-out set; None: the primary one.
            first, last: first and last step, both included; step 0 is the initial policy.

        Returns:
            `step`, `problem`, and per completion `correct`, `lengths`, `truncated`; prompt, solution and completions of
            the problems whose texts are recorded.

        Raises:
            ConfigError: the run has no such held-out set.
            DataError: a file cannot be read, or the records take more than 2 GiB.
        """
        import pandas as pd

        key = self.heldout_keys[0] if key is None else key
        if key not in self.heldout_keys:
            raise ConfigError(f"{self.path} has no held-out set {key}; it has {', '.join(self.heldout_keys)}")
        budget, frames = MemoryBudget(), []
        for file in list_heldout_files(self._folder, key):
            if file.step >= first and (last is None or file.step <= last):
                table = budget.take(read_heldout(self._folder, file), self._folder.uri_of(*file.name.split("/")))
                frame = table.to_pandas()
                frame.insert(0, "step", file.step)
                frames.append(frame)
        if not frames:
            return pd.DataFrame(columns=["step", "problem", "correct", "lengths", "truncated"])
        return pd.concat(frames, ignore_index=True)

    @property
    def checkpoints(self) -> list[RunCheckpoint]:
        """Complete checkpoints that exist, in the order of writing."""
        return [_describe(each) for each in self._data.checkpoints]

    @property
    def best_checkpoint(self) -> RunCheckpoint | None:
        """Checkpoint with the highest value of the run's `run.best_metric`; None if none has been measured."""
        recorded = self._data.section("run").get("best_metric", RunConfig.best_metric)
        found = best_checkpoint(self._data.checkpoints, ranking_metric(str(recorded), self._data.heldout_keys))
        return None if found is None else _describe(found)


def _describe(checkpoint: CheckpointInfo) -> RunCheckpoint:
    return RunCheckpoint(checkpoint.step, checkpoint.uri, checkpoint.metrics)


def _number(value: Any) -> float:
    return float(value) if is_plausible(value) else np.nan


def _values(lists: "pa.ChunkedArray", sizes: NDArray[np.integer], *, is_number: bool) -> NDArray[Any]:
    """Return the values of all completions, NaN or None for the completions of a group without values.

    Args:
        lists: (groups,) lists, one value per completion.
        sizes: (groups,) number of completions.

    Raises:
        DataError: a group has another number of values than completions.
    """
    import pyarrow.compute as pc

    has_values = lists.is_valid().to_numpy()
    own = pc.list_value_length(lists).fill_null(0).to_numpy()
    if not np.array_equal(own, np.where(has_values, sizes, 0)):
        raise DataError("a group of rollouts/ has another number of values than completions; the file is damaged")
    values = np.full(int(sizes.sum()), np.nan if is_number else None, dtype=float if is_number else object)
    values[np.repeat(has_values, sizes)] = pc.list_flatten(lists).to_numpy(zero_copy_only=False)
    return values
