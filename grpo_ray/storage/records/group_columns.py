"""Arrow columns of groups: conversion from `GroupRecord`, and counts of their verdicts."""

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from grpo_ray.storage.records.conversation_columns import COLUMNS, conversation_types, conversation_values
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.tokens import TokenRecord, token_sizes

if TYPE_CHECKING:
    import pyarrow as pa

CONVERSATION_COLUMNS = (*COLUMNS, "result_tokens")
"""Columns that only files of runs with tools or environments have."""
DEFAULTS = dict.fromkeys(CONVERSATION_COLUMNS) | {"source": ""}
"""Columns that a file may lack -> their value then."""
SORT_KEYS = [("step", "ascending"), ("epoch", "ascending"), ("problem", "ascending")]


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
        with_texts: include the columns of samples except `tokens`; they take far more memory than the other columns.
        with_tokens: include all columns except those of conversations.
        with_conversations: include the columns of conversations; `messages` only together with texts or tokens,
            `result_tokens` only together with tokens.
    """
    import pyarrow as pa

    types = {
        "step": pa.int64(),
        "epoch": pa.int64(),
        "problem": pa.string(),
        "source": pa.string(),
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
    """Return the column `result_tokens` of a group; None without recorded tokens, and in a run without tools."""
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
    sizes = [token_sizes(tokens) for tokens in flat]
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


def drop_empty_source(table: "pa.Table") -> "pa.Table":
    """Drop the column `source` of a run with a single dataset."""
    import pyarrow.compute as pc

    has_source = pc.any(pc.not_equal(table["source"], "")).as_py()
    return table if has_source else table.drop_columns(["source"])


def drop_empty_conversations(table: "pa.Table") -> "pa.Table":
    """Drop the columns of conversations if no group has any."""
    if table["turns"].null_count < len(table):
        return table
    return table.drop_columns([name for name in CONVERSATION_COLUMNS if name in table.column_names])


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
