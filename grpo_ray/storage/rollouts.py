"""Rollout files: one row per group, as Parquet files in `rollouts/` of the run folder, one file per checkpoint.

Any tool can read them. For example the solve rate of every problem, with the run folder as working directory:

    pandas.read_parquet("rollouts").explode("correct").astype({"correct": float}).groupby("problem")["correct"].mean()

or, in DuckDB:

    SELECT problem, avg(c) FROM (SELECT problem, unnest(correct) AS c FROM 'rollouts/*.parquet')
    WHERE NOT isnan(c) GROUP BY problem

One group per step, the first of rank 0, also has its prompt and completions, truncated to a bounded size; these
columns are null in all other rows.

A file holds the steps since the checkpoint before, and is written before the checkpoint of its last step. A run that
resumes from a checkpoint therefore finds all files up to it, and removes the later ones with `drop_rollouts_after`:
every group has exactly one row.

This module also derives the curriculum of an epoch from the rows of earlier epochs (`plan_curriculum`).
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from grpo_ray.errors import DataError
from grpo_ray.storage.run_folder import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "rollouts"
TEXT_BYTES, GROUP_BYTES = 4096, 32768
"""Largest size of one text, and of all completions of a group, in bytes of UTF-8."""
_FILE_NAME = re.compile(r"steps-(\d{8,})-(\d{8,})\.parquet")
_SORT_KEYS = [("step", "ascending"), ("epoch", "ascending"), ("problem", "ascending")]


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """Result of one group; tuples have one value per completion, (num_generations,), in the same order."""

    step: int
    """Step that the group was drawn for, from 1."""
    epoch: int
    """Epoch that the group counts for, from 0."""
    problem: str
    """Id of the problem."""
    rewards: tuple[float, ...]
    """Combined reward; NaN where the completion could not be graded."""
    correct: tuple[float, ...] | None
    """Verdict of the correctness reward, 1 or 0; NaN where it is unknown. None if the run has no such reward."""
    lengths: tuple[int, ...]
    """Completion length in tokens."""
    truncated: tuple[bool, ...]
    """True where the completion reached the token limit."""
    trained: bool = True
    """False if the group was discarded (`grpo.dynamic_sampling`) instead of trained on."""
    prompt: str | None = None
    """Text of the chat messages; None if the texts of this group are not kept."""
    completions: tuple[str, ...] | None = None
    """Text of the completions; None if the texts of this group are not kept."""


def attach_texts(group: GroupRecord, prompt: Sequence[Mapping[str, str]], completions: Sequence[str]) -> GroupRecord:
    """Return the group with its texts, truncated to a size that is negligible beside a checkpoint's weights.

    Args:
        group: a group without texts.
        prompt: chat messages; if there are several, each is prefixed with its role.
        completions: (num_generations,), in the order of the rewards.
    """
    messages = [m["content"] if len(prompt) == 1 else f"{m['role']}: {m['content']}" for m in prompt]
    limit = min(TEXT_BYTES, GROUP_BYTES // max(1, len(completions)))
    return replace(
        group,
        prompt=truncate_middle("\n\n".join(messages), TEXT_BYTES),
        completions=tuple(truncate_middle(text, limit) for text in completions),
    )


def truncate_middle(text: str, limit: int) -> str:
    """Shorten a text to at most `limit` bytes of UTF-8; keep the beginning (question) and the end (answer).

    An unpaired surrogate, which UTF-8 cannot encode, becomes "?".
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    gap = f"\n[... of {len(data)} bytes ...]\n"
    kept_bytes = limit - len(gap)
    # "ignore" drops a character that is cut in half.
    if kept_bytes <= 0:
        return data[:limit].decode("utf-8", "ignore")
    end_bytes = kept_bytes // 3
    begin, end = data[: kept_bytes - end_bytes], data[len(data) - end_bytes :]
    return gap.join(part.decode("utf-8", "ignore") for part in (begin, end))


def groups_table(
    groups: Sequence[GroupRecord], previous: "pa.Table | None" = None, with_texts: bool = False
) -> "pa.Table":
    """Convert groups to a table whose columns are the fields of `GroupRecord`.

    Args:
        groups: one row each, in this order.
        previous: table whose rows come first; None: no rows.
        with_texts: include `prompt` and `completions`, which take far more memory than all other columns together.
    """
    import pyarrow as pa

    types = {
        "step": pa.int64(),
        "epoch": pa.int64(),
        "problem": pa.string(),
        "rewards": pa.list_(pa.float32()),
        "correct": pa.list_(pa.float32()),
        "lengths": pa.list_(pa.int32()),
        "truncated": pa.list_(pa.bool_()),
        "trained": pa.bool_(),
        **({"prompt": pa.string(), "completions": pa.list_(pa.string())} if with_texts else {}),
    }
    columns = {name: [getattr(group, name) for group in groups] for name in types}
    table = pa.table(columns, schema=pa.schema(list(types.items())))
    return table if previous is None else pa.concat_tables([previous, table])


def write_rollouts(folder: RunFolder, groups: Sequence[GroupRecord]) -> str:
    """Write the groups of the steps since the last checkpoint as one file, atomically.

    Returns:
        The file's name below the run folder, such as `rollouts/steps-00000011-00000020.parquet` for steps 11 to 20;
        "" if there are no groups and so no file. Its rows are sorted by step, epoch and problem.
    """
    return _write_table(folder, groups_table(groups, with_texts=True)) if groups else ""


def read_rollouts(folder: RunFolder, up_to_step: int | None = None) -> "pa.Table":
    """Read all groups of a run, in the order of steps, without texts.

    Args:
        folder: the run folder.
        up_to_step: last step to read; None: all.

    Returns:
        A table with the columns of `groups_table`.

    Raises:
        DataError: a file cannot be read; the message names it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    files = (name for first, _, name in _list_files(folder) if up_to_step is None or first <= up_to_step)
    table = pa.concat_tables([groups_table([]), *(_read_table(folder, name) for name in files)])
    return table if up_to_step is None else table.filter(pc.field("step") <= up_to_step)


def read_texts(folder: RunFolder) -> "pa.Table":
    """Read the groups that have texts from the first and the last file, to compare early with recent completions.

    Returns:
        A table with the columns of `groups_table(with_texts=True)`.

    Raises:
        DataError: a file cannot be read; the message names it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    names = [name for _, _, name in _list_files(folder)]
    first_and_last = dict.fromkeys([*names[:1], *names[-1:]])  # without repetition if there is one file
    tables = (_read_table(folder, name, with_texts=True) for name in first_and_last)
    return pa.concat_tables([groups_table([], with_texts=True), *tables]).filter(pc.is_valid(pc.field("completions")))


def drop_rollouts_after(folder: RunFolder, step: int) -> list[str]:
    """Remove the groups of all steps after `step`: a run that resumes from this step takes those steps again.

    Returns:
        The names of the removed files. A file with steps before and after `step` is replaced by one without the later
        steps and not named; files that were written between two checkpoints never are of this kind.
    """
    import pyarrow.compute as pc

    removed = []
    for first, last, name in _list_files(folder):
        if last <= step:
            continue
        if first <= step:
            _write_table(folder, _read_table(folder, name, with_texts=True).filter(pc.field("step") <= step))
        else:
            removed.append(name)
        folder.filesystem.delete_file(folder.path(FOLDER, name))
    return removed


def plan_curriculum(
    table: "pa.Table", epoch: int, skip_solved: int | None, prefer_mixed: bool
) -> tuple[list[str], list[str]]:
    """Choose which problems an epoch skips and which come first, from the groups of earlier epochs.

    A group is solved if it has completions and all of them are correct; an unknown verdict makes it unsolved.

    Args:
        table: from `groups_table` or `read_rollouts`, rows in any order; rows of `epoch` and later ones are ignored.
        epoch: the epoch that begins.
        skip_solved: skip a problem whose last `skip_solved` groups are solved; None or 0 skips nothing. Only problems
            that the epoch just before used are skipped, so a solved problem returns every other epoch and the run
            notices if the policy forgets it.
        prefer_mixed: prefer problems that have both correct and incorrect completions over all their groups
            (completions of unknown verdict do not count): their groups have a gradient.

    Returns:
        Sorted ids of the skipped problems, and sorted ids of the preferred problems.
    """
    import pyarrow.compute as pc

    table = table.filter(pc.field("epoch") < epoch).sort_by([("problem", "ascending"), *_SORT_KEYS[:2]])
    if not len(table):
        return [], []
    known, correct, solved = solve_counts(table)

    # The rows of problem i are begins[i] to ends[i] - 1, in order of step.
    id_of_row = np.array(table["problem"].to_pylist(), dtype=str)
    begins = np.flatnonzero(np.append(True, id_of_row[1:] != id_of_row[:-1]))
    ends = np.append(begins[1:], len(id_of_row))
    ids = id_of_row[begins]

    skipped = np.zeros(len(ids), dtype=bool)
    if skip_solved:
        solved_before = np.append(0, np.cumsum(solved))  # solved_before[r]: solved groups in rows 0 to r - 1
        last_groups = np.maximum(ends - skip_solved, begins)
        used_just_before = table["epoch"].to_numpy()[ends - 1] == epoch - 1
        skipped = used_just_before & (solved_before[ends] - solved_before[last_groups] == skip_solved)

    preferred = np.zeros(len(ids), dtype=bool)
    if prefer_mixed:
        known, correct = np.add.reduceat(known, begins), np.add.reduceat(correct, begins)
        preferred = (correct > 0) & (correct < known) & ~skipped
    return ids[skipped].tolist(), ids[preferred].tolist()


def solve_counts(
    table: "pa.Table",
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
    """Count verdicts per group.

    Returns:
        Number of completions of known verdict, number of correct ones, and True where a group has completions and
        all are correct; (rows,) each.
    """
    import pyarrow.compute as pc

    sizes = pc.list_value_length(table["correct"]).fill_null(0).to_numpy()
    values = pc.list_flatten(table["correct"]).to_numpy()
    rows = np.repeat(np.arange(len(table)), sizes)
    known = np.bincount(rows[~np.isnan(values)], minlength=len(table))
    correct = np.bincount(rows[values == 1.0], minlength=len(table))
    return known, correct, (correct == sizes) & (sizes > 0)


def _list_files(folder: RunFolder) -> list[tuple[int, int, str]]:
    """Return first step, last step and name of each rollout file, in the order of steps; skip all other files."""
    import pyarrow.fs

    selector = pyarrow.fs.FileSelector(folder.path(FOLDER), allow_not_found=True)
    names = [info.base_name for info in folder.filesystem.get_file_info(selector)]
    matches = [match for name in names if (match := _FILE_NAME.fullmatch(name))]
    return sorted((int(match[1]), int(match[2]), match[0]) for match in matches)


def _read_table(folder: RunFolder, name: str, with_texts: bool = False) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = groups_table([], with_texts=with_texts).schema
    try:
        # Not `read_table`: it adds a column for each parent folder with a name such as `seed=7`.
        with folder.filesystem.open_input_file(folder.path(FOLDER, name)) as file:
            table = pq.ParquetFile(file).read(columns=schema.names)
        # Older versions wrote files without these columns.
        for column, value in {"trained": True, "prompt": None, "completions": None}.items():
            if column in schema.names and column not in table.column_names:
                field, at = schema.field(column), min(schema.get_field_index(column), table.num_columns)
                table = table.add_column(at, field, pa.array([value] * len(table), field.type))
        return table.cast(schema)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{folder.uri_of(FOLDER, name)}: cannot be read: {error}") from error


def _write_table(folder: RunFolder, table: "pa.Table") -> str:
    """Write the file of a table that has rows, atomically; return its name below the run folder."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    steps = pc.min_max(table["step"]).as_py()
    name = f"steps-{steps['min']:08d}-{steps['max']:08d}.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(table.sort_by(_SORT_KEYS), sink)
    folder.filesystem.create_dir(folder.path(FOLDER), recursive=True)
    if folder.local is None:  # an object becomes visible only when it is complete
        with folder.filesystem.open_output_stream(folder.path(FOLDER, name)) as stream:
            stream.write(sink.getvalue())
        return f"{FOLDER}/{name}"
    # A hidden name: readers of the whole folder must skip a file that a crash truncated.
    temporary = Path(folder.path(FOLDER, f".{name}.{os.getpid()}.tmp"))
    try:
        temporary.write_bytes(sink.getvalue())
        os.replace(temporary, folder.path(FOLDER, name))
    finally:
        temporary.unlink(missing_ok=True)
    return f"{FOLDER}/{name}"
