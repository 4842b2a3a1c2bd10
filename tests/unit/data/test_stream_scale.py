"""Tests of message sizes and reads that must not grow with the dataset; `bench_scale.py` measures the rest."""

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray import cloudpickle

from grpo_ray.data.files import file_shards
from grpo_ray.data.ledger import DatasetFingerprint, Ledger, uint64_to_ids
from grpo_ray.data.problem import Problem, parse_problem
from grpo_ray.data.stream import SHARDS_PER_WINDOW, EpochPlan, Split, make_epoch_reader, training_stream

NONE = np.empty(0, dtype=np.uint64)
WORD = "perpendicular"
"""Word that every prompt contains."""
SLACK = 2_000
"""Bytes of a message besides the ids."""


def write_parquet(folder: Path, rows: int, groups: int) -> Split:
    """Write a split with this number of rows and row groups, whose prompts contain `WORD`."""
    prompts = [[{"role": "user", "content": f"Is {WORD} line {n} there?"}] for n in range(rows)]
    table = pa.table({"prompt": prompts, "solution": [f"{n}" for n in range(rows)]})
    folder.mkdir(exist_ok=True)
    path = folder / "problems.parquet"
    pq.write_table(table, path, row_group_size=rows // groups)
    return Split("some", file_shards(str(path)))


def test_training_stream_task_has_no_texts_and_fixed_size(tmp_path: Path) -> None:
    sizes = []
    for rows in (16, 1_600):
        split = write_parquet(tmp_path / f"{rows}", rows, groups=16)
        assert len(split.shards) == 16 and sum(shard.num_rows for shard in split.shards) == rows
        pickled = cloudpickle.dumps(partial(training_stream, split, 0, None))
        assert WORD.encode() not in pickled
        sizes.append(len(pickled))
    assert sizes[1] - sizes[0] < 200  # a hundred times the rows in as many row groups: only the numbers are longer


@pytest.mark.parametrize("used", [0, 1_000, 10_000])
def test_epoch_plan_takes_eight_bytes_per_used_problem(used: int) -> None:
    ledger = Ledger(DatasetFingerprint(10**9, "0" * 32))
    ledger.mark(0, uint64_to_ids(np.arange(used, dtype=np.uint64) * 2**40))
    message = pickle.dumps(EpochPlan(0, ledger.used(0), ledger.preferred(0)), protocol=5)
    assert 8 * used <= len(message) < 8 * used + SLACK


@dataclass(frozen=True)
class CountedShard:
    """Shard that creates a file in a folder when it is read."""

    number: int
    folder: Path
    num_rows: int = 4

    def read(self) -> Iterator[Problem]:
        (self.folder / f"{self.number}").touch()
        for row in range(self.num_rows):
            text = f"{self.num_rows * self.number + row}"
            yield parse_problem({"prompt": text, "solution": text}, where="here")


def test_epoch_reader_first_problem_reads_one_window(tmp_path: Path) -> None:
    split = Split("some", [CountedShard(n, tmp_path) for n in range(20 * SHARDS_PER_WINDOW)])
    reader, plan = make_epoch_reader(split, seed=0), EpochPlan(0, NONE, NONE)
    rows = itertools.chain.from_iterable(reader.run_read_task(task, plan) for task in range(reader.num_read_tasks))
    next(rows)
    assert len(list(tmp_path.iterdir())) == SHARDS_PER_WINDOW
