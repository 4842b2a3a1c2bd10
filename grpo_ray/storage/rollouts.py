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

Only files of runs with tools or environments have the columns of `storage/conversations.py`, and `result_tokens` (K,):
True for recorded tokens that the policy did not generate.

A file holds the steps since the checkpoint before, and is written before the checkpoint of its last step. A run that
resumes from a checkpoint therefore finds all files up to it, and removes the later ones with `drop_rollouts_after`:
every group has exactly one row. Rows are sorted by step and stored in row groups of `ROW_GROUP` rows, so that a range
of steps is read without the other steps of its file (`read_steps`).

This module also derives the curriculum of an epoch from the rows of earlier epochs (`plan_curriculum`).
"""

import math
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from grpo_ray.errors import DataError
from grpo_ray.storage.conversations import (
    COLUMNS,
    ConversationRecord,
    conversation_types,
    conversation_values,
    without_messages,
)
from grpo_ray.storage.parquet import FOLDER_BYTES, MemoryBudget, read_columns, row_group_rows
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.truncation import recorded_text

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "rollouts"
TEXT_BYTES, GROUP_BYTES = 4096, 32768
"""Largest size of one text, and of all completions of a group, in bytes of UTF-8."""
COMPLETION_TOKENS, GROUP_TOKENS = 256, 2048
"""Most tokens recorded of one completion, and of all completions of a group."""
ROW_GROUP = 1000
"""Rows of a file that are read together."""
Sample = Literal["first", "signal"]
"""Reason for which the texts and tokens of a group are recorded; see the module's docstring."""
B = TypeVar("B", bytes, "array[float]")
_FILE_NAME = re.compile(r"steps-(\d{8,})-(\d{8,})\.parquet")
CONVERSATION_COLUMNS = (*COLUMNS, "result_tokens")
"""Columns that only files of runs with tools or environments have."""
_SORT_KEYS = [("step", "ascending"), ("epoch", "ascending"), ("problem", "ascending")]


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """Tokens of one completion: the first `head` ones and the last ones of a long completion, K in all."""

    text: bytes
    """Text of the K tokens in UTF-8. Without a gap it is the completion's text, without special tokens such as its end.
    """
    ends: "array[int]"
    """(K,) int32, end of each token in `text`, bytes. All tokens of one character but the last end where the character
    begins; special tokens are empty."""
    head: int
    """Tokens before the gap. The gap has the completion's length minus K tokens, mostly none."""
    engine_logps: "array[float]"
    """(K,) float32, log-probabilities that the tokens were sampled with, nats; NaN where the engine returned none."""
    learner_logps: "array[float] | None" = None
    """(K,) float32, the learner's under the weights that generated the completion, nats. None if the learner did not
    read the completion, as one without advantage."""
    masked: bytes
    """(K,) 1 for a token without gradient though the completion has an advantage: excluded by a mask of the loss, or
    clipped."""
    results: bytes | None = None
    """(K,) 1 for a token of a tool's result, which the policy did not generate; None in a run without tools."""

    @property
    def texts(self) -> list[str]:
        """Text of each token, (K,)."""
        return [self.text[start:end].decode() for start, end in pairwise((0, *self.ends))]


@dataclass(frozen=True)
class LossTokens:
    """Tokens of a sampled completion as the loss read them, with the gap of `keep_ends`."""

    step: int
    """Step that the group was drawn for."""
    sample: Sample
    """Sample of that step that the completion belongs to."""
    index: int
    """Index of the completion in its group."""
    logps: "array[float]"
    """(K,) float32, the learner's log-probabilities, nats."""
    masked: bytes | None
    """(K,) 1 for a token without gradient; None if the completion was read outside of the loss."""


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
    sample: Sample | None = None
    """Reason for which texts and tokens are kept; None if they are not."""
    advantages: tuple[float, ...] | None = None
    """Advantage of each completion; None if the texts of this group are not kept."""
    tokens: tuple[TokenRecord, ...] | None = None
    """Tokens of each completion; None if they are not kept."""
    conversations: tuple[ConversationRecord, ...] | None = None
    """Turns and calls of each completion, and its messages if texts are kept; None in a run without tools."""


@dataclass(frozen=True)
class RolloutFile:
    """One file of `rollouts/`. One with the same steps and another size or time has been replaced."""

    first_step: int
    last_step: int
    name: str
    size: int
    """Bytes."""
    modified_ns: int
    """Time of the last change, nanoseconds since 1970."""


def attach_texts(group: GroupRecord, prompt: Sequence[Mapping[str, str]], completions: Sequence[str]) -> GroupRecord:
    """Return the group with its texts, without secrets, and of a size that is negligible beside a checkpoint's weights.

    Args:
        group: a group without texts.
        prompt: chat messages.
        completions: (num_generations,), in the order of the rewards.
    """
    limit = min(TEXT_BYTES, GROUP_BYTES // max(1, len(completions)))
    return replace(
        group,
        prompt=recorded_text(prompt_text(prompt), TEXT_BYTES),
        completions=tuple(recorded_text(text, limit) for text in completions),
    )


def prompt_text(prompt: Sequence[Mapping[str, str]]) -> str:
    """Return chat messages as one text; if there are several, each is prefixed with its role."""
    return "\n\n".join(m["content"] if len(prompt) == 1 else f"{m['role']}: {m['content']}" for m in prompt)


def without_texts(group: GroupRecord) -> GroupRecord:
    """Return the group without texts and tokens, which take most of its memory."""
    conversations = without_messages(group.conversations)
    return replace(
        group, prompt=None, completions=None, sample=None, advantages=None, tokens=None, conversations=conversations
    )


def keep_ends(count: int, completions: int) -> tuple[int, int]:
    """Return how many of a completion's tokens are recorded: the first ones, and the last ones.

    Args:
        count: tokens of the completion.
        completions: completions of its group.
    """
    limit = min(COMPLETION_TOKENS, max(2, GROUP_TOKENS // max(1, completions)))
    if count <= limit:
        return count, 0
    return limit - limit // 3, limit // 3


def cut_middle(values: B, head: int, tail: int) -> B:
    """Return the first `head` and the last `tail` values."""
    if head + tail >= len(values):
        return values
    return values[:head] + values[len(values) - tail :]


def bound_text(tokens: TokenRecord, limit: int) -> TokenRecord:
    """Leave out tokens next to the gap until the text has at most `limit` bytes: a vocabulary may have long tokens."""
    if len(tokens.text) <= limit:
        return tokens
    sizes = _sizes(tokens)
    has_gap = tokens.head < len(sizes)
    head = min(tokens.head, _count_fitting(sizes, limit - limit // 3))
    tail = min(len(sizes) - (tokens.head if has_gap else head), _count_fitting(sizes[::-1], limit // 3))
    kept = np.concatenate([sizes[:head], sizes[len(sizes) - tail :]])
    first, last = int(sizes[:head].sum()), int(sizes[len(sizes) - tail :].sum())
    return replace(
        tokens,
        text=tokens.text[:first] + tokens.text[len(tokens.text) - last :],
        ends=array("i", np.cumsum(kept).astype(np.int32).tobytes()),
        head=head,
        engine_logps=cut_middle(tokens.engine_logps, head, tail),
        learner_logps=None if tokens.learner_logps is None else cut_middle(tokens.learner_logps, head, tail),
        masked=cut_middle(tokens.masked, head, tail),
        results=None if tokens.results is None else cut_middle(tokens.results, head, tail),
    )


def without_token_texts(tokens: TokenRecord) -> TokenRecord:
    """Return the tokens with empty texts: those of a completion with a secret, which may span several tokens."""
    return replace(tokens, text=b"", ends=array("i", bytes(4 * len(tokens.ends))))


def _sizes(tokens: TokenRecord) -> NDArray[np.int32]:
    """Return the bytes of each token's text, (K,)."""
    return np.diff(np.frombuffer(tokens.ends, np.int32), prepend=np.int32(0))


def _count_fitting(sizes: NDArray[np.int32], limit: int) -> int:
    """Return the number of first sizes that add up to at most `limit`."""
    return int(np.searchsorted(np.cumsum(sizes), limit, side="right"))


def add_loss_tokens(groups: Sequence[GroupRecord], rows: Iterable[LossTokens]) -> list[GroupRecord]:
    """Add the learner's log-probabilities and the loss's masks of their tokens to the sampled groups.

    Args:
        groups: in any order.
        rows: completions as the loss read them, on any worker. If a completion was read several times (`grpo.epochs`),
            the log-probabilities of the first row and the mask of the last one count; rows of other groups are ignored.
    """
    logps: dict[tuple[int, Sample, int], array[float]] = {}
    masks: dict[tuple[int, Sample, int], bytes] = {}
    for row in rows:
        place = (row.step, row.sample, row.index)
        logps.setdefault(place, row.logps)
        if row.masked is not None:
            masks[place] = row.masked

    def joined(group: GroupRecord, index: int, tokens: TokenRecord) -> TokenRecord:
        assert group.sample is not None and group.advantages is not None
        place, tail = (group.step, group.sample, index), len(tokens.ends) - tokens.head
        if place in logps:
            tokens = replace(tokens, learner_logps=cut_middle(logps[place], tokens.head, tail))
        # Without an advantage no token has a gradient, whatever the loss masks.
        if place in masks and group.advantages[index]:
            tokens = replace(tokens, masked=cut_middle(masks[place], tokens.head, tail))
        return tokens

    return [
        group
        if group.tokens is None
        else replace(group, tokens=tuple(joined(group, index, each) for index, each in enumerate(group.tokens)))
        for group in groups
    ]


def groups_table(
    groups: Sequence[GroupRecord],
    previous: "pa.Table | None" = None,
    with_texts: bool = False,
    with_tokens: bool = False,
    with_conversations: bool = False,
) -> "pa.Table":
    """Convert groups to a table whose columns are fields of `GroupRecord`.

    Args:
        groups: one row each, in this order.
        previous: table whose rows come first; None: no rows.
        with_texts: include the columns of the samples but `tokens`, which take far more memory than the others.
        with_tokens: include all columns but those of conversations.
        with_conversations: include the columns of conversations, `messages` and `result_tokens` as those of the
            samples above.
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
    }
    if with_texts or with_tokens:
        texts, numbers = pa.list_(pa.string()), pa.list_(pa.float32())
        types |= {"prompt": pa.string(), "completions": texts, "sample": pa.string(), "advantages": numbers}
    columns = {name: pa.array([getattr(group, name) for group in groups], type) for name, type in types.items()}
    if with_tokens:
        columns["tokens"] = _token_column([group.tokens for group in groups])
    if with_conversations:
        rows = [conversation_values(group.conversations) for group in groups]
        for name, type in conversation_types(with_messages=with_texts or with_tokens).items():
            columns[name] = pa.array([row[name] for row in rows], type)
    if with_conversations and with_tokens:
        columns["result_tokens"] = pa.array(map(_result_tokens, groups), pa.list_(pa.list_(pa.bool_())))
    table = pa.table(columns)
    return table if previous is None else pa.concat_tables([previous, table])


def _result_tokens(group: GroupRecord) -> list[NDArray[np.bool_]] | None:
    """Return the flags of the tokens of each completion; None without tokens, and in a run without tools."""
    if group.tokens is None or group.conversations is None:
        return None
    return [np.frombuffer(each.results or bytes(len(each.ends)), np.bool_) for each in group.tokens]


def _token_column(groups: Sequence[tuple[TokenRecord, ...] | None]) -> "pa.Array":
    """Return the column `tokens`: for each group a list with a struct for each completion, or null.

    Built from whole buffers: a Python object for each of 10^5 tokens would take longer than a short step.
    """
    import pyarrow as pa

    flat = [tokens for group in groups for tokens in group or ()]
    offsets = _offsets(len(tokens.ends) for tokens in flat)
    sizes = [_sizes(tokens) for tokens in flat]
    texts = pa.StringArray.from_buffers(
        int(offsets[-1]),
        pa.py_buffer(_offsets(_joined(sizes, np.int32)).tobytes()),
        pa.py_buffer(b"".join(tokens.text for tokens in flat)),
    )
    is_unread = np.array([tokens.learner_logps is None for tokens in flat], dtype=bool)
    unread = [tokens.learner_logps or array("f", bytes(4 * len(tokens.ends))) for tokens in flat]
    fields = {
        "texts": pa.ListArray.from_arrays(offsets, texts),
        "engine_logps": pa.ListArray.from_arrays(offsets, _joined((each.engine_logps for each in flat), np.float32)),
        "learner_logps": pa.ListArray.from_arrays(offsets, _joined(unread, np.float32), mask=pa.array(is_unread)),
        "masked": pa.ListArray.from_arrays(
            offsets, pa.array(_joined((each.masked for each in flat), np.uint8).astype(bool))
        ),
        "head": pa.array([tokens.head for tokens in flat], pa.int32()),
    }
    completions = pa.StructArray.from_arrays(list(fields.values()), list(fields))
    is_null = np.array([group is None for group in groups], dtype=bool)
    return pa.ListArray.from_arrays(_offsets(len(group or ()) for group in groups), completions, mask=pa.array(is_null))


def _offsets(lengths: "Iterable[int]") -> NDArray[np.int32]:
    """Return the offsets of consecutive parts of these lengths, the first of which is 0."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def _joined(parts: Iterable[Any], kind: type[np.generic]) -> NDArray[Any]:
    """Concatenate buffers of numbers; empty without parts."""
    return np.concatenate([np.empty(0, kind), *(np.frombuffer(part, kind) for part in parts)])


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
        limit: largest size of the table, bytes; None for a run of one's own, which may be of any length.

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
    """Read the groups of some steps, in the order of steps; other steps' files, and most of their rows, are not read.

    Args:
        first, last: the steps, both included; without `last` all from the first one on.
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
    return _drop_empty_conversations(table)


def _drop_empty_conversations(table: "pa.Table") -> "pa.Table":
    """Drop the columns of conversations if no group has any."""
    if table["turns"].null_count < len(table):
        return table
    return table.drop_columns([name for name in CONVERSATION_COLUMNS if name in table.column_names])


def importance_ratios(tokens: Mapping[str, Any]) -> list[float | None]:
    """Return exp(learner - engine) of each token, (K,), for an entry of the column `tokens`.

    None where one of the two log-probabilities is unknown. A ratio of 1 means that both computed the same.
    """
    learner, engine = tokens["learner_logps"], tokens["engine_logps"]
    if learner is None:
        return [None] * len(engine)
    # A file may be damaged or hostile: exp of a gap beyond 700 does not exist.
    gaps = [
        math.nan if ours is None or theirs is None else ours - theirs
        for ours, theirs in zip(learner, engine, strict=False)
    ]
    return [math.exp(min(gap, 700.0)) if math.isfinite(gap) else None for gap in gaps]


def drop_rollouts_after(folder: RunFolder, step: int) -> list[str]:
    """Remove the groups of all steps after `step`: a run that resumes from this step takes those steps again.

    Returns:
        The names of the removed files. A file with steps before and after `step` is replaced by one without the later
        steps and not named; files that were written between two checkpoints never are of this kind.
    """
    removed = []
    for file in list_rollout_files(folder):
        if file.last_step <= step:
            continue
        if file.first_step <= step:
            schema = groups_table([], with_tokens=True, with_conversations=True).schema
            kept = _read_table(folder, file.name, schema, last=step)
            _write_table(folder, _drop_empty_conversations(kept))
        else:
            removed.append(file.name)
        folder.filesystem.delete_file(folder.path(FOLDER, file.name))
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
                dict.fromkeys(CONVERSATION_COLUMNS),
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

    steps = pc.min_max(table["step"]).as_py()
    name = f"steps-{steps['min']:08d}-{steps['max']:08d}.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.sort_by(_SORT_KEYS),
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
        temporary.write_bytes(sink.getvalue())
        os.replace(temporary, folder.path(FOLDER, name))
    finally:
        temporary.unlink(missing_ok=True)
    return f"{FOLDER}/{name}"
