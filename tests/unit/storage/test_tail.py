"""Tests of the incremental reader of files that grow by lines: appending, cutting, replacing, half lines."""

from pathlib import Path
from typing import Any

import pytest

from grpo_ray.storage import tail as tail_module
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.tail import LineTail, NewLines

NAME = "metrics.jsonl"


@pytest.fixture(params=["local", "object store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path) if request.param == "local" else "mock://bucket/runs", "run")


def lines(new: NewLines) -> list[str]:
    assert not new.has_more
    return [line.decode() for line in new.lines]


def test_tail_growing_file_gives_each_line_once(folder: RunFolder) -> None:
    tail = LineTail(folder, NAME)
    assert tail.read() == NewLines([], False, False)
    folder.write_text("a\nb\n", NAME)
    assert lines(tail.read()) == ["a", "b"]
    assert lines(tail.read()) == []
    folder.write_text("a\nb\nc\n", NAME)
    new = tail.read()
    assert lines(new) == ["c"] and not new.is_reset


def test_tail_half_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text('{"step": 1}\n{"st', NAME)
    tail = LineTail(folder, NAME)
    assert lines(tail.read()) == ['{"step": 1}'] and tail.exists and tail.has_half_line
    with open(folder.path(NAME), "a") as file:
        file.write('ep": 2}\n')
    assert lines(tail.read()) == ['{"step": 2}'] and not tail.has_half_line


def test_tail_cut_file_is_read_from_its_start(folder: RunFolder) -> None:
    tail = LineTail(folder, NAME)
    folder.write_text("1 first\n2 first\n3 first\n", NAME)
    tail.read()
    folder.write_text("1 first\n", NAME)
    new = tail.read()
    assert new.is_reset and lines(new) == ["1 first"]


def test_tail_cut_and_longer_file_is_read_from_its_start(folder: RunFolder) -> None:
    """The run has gone back to step 1 and beyond its former end between two readings."""
    tail = LineTail(folder, NAME)
    folder.write_text("1 first\n2 first\n3 first\n", NAME)
    tail.read()
    folder.write_text("1 first\n2 again\n3 again\n4 again\n5 again\n", NAME)
    new = tail.read()
    assert new.is_reset and lines(new) == ["1 first", "2 again", "3 again", "4 again", "5 again"]


class _FailingFile:
    """File whose second read fails."""

    def __init__(self, file: Any) -> None:
        self._file, self._reads = file, 0

    def __enter__(self) -> "_FailingFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, place: int) -> None:
        self._file.seek(place)

    def read(self, size: int) -> bytes:
        self._reads += 1
        if self._reads == 2:
            raise FileNotFoundError("lost")
        data: bytes = self._file.read(size)
        return data


def test_tail_failed_reading_of_a_cut_file_still_voids_earlier_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(str(tmp_path), "run")
    tail = LineTail(folder, NAME)
    folder.write_text("1 first\n2 first\n3 first\n", NAME)
    tail.read()
    folder.write_text("1 again\n", NAME)
    filesystem = folder.filesystem

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(filesystem, name)

        def open_input_file(self, path: str) -> _FailingFile:
            return _FailingFile(filesystem.open_input_file(path))

    with monkeypatch.context() as patch:
        patch.setattr(folder, "filesystem", Failing())
        with pytest.raises(FileNotFoundError):
            tail.read()
    new = tail.read()
    assert new.is_reset and lines(new) == ["1 again"]


def test_tail_deleted_file_voids_earlier_lines_once(folder: RunFolder) -> None:
    tail = LineTail(folder, NAME)
    folder.write_text("a\n", NAME)
    tail.read()
    folder.delete_file(NAME)
    assert tail.read() == NewLines([], True, False)
    assert tail.read() == NewLines([], False, False)
    folder.write_text("b\n", NAME)
    assert lines(tail.read()) == ["b"]


def test_tail_long_file_is_read_in_blocks(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "BLOCK_BYTES", 10)
    monkeypatch.setattr(tail_module, "COMPARED_BYTES", 4)
    folder.write_text("aaaa\nbbbb\ncccc\n" + "d" * 25 + "\neeee\n", NAME)
    tail, found = LineTail(folder, NAME), []
    for _ in range(20):
        new = tail.read()
        found += new.lines
        assert not new.is_reset
        if not new.has_more:
            break
    # The line that is longer than a block is not read whole.
    assert found[:3] == [b"aaaa", b"bbbb", b"cccc"] and found[-1] == b"eeee" and b"d" * 25 not in found
