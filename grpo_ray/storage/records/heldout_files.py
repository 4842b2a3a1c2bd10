"""Records of held-out measurements: one row per problem, as `<key>/step-<8 digits>.parquet` in the run folder.

The key of a held-out set is its folder: `heldout/` if there is one set, `heldout/<name>/` for each of several. Step 0
is the initial policy. All problems have their verdicts, lengths and flags of truncation; the first `TEXT_PROBLEMS`
problems of the set also have prompt, solution and completions, truncated to a bounded size.

    SELECT problem, completions FROM 'heldout/step-00000040.parquet' WHERE list_contains(correct, 0)

A measurement taken again replaces the file of its step. A run that goes back to a checkpoint removes the files of later
steps with `drop_heldout_after`. A file's metadata has the policy that was measured and the conditions of the
measurement (`metrics.measurement_conditions`): files of other problems, sampling, tools or grading are not compared.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from grpo_ray.config.heldout_keys import HELDOUT
from grpo_ray.errors import DataError
from grpo_ray.storage.parquet import read_columns
from grpo_ray.storage.records.conversation_columns import (
    COLUMNS,
    ConversationRecord,
    conversation_types,
    conversation_values,
)
from grpo_ray.storage.records.groups import TEXT_BYTES
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.truncation import recorded_text

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_PROBLEMS = 128
"""Problems of a set whose texts are recorded, the first ones in the order of the set."""
FILE_BYTES = 2 << 20
"""Largest size of the prompts, solutions and completions of a file before compression, in bytes of UTF-8."""
_FILE_NAME = re.compile(r"step-(\d{8,15})\.parquet")
_CONDITIONS, _POLICY = b"grpo_ray.conditions", b"grpo_ray.policy"


@dataclass(frozen=True, kw_only=True)
class HeldoutRecord:
    """Completions of one held-out problem; tuples have one value per completion, (k,), in the same order."""

    problem: str
    """Id of the problem."""
    correct: tuple[float, ...]
    """Verdict, 1 or 0; NaN where the solution cannot be parsed."""
    lengths: tuple[int, ...]
    """Completion length in tokens."""
    truncated: tuple[bool, ...]
    """True where the completion reached the token limit."""
    prompt: str | None = None
    """Text of the chat messages; None if the texts of this problem are not recorded."""
    solution: str | None = None
    """The problem's solution; None as above."""
    completions: tuple[str, ...] | None = None
    """Text of the completions; None as above."""
    conversations: tuple[ConversationRecord, ...] | None = None
    """Turns, calls and messages of the completions; None as above, and in a run without tools."""


@dataclass(frozen=True)
class HeldoutFile:
    """File of one measurement. If size or time changes under the same name, the file was replaced."""

    key: str
    """Key of the held-out set."""
    step: int
    """Step of the measured policy; 0 for the initial one."""
    size: int
    """Bytes."""
    modified_ns: int
    """Time of the last change, nanoseconds since 1970."""

    @property
    def name(self) -> str:
        """Path below the run folder."""
        return f"{self.key}/step-{self.step:08d}.parquet"


@dataclass(frozen=True)
class Measurement:
    """One measurement of a held-out set without its texts."""

    file: HeldoutFile
    policy: str
    """Name of the measured checkpoint; "" for the initial policy."""
    conditions: str
    """Conditions of the measurement, as JSON. Measurements under other conditions cannot be compared."""
    problems: tuple[str, ...]
    """(P,), ids in the order of the set."""
    accuracy: NDArray[np.float32]
    """(P,), share of correct completions of each problem; NaN where a verdict is unknown."""

    @property
    def solved(self) -> NDArray[np.bool_]:
        """(P,), True where more than half of a problem's completions are correct."""
        return self.accuracy > 0.5


@dataclass(frozen=True)
class Changes:
    """Problems whose outcome differs between two measurements; ids in the order of the set."""

    solved: tuple[str, ...]
    """Solved in the later measurement only."""
    lost: tuple[str, ...]
    """Solved in the earlier measurement only."""


def baseline_file(key: str) -> str:
    """Return the name of the file with the baseline (`evaluation/baseline.py`) of a held-out set, given by its key."""
    return f"{key.replace('/', '_')}_before.json"


def bound_heldout_text(text: str, samples: int) -> str:
    """Redact and truncate a prompt, a solution or a completion, so that a file has at most `FILE_BYTES` of them.

    Args:
        samples: completions per problem, k.
    """
    return recorded_text(text, heldout_text_bytes(samples))


def heldout_text_bytes(samples: int) -> int:
    """Return the largest size of one text in bytes of UTF-8, and of the messages of one conversation together."""
    return min(TEXT_BYTES, FILE_BYTES // TEXT_PROBLEMS // (samples + 2))


def heldout_table(records: Sequence[HeldoutRecord], with_conversations: bool = False) -> "pa.Table":
    """Convert records to a table whose columns are the fields of `HeldoutRecord`.

    Args:
        with_conversations: include the columns of conversations (`storage/records/conversation_columns.py`).
    """
    import pyarrow as pa

    types = {
        "problem": pa.string(),
        "correct": pa.list_(pa.float32()),
        "lengths": pa.list_(pa.int32()),
        "truncated": pa.list_(pa.bool_()),
        "prompt": pa.string(),
        "solution": pa.string(),
        "completions": pa.list_(pa.string()),
    }
    columns: dict[str, list[Any]] = {name: [getattr(record, name) for record in records] for name in types}
    if with_conversations:
        rows = [conversation_values(record.conversations) for record in records]
        types |= conversation_types(with_messages=True)
        columns |= {name: [row[name] for row in rows] for name in COLUMNS}
    return pa.table(columns, schema=pa.schema(list(types.items())))


def write_heldout(
    folder: RunFolder,
    key: str,
    step: int,
    records: Sequence[HeldoutRecord],
    *,
    policy: str,
    conditions: Mapping[str, Any],
) -> str:
    """Write the records of one measurement atomically; they replace those of an earlier one of the same step.

    Args:
        key: key of the held-out set.
        step: step of the measured policy; 0 for the initial one.
        records: in the order of the set.
        policy: name of the measured checkpoint; "" for the initial policy.
        conditions: conditions of the measurement, in JSON's types.

    Returns:
        The file's name below the run folder.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = {_CONDITIONS: json.dumps(conditions, sort_keys=True).encode(), _POLICY: policy.encode()}
    table = heldout_table(records, any(record.conversations is not None for record in records))
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(about), sink, compression="zstd")
    file = HeldoutFile(key, step, 0, 0)
    folder.write_bytes(sink.getvalue().to_pybytes(), *file.name.split("/"))
    return file.name


def heldout_keys_with_records(folder: RunFolder) -> list[str]:
    """Return the sorted keys of the held-out sets that have records."""
    return sorted({file.key for file in _list_files(folder, recursive=True)})


def list_heldout_files(folder: RunFolder, key: str) -> list[HeldoutFile]:
    """Return the files of a held-out set, in the order of steps; all other files are left out."""
    return sorted((file for file in _list_files(folder, key) if file.key == key), key=lambda file: file.step)


def read_heldout(folder: RunFolder, file: HeldoutFile) -> "pa.Table":
    """Read the records of one measurement.

    Returns:
        A table with the columns of `heldout_table`, in the order of the set, and in a run with tools those of
        conversations.

    Raises:
        DataError: the file cannot be read; the message names it.
    """
    return _read_table(folder, file, heldout_table([], with_conversations=True).schema)[0]


def read_verdicts(folder: RunFolder, file: HeldoutFile) -> dict[str, list[float]]:
    """Read the verdicts of one measurement: id of a problem -> 1, 0 or NaN for each completion.

    Raises:
        DataError: the file cannot be read; the message names it.
    """
    columns = read_heldout(folder, file).select(["problem", "correct"]).to_pydict()
    return {
        problem: [np.nan if verdict is None else verdict for verdict in verdicts or ()]
        for problem, verdicts in zip(columns["problem"], columns["correct"], strict=True)
        if problem is not None
    }


def read_measurement(folder: RunFolder, file: HeldoutFile) -> Measurement:
    """Read the verdicts of one measurement, without texts.

    Raises:
        DataError: the file cannot be read; the message names it.
    """
    schema = heldout_table([]).select(["problem", "correct"]).schema
    table, about = _read_table(folder, file, schema)
    return Measurement(
        file,
        about.get(_POLICY, b"").decode("utf-8", "replace"),
        about.get(_CONDITIONS, b"").decode("utf-8", "replace"),
        tuple(problem or "" for problem in table["problem"].to_pylist()),
        np.array([_mean(verdicts or ()) for verdicts in table["correct"].to_pylist()], dtype=np.float32),
    )


def read_measurements(folder: RunFolder, key: str) -> list[Measurement]:
    """Read the verdicts of all measurements of a held-out set, in the order of steps.

    Those under other conditions than the latest step's are left out: their problems or their sampling differ.

    Raises:
        DataError: a file cannot be read; the message names it.
    """
    return comparable([read_measurement(folder, file) for file in list_heldout_files(folder, key)])


def comparable(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements of one held-out set under the conditions of the last one."""
    return [each for each in measurements if each.conditions == measurements[-1].conditions]


def compare_measurements(earlier: Measurement, later: Measurement) -> Changes:
    """Return the problems that were newly solved or lost between two measurements of one set.

    Problems that only one of the two has, and those of unknown verdict in one of them, are left out.
    """
    before = {
        problem: solved
        for problem, solved, accuracy in zip(earlier.problems, earlier.solved, earlier.accuracy, strict=True)
        if not np.isnan(accuracy)
    }
    gained: list[str] = []
    lost: list[str] = []
    for problem, solved, accuracy in zip(later.problems, later.solved, later.accuracy, strict=True):
        if problem in before and not np.isnan(accuracy) and solved != before[problem]:
            (gained if solved else lost).append(problem)
    return Changes(tuple(gained), tuple(lost))


def drop_heldout_after(folder: RunFolder, step: int) -> list[str]:
    """Remove the records of all steps after `step`: a run that resumes from this step takes those steps again.

    Returns:
        The names of the removed files below the run folder.
    """
    removed = [file.name for file in _list_files(folder, recursive=True) if file.step > step]
    for name in removed:
        folder.filesystem.delete_file(folder.path(*name.split("/")))
    return removed


def _list_files(folder: RunFolder, key: str = HELDOUT, *, recursive: bool = False) -> Iterable[HeldoutFile]:
    import pyarrow.fs

    root = folder.path(key)
    selector = pyarrow.fs.FileSelector(root, allow_not_found=True, recursive=recursive)
    for info in folder.filesystem.get_file_info(selector):
        match = _FILE_NAME.fullmatch(info.base_name)
        below = info.path.removeprefix(f"{root}/").split("/")
        if match and info.is_file and len(below) <= 2:
            yield HeldoutFile("/".join((key, *below[:-1])), int(match[1]), info.size or 0, info.mtime_ns or 0)


def _read_table(folder: RunFolder, file: HeldoutFile, schema: "pa.Schema") -> "tuple[pa.Table, Mapping[bytes, bytes]]":
    """Read the columns of `schema` from a file, and the file's metadata."""
    import pyarrow as pa

    try:
        with folder.open_input_file(*file.name.split("/")) as stream:
            table = read_columns(stream, schema, dict.fromkeys(COLUMNS))
        about = table.schema.metadata or {}
        table = table.cast(schema)  # without the metadata of the file
        if "turns" in schema.names and table["turns"].null_count == len(table):
            table = table.drop_columns([name for name in COLUMNS if name in table.column_names])
        return table, about
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{folder.uri_of(*file.name.split('/'))}: cannot be read: {error}") from error


def _mean(verdicts: Sequence[float | None]) -> float:
    """Return the mean of a problem's verdicts; NaN without verdicts or with an unknown one."""
    values = [np.nan if verdict is None else verdict for verdict in verdicts]
    return sum(values) / len(values) if values else np.nan
