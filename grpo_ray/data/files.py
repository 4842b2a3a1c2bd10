"""Problems in parquet, jsonl and csv files: local, s3://, gs://, hf://.

A file is read in shards (a parquet row group, a run of lines), each on its own, wherever there is a free core. Who
reads a shard knows the file and the number of its first row, so a bad row can be named wherever it turns up.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.data.problem import Problem, parse_problem
from grpo_ray.errors import DataError

SUFFIXES = (".parquet", ".jsonl", ".csv")
LINES_PER_SHARD = 5_000


@dataclass(frozen=True, kw_only=True)
class FileShard:
    """A run of rows of one file; small enough to hold in memory, cheap to send."""

    path: str
    """Path or URI of the file."""
    first_row: int
    """Number of the first row in the file, from 1."""
    rows: int
    """How many rows."""
    offset: int = 0
    """Where it begins: the row group of a parquet file, the byte of a jsonl file."""
    length: int = 0
    """Bytes of a jsonl shard."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column -> the file's."""
    system_prompt: str | None = None

    def read(self) -> Iterator[Problem]:
        """Yield the shard's problems in the file's order; DataError names the first bad row."""
        rows = {"parquet": _parquet_rows, "jsonl": _jsonl_rows, "csv": _csv_rows}[self.path.rpartition(".")[2]]
        for number, row in rows(self):
            where = f"{self.path}, row {number}"
            if self.columns:
                row = _rename(row, self.columns, where)
            yield parse_problem(row, where=where, system_prompt=self.system_prompt)


def file_shards(
    paths: str, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> list[FileShard]:
    """Find the files behind a path, folder, glob or URI, and cut them into shards without reading their rows.

    Files come in the order of their names. Raises DataError if there are none, or one cannot be opened.
    """
    shards: list[FileShard] = []
    for path in find_files(paths):
        cut = {"parquet": _parquet_shards, "jsonl": _jsonl_shards, "csv": _csv_shards}[path.rpartition(".")[2]]
        for shard in cut(path):
            shards.append(FileShard(**shard, path=path, columns=dict(columns or {}), system_prompt=system_prompt))
    if not sum(shard.rows for shard in shards):
        raise DataError(f"{paths}: the file has no rows")
    return shards


def find_files(paths: str) -> list[str]:
    """The parquet, jsonl and csv files behind a path, folder, glob or URI, sorted by name."""
    import fsspec

    try:
        filesystem, path = fsspec.url_to_fs(paths)
    except (ImportError, ValueError) as error:
        raise DataError(f"{paths}: cannot be opened: {error}") from None
    try:
        if filesystem.isdir(path):
            found = [name for name in filesystem.find(path) if name.endswith(SUFFIXES)]
        elif filesystem.exists(path):
            found = [path]
        else:
            found = [name for name in filesystem.glob(path) if name.endswith(SUFFIXES)]
    except OSError as error:
        raise DataError(f"{paths}: cannot be opened: {error}") from None
    if not found:
        raise DataError(f"{paths}: no such file or folder, or no {', '.join(SUFFIXES)} file in it")
    if not all(name.endswith(SUFFIXES) for name in found):
        raise DataError(f"{paths}: not a {', '.join(SUFFIXES)} file")
    return [filesystem.unstrip_protocol(name).removeprefix("file://") for name in sorted(found)]


def _open(path: str) -> Any:
    import fsspec

    try:
        return fsspec.open(path, "rb").open()
    except (OSError, ImportError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _parquet_shards(path: str) -> Iterator[dict[str, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _open(path) as file:
        try:
            metadata = pq.ParquetFile(file).metadata
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: is not a parquet file: {error}") from None
    first = 1
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        yield {"first_row": first, "rows": rows, "offset": group}
        first += rows


def _parquet_rows(shard: FileShard) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = shard.first_row
    with _open(shard.path) as file:
        batches = pq.ParquetFile(file).iter_batches(batch_size=1_000, row_groups=[shard.offset])
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(f"{shard.path}, row {number} and on: cannot be read: {error}") from None
            if batch is None:
                return
            for row in batch.to_pylist():
                yield number, row
                number += 1


def _jsonl_shards(path: str) -> Iterator[dict[str, int]]:
    """Cut at line ends; blank lines count as rows of the file but hold no problem."""
    with _open(path) as file:
        first, offset, position, rows = 1, 0, 0, 0
        for line in file:
            position += len(line)
            rows += 1
            if rows == LINES_PER_SHARD:
                yield {"first_row": first, "rows": rows, "offset": offset, "length": position - offset}
                first, offset, rows = first + rows, position, 0
        if rows:
            yield {"first_row": first, "rows": rows, "offset": offset, "length": position - offset}


def _jsonl_rows(shard: FileShard) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(shard.path) as file:
        file.seek(shard.offset)
        block = file.read(shard.length)
    for number, line in enumerate(io.BytesIO(block), start=shard.first_row):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{shard.path}, row {number}: is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{shard.path}, row {number}: must be a JSON object, not {type(row).__name__}")
        yield number, row


def _csv_shards(path: str) -> Iterator[dict[str, int]]:
    # One shard: a quoted field may hold line ends, so a csv file cannot be cut without reading it from the start.
    yield {"first_row": 1, "rows": sum(1 for _ in _csv_reader(path))}


def _csv_rows(shard: FileShard) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in enumerate(_csv_reader(shard.path), start=shard.first_row):
        if None in row:
            raise DataError(f"{shard.path}, row {number}: has more fields than the header")
        yield number, row


def _csv_reader(path: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        try:
            yield from csv.DictReader(text)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: is not a csv file: {error}") from None


def _rename(row: Mapping[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    for ours, theirs in columns.items():
        if theirs not in row:
            raise DataError(
                f"{where}: no column '{theirs}' (data.columns maps '{ours}' to it); the row has "
                f"{', '.join(sorted(map(str, row))) or 'no columns'}"
            )
    taken = set(columns.values())
    return {k: v for k, v in row.items() if k not in taken} | {ours: row[theirs] for ours, theirs in columns.items()}
