"""Problems as Ray Datasets: one endless, seeded order that any number of workers deals out alike (law 1).

An epoch visits the shards in a shuffled order. They are read a window at a time, and the problems of a window are
shuffled together, so that memory holds a few windows however large the dataset is. The order comes from the seed
and the shards alone: Ray's own shuffles depend on how many blocks a cluster of this size happens to make.

The dataset is run once for each round, and a round is what is left of one epoch: the workers say on the board which
epoch it is and what of it is used already (`EpochPlan`), and the tasks that read leave that out before anything is dealt.
So the stream always begins with the first problem that no step was taken on, whoever died. What an epoch leaves over
because counts do not divide is carried into the next round's first step.
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint, to_ids, to_numbers, within
from grpo_ray.data.problem import Problem
from grpo_ray.data.registry import Shard, is_heldout, open_dataset
from grpo_ray.errors import DataError

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
    homes: Mapping[str, int] = field(default_factory=dict)
    """Id of a problem that lies in several shards -> number of the one that it is read from."""

    def read(self) -> Iterator[Problem]:
        """All problems in the dataset's order, each once."""
        return itertools.islice(_once(itertools.chain.from_iterable(map(self.read_shard, self.shards))), self.limit)

    def read_shard(self, shard: Shard) -> Iterator[Problem]:
        """The rows of one shard that belong to this split (`limit` aside); a problem may stand in several."""
        for problem in shard.read():
            if self.heldout_share and is_heldout(problem.id, self.heldout_share) != self.keep_heldout:
                continue
            if problem.id not in self.left_out:
                yield problem

    def own(self, number: int) -> Iterator[Problem]:
        """The problems that are read from the shard of this number, each once."""
        for problem in _once(self.read_shard(self.shards[number])):
            if self.homes.get(problem.id, number) == number:
                yield problem


def _once(problems: Iterator[Problem]) -> Iterator[Problem]:
    """Problems without those that came before."""
    seen: set[str] = set()
    for problem in problems:
        if problem.id not in seen:
            seen.add(problem.id)
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


@dataclass(frozen=True)
class DatasetIndex:
    """What a split turned out to hold when every row of it was read."""

    split: Split
    """With repeated problems settled: each is read from one shard."""
    contents: DatasetFingerprint
    numbers: np.ndarray = field(repr=False)
    """Sorted numbers (uint64) of all its problems."""


def build_index(split: Split) -> DatasetIndex:
    """Read every row once, in parallel on the cluster.

    A problem that stands in several rows is one problem: it is used once in an epoch. Raises DataError for the first
    bad row in the dataset's order, naming field, file and row.
    """
    import ray

    if split.limit is not None or len(split.shards) == 1:  # not worth a task
        return _surveyed(split, np.sort(to_numbers(problem.id for problem in split.read())))

    def look(row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ids": to_numbers(problem.id for problem in split.own(row["item"])).tobytes(), "error": ""}
        except DataError as error:
            return {"ids": b"", "error": str(error)}

    numbers = list(range(len(split.shards)))
    dataset = ray.data.from_items(numbers, override_num_blocks=min(len(numbers), 256)).map(look)
    dataset.context.execution_options.preserve_order = True  # the first bad row is the one to name
    found = []
    for row in dataset.take_all():
        if row["error"]:
            raise DataError(row["error"])
        found.append(np.frombuffer(row["ids"], dtype=np.uint64))
    every, counts = np.unique(np.concatenate(found), return_counts=True)
    repeated = every[counts > 1]
    homes: dict[str, int] = {}
    for number, ids in enumerate(found):
        for name in to_ids(ids[np.isin(ids, repeated)]):
            homes.setdefault(name, number)
    return _surveyed(replace(split, homes=homes), every)


def _surveyed(split: Split, numbers: np.ndarray) -> DatasetIndex:
    if not len(numbers):
        raise DataError(f"{split.name}: no problems left after data.heldout_share={split.heldout_share}")
    parts = np.array_split(numbers, -(-len(numbers) // 100_000))  # a problem takes 16 times the room as text
    return DatasetIndex(split, DatasetFingerprint.of(itertools.chain.from_iterable(map(to_ids, parts))), numbers)


@dataclass(frozen=True)
class EpochPlan:
    """What is dealt next: what is left of one epoch."""

    epoch: int
    left_out: np.ndarray
    """Sorted numbers (uint64) of the epoch's problems that are used already, or passed over."""
    preferred: np.ndarray
    """Sorted numbers of the problems that come first."""
    carried: tuple[dict[str, Any], ...] = ()
    """Rows that the epoch before left over; they come before everything."""


@dataclass(frozen=True)
class EpochReader:
    """The seeded order of a split's epochs, in pieces that tasks read on their own."""

    split: Split
    seed: int
    prefers: bool = True
    """Whether rounds may name problems that come first; where none does, a piece for each window is saved."""

    @property
    def windows(self) -> int:
        """Windows of an epoch; each is some shards that are read and shuffled together."""
        return -(-len(self.split.shards) // SHARDS_PER_WINDOW)

    @property
    def pieces(self) -> int:
        """Pieces of a round: what is carried, then each window's preferred problems, then each window's others."""
        return 1 + (2 if self.prefers else 1) * self.windows

    def read(self, piece: int, round: EpochPlan) -> Iterator[dict[str, Any]]:
        """Yield a piece's problems as rows of a Ray Dataset."""
        if piece == 0:
            yield from round.carried
            return
        window = (piece - 1) % self.windows
        first_pass = self.prefers and piece <= self.windows
        if first_pass and not len(round.preferred):
            return
        problems = self.window(round.epoch, window)
        numbers = to_numbers(problem.id for problem in problems)
        dealt = ~within(round.left_out, numbers)
        if self.prefers:
            dealt &= within(round.preferred, numbers) == first_pass
        for problem in itertools.compress(problems, dealt):
            yield to_row(problem, round.epoch)

    def window(self, epoch: int, window: int) -> list[Problem]:
        """The problems of one window in their seeded order, the same on any cluster."""
        shards = list(range(len(self.split.shards)))
        random.Random(f"{self.seed}/{epoch}").shuffle(shards)
        first = window * SHARDS_PER_WINDOW
        problems = [p for n in shards[first : first + SHARDS_PER_WINDOW] for p in self.split.own(n)]
        random.Random(f"{self.seed}/{epoch}/{window}").shuffle(problems)
        return problems


@dataclass(frozen=True)
class _Listed:
    """Problems held as they are."""

    problems: tuple[Problem, ...]

    @property
    def rows(self) -> int:
        return len(self.problems)

    def read(self) -> Iterator[Problem]:
        return iter(self.problems)


def epoch_reader(split: Split, seed: int, prefers: bool = True) -> EpochReader:
    """The order of a split's epochs."""
    if split.limit is not None:
        # A limit means the first problems of the dataset, whatever shard they lie in: one window, read in order.
        split = Split(split.name, [_Listed(tuple(split.read()))])
    return EpochReader(split, seed, prefers)


def training_stream(split: Split, seed: int, board: Any, prefers: bool = True) -> "ray.data.Dataset":
    """A Ray Dataset of one round, as often as it is run: the round that is on the board then.

    board: handle of an actor whose `round()` gives the reference of a `EpochPlan`, in a list.
    """
    import ray.data

    epochs = epoch_reader(split, seed, prefers)

    def read(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        (round,) = ray.get(board.round.remote())
        return epochs.read(row["item"], ray.get(round))

    return ray.data.from_items(list(range(epochs.pieces)), override_num_blocks=epochs.pieces).flat_map(read)


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
