"""Tests of the records of held-out measurements: writing, reading, comparing, dropping steps that are taken again."""

import math
from pathlib import Path

import numpy as np
import pytest

from grpo_ray.errors import DataError
from grpo_ray.storage.records.heldout_files import (
    FILE_BYTES,
    TEXT_PROBLEMS,
    HeldoutRecord,
    bound_heldout_text,
    compare_measurements,
    drop_heldout_after,
    heldout_keys_with_records,
    list_heldout_files,
    read_heldout,
    read_measurement,
    read_measurements,
    write_heldout,
)
from grpo_ray.storage.run_folder import RunFolder

NAN = math.nan
CONDITIONS = {"count": 2, "sampling": {"temperature": 0.0}}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path / "step=7"), "run")


@pytest.fixture
def remote() -> RunFolder:
    return RunFolder("mock://bucket/runs", "run")


def record(problem: str, *correct: float, text: str | None = None) -> HeldoutRecord:
    """Make the record of a problem, with texts if `text` is given."""
    return HeldoutRecord(
        problem=problem,
        correct=correct,
        lengths=(7,) * len(correct),
        truncated=(False,) * len(correct),
        prompt=text,
        solution=text,
        completions=None if text is None else (text,) * len(correct),
    )


def write(folder: RunFolder, step: int, *correct: float, key: str = "heldout", temperature: float = 0.0) -> str:
    """Write a measurement whose problem n has the n-th verdict."""
    records = [record(f"{n:016x}", verdict) for n, verdict in enumerate(correct)]
    conditions = {"sampling": {"temperature": temperature}}
    return write_heldout(folder, key, step, records, policy=f"checkpoint-{step:06d}", conditions=conditions)


def ids(*numbers: int) -> tuple[str, ...]:
    return tuple(f"{n:016x}" for n in numbers)


def test_write_heldout_records_read_back_equal(folder: RunFolder, remote: RunFolder) -> None:
    records = [record("a" * 16, 1.0, 0.0, text="é\0"), record("b" * 16, NAN, 1.0)]
    for place in (folder, remote):
        name = write_heldout(place, "heldout/math", 40, records, policy="checkpoint-000040", conditions=CONDITIONS)
        assert name == "heldout/math/step-00000040.parquet"
        (file,) = list_heldout_files(place, "heldout/math")
        assert (file.step, file.name) == (40, name) and file.size > 0
        first, second = read_heldout(place, file).to_pylist()
        assert first == {
            "problem": "a" * 16, "correct": [1.0, 0.0], "lengths": [7, 7], "truncated": [False, False],
            "prompt": "é\0", "solution": "é\0", "completions": ["é\0", "é\0"],
        }  # fmt: skip
        assert math.isnan(second["correct"][0]) and second["completions"] is None and second["prompt"] is None
        measured = read_measurement(place, file)
        assert (measured.policy, measured.problems) == ("checkpoint-000040", ("a" * 16, "b" * 16))
        np.testing.assert_array_equal(measured.accuracy, np.array([0.5, NAN], np.float32))
        assert measured.solved.tolist() == [False, False]


def test_list_heldout_files_keys_are_folders(folder: RunFolder, remote: RunFolder) -> None:
    for place in (folder, remote):
        assert heldout_keys_with_records(place) == [] and list_heldout_files(place, "heldout") == []
        for step in (100_000_000, 20, 0):
            write(place, step, 1.0)
        write(place, 20, 1.0, key="heldout/math")
        place.write_text("mine", "heldout", "notes.txt")
        place.write_text("mine", "heldout", "math", "step-1.parquet")
        place.write_text("mine", "heldout", "math", "deeper", "step-00000001.parquet")
        assert heldout_keys_with_records(place) == ["heldout", "heldout/math"]
        assert [file.step for file in list_heldout_files(place, "heldout")] == [0, 20, 100_000_000]
        assert [file.step for file in list_heldout_files(place, "heldout/math")] == [20]


def test_write_heldout_same_step_replaces_the_file(folder: RunFolder) -> None:
    write(folder, 20, 1.0)
    (before,) = list_heldout_files(folder, "heldout")
    write(folder, 20, 0.0, 1.0)
    (after,) = list_heldout_files(folder, "heldout")
    assert before != after and read_measurement(folder, after).accuracy.tolist() == [0.0, 1.0]


def test_drop_heldout_after_removes_later_steps_of_all_sets(folder: RunFolder, remote: RunFolder) -> None:
    for place in (folder, remote):
        assert drop_heldout_after(place, 0) == []
        for step in (0, 20, 40):
            write(place, step, 1.0)
            write(place, step, 1.0, key="heldout/math")
        assert drop_heldout_after(place, 40) == []
        assert sorted(drop_heldout_after(place, 20)) == [
            "heldout/math/step-00000040.parquet", "heldout/step-00000040.parquet",
        ]  # fmt: skip
        assert len(drop_heldout_after(place, 0)) == 2
        assert [file.step for file in list_heldout_files(place, "heldout")] == [0]


def test_read_measurements_leaves_out_other_conditions(folder: RunFolder) -> None:
    write(folder, 0, 1.0, temperature=0.7)
    for step in (20, 40):
        write(folder, step, 0.0)
    assert [each.file.step for each in read_measurements(folder, "heldout")] == [20, 40]
    assert read_measurements(folder, "heldout/math") == []


def test_compare_measurements_newly_solved_and_lost(folder: RunFolder) -> None:
    write(folder, 0, 0.0, 1.0, 1.0, NAN, 0.0, 0.0)
    write(folder, 20, 1.0, 0.0, 1.0, 1.0, NAN)  # the last problem is missing
    earlier, later = read_measurements(folder, "heldout")
    assert (compare_measurements(earlier, later).solved, compare_measurements(earlier, later).lost) == (ids(0), ids(1))
    assert compare_measurements(later, earlier).solved == ids(1)


def test_measurement_solved_more_than_half_correct(folder: RunFolder) -> None:
    records = [record("a" * 16, 1.0, 1.0, 0.0), record("b" * 16, 1.0, 0.0), record("c" * 16)]
    write_heldout(folder, "heldout", 0, records, policy="", conditions={})
    (measured,) = read_measurements(folder, "heldout")
    assert measured.solved.tolist() == [True, False, False] and np.isnan(measured.accuracy[2])


@pytest.mark.parametrize("content", ["", "PAR1 cut short", "PAR1" + "\0" * 100 + "PAR1"])
def test_read_heldout_damaged_file_raises_with_its_name(folder: RunFolder, content: str) -> None:
    folder.write_text(content, "heldout", "step-00000020.parquet")
    (file,) = list_heldout_files(folder, "heldout")
    for read in (read_heldout, read_measurement):
        with pytest.raises(DataError, match=r"run/heldout/step-00000020\.parquet: cannot be read: "):
            read(folder, file)


@pytest.mark.parametrize("samples", [1, 8, 64])
def test_bound_heldout_text_file_stays_within_its_limit(samples: int) -> None:
    size = len(bound_heldout_text("é" * 50_000, samples).encode())
    assert size * (samples + 2) * TEXT_PROBLEMS <= FILE_BYTES and size > 100
