"""Open rollouts: completions that are sampled over several optimizer steps, and their file in a checkpoint.

With `rollout.max_staleness`, the end of a step leaves completions for later steps: finished ones, and ones that the
next rounds continue. A checkpoint holds them as one row each. A resumed run draws the same problems again, and finds
the completions by their keys, whatever its number of workers.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_ray.errors import CheckpointError
from grpo_ray.storage.parquet import read_columns, row_group_rows

if TYPE_CHECKING:
    import pyarrow as pa

FILE_NAME = "open_rollouts.parquet"
"""File of a checkpoint."""
GROUP_TOKENS = 1 << 20
"""Tokens of the rows that are read together, unless a single one has more."""
TOTAL_BYTES = 1 << 36
"""Largest size of the file's columns. It is the run's own file, which a resumed run has to read."""
SETTINGS = b"grpo_ray.settings"
"""Key of the file's metadata with the settings that the completions depend on, as JSON."""


TOKEN_COLUMNS = {"token_ids": "i", "logps": "f", "unprocessed_logps": "f", "own": "b"}
"""Column with a value for each token -> type code of `array`."""


@dataclass(frozen=True)
class RolloutKey:
    """Identity of a completion in a run."""

    source: str
    """Source of a mixture; "" for a single dataset."""
    problem: str
    """Id of the problem."""
    epoch: int
    index: int
    """Number of the completion in its group."""


@dataclass(kw_only=True)
class OpenRollout:
    """Completion of a later step, with its tokens so far. T tokens."""

    key: RolloutKey
    batch: int
    """Number of optimizer steps before the step that trains on it."""
    prompt: str
    """Digest of the prompt's token ids (`prompt_digest`)."""
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    """(T,)"""
    logps: "array[float]" = field(default_factory=lambda: array("f"))
    """(T,) log-probabilities with which the tokens were sampled, nats; NaN where the engine returned none."""
    unprocessed_logps: "array[float]" = field(default_factory=lambda: array("f"))
    """(T,) the same before filters and penalties; empty if the run uses none."""
    own: "array[int]" = field(default_factory=lambda: array("b"))
    """(T,) 1 on tokens that the policy sampled, 0 on results of tools; empty without tools."""
    conversation: dict[str, Any] | None = None
    """State of its turns, in JSON types (`OpenConversation.state`); None without tools, and before its first turn."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Version of the weights, and number of the tokens sampled with it, for each segment, in order."""
    finished: bool = False
    """True if no token is missing."""

    @property
    def began(self) -> int:
        """Version of the first token; the completion's batch if it has none yet."""
        return self.runs[0][0] if self.runs else self.batch

    def add_segment(
        self,
        version: int,
        token_ids: Sequence[int],
        logps: Sequence[float | None],
        unprocessed_logps: Sequence[float | None],
        own: Sequence[int] = (),
    ) -> None:
        """Append the tokens that a round has sampled, (T,) each; `unprocessed_logps` and `own` may be empty."""
        self.token_ids.extend(token_ids)
        self.logps.extend(map(_number, logps))
        self.unprocessed_logps.extend(map(_number, unprocessed_logps))
        self.own.extend(own)
        self.runs.append((version, len(token_ids)))

    def delete_tokens(self) -> None:
        """Begin anew, without tokens."""
        for column in (self.token_ids, self.logps, self.unprocessed_logps, self.own, self.runs):
            del column[:]
        self.conversation, self.finished = None, False


def optional_logps(logps: "array[float]") -> list[float | None]:
    """Return log-probabilities with None in place of NaN."""
    return [None if math.isnan(each) else each for each in logps]


def _number(logp: float | None) -> float:
    return math.nan if logp is None else logp


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Hash the token ids of a prompt into 16 hex digits."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).hexdigest()


def save_open_rollouts(folder: Path, rollouts: Sequence[OpenRollout], settings: Mapping[str, Any]) -> None:
    """Write open rollouts into a checkpoint's folder; no file if there are none.

    Args:
        settings: settings that the completions depend on, in JSON types.
    """
    if not rollouts:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    columns = {
        "batch": [each.batch for each in rollouts],
        "source": [each.key.source for each in rollouts],
        "problem": [each.key.problem for each in rollouts],
        "epoch": [each.key.epoch for each in rollouts],
        "index": [each.key.index for each in rollouts],
        "prompt": [each.prompt for each in rollouts],
        "token_ids": [each.token_ids for each in rollouts],
        "logps": [each.logps for each in rollouts],
        "unprocessed_logps": [each.unprocessed_logps for each in rollouts],
        "own": [each.own for each in rollouts],
        "conversation": [None if each.conversation is None else json.dumps(each.conversation) for each in rollouts],
        "versions": [[version for version, _ in each.runs] for each in rollouts],
        "version_tokens": [[tokens for _, tokens in each.runs] for each in rollouts],
        "finished": [each.finished for each in rollouts],
    }
    arrays = [pa.array(columns[column.name], type=column.type) for column in schema]
    metadata = {SETTINGS: json.dumps(settings, sort_keys=True).encode()}
    schema = schema.with_metadata(metadata)
    table = pa.Table.from_arrays(arrays, schema=schema)
    rows = max(1, GROUP_TOKENS // max(1, *(len(each.token_ids) for each in rollouts)))
    pq.write_table(table, folder / FILE_NAME, row_group_size=row_group_rows(len(rollouts), rows))


def load_open_rollouts(folder: Path) -> tuple[list[OpenRollout], dict[str, Any]]:
    """Read the open rollouts of a checkpoint, and the settings that they depend on; both empty without a file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    import pyarrow as pa

    path = folder / FILE_NAME
    if not path.exists():
        return [], {}
    try:
        with pa.memory_map(str(path)) as stream:
            table = read_columns(stream, _schema(), {"own": [], "conversation": None}, limit=TOTAL_BYTES)
        settings = dict(json.loads(table.schema.metadata[SETTINGS]))
        rollouts = [rollout for batch in table.to_batches() for rollout in _rollouts_of(batch)]
    except (pa.ArrowException, ValueError, TypeError, KeyError, OSError, OverflowError) as error:
        raise CheckpointError(f"{path}: cannot be read as open rollouts: {error}") from error
    return rollouts, settings


def _rollouts_of(batch: "pa.RecordBatch") -> Iterator[OpenRollout]:
    """Convert rows of the file; columns of tokens are copied as a whole, without an object for each token."""
    others = batch.drop_columns(list(TOKEN_COLUMNS)).to_pylist()
    columns = {name: _slices(batch.column(name), kind) for name, kind in TOKEN_COLUMNS.items()}
    for place, row in enumerate(others):
        yield _rollout_of(row | {name: slices[place] for name, slices in columns.items()})


def _slices(column: "pa.ListArray", kind: str) -> "list[array[Any]]":
    """Return the values of each list as an array of a type code."""
    values, offsets = column.values.to_numpy(), column.offsets.to_pylist()
    return [array(kind, values[first:end].tobytes()) for first, end in pairwise(offsets)]


def _rollout_of(row: Mapping[str, Any]) -> OpenRollout:
    """Convert a row of the file. Raises ValueError if its columns do not match."""
    tokens, runs = len(row["token_ids"]), list(zip(row["versions"], row["version_tokens"], strict=True))
    if sum(count for _, count in runs) != tokens or len(row["logps"]) != tokens:
        raise ValueError(f"the completion of problem {row['problem']} has columns of different lengths")
    if len(row["unprocessed_logps"]) not in (0, tokens):
        raise ValueError(f"unprocessed_logps of problem {row['problem']} has another length than token_ids")
    conversation = None if row["conversation"] is None else dict(json.loads(row["conversation"]))
    if len(row["own"]) != (0 if conversation is None else tokens):
        raise ValueError(f"own of problem {row['problem']} has another length than token_ids")
    return OpenRollout(
        key=RolloutKey(row["source"], row["problem"], row["epoch"], row["index"]),
        batch=row["batch"],
        prompt=row["prompt"],
        token_ids=row["token_ids"],
        logps=row["logps"],
        unprocessed_logps=row["unprocessed_logps"],
        own=row["own"],
        conversation=conversation,
        runs=runs,
        finished=row["finished"],
    )


def _schema() -> "pa.Schema":
    import pyarrow as pa

    return pa.schema(
        {
            "batch": pa.int64(),
            "source": pa.string(),
            "problem": pa.string(),
            "epoch": pa.int64(),
            "index": pa.int64(),
            "prompt": pa.string(),
            "token_ids": pa.list_(pa.int32()),
            "logps": pa.list_(pa.float32()),
            "unprocessed_logps": pa.list_(pa.float32()),
            "own": pa.list_(pa.int8()),
            "conversation": pa.string(),
            "versions": pa.list_(pa.int64()),
            "version_tokens": pa.list_(pa.int64()),
            "finished": pa.bool_(),
        }
    )
