"""What must not grow with the problems; `benchmarks/bench_scale.py` measures what does."""

import itertools
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ray import cloudpickle

from grpo_ray.data.files import file_shards
from grpo_ray.data.stream import SHARDS_PER_WINDOW, Round, Split, epochs_of, training_stream
from grpo_ray.ledger import FILE_NAME, Contents, Ledger, to_ids
from grpo_ray.problem import Problem, parse_problem

NONE = np.empty(0, dtype=np.uint64)
WORD = "perpendicular"
"""Stands in every prompt."""
SLACK = 2_000
"""Bytes of what is said beside the numbers."""


def write_parquet(folder: Path, rows: int, groups: int) -> Split:
    """A split of so many row groups, whose prompts hold `WORD`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = [[{"role": "user", "content": f"Is {WORD} line {n} there?"}] for n in range(rows)]
    table = pa.table({"prompt": prompts, "solution": [f"{n}" for n in range(rows)]})
    folder.mkdir(exist_ok=True)
    path = folder / "problems.parquet"
    pq.write_table(table, path, row_group_size=rows // groups)
    return Split("some", file_shards(str(path)))


def test_what_the_driver_hands_out_holds_no_problems_texts_and_does_not_grow_with_them(tmp_path):
    sizes = []
    for rows in (160, 16_000):
        split = write_parquet(tmp_path / f"{rows}", rows, groups=16)
        assert len(split.shards) == 16 and sum(shard.rows for shard in split.shards) == rows
        handed_out = cloudpickle.dumps(partial(training_stream, split, 0, None))
        assert WORD.encode() not in handed_out
        sizes.append(len(handed_out))
    assert sizes[1] - sizes[0] < 200  # a hundred times the rows in as many row groups: longer numbers, and no more


@pytest.mark.parametrize("used", [0, 1_000, 100_000])
def test_a_round_is_eight_bytes_a_used_problem(used):
    choice = random.Random(0)
    ledger = Ledger(Contents(10**9, "0" * 32))
    ledger.mark(0, [f"{choice.getrandbits(64):016x}" for _ in range(used)])
    message = pickle.dumps(Round(0, ledger.used(0), ledger.preferred(0)), protocol=5)
    assert 8 * used <= len(message) < 8 * used + SLACK


def test_a_ledger_in_a_checkpoint_is_eight_bytes_a_used_problem(tmp_path):
    choice = random.Random(0)
    ledger, sizes = Ledger(Contents(10**9, "0" * 32)), []
    for count in (1_000, 99_000):
        ledger.mark(0, [f"{choice.getrandbits(64):016x}" for _ in range(count)])
        ledger.save(tmp_path)
        sizes.append((tmp_path / FILE_NAME).stat().st_size)
    assert sizes[1] - sizes[0] == 8 * 99_000
    assert sizes[0] < 8 * 1_000 + SLACK


def test_a_ledger_forgets_an_epoch_that_is_whole(tmp_path):
    ids = to_ids(np.arange(10_000, dtype=np.uint64))
    ledger = Ledger(Contents.of(ids))
    ledger.mark(0, ids)
    ledger.save(tmp_path)
    assert ledger.epoch == 1 and (tmp_path / FILE_NAME).stat().st_size < SLACK


@dataclass(frozen=True)
class Counted:
    """A shard that leaves word of being read."""

    number: int
    folder: Path
    rows: int = 4

    def read(self) -> Iterator[Problem]:
        (self.folder / f"{self.number}").touch()
        for row in range(self.rows):
            text = f"{self.rows * self.number + row}"
            yield parse_problem({"prompt": text, "solution": text}, where="here")


def test_the_first_problem_needs_one_window_read(tmp_path):
    order = epochs_of(Split("some", [Counted(n, tmp_path) for n in range(20 * SHARDS_PER_WINDOW)]), seed=0)
    rows = itertools.chain.from_iterable(order.read(piece, Round(0, NONE, NONE)) for piece in range(order.pieces))
    next(rows)
    assert len(list(tmp_path.iterdir())) == SHARDS_PER_WINDOW
