"""Problems as Ray Datasets: one seeded order per epoch, the same for any number of workers.

Ray Data executes the training dataset once for each epoch plan (`EpochPlan`), the remainder of one epoch. The input of
the dataset is a list of read task numbers (`ray.data.from_items(...).flat_map(...)`). Each read task fetches the
current plan from the run coordinator and yields its part of the problems, without those that the plan excludes (used or
skipped). So the stream always starts with the first problem that no step has used, even after a worker failed. Problems
of an epoch that do not fill a whole step are carried over to the first step of the next plan.

The order (invariant: worker-count invariance) depends on the seed and the shards only: an epoch visits the shards in
a shuffled order, `SHARDS_PER_WINDOW` at a time, and shuffles the problems of each such window together. Memory holds a
few windows, however large the dataset is. Ray Data's own shuffles are not used: their order depends on how many
blocks a cluster of this size produces.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from grpo_ray.config.heldout_keys import HELDOUT
from grpo_ray.config.schema import Config
from grpo_ray.config.sources import TrainingSource, derived_heldout_share
from grpo_ray.data.demonstrations import COMPLETION
from grpo_ray.data.ledger import DatasetFingerprint, IdArray, ids_to_uint64, isin_sorted, uint64_to_ids
from grpo_ray.data.problem import Problem
from grpo_ray.data.registry import (
    Shard,
    SourceShard,
    as_demonstrations,
    beside_demonstrations,
    is_heldout,
    open_dataset,
)
from grpo_ray.errors import DataError

if TYPE_CHECKING:
    import ray.data

T = TypeVar("T")

SHARDS_PER_WINDOW = 8
MAX_INDEX_TASKS = 256
MAX_LOADED_PART = 2_000
"""Largest held-out part of a dataset, in expected problems, that is kept in memory."""
FEW_HELDOUT = 50
"""Number of held-out problems below which the 95 % interval of an accuracy of 0.5 is wider than 0.25."""
IDS_PER_BATCH = 100_000
"""Ids converted to text at once while an index is made: the conversion takes 16 times the memory of the ids."""


@dataclass(frozen=True)
class Split:
    """The training or held-out part of a dataset: its shards, and which of their problems belong to it."""

    name: str
    """Name in the config, for error messages."""
    shards: Sequence[Shard]
    heldout_share: float = 0.0
    """Share of the dataset that `is_heldout` selects, 0 to 1; 0 if the split is a dataset of its own."""
    keep_heldout: bool = False
    """Keep the selected share instead of the rest."""
    limit: int | None = None
    """Use at most this number of problems, the first ones in the dataset's order; None: all."""
    excluded_ids: frozenset[str] = frozenset()
    """Ids of problems that are left out; they do not count towards `limit`."""
    overlong_ids: frozenset[str] = frozenset()
    """Ids of problems that are left out for their length. They count towards `limit`, so that no problem beyond the
    limit takes the place of an overlong one."""
    owner_shards: Mapping[str, int] = field(default_factory=dict)
    """Id of a problem that occurs in several shards -> index of the shard that it is read from."""
    columns: tuple[str, ...] | None = None
    """Further columns of all problems, sorted; a problem without one of them has None there. None: as in each row."""

    def read(self) -> Iterator[Problem]:
        """Yield all problems in the dataset's order, each once."""
        problems = itertools.chain.from_iterable(map(self.read_shard, self.shards))
        first = itertools.islice(_unique(problems), self.limit)
        return (problem for problem in first if problem.id not in self.overlong_ids)

    def read_shard(self, shard: Shard) -> Iterator[Problem]:
        """Yield a shard's problems that belong to the split, including repeated and overlong ones, without limit."""
        for problem in shard.read():
            if self.heldout_share and is_heldout(problem.question_id, self.heldout_share) != self.keep_heldout:
                continue
            if problem.id not in self.excluded_ids:
                yield problem if self.columns is None else problem.with_columns(self.columns)

    def read_owned(self, shard_index: int) -> Iterator[Problem]:
        """Yield the problems that are read from this shard, each once."""
        for problem in _unique(self.read_shard(self.shards[shard_index])):
            is_owner = self.owner_shards.get(problem.id, shard_index) == shard_index
            if is_owner and problem.id not in self.overlong_ids:
                yield problem


def _unique(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield problems in order, without repetitions."""
    seen: set[str] = set()
    for problem in problems:
        if problem.id not in seen:
            seen.add(problem.id)
            yield problem


def open_splits(
    config: Config, needs_solutions: Callable[[str], bool] | None = None
) -> tuple[dict[str, Split], dict[str, Split]]:
    """Open the training splits of a config by source, and its held-out sets by key (`config/heldout_keys.py`).

    A single dataset is the source "".

    Args:
        needs_solutions: returns True if every row of a source must have a solution (`registry.needs_solutions`, which
            loads the rewards); None: if a built-in reward reads it.
    """
    data, heldout = config.data, config.heldout_sources
    needs = needs_solutions or config.needs_solutions_of

    is_taught = config.run.kind == "sft"

    def open_source(
        dataset: str, split: str, source: TrainingSource | None, *, is_only_taught: bool = False
    ) -> Sequence[Shard]:
        name = "" if source is None else source.name
        has_tests = not is_only_taught and "code_tests" in (*config.rewards_of(name), config.heldout_score_of(name))
        needs_solution = not is_only_taught and needs(name)
        settings = source or data
        if is_taught and split == "heldout":  # its completions are sampled
            named = {ours: theirs for ours, theirs in settings.columns.items() if ours != COMPLETION}
            settings = replace(settings, columns=named)
        shards = open_dataset(dataset, split, settings, needs_solution, config.columns_decide_tasks, has_tests)
        if is_taught:
            shards = as_demonstrations(shards, dataset) if split == "train" else beside_demonstrations(shards)
        return (
            shards if source is None or not name else [SourceShard(each, name, source.environment) for each in shards]
        )

    training: dict[str, Split] = {}
    parts: dict[str, Split] = {}
    for name, source in config.training_sources.items():
        key = f"{HELDOUT}/{name}" if name else HELDOUT
        has_part = key in heldout and heldout[key].is_part_of_training
        shards = open_source(source.dataset, "train", source, is_only_taught=is_taught and not has_part)
        share = 0.0
        if has_part:
            share = data.heldout_share or derived_heldout_share(data.heldout, sum(shard.num_rows for shard in shards))
            parts[key] = Split(source.label, shards, share, keep_heldout=True, limit=data.heldout_limit)
        training[name] = Split(source.label, shards, share, limit=source.limit)
    sets: dict[str, Split] = {}
    for key, each in heldout.items():
        source_of_set = config.training_sources.get(config.source_of(key))
        sets[key] = parts.get(key) or Split(
            each.dataset, open_source(each.dataset, "heldout", source_of_set), limit=data.heldout_limit
        )
    return training, sets


def describe_heldout_part(dataset: str, heldout: int, training: int) -> str:
    """Describe a part of the training dataset that is held out.

    Args:
        heldout: number of its problems.
        training: number of the problems that are left to train on.
    """
    text = f"{heldout} problems of {dataset} are held out of training, which has {training}"
    if heldout >= FEW_HELDOUT:
        return text
    return (
        f"{text}; so few can show only large differences; to hold out more, set data.heldout to other problems, or "
        "data.heldout_share to a larger fraction"
    )


def describe_repeated_rows(index: "DatasetIndex") -> str:
    """Describe the rows that count only once, because they are equal in all columns."""
    rows = "1 row" if index.repeated_rows == 1 else f"{index.repeated_rows} rows"
    return f"{index.split.name}: {rows} left out, equal to an earlier row in all columns"


def reason_if_empty(split: Split) -> str:
    """Return the reason why a split has no problems, and the setting to change."""
    if not split.heldout_share:
        return "no problems left"
    share = f"data.heldout_share={split.heldout_share:g}"
    if split.keep_heldout:
        return (
            f"{share} holds out none of its few problems, and checkpoints are measured on held-out ones; set "
            "data.heldout to other problems, or data.heldout_share to a larger fraction, such as 0.2"
        )
    return f"no problems left after {share}; set a smaller fraction"


@dataclass(frozen=True)
class DatasetIndex:
    """Result of a full scan of a split."""

    split: Split
    """The split with `columns`, and with `owner_shards`, so that a problem in several shards is read from one."""
    fingerprint: DatasetFingerprint
    ids: IdArray = field(repr=False)
    """Ids of all problems, sorted, (P,) uint64."""
    repeated_rows: int = 0
    """Rows that equal an earlier row in all columns; 0 for a split with a limit, and for a small held-out part."""

    def without_overlong(self, overlong: IdArray) -> "DatasetIndex":
        """Return the index of the split without these problems.

        Args:
            overlong: ids of the problems to leave out, sorted, (N,) uint64.

        Raises:
            DataError: no problem is left.
        """
        if not len(overlong):
            return self
        split = replace(self.split, overlong_ids=frozenset(uint64_to_ids(overlong)))
        ids = self.ids[~isin_sorted(self.ids, overlong)]
        return replace(_make_index(split, ids, "all prompts are too long"), repeated_rows=self.repeated_rows)


OnShard = Callable[[int, int], None]
"""Callback that gets the number of finished shards and the total number of shards."""


def ignore_shard(done: int, total: int) -> None:
    """Do nothing."""


def build_index(split: Split, on_shard: OnShard = ignore_shard) -> DatasetIndex:
    """Read every row of a split once, in parallel on the Ray cluster.

    Rows that are equal in all columns are one problem, which an epoch uses once.

    Args:
        on_shard: called with the number of shards read so far, and their total number.

    Raises:
        DataError: a row cannot be used (the first one in the dataset's order; the message names file, row and field),
            or the split has no problem.
    """
    if split.keep_heldout and split.heldout_share * sum(shard.num_rows for shard in split.shards) <= MAX_LOADED_PART:
        split = _load_part(split, on_shard)
    scans = map_shards(split, _scan, on_shard, with_repeated=True)
    columns = tuple(sorted({name for scan in scans for name in scan.columns}))
    ids_per_shard = [scan.ids for scan in scans]
    ids, counts = np.unique(np.concatenate(ids_per_shard), return_counts=True)
    owner_shards = _first_shards(ids_per_shard, repeated=ids[counts > 1])
    index = _make_index(replace(split, owner_shards=owner_shards, columns=columns), ids, reason_if_empty(split))
    return replace(index, repeated_rows=sum(scan.rows for scan in scans) - len(ids))


@dataclass(frozen=True)
class _ShardResult:
    """Wrapper of one shard's result in a Ray Data column, which would convert a bare tuple or array."""

    value: Any


def map_shards(
    split: Split,
    function: Callable[[Iterator[Problem]], T],
    on_shard: OnShard = ignore_shard,
    *,
    with_repeated: bool = False,
) -> list[T]:
    """Apply a function to the problems of each shard, in parallel on the Ray cluster.

    Args:
        function: gets the problems that are read from a shard, each once; its result must be picklable.
        on_shard: called with the number of finished shards, and their total number.
        with_repeated: pass a repeated problem to the function each time that it occurs, unless the split has a limit.

    Returns:
        The results in the order of the shards; a single one, computed without Ray tasks, if the split has a limit or
        only one shard.

    Raises:
        DataError: a row cannot be used: the first one in the dataset's order.
        OSError: the storage of the data cannot be reached.
    """
    if split.limit is not None:
        return [function(split.read())]

    def read(index: int) -> Iterator[Problem]:
        return split.read_shard(split.shards[index]) if with_repeated else split.read_owned(index)

    if len(split.shards) == 1:
        return [function(read(0))]
    import ray

    def apply(row: dict[str, Any]) -> dict[str, Any]:
        # The error is returned as a value: Ray would raise the first error in time, not in the dataset's order.
        try:
            return {"result": _ShardResult(function(read(row["item"])))}
        except (DataError, OSError) as error:
            return {"result": _ShardResult(error)}

    shard_indices = list(range(len(split.shards)))
    blocks = min(len(shard_indices), MAX_INDEX_TASKS)
    dataset = ray.data.from_items(shard_indices, override_num_blocks=blocks).map(apply)
    dataset.context.execution_options.preserve_order = True  # rows come in the order of the shards
    results = []
    for row in dataset.iter_rows():
        results.append(row["result"].value)
        on_shard(len(results), len(shard_indices))
    if error := next((each for each in results if isinstance(each, DataError | OSError)), None):
        raise error
    return results


@dataclass(frozen=True)
class _Scan:
    """Content of one shard."""

    ids: IdArray
    """Ids of its problems, each once, sorted, (N,) uint64."""
    rows: int
    columns: tuple[str, ...]
    """Names of all further columns, sorted."""


def _scan(problems: Iterable[Problem]) -> _Scan:
    columns: set[str] = set()
    ids: list[str] = []
    for problem in problems:
        ids.append(problem.id)
        columns.update(problem.columns)
    return _Scan(np.unique(ids_to_uint64(ids)), len(ids), tuple(sorted(columns)))


def _first_shards(ids_per_shard: Sequence[IdArray], repeated: IdArray) -> dict[str, int]:
    """Map the id of each repeated problem to the index of the first shard that has it."""
    owners: dict[str, int] = {}
    for index, ids in enumerate(ids_per_shard):
        for name in uint64_to_ids(ids[np.isin(ids, repeated)]):
            owners.setdefault(name, index)
    return owners


def _load_part(split: Split, on_shard: OnShard) -> Split:
    """Load a small held-out part into memory, so that later readers need not scan the whole dataset for it."""
    shards = map_shards(replace(split, limit=None), list, on_shard)
    problems = itertools.islice(_unique(itertools.chain.from_iterable(shards)), split.limit)
    return replace(split, shards=[_LoadedShard(tuple(problems))])


def _make_index(split: Split, ids: IdArray, reason: str) -> DatasetIndex:
    if not len(ids):
        raise DataError(f"{split.name}: {reason}")
    batches = np.array_split(ids, -(-len(ids) // IDS_PER_BATCH))
    fingerprint = DatasetFingerprint.of(itertools.chain.from_iterable(map(uint64_to_ids, batches)))
    return DatasetIndex(split, fingerprint, ids)


@dataclass(frozen=True)
class EpochPlan:
    """The rest of one epoch: the problems that one execution of the training dataset yields, and their priority."""

    epoch: int
    excluded: IdArray
    """Ids of the epoch's problems that are used or skipped, sorted, (N,) uint64."""
    preferred: IdArray
    """Ids of the problems that come first, sorted, (N,) uint64."""
    carried_over: tuple[dict[str, Any], ...] = ()
    """Rows (`to_row`) left over from the previous epoch; they come before all others."""


@dataclass(frozen=True)
class EpochReader:
    """Seeded order of a split's epochs, divided into read tasks that run independently.

    The stream is the concatenation of the read tasks in the order of their numbers: task 0 yields the rows that are
    carried over; one task per window yields its preferred problems; and one task per window yields its other problems.
    """

    split: Split
    seed: int
    with_preferred: bool = True
    """False if no plan prefers problems: saves one read task per window."""

    @property
    def num_windows(self) -> int:
        """Number of windows in an epoch; the shards of a window are read and shuffled together."""
        return -(-len(self.split.shards) // SHARDS_PER_WINDOW)

    @property
    def num_read_tasks(self) -> int:
        return 1 + (2 if self.with_preferred else 1) * self.num_windows

    def read_epoch(self, plan: EpochPlan) -> Iterator[dict[str, Any]]:
        """Yield the rows of all read tasks."""
        return itertools.chain.from_iterable(self.run_read_task(task, plan) for task in range(self.num_read_tasks))

    def run_read_task(self, task: int, plan: EpochPlan) -> Iterator[dict[str, Any]]:
        """Yield the rows of one read task.

        Args:
            task: number of the read task, 0 to `num_read_tasks` - 1.
            plan: the epoch to read, and its excluded and preferred problems.
        """
        if task == 0:
            yield from plan.carried_over
            return
        window = (task - 1) % self.num_windows
        reads_preferred = self.with_preferred and task <= self.num_windows
        if reads_preferred and not len(plan.preferred):
            return  # without reading the window
        problems = self.read_window(plan.epoch, window)
        ids = ids_to_uint64(problem.id for problem in problems)
        selected = ~isin_sorted(ids, plan.excluded)
        if self.with_preferred:
            selected &= isin_sorted(ids, plan.preferred) == reads_preferred
        for problem in itertools.compress(problems, selected):
            yield to_row(problem, plan.epoch)

    def read_window(self, epoch: int, window: int) -> list[Problem]:
        """Return the problems of one window in their seeded order, which is the same on every cluster."""
        shard_indices = list(range(len(self.split.shards)))
        random.Random(f"{self.seed}/{epoch}").shuffle(shard_indices)
        first = window * SHARDS_PER_WINDOW
        problems = [
            problem
            for index in shard_indices[first : first + SHARDS_PER_WINDOW]
            for problem in self.split.read_owned(index)
        ]
        random.Random(f"{self.seed}/{epoch}/{window}").shuffle(problems)
        return problems


@dataclass(frozen=True)
class _LoadedShard:
    """Shard of problems that are in memory."""

    problems: tuple[Problem, ...] = field(repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.problems)

    def read(self) -> Iterator[Problem]:
        return iter(self.problems)


def make_epoch_reader(split: Split, seed: int, with_preferred: bool = True) -> EpochReader:
    """Create the reader of a split's epochs; a split with a limit is loaded into memory."""
    if split.limit is not None:
        # The limit counts problems across shards, so one reader must apply it; the problems then form one window.
        split = Split(split.name, [_LoadedShard(tuple(split.read()))])
    return EpochReader(split, seed, with_preferred)


def training_stream(
    split: Split, seed: int, coordinator: Any, with_preferred: bool = True, most_problems: int | None = None
) -> "ray.data.Dataset":
    """Create the training dataset; each execution yields the rows of the coordinator's epoch plan at that time.

    Ray Data reads ahead of its consumers until the object store is full: often a whole epoch, in blocks of a few rows,
    at about 4 ms of CPU time per block. `most_problems` ends each read task once no consumer can need more rows of it.

    Args:
        split: the training split, from `build_index`.
        seed: seed of the order.
        coordinator: handle of the `RunCoordinator` actor, whose `epoch_plan()` returns a list with one object
            reference, to an `EpochPlan`.
        with_preferred: False if no plan prefers problems.
        most_problems: number of problems that the consumers of one execution draw at most; None: all.
    """
    import ray.data

    reader = make_epoch_reader(split, seed, with_preferred)

    def read(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        (plan,) = ray.get(coordinator.epoch_plan.remote())
        return itertools.islice(reader.run_read_task(row["item"], ray.get(plan)), most_problems)

    read_tasks = list(range(reader.num_read_tasks))
    return ray.data.from_items(read_tasks, override_num_blocks=len(read_tasks)).flat_map(read)


def heldout_dataset(split: Split) -> "ray.data.Dataset":
    """Create the dataset of the held-out problems, in the dataset's order."""
    import ray.data

    return ray.data.from_items([to_row(problem, epoch=0) for problem in split.read()])


def to_row(problem: Problem, epoch: int) -> dict[str, Any]:
    """Convert a problem to a flat row of a Ray Dataset.

    Prompt and columns are JSON text: an Arrow column has one type, and these may vary in type from row to row.
    """
    return {
        "id": problem.id,
        "epoch": epoch,
        "prompt": json.dumps(problem.prompt),
        "solution": problem.solution,
        "columns": json.dumps(dict(problem.columns), default=str),
        "source": problem.source,
    }


def from_row(row: Mapping[str, Any]) -> Problem:
    """Convert a row of `to_row` back into a problem."""
    return Problem(
        id=row["id"],
        prompt=json.loads(row["prompt"]),
        solution=row["solution"],
        columns=json.loads(row["columns"]),
        source=row["source"],
    )
