"""Shards in memory, and the order in which the training stream yields their problems."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo_ray.data.ledger import ids_to_uint64
from grpo_ray.data.problem import Problem, parse_problem
from grpo_ray.data.stream import Split, make_epoch_reader


def problem(number: int) -> Problem:
    return parse_problem({"prompt": f"Question {number}?", "solution": f"{number}"}, where="here")


@dataclass(frozen=True)
class MemoryShard:
    """Shard of the problems `first` to `first` + `num_rows` - 1."""

    first: int
    num_rows: int

    def read(self) -> Iterator[Problem]:
        return map(problem, range(self.first, self.first + self.num_rows))


def shards_of(count: int, rows: int) -> list[MemoryShard]:
    return [MemoryShard(rows * i, rows) for i in range(count)]


def numbers(split: Split, seed: int = 0, epochs: int = 1) -> list[list[int]]:
    """Return the numbers of the problems of each epoch, in the order of the stream."""
    reader = make_epoch_reader(split, seed)
    return [
        [int(p.solution) for window in range(reader.num_windows) for p in reader.read_window(epoch, window)]
        for epoch in range(epochs)
    ]


NO_IDS = np.empty(0, dtype=np.uint64)


def ids(some: Sequence[int]) -> np.ndarray:
    """Return the ids of problems, sorted, as in an `EpochPlan`."""
    return np.sort(ids_to_uint64(problem(number).id for number in some))


def write_jsonl(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"Question {i}?", "solution": f"{i}"}) + "\n" for i in range(count)))
    return str(path)
