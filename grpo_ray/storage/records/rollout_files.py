"""Rollout files: one row per group, as Parquet files in `rollouts/` of the run folder, one file per checkpoint.

Any tool can read them. For example the solve rate of every problem, with the run folder as working directory:

    pandas.read_parquet("rollouts").explode("correct").astype({"correct": float}).groupby("problem")["correct"].mean()

or, in DuckDB:

    SELECT problem, avg(c) FROM (SELECT problem, unnest(correct) AS c FROM 'rollouts/*.parquet')
    WHERE NOT isnan(c) GROUP BY problem

One or two groups per step are sampled: they also have their prompt and completions, truncated to a bounded size, the
advantages, and the log-probabilities of single tokens (`TokenRecord`). These columns are null in all other rows. The
column `sample` has the reason, which does not depend on the number of workers:

| sample | group |
|---|---|
| `first` | the first one drawn for the step, whatever its rewards: an unbiased sample |
| `signal` | the first one whose rewards differ, in the order in which they were drawn, unless that is the `first` one |

Only files of mixtures have the column `source`. Only files of runs with tools or environments have the columns of
`storage/records/conversation_columns.py`, and `result_tokens` (K,): True for recorded tokens that the policy did not
generate.

A file holds the steps since the previous checkpoint, and is written before the checkpoint of its last step. A run that
resumes from a checkpoint therefore finds all files up to it, and removes the later ones with `drop_rollouts_after`:
every group has exactly one row. Rows are sorted by step and stored in row groups of `ROW_GROUP` rows, so that a range
of steps is read without the other steps of its file (`read_steps`).
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ray.errors import DataError
from grpo_ray.storage.parquet import FOLDER_BYTES, MemoryBudget, read_columns, row_group_rows
from grpo_ray.storage.records.group_columns import (
    DEFAULTS,
    SORT_KEYS,
    drop_empty_conversations,
    drop_empty_source,
    groups_table,
)
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.run_folder import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "rollouts"
ROW_GROUP = 1000
"""Rows of a file that are read together."""
_FILE_NAME = re.compile(r"steps-(\d{8,})-(\d{8,})\.parquet")


@dataclass(frozen=True)
class RolloutFile:
    """One file of `rollouts/`. If size or time changes under the same name, the file was replaced."""

    first_step: int
    last_step: int
    name: str
    size: int
    """Bytes."""
    modified_ns: int
    """Time of the last change, nanoseconds since 1970."""


def write_rollouts(folder: RunFolder, groups: Sequence[GroupRecord]) -> str:
    """Write the groups of the steps since the last checkpoint as one file, atomically.

    Returns:
        The file's name below the run folder, such as `rollouts/steps-00000011-00000020.parquet` for steps 11 to 20;
        "" if there are no groups and so no file. Its rows are sorted by step, epoch and problem.
    """
    has_conversations = any(group.conversations is not None for group in groups)
    table = groups_table(groups, with_tokens=True, with_conversations=has_conversations)
    return _write_table(folder, table) if groups else ""


def read_rollouts(folder: RunFolder, up_to_step: int | None = None, limit: int | None = FOLDER_BYTES) -> "pa.Table":
    """Read all groups of a run, in the order of steps, without texts.

    Args:
        folder: the run folder.
        up_to_step: last step to read; None: all.
        limit: largest size of the table, bytes; None: no limit, for the user's own run, which may be of any length.

    Returns:
        A table with the columns of `groups_table`.

    Raises:
        DataError: a file cannot be read; the message names it.
    """
    return read_steps(folder, last=up_to_step, limit=limit)


def read_steps(
    folder: RunFolder,
    first: int = 0,
    last: int | None = None,
    *,
    with_texts: bool = False,
    with_tokens: bool = False,
    samples_only: bool = False,
    limit: int | None = FOLDER_BYTES,
) -> "pa.Table":
    """Read the groups of some steps, in the order of steps; files and row groups of other steps only are not read.

    Args:
        first, last: first and last step, both included; without `last` all steps from the first one on.
        with_texts, with_tokens: as for `groups_table`.
        samples_only: read only the groups that have texts.
        limit: largest size of the table, bytes; None: any.

    Returns:
        A table with the columns of `groups_table`. A row of `tokens` has a dictionary for each completion, with the
        fields of `TokenRecord`, but with `texts` (K,) in place of `text` and `ends`.

    Raises:
        DataError: a file cannot be read; the message names it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = groups_table([], with_texts=with_texts or samples_only, with_tokens=with_tokens).schema
    files = [file for file in list_rollout_files(folder) if file.last_step >= first]
    files = [file for file in files if last is None or file.first_step <= last]
    budget, tables = MemoryBudget(limit), [schema.empty_table()]
    for file in files:
        table = _read_table(folder, file.name, schema, first, last)
        if samples_only:
            table = table.filter(pc.is_valid(pc.field("completions")))
        tables.append(budget.take(table, folder.uri_of(FOLDER, file.name)))
    return pa.concat_tables(tables)


def read_rollout_file(
    folder: RunFolder, file: RolloutFile, columns: Sequence[str], step: int | None = None
) -> "pa.Table":
    """Read some columns of a file, in the order of its rows.

    Args:
        folder: the run folder.
        file: from `list_rollout_files`.
        columns: fields of `GroupRecord`; `step` is read in any case.
        step: read only the groups of this step; None: all.

    Raises:
        DataError: the file cannot be read; the message names it.
    """
    schema = (
        groups_table([], with_tokens=True, with_conversations=True)
        .select(list(dict.fromkeys(["step", *columns])))
        .schema
    )
    return _read_table(folder, file.name, schema, step or 0, step)


def read_texts(folder: RunFolder) -> "pa.Table":
    """Read the groups that have texts from the first and the last file, to compare early with recent completions.

    Returns:
        A table with the columns of `groups_table(with_texts=True)`, and in a run with tools those of conversations.

    Raises:
        DataError: a file cannot be read; the message names it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = groups_table([], with_texts=True, with_conversations=True).schema
    names = [file.name for file in list_rollout_files(folder)]
    first_and_last = dict.fromkeys([*names[:1], *names[-1:]])  # without repetition if there is one file
    tables = (_read_table(folder, name, schema) for name in first_and_last)
    table = pa.concat_tables([schema.empty_table(), *tables]).filter(pc.is_valid(pc.field("completions")))
    return drop_empty_conversations(table)


def drop_rollouts_after(folder: RunFolder, step: int) -> list[str]:
    """Remove the groups of all steps after `step`: a run that resumes from this step takes those steps again.

    Returns:
        The names of the removed files. A file with steps before and after `step` is replaced by one without the later
        steps, and is not in this list; files end at checkpoints, so none has both if `step` has a checkpoint.
    """
    removed = []
    for file in list_rollout_files(folder):
        if file.last_step <= step:
            continue
        if file.first_step <= step:
            schema = groups_table([], with_tokens=True, with_conversations=True).schema
            kept = _read_table(folder, file.name, schema, last=step)
            _write_table(folder, drop_empty_conversations(kept))
        else:
            removed.append(file.name)
        folder.filesystem.delete_file(folder.path(FOLDER, file.name))
    return removed


def list_rollout_files(folder: RunFolder) -> list[RolloutFile]:
    """Return the rollout files of a run, in the order of steps; all other files are left out."""
    import pyarrow.fs

    selector = pyarrow.fs.FileSelector(folder.path(FOLDER), allow_not_found=True)
    found = []
    for info in folder.filesystem.get_file_info(selector):
        if match := _FILE_NAME.fullmatch(info.base_name):
            found.append(RolloutFile(int(match[1]), int(match[2]), match[0], info.size or 0, info.mtime_ns or 0))
    return sorted(found, key=lambda file: (file.first_step, file.last_step))


def _read_table(
    folder: RunFolder, name: str, schema: "pa.Schema", first: int = 0, last: int | None = None
) -> "pa.Table":
    """Read the columns of `schema` from a file, for the steps from `first` to `last`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        with folder.open_input_file(FOLDER, name) as stream:
            table = read_columns(
                stream,
                schema,
                DEFAULTS,
                ordered_by="step",
                has_rows=lambda least, most: most >= first and (last is None or least <= last),
            )
        table = table.cast(schema)  # without the metadata of the file
        steps = pc.field("step")
        return table.filter(steps >= first if last is None else (steps >= first) & (steps <= last))
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{folder.uri_of(FOLDER, name)}: cannot be read: {error}") from error


def _write_table(folder: RunFolder, table: "pa.Table") -> str:
    """Write the file of a table that has rows, atomically; return its name below the run folder."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = drop_empty_source(table)
    steps = pc.min_max(table["step"]).as_py()
    name = f"steps-{steps['min']:08d}-{steps['max']:08d}.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.sort_by(SORT_KEYS),
        sink,
        row_group_size=row_group_rows(len(table), ROW_GROUP),
        compression="zstd",
        write_statistics=["step"],  # those of texts would be most of the footer
    )
    folder.filesystem.create_dir(folder.path(FOLDER), recursive=True)
    if folder.local is None:  # an object becomes visible only when it is complete
        with folder.filesystem.open_output_stream(folder.path(FOLDER, name)) as stream:
            stream.write(sink.getvalue())
        return f"{FOLDER}/{name}"
    # A hidden name: readers of the whole folder must skip a file that a crash truncated.
    temporary = Path(folder.path(FOLDER, f".{name}.{os.getpid()}.tmp"))
    try:
        with open(temporary, "wb") as file:
            file.write(sink.getvalue())
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
        os.replace(temporary, folder.path(FOLDER, name))
    finally:
        temporary.unlink(missing_ok=True)
    return f"{FOLDER}/{name}"
