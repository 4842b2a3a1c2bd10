"""Tests of DeepMath's loading code on files of the same form, in a local folder instead of the hub's file system."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stores_on_disk import stores_on_disk

from grpo_ray.config.loader import load_config
from grpo_ray.data.registry import open_dataset


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Path]:
    with stores_on_disk(tmp_path):
        yield tmp_path / "hf" / "datasets"


def write(path: Path, solutions: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": [{"role": "user", "content": f"Question {i}"}], "solution": text} for i, text in enumerate(solutions)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)


def test_deepmath_both_splits_are_read_by_row_groups(hub: Path) -> None:
    data = hub / "trl-lib" / "DeepMath-103K" / "data"
    write(data / "train-00000-of-00001.parquet", ["$1$", "Yes", r"$\frac{1}{2}$"])
    write(data / "test-00000-of-00001.parquet", ["No"])
    train = open_dataset("deepmath", "train", load_config().data)
    assert [shard.num_rows for shard in train] == [2, 1]
    problems = list(itertools.chain.from_iterable(shard.read() for shard in train))
    assert [problem.solution for problem in problems] == ["$1$", "Yes", r"$\frac{1}{2}$"]
    assert problems[0].prompt == [{"role": "user", "content": "Question 0"}]
    (heldout,) = open_dataset("deepmath", "heldout", load_config().data)
    assert [problem.solution for problem in heldout.read()] == ["No"]


def test_open_dataset_hub_id_of_same_shape_is_read(hub: Path) -> None:
    write(hub / "someone" / "problems" / "data" / "train-00000-of-00001.parquet", ["$7$"])
    (shard,) = open_dataset("someone/problems", "train", load_config().data)
    assert [problem.solution for problem in shard.read()] == ["$7$"]
