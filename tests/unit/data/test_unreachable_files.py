"""Tests of reading problems from storage that cannot be reached for a while."""

import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import fsspec
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from grpo_ray.data import files
from grpo_ray.data.files import file_shards
from grpo_ray.errors import DataError
from grpo_ray.storage import retry

ROWS = [{"prompt": f"What is {n} + 1? {'x' * 600}", "solution": f"{n + 1}"} for n in range(40)]
"""Rows whose csv file is read in several blocks, so that a failure comes after rows have been yielded."""


class FailingFile(io.FileIO):
    """File whose reads beyond a byte fail, while there are failures left."""

    def __init__(self, path: str, owner: "FailingFileSystem"):
        super().__init__(path, "rb")
        self._owner = owner

    def readinto(self, buffer: Any) -> int:
        self._owner.fail_at(self.tell() + len(buffer))
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._owner.fail_at(os.fstat(self.fileno()).st_size)
        return super().readall()


class FailingFileSystem(LocalFileSystem):
    """Local files under `failing://`."""

    protocol = "failing"
    cachable = False
    failures: ClassVar[list[Exception]] = []
    """Errors of the next reads, in order."""
    beyond = 0
    """Byte from which on reads fail."""

    @classmethod
    def fail_at(cls, end: int) -> None:
        if end > cls.beyond and cls.failures:
            raise cls.failures.pop(0)

    def exists(self, path: str, **settings: Any) -> bool:
        self.fail_at(1 << 60)
        return super().exists(path, **settings)

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> Any:
        return io.BufferedReader(FailingFile(path, self), 64)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """Return the list of errors that the next reads of `failing://` files raise; nothing waits."""
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(files, "LINES_PER_SHARD", 15)
    monkeypatch.setattr(files, "PARQUET_BATCH_ROWS", 4)
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    FailingFileSystem.failures, FailingFileSystem.beyond = [], 0
    yield FailingFileSystem.failures
    FailingFileSystem.failures = []


@pytest.fixture(params=["jsonl", "csv", "parquet"])
def problems(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of a file of `ROWS`, in each format."""
    path = tmp_path / f"some.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=20)
    elif request.param == "csv":
        path.write_text("prompt,solution\n" + "".join(f"{row['prompt']},{row['solution']}\n" for row in ROWS))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"failing://{path}"


def stale() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def read(path: str) -> list[str]:
    return [problem.solution for shard in file_shards(path) for problem in shard.read()]


@pytest.mark.parametrize("count", [1, 3])
def test_stale_file_while_rows_are_read_repeats_and_loses_none(
    problems: str, failures: list[Exception], count: int
) -> None:
    shards = file_shards(problems)
    FailingFileSystem.beyond = os.path.getsize(problems.removeprefix("failing://")) // 2
    failures.extend(stale() for _ in range(count))
    rows = [problem for shard in shards for problem in shard.read()]
    assert [row.solution for row in rows] == [row["solution"] for row in ROWS]
    # The number of a row, which messages name, is right after the failure too.
    assert [row.where.rpartition(" ")[2] for row in rows] == [str(n + 1) for n in range(len(ROWS))]
    assert not failures


def test_stale_file_while_files_are_found_and_divided_is_waited_out(problems: str, failures: list[Exception]) -> None:
    failures.extend(stale() for _ in range(3))
    assert read(problems) == [row["solution"] for row in ROWS] and not failures


def test_storage_that_stays_unreachable_is_no_data_error(
    problems: str, failures: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = file_shards(problems)
    monkeypatch.setattr(retry._StorageAttempts, "are_over", lambda self, state: state.attempt_number >= 3)
    failures.extend(stale() for _ in range(10))
    with pytest.raises(OSError, match=r"some\.\w+: .*Stale file handle") as caught:
        list(shards[0].read())
    assert caught.value.errno == errno.ESTALE and retry.is_transient(caught.value)


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EISDIR, "a folder")]
)
def test_error_that_waiting_cannot_mend_ends_the_run(problems: str, failures: list[Exception], error: OSError) -> None:
    shards = file_shards(problems)
    failures.append(error)
    with pytest.raises(DataError, match=rf"some\.\w+: .*{error.strerror}"):
        list(shards[0].read())


REQUEST = httpx.Request("GET", "https://example.org/a.jsonl")


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (httpx.ConnectError("refused"), True),
        (httpx.ReadTimeout("slow"), True),
        (httpx.HTTPStatusError("503", request=REQUEST, response=httpx.Response(503)), True),
        (httpx.HTTPStatusError("404", request=REQUEST, response=httpx.Response(404)), False),
        (aiohttp.ServerDisconnectedError(), True),
        (aiohttp.ClientPayloadError("cut"), True),
        (ValueError("503"), False),
        (stale(), True),
        (FileNotFoundError(errno.ENOENT, "none"), False),
    ],
)
def test_is_transient_knows_the_errors_of_filesystems(error: Exception, transient: bool) -> None:
    assert retry.is_transient(error) is transient


def test_connection_error_of_a_library_is_an_os_error_with_the_files_name(
    problems: str, failures: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = file_shards(problems)
    monkeypatch.setattr(retry._StorageAttempts, "are_over", lambda self, state: True)
    failures.extend(httpx.ConnectError("refused") for _ in range(10))
    with pytest.raises(ConnectionError, match=r"^failing:///.*some\.\w+: .*refused"):
        list(shards[0].read())
