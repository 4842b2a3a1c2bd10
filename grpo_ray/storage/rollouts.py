"""What became of each group: Parquet files in `rollouts/` of the run folder, one for the steps between two checkpoints.

Any tool reads them. The solve rate of every problem, from inside the run folder:

    pandas.read_parquet("rollouts").explode("correct").astype({"correct": float}).groupby("problem")["correct"].mean()

or, in DuckDB:

    SELECT problem, avg(c) FROM (SELECT problem, unnest(correct) AS c FROM 'rollouts/*.parquet')
    WHERE NOT isnan(c) GROUP BY problem

Of one group of each step, the first of rank 0, the prompt and the completions stand there too, cut to a bounded size;
in the rows of all others those columns are null.

A file is written before the checkpoint of its last step. So a run that goes back to a checkpoint has all files up to
it, and `drop_rollouts_after` takes away what came later: every group stands there once.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_ray.errors import DataError
from grpo_ray.storage.run_folder import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "rollouts"
TEXT_BYTES, GROUP_BYTES = 4096, 32768
"""Most that is kept of one text, and of all completions of a group; UTF-8."""
_FILE = re.compile(r"steps-(\d{8,})-(\d{8,})\.parquet")
_ORDER = [("step", "ascending"), ("epoch", "ascending"), ("problem", "ascending")]


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """What became of one group; the tuples hold one value for each completion, in the same order."""

    step: int
    """The step that it was drawn for, from 1."""
    epoch: int
    """The epoch that it counts for, from 0."""
    problem: str
    """The problem's id."""
    rewards: tuple[float, ...]
    """Combined reward; NaN where the completion could not be scored."""
    correct: tuple[float, ...] | None
    """Verdict of the correctness reward, 1 or 0; NaN where it is unknown. None if the run has no such reward."""
    lengths: tuple[int, ...]
    """Tokens."""
    truncated: tuple[bool, ...]
    """Whether the completion was cut off at the limit of tokens."""
    trained: bool = True
    """Whether the step was taken on it; False where it was put aside (`grpo.dynamic_sampling`)."""
    prompt: str | None = None
    """What the chat messages say; None where no texts are kept."""
    completions: tuple[str, ...] | None = None
    """What the policy wrote; None where no texts are kept."""


def attach_texts(group: GroupRecord, prompt: Sequence[Mapping[str, str]], completions: Sequence[str]) -> GroupRecord:
    """The group with its texts, each cut to a size that does not matter beside the weights of a checkpoint.

    prompt: chat messages; the role stands before each where there are several.
    completions: (num_generations,), in the order of the rewards.
    """
    said = [m["content"] if len(prompt) == 1 else f"{m['role']}: {m['content']}" for m in prompt]
    limit = min(TEXT_BYTES, GROUP_BYTES // max(1, len(completions)))
    return replace(
        group,
        prompt=shorten("\n\n".join(said), TEXT_BYTES),
        completions=tuple(shorten(text, limit) for text in completions),
    )


def shorten(text: str, limit: int) -> str:
    """The beginning and the end of a text, where the question and the answer stand, in at most `limit` bytes of UTF-8.

    Half of a surrogate pair, which is no text, becomes "?".
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    gap = f"\n[... of {len(data)} bytes ...]\n"
    room = limit - len(gap)
    # A character that the cut goes through is left out.
    if room <= 0:
        return data[:limit].decode("utf-8", "ignore")
    begin, end = data[: room - room // 3], data[len(data) - room // 3 :]
    return gap.join(part.decode("utf-8", "ignore") for part in (begin, end))


def groups_table(groups: Sequence[GroupRecord], before: "pa.Table | None" = None, texts: bool = False) -> "pa.Table":
    """Groups as a table of one row each, in the order given, below the rows of `before`; the columns are `GroupRecord`'s.

    texts: with `prompt` and `completions`, which take far more memory than all others together.
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
        **({"prompt": pa.string(), "completions": pa.list_(pa.string())} if texts else {}),
    }
    columns = {name: [getattr(group, name) for group in groups] for name in types}
    table = pa.table(columns, schema=pa.schema(list(types.items())))
    return table if before is None else pa.concat_tables([before, table])


def write_rollouts(folder: RunFolder, groups: Sequence[GroupRecord]) -> str:
    """Write the groups of the steps since the last checkpoint as one file, whole or not at all.

    Gives the file's name below the run folder, `rollouts/steps-00000011-00000020.parquet` for the steps 11 to 20. Rows
    are in order of step, epoch and problem. No groups make no file, and "".
    """
    return _write(folder, groups_table(groups, texts=True)) if groups else ""


def read_rollouts(folder: RunFolder, up_to_step: int | None = None) -> "pa.Table":
    """All groups of a run in order of step, without texts, those of later steps than `up_to_step` left out.

    The columns are those of `groups_table`. Raises DataError naming the file if one cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    files = (name for first, _, name in _files(folder) if up_to_step is None or first <= up_to_step)
    table = pa.concat_tables([groups_table([]), *(_read(folder, name) for name in files)])
    return table if up_to_step is None else table.filter(pc.field("step") <= up_to_step)


def read_texts(folder: RunFolder) -> "pa.Table":
    """The groups whose texts were kept, of the first and of the last file alone: how the policy wrote then and now.

    The columns are those of `groups_table` with texts. Raises DataError naming the file if one cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    names = [name for _, _, name in _files(folder)]
    ends = dict.fromkeys([*names[:1], *names[-1:]])  # one file is both
    tables = (_read(folder, name, texts=True) for name in ends)
    return pa.concat_tables([groups_table([], texts=True), *tables]).filter(pc.is_valid(pc.field("completions")))


def drop_rollouts_after(folder: RunFolder, step: int) -> int:
    """Take away the groups of all steps after `step`: a run that goes back to it takes them again.

    Gives how many files were removed. A file that spans the step, which none does that was written between two
    checkpoints, is cut and not counted.
    """
    import pyarrow.compute as pc

    removed = 0
    for first, last, name in _files(folder):
        if last <= step:
            continue
        if first <= step:
            _write(folder, _read(folder, name, texts=True).filter(pc.field("step") <= step))
        else:
            removed += 1
        folder.filesystem.delete_file(folder.path(FOLDER, name))
    return removed


def plan_curriculum(
    table: "pa.Table", epoch: int, skip_solved: int | None, prefer_mixed: bool
) -> tuple[list[str], list[str]]:
    """What an epoch makes of the groups of the epochs before it: the sorted ids passed over, and those that come first.

    table: as from `groups_table` and `read_rollouts`, rows in any order; rows of `epoch` and later ones do not count.
    skip_solved: pass over a problem whose last so many groups were wholly correct; None or 0 passes over nothing. Only
        a problem of the epoch just before is passed over, so a solved problem comes back every other epoch, and it is
        noticed when the policy forgets it.
    prefer_mixed: put first what was sometimes correct and sometimes not, over all groups; such groups have a gradient.
    Completions of unknown verdict make no group wholly correct, and do not count in the share.
    """
    import pyarrow.compute as pc

    table = table.filter(pc.field("epoch") < epoch).sort_by([("problem", "ascending"), *_ORDER[:2]])
    if not len(table):
        return [], []
    known, right, solved = solve_counts(table)

    # Rows of a problem lie side by side in order of step; `begins` and `ends` are its rows.
    ids = np.array(table["problem"].to_pylist(), dtype=str)
    begins = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    ends = np.append(begins[1:], len(ids))
    names = ids[begins]

    passed_over = np.zeros(len(names), dtype=bool)
    if skip_solved:
        solved_before = np.append(0, np.cumsum(solved))
        since = np.maximum(ends - skip_solved, begins)
        just_before = table["epoch"].to_numpy()[ends - 1] == epoch - 1
        passed_over = just_before & (solved_before[ends] - solved_before[since] == skip_solved)

    preferred = np.zeros(len(names), dtype=bool)
    if prefer_mixed:
        known, right = np.add.reduceat(known, begins), np.add.reduceat(right, begins)
        preferred = (right > 0) & (right < known) & ~passed_over
    return names[passed_over].tolist(), names[preferred].tolist()


def solve_counts(table: "pa.Table") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row: completions of known verdict, correct ones, and whether all there are are correct; each (rows,)."""
    import pyarrow.compute as pc

    sizes = pc.list_value_length(table["correct"]).fill_null(0).to_numpy()
    values = pc.list_flatten(table["correct"]).to_numpy()
    rows = np.repeat(np.arange(len(table)), sizes)
    known = np.bincount(rows[~np.isnan(values)], minlength=len(table))
    right = np.bincount(rows[values == 1.0], minlength=len(table))
    return known, right, (right == sizes) & (sizes > 0)


def _files(folder: RunFolder) -> Iterator[tuple[int, int, str]]:
    """First step, last step and name of each file, in order of steps; other files are not ours."""
    import pyarrow.fs

    chosen = pyarrow.fs.FileSelector(folder.path(FOLDER), allow_not_found=True)
    names = [info.base_name for info in folder.filesystem.get_file_info(chosen)]
    found = [match for name in names if (match := _FILE.fullmatch(name))]
    yield from sorted((int(match[1]), int(match[2]), match[0]) for match in found)


def _read(folder: RunFolder, name: str, texts: bool = False) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = groups_table([], texts=texts).schema
    try:
        # Not `read_table`: it makes columns of folders that are called `seed=7`.
        with folder.filesystem.open_input_file(folder.path(FOLDER, name)) as file:
            table = pq.ParquetFile(file).read(columns=schema.names)
        for column, value in {"trained": True, "prompt": None, "completions": None}.items():
            if column in schema.names and column not in table.column_names:  # a file from before there was this one
                field, at = schema.field(column), min(schema.get_field_index(column), table.num_columns)
                table = table.add_column(at, field, pa.array([value] * len(table), field.type))
        return table.cast(schema)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{folder.uri_of(FOLDER, name)}: cannot be read: {error}") from error


def _write(folder: RunFolder, table: "pa.Table") -> str:
    """Write the file of a table that has rows; gives its name below the run folder."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    steps = pc.min_max(table["step"]).as_py()
    name = f"steps-{steps['min']:08d}-{steps['max']:08d}.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(table.sort_by(_ORDER), sink)
    folder.filesystem.create_dir(folder.path(FOLDER), recursive=True)
    if folder.local is None:  # object stores show a file only when it is whole
        with folder.filesystem.open_output_stream(folder.path(FOLDER, name)) as stream:
            stream.write(sink.getvalue())
        return f"{FOLDER}/{name}"
    # Hidden: who reads the folder as a whole must not meet a file that a crash cut short.
    aside = Path(folder.path(FOLDER, f".{name}.{os.getpid()}.tmp"))
    try:
        aside.write_bytes(sink.getvalue())
        os.replace(aside, folder.path(FOLDER, name))
    finally:
        aside.unlink(missing_ok=True)
    return f"{FOLDER}/{name}"
