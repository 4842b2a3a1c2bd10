"""What must not grow with the problems; `benchmarks/bench_scale.py` measures what does."""

import itertools
import pickle
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_ray.course import Course
from grpo_ray.data.files import file_shards
from grpo_ray.data.stream import SHARDS_PER_WINDOW, Round, Split, epochs_of, survey, training_stream
from grpo_ray.ledger import FILE_NAME, Contents, Ledger, to_ids
from grpo_ray.problem import Problem, parse_problem
from grpo_ray.settings import load
from grpo_ray.storage import RunFolder

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


@pytest.fixture
def board(cluster: None) -> Any:
    import ray

    from grpo_ray.board import Board

    return ray.remote(num_cpus=0)(Board).remote()


def test_what_the_driver_hands_out_holds_no_problems_texts_and_does_not_grow_with_them(board, tmp_path):
    from ray import cloudpickle

    sizes = []
    for rows in (160, 16_000):
        split = write_parquet(tmp_path / f"{rows}", rows, groups=16)
        surveyed = survey(split)
        assert surveyed.contents.count == rows and surveyed.numbers.nbytes == 8 * rows
        handed_out = cloudpickle.dumps(partial(training_stream, surveyed.split, 0, board))
        assert WORD.encode() not in handed_out
        sizes.append(len(handed_out))
    assert sizes[1] - sizes[0] < 200  # a hundred times the rows in as many row groups: longer numbers, and no more


@pytest.mark.parametrize("used", [0, 1_000, 100_000])
def test_a_round_on_the_board_is_eight_bytes_a_used_problem(board, tmp_path, used):
    import ray

    choice = random.Random(0)
    ids = [f"{choice.getrandbits(64):016x}" for _ in range(used)]
    ledger = Ledger(Contents(10**9, "0" * 32))
    if ids:
        ledger.mark(0, ids)
    config = load(None, ["grpo.prompts_per_step=4", "cluster.num_workers=1"])
    row = {"id": "0" * 16, "epoch": 0, "prompt": "[]", "solution": WORD, "columns": "{}"}
    course = Course(config, ledger, RunFolder(str(tmp_path), "run"), board, rows=lambda: itertools.repeat(row))
    next(course.problems())
    shown = ray.get(board.round.remote())
    message = pickle.dumps(shown, protocol=5)
    assert np.array_equal(shown.left_out, ledger.used(0))
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


@pytest.fixture
def shard() -> type:
    """A class of shards, made here because a task of Ray cannot import a file of tests."""

    @dataclass(frozen=True)
    class Counted:
        """A shard that leaves word of each reading, and may wait until somebody has seen a first problem."""

        number: int
        folder: str
        first_seen: str | None = None
        rows: int = 4

        def read(self) -> Iterator[Problem]:
            Path(self.folder, f"{self.number}").touch()
            limit = time.monotonic() + 120
            while self.first_seen and not Path(self.first_seen).exists():
                if time.monotonic() > limit:
                    raise TimeoutError("no problem came before this shard was read")
                time.sleep(0.05)
            for row in range(self.rows):
                text = f"{self.rows * self.number + row}"
                yield parse_problem({"prompt": text, "solution": text}, where="here")

    return Counted


def test_the_first_problem_needs_one_window_read(shard, tmp_path):
    order = epochs_of(Split("some", [shard(n, str(tmp_path)) for n in range(20 * SHARDS_PER_WINDOW)]), seed=0)
    rows = itertools.chain.from_iterable(order.read(piece, Round(0, NONE, NONE)) for piece in range(order.pieces))
    next(rows)
    assert len(list(tmp_path.iterdir())) == SHARDS_PER_WINDOW


def test_ray_gives_the_first_problem_before_the_other_windows_are_read(shard, board, tmp_path):
    import ray

    read, seen = tmp_path / "read", tmp_path / "seen"
    count = 20 * SHARDS_PER_WINDOW
    read.mkdir()
    order = epochs_of(Split("some", [shard(n, str(read)) for n in range(count)]), seed=0)
    first = {problem.id for problem in order.window(0, 0)}
    waiting = [
        shard(n, str(read)) if (read / f"{n}").exists() else shard(n, str(read), str(seen)) for n in range(count)
    ]
    assert sum(each.first_seen is None for each in waiting) == SHARDS_PER_WINDOW
    ray.get(board.begin_round.remote(Round(0, NONE, NONE)))
    row = next(iter(training_stream(Split("some", waiting), 0, board).iter_rows()))
    assert row["id"] in first
    assert len(list(read.iterdir())) < count  # the rest waits, or has not begun
    seen.touch()
