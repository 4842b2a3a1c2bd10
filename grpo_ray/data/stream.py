"""Problems as Ray Datasets: one endless, seeded order that any number of workers deals out alike (law 1).

An epoch visits the shards in a shuffled order. They are read a window at a time, and the problems of a window are
shuffled together, so that memory holds a few windows however large the dataset is. The order comes from the seed
and the shards alone: Ray's own shuffles depend on how many blocks a cluster of this size happens to make.

Epoch follows epoch in one stream. What is left at the end of one is the beginning of the next one's first step,
so no problem is dropped because counts do not divide.
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_ray.config import Config
from grpo_ray.data import Shard, is_heldout, open_dataset
from grpo_ray.errors import DataError
from grpo_ray.problem import Problem

if TYPE_CHECKING:
    import ray.data

SHARDS_PER_WINDOW = 8


@dataclass(frozen=True)
class Split:
    """The problems of one split: its shards, and the share that was cut off or kept."""

    name: str
    """As in the config, for messages."""
    shards: Sequence[Shard]
    heldout_share: float = 0.0
    """Share cut off by `is_heldout`; 0 if the split is whole."""
    keep_heldout: bool = False
    """Keep the part that was cut off, not the rest."""
    limit: int | None = None
    """Use at most so many problems, the first ones in the dataset's order."""
    left_out: frozenset[str] = frozenset()
    """Ids of problems to pass over."""

    def read(self) -> Iterator[Problem]:
        """All problems in the dataset's order."""
        problems = itertools.chain.from_iterable(map(self.read_shard, self.shards))
        return itertools.islice(problems, self.limit)

    def read_shard(self, shard: Shard) -> Iterator[Problem]:
        """The problems of one shard that belong to this split (`limit` aside)."""
        for problem in shard.read():
            if self.heldout_share and is_heldout(problem.id, self.heldout_share) != self.keep_heldout:
                continue
            if problem.id not in self.left_out:
                yield problem


def open_splits(config: Config) -> tuple[Split, Split]:
    """The training and the held-out split that a config names."""
    data = config.data
    shards = open_dataset(data.train, "train", data)
    if data.heldout is None:
        cut = data.heldout_share
        return (
            Split(data.train, shards, cut, limit=data.limit),
            Split(data.train, shards, cut, keep_heldout=True, limit=data.heldout_limit),
        )
    heldout = open_dataset(data.heldout, "heldout", data)
    return Split(data.train, shards, limit=data.limit), Split(data.heldout, heldout, limit=data.heldout_limit)


def count_problems(split: Split) -> int:
    """Read every row once, in parallel on the cluster, and count the problems.

    Raises DataError for the first bad row in the dataset's order, naming field, file and row.
    """
    import ray

    def check(row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"count": sum(1 for _ in split.read_shard(row["item"])), "error": ""}
        except DataError as error:
            return {"count": 0, "error": str(error)}

    shards = list(split.shards)
    if len(shards) == 1:  # not worth a task
        rows = [check({"item": shards[0]})]
    else:
        dataset = ray.data.from_items(shards, override_num_blocks=min(len(shards), 256)).map(check)
        dataset.context.execution_options.preserve_order = True  # the first bad row is the one to name
        rows = dataset.take_all()
    for row in rows:
        if row["error"]:
            raise DataError(row["error"])
    count = sum(row["count"] for row in rows)
    if not count:
        raise DataError(f"{split.name}: no problems left after data.heldout_share={split.heldout_share}")
    return min(count, split.limit or count)


@dataclass(frozen=True)
class Window:
    """What is read and shuffled together: some shards of one epoch."""

    split: Split
    shards: Sequence[Shard]
    epoch: int
    seed: str

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the window's problems as rows of a Ray Dataset, in their seeded order."""
        problems = [p for shard in self.shards for p in self.split.read_shard(shard)]
        random.Random(self.seed).shuffle(problems)
        return (to_row(problem, self.epoch) for problem in problems)


def windows(split: Split, seed: int, epochs: int) -> Iterator[Window]:
    """Cut epochs into windows, shuffled by the seed; the same on any cluster."""
    if split.limit is not None:
        # A limit means the first problems of the dataset, whatever shard they lie in: one window, read in order.
        split = Split(split.name, [_Listed(tuple(split.read()))])
    for epoch in range(epochs):
        shards = list(split.shards)
        random.Random(f"{seed}/{epoch}").shuffle(shards)
        for number, first in enumerate(range(0, len(shards), SHARDS_PER_WINDOW)):
            yield Window(split, shards[first : first + SHARDS_PER_WINDOW], epoch, f"{seed}/{epoch}/{number}")


@dataclass(frozen=True)
class _Listed:
    """Problems held as they are."""

    problems: tuple[Problem, ...]

    @property
    def rows(self) -> int:
        return len(self.problems)

    def read(self) -> Iterator[Problem]:
        return iter(self.problems)


def training_stream(split: Split, seed: int, epochs: int) -> "ray.data.Dataset":
    """A Ray Dataset of `epochs` epochs of problems, in an order that depends on the seed alone."""
    import ray.data

    items = list(windows(split, seed, epochs))
    return ray.data.from_items(items, override_num_blocks=len(items)).flat_map(lambda row: row["item"].read())


def heldout_dataset(split: Split) -> "ray.data.Dataset":
    """A Ray Dataset of the held-out problems, in the dataset's order."""
    import ray.data

    return ray.data.from_items([to_row(problem, epoch=0) for problem in split.read()])


def to_row(problem: Problem, epoch: int) -> dict[str, Any]:
    """A problem as a flat row of text: Arrow would force one type on columns that vary from row to row."""
    return {
        "id": problem.id,
        "epoch": epoch,
        "prompt": json.dumps(problem.prompt),
        "solution": problem.solution,
        "columns": json.dumps(dict(problem.columns), default=str),
    }


def from_row(row: dict[str, Any]) -> Problem:
    """The problem that `to_row` flattened."""
    return Problem(
        id=row["id"], prompt=json.loads(row["prompt"]), solution=row["solution"], columns=json.loads(row["columns"])
    )
