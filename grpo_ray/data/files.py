"""Problems in parquet, jsonl and csv files: local, s3://, gs://, hf://.

A file is divided into shards (a parquet row group, or consecutive lines) that are read independently, in any process.
A shard has the file's name and the number of its first row, so that every error message can name the bad row.

Operations on unreachable storage are retried for `DEFAULT_RETRY_SECONDS`, like those on the run folder. If they still
fail, they raise an OSError, after which the workers are restarted. Every other failure is a DataError, which ends the
run.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, cast

from grpo_ray.config.sources import FILE_SUFFIXES
from grpo_ray.data.demonstrations import COMPLETION, demonstrated_text
from grpo_ray.data.problem import Problem, parse_problem
from grpo_ray.data.program_tests import parse_tests
from grpo_ray.errors import DataError, GrpoRayError
from grpo_ray.storage.retry import is_transient, retry_transient

LINES_PER_SHARD = 5_000
"""Lines of one shard of a jsonl file."""
PARQUET_BATCH_ROWS = 1_000
"""Rows of a parquet file that are decoded at once."""


@dataclass(frozen=True, kw_only=True)
class FileShard:
    """Consecutive rows of one file: a reference to them, cheap to send to another process."""

    path: str
    """Path or URI of the file."""
    first_row: int
    """Number of the first row in the file, from 1."""
    num_rows: int
    """Number of rows, including blank lines of a jsonl file, which hold no problem."""
    offset: int = 0
    """Start of the shard: number of the row group in a parquet file, position in bytes in a jsonl file."""
    length: int = 0
    """Bytes of a jsonl shard."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column name -> the file's column name."""
    system_prompt: str | None = None
    needs_solution: bool = True
    """False if rows may lack a solution."""
    columns_decide: bool = False
    """True if the columns determine the task (`parse_problem`)."""
    has_tests: bool = False
    """True if the column `tests` holds tests of programs, which are checked."""
    is_demonstration: bool = False
    """True if the rows are demonstrations, whose column `completion` is checked."""
    ignores_completion: bool = False
    """True if a column `completion` is left out, for problems that are only measured beside demonstrations."""

    def read(self) -> Iterator[Problem]:
        """Yield the shard's problems in the file's order.

        Raises:
            DataError: a row cannot be used; the message names file and row.
            OSError: storage could not be reached for `DEFAULT_RETRY_SECONDS`; the message names the file.
        """
        for number, row in _read_rows(self):
            where = f"{self.path}, row {number}"
            if self.columns:
                row = _rename(row, self.columns, where)
            if self.ignores_completion:
                row = {name: value for name, value in row.items() if name != COMPLETION}
            try:
                problem = parse_problem(
                    row,
                    where=where,
                    system_prompt=self.system_prompt,
                    needs_solution=self.needs_solution,
                    columns_decide=self.columns_decide,
                    is_demonstration=self.is_demonstration,
                )
                if self.has_tests:
                    check_tests(problem)
                if self.is_demonstration:
                    demonstrated_text(problem)
            except DataError as error:
                raise DataError(f"{error}{_renamed_columns(str(error), self.columns)}") from None
            yield problem


def _renamed_columns(message: str, columns: Mapping[str, str]) -> str:
    """Return a note for an error message: the file's names of the renamed columns that it mentions; "" if none."""
    named = [f"'{ours}' is its column '{theirs}'" for ours, theirs in columns.items() if f"'{ours}'" in message]
    return f" ({', '.join(named)})" if named else ""


def check_tests(problem: Problem) -> None:
    """Raise DataError if the tests of a problem have no known form; the message names file and row."""
    columns = problem.columns
    if columns.get("tests") is None:
        return
    try:
        parse_tests(columns["tests"], columns.get("entry_point"), columns.get("setup"))
    except DataError as error:
        raise DataError(f"{problem.where}: {error}") from None


def file_shards(
    paths: str, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> list[FileShard]:
    """Find files and divide them into shards, without parsing their rows.

    Args:
        paths: path, folder, glob or URI.
        columns: our column name -> the files' column name.
        system_prompt: added to prompts without a system message.

    Returns:
        The shards of all files, in the order of the files' names.

    Raises:
        DataError: there are no files or no rows, or a file cannot be opened.
        OSError: storage could not be reached for `DEFAULT_RETRY_SECONDS`; the message names the file.
    """
    shards = [
        FileShard(**bounds, path=path, columns=dict(columns or {}), system_prompt=system_prompt)
        for path in retry_transient(partial(find_files, paths))
        for bounds in retry_transient(partial(_divide, path))
    ]
    if not sum(shard.num_rows for shard in shards):
        raise DataError(f"{paths}: there are no rows")
    return shards


def find_files(paths: str) -> list[str]:
    """Return the parquet, jsonl and csv files of a path, folder, glob or URI, sorted by name.

    Raises:
        DataError: there are none, a single file has another suffix, or the storage cannot be opened.
        OSError: the storage cannot be reached.
    """
    import fsspec

    with _reading(f"{paths}: cannot be opened"):
        filesystem, path = fsspec.url_to_fs(paths)
        if filesystem.isdir(path):
            names = [name for name in filesystem.find(path) if name.endswith(FILE_SUFFIXES)]
        elif filesystem.exists(path):
            names = [path]
        else:
            names = [name for name in filesystem.glob(path) if name.endswith(FILE_SUFFIXES)]
    if not names:
        raise DataError(f"{paths}: no such file or folder, or no {', '.join(FILE_SUFFIXES)} file in it")
    if not all(name.endswith(FILE_SUFFIXES) for name in names):
        raise DataError(f"{paths}: not a {', '.join(FILE_SUFFIXES)} file")
    return [filesystem.unstrip_protocol(name).removeprefix("file://") for name in sorted(names)]


def _suffix(path: str) -> str:
    return path.rpartition(".")[2]


@contextmanager
def _reading(failure: str) -> Iterator[None]:
    """Convert the errors of storage and of file formats.

    Args:
        failure: beginning of the message: the file and the operation that failed.

    Raises:
        OSError: storage cannot be reached.
        DataError: any other OSError, ImportError or ValueError, or an OverflowError (a date that Python does not have).
            Errors of other classes pass unchanged.
    """
    try:
        yield
    except GrpoRayError:
        raise
    except Exception as error:  # the client of a remote storage may raise any class for a transient failure
        if is_transient(error):
            number, text = getattr(error, "errno", None), getattr(error, "strerror", None) or error
            message = f"{failure}: {text}"
            raise (OSError(number, message) if number else ConnectionError(message)) from None
        if isinstance(error, OSError | ImportError | ValueError | OverflowError):
            raise DataError(f"{failure}: {error}") from None
        raise


def _open_file(path: str) -> BinaryIO:
    import fsspec

    with _reading(f"{path}: cannot be read"):
        return cast(BinaryIO, fsspec.open(path, "rb").open())


def _divide(path: str) -> list[dict[str, Any]]:
    """Return the bounds of a file's shards, as fields of `FileShard`."""
    return list(DIVIDE[_suffix(path)](path))


def _read_rows(shard: FileShard) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the values of each row; wait while storage is unreachable, then continue."""
    rows, last = READ_ROWS[_suffix(shard.path)](shard), shard.first_row - 1
    while True:
        try:
            following = next(rows, None)
        except OSError:
            rows, following = retry_transient(partial(_read_rows_after, shard, last))
        if following is None:
            return
        last = following[0]
        yield following


def _read_rows_after(
    shard: FileShard, last: int
) -> tuple[Iterator[tuple[int, dict[str, Any]]], tuple[int, dict[str, Any]] | None]:
    """Read a shard again, up to the row that follows row `last`.

    Returns:
        Iterator over the rows after that one, and that row, or None if there is none.
    """
    rows = READ_ROWS[_suffix(shard.path)](shard)
    return rows, next((row for row in rows if row[0] > last), None)


def _divide_parquet(path: str) -> Iterator[dict[str, Any]]:
    """Yield the bounds of each row group: fields of `FileShard`, as in all functions of `DIVIDE`."""
    import pyarrow.parquet as pq

    with _open_file(path) as file, _reading(f"{path}: is not a parquet file"):
        opened = pq.ParquetFile(file)
        metadata, names = opened.metadata, opened.schema_arrow.names
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{path}: has the column '{repeated}' twice; rename one of them")
    first = 1
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        yield {"first_row": first, "num_rows": rows, "offset": group}
        first += rows


def _read_parquet(shard: FileShard) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the values of each row, as in all functions of `READ_ROWS`."""
    import pyarrow.parquet as pq

    number = shard.first_row
    with _open_file(shard.path) as file:
        with _reading(f"{shard.path}: cannot be read"):
            batches = pq.ParquetFile(file).iter_batches(batch_size=PARQUET_BATCH_ROWS, row_groups=[shard.offset])
        while True:
            with _reading(f"{shard.path}: cannot be read from row {number} on"):
                batch = next(batches, None)
                rows = None if batch is None else batch.to_pylist()
            if rows is None:
                return
            for row in rows:
                yield number, row
                number += 1


def _divide_jsonl(path: str) -> Iterator[dict[str, Any]]:
    """Yield the bounds of each `LINES_PER_SHARD` lines."""
    with _open_file(path) as file, _reading(f"{path}: cannot be read"):
        first, offset, position, rows = 1, 0, 0, 0
        for line in file:
            position += len(line)
            rows += 1
            if rows == LINES_PER_SHARD:
                yield {"first_row": first, "num_rows": rows, "offset": offset, "length": position - offset}
                first, offset, rows = first + rows, position, 0
        if rows:
            yield {"first_row": first, "num_rows": rows, "offset": offset, "length": position - offset}


def _read_jsonl(shard: FileShard) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open_file(shard.path) as file, _reading(f"{shard.path}: cannot be read"):
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


def _divide_csv(path: str) -> Iterator[dict[str, Any]]:
    # One shard: a quoted field may contain line ends, so no row can be found without reading all rows before it.
    yield {"first_row": 1, "num_rows": sum(1 for _ in _iter_csv(path))}


def _read_csv(shard: FileShard) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in enumerate(_iter_csv(shard.path), start=shard.first_row):
        if None in row:
            raise DataError(f"{shard.path}, row {number}: has more fields than the header")
        yield number, row


def _iter_csv(path: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    with (
        _open_file(path) as file,
        _reading(f"{path}: is not a csv file"),
        io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
    ):
        # Strict, because otherwise a quote without its end takes all rows after it into a field.
        rows = csv.DictReader(text, strict=True)
        number = 0
        try:
            names = rows.fieldnames or ()
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise DataError(f"{path}: the header has the column '{repeated}' twice; rename one of them")
            number = 1
            for row in rows:
                yield row
                number += 1
        except csv.Error as error:
            place = f"row {number}" if number else "header"
            raise DataError(f"{path}, {place}: is not csv: {error}") from None


DIVIDE = {"parquet": _divide_parquet, "jsonl": _divide_jsonl, "csv": _divide_csv}
"""Suffix -> function(path) that yields the bounds of a file's shards."""
READ_ROWS = {"parquet": _read_parquet, "jsonl": _read_jsonl, "csv": _read_csv}
"""Suffix -> function(shard) that yields the number and the values of each row of a shard."""


def _rename(row: Mapping[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """Rename the mapped columns of a row to our names; a mapped column replaces a column that has our name."""
    for ours, theirs in columns.items():
        if theirs not in row:
            raise DataError(
                f"{where}: no column '{theirs}' (`columns` maps '{ours}' to it); the row has "
                f"{', '.join(sorted(map(str, row))) or 'no columns'}"
            )
    mapped = set(columns.values())
    return {k: v for k, v in row.items() if k not in mapped} | {ours: row[theirs] for ours, theirs in columns.items()}
