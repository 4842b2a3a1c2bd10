"""Random histories of one run: launches, kills, edits of the data, changed options, worker counts, damaged checkpoints.

A third of the runs are on mixtures, whose sources are added, removed and given other weights between launches.

    python tests/helpers/run_histories.py --histories 10000      # counts; the seed of a failure is printed
    python tests/helpers/run_histories.py --first 4711 --histories 1

Ledger, problem loader, stream order, dataset index, checks of the dataset, rollouts, and writing, finding and verifying
checkpoints are the real ones. Replaced are Ray (workers are threads that gather at barriers, shards are read in this
process) and the learner with its engine: a step draws batches, invents verdicts, and records the groups.

The checks know nothing of the ledger. They follow the groups of the steps that led to each checkpoint, and assert

- that no problem is used twice in an epoch, and none that the launch's dataset does not have;
- that an epoch is left only when each of its problems was used, or may be skipped because its last groups were solved;
- that each step of a mixture has the shares of its sources, however these change from launch to launch;
- that the problems of steps whose completions had begun (`rollout.max_staleness`) are drawn in the same steps again;
- that a launch is refused exactly if the training problems changed without `data.accept_changes`, or no checkpoint is
  whole; and that after the first step nothing is refused.
"""

import argparse
import contextlib
import functools
import math
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from number_shards import NumberShard, problem
from ray.train import Checkpoint

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config, SourceConfig
from grpo_ray.data import stream
from grpo_ray.data.ledger import ids_to_uint64
from grpo_ray.data.mixture import MixturePlan, read_mixture
from grpo_ray.data.problem import SOURCE, Problem
from grpo_ray.data.registry import SourceShard
from grpo_ray.data.stream import DatasetIndex, EpochPlan, Split, build_index, make_epoch_reader
from grpo_ray.driver.launch import UNVERIFIABLE_FILE, DatasetIndexes, read_unverifiable
from grpo_ray.driver.preflight.same_run import check_dataset, record_dataset
from grpo_ray.errors import CheckpointError, ConfigError, DataError
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.storage import checkpoint_integrity, checkpoints
from grpo_ray.storage.checkpoint_upload import CheckpointUploader
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.training import problem_loader, start_point
from grpo_ray.training.attempt import remove_leftovers
from grpo_ray.training.problem_loader import ProblemLoader
from grpo_ray.training.start_point import choose_start, load_ledger

KILLS = ("drawn", "recorded", "settled", "files written", "rollouts written", "committed")
"""Moments of a step at which an attempt can be killed."""
SOURCES = ("a", "b", "c")
"""Names of the sources of mixtures; a single dataset is the source ""."""
LENGTHS = 9
"""Lengths of prompts, in invented tokens: problem n has 1 + n % LENGTHS."""

Use = tuple[int, str]
"""Epoch and problem id of a group."""


class Killed(BaseException):
    """The end of a killed worker; no handler of the package catches it."""


# Workers


class Workers:
    """Threads that gather values like the workers of a run."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._local = threading.local()
        self._slots: list[Any] = [None] * count
        self._barrier = threading.Barrier(count)

    @property
    def rank(self) -> int:
        return getattr(self._local, "rank", 0)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers in rank order."""
        if self.count == 1:
            return [value]
        self._slots[self.rank] = value
        self._barrier.wait(60)
        values = list(self._slots)
        self._barrier.wait(60)
        return values

    def run(self, work: Callable[[int], None]) -> None:
        """Run `work(rank)` on every worker; raise the error of the first one that failed."""
        errors: list[BaseException] = []

        def run_one(rank: int) -> None:
            self._local.rank = rank
            try:
                work(rank)
            except BaseException as error:  # a thread's own error would be lost, and the others would wait
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run_one, args=(rank,), daemon=True) for rank in range(1, self.count)]
        for thread in threads:
            thread.start()
        run_one(0)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a worker hangs"
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])


@contextlib.contextmanager
def replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module."""
    before = {name: getattr(module, name) for name in attributes}
    for name, value in attributes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def map_shards_here(
    split: Split,
    function: Callable[[Iterator[Problem]], Any],
    on_shard: Callable[[int, int], None],
    *,
    with_repeated: bool = False,
) -> list[Any]:
    """Apply a function to each shard in this process; see `stream.map_shards`."""
    if split.limit is not None:
        return [function(split.read())]
    if with_repeated:
        return [function(split.read_shard(shard)) for shard in split.shards]
    return [function(split.read_owned(index)) for index in range(len(split.shards))]


# Data


@functools.cache
def problem_of(source: str, number: int) -> Problem:
    """Return a problem of a source, or of a single dataset (source "")."""
    return problem(number).of_source(source) if source else problem(number)


@functools.cache
def origins() -> dict[str, tuple[str, int]]:
    """Return problem id -> source and number."""
    return {problem_of(source, number).id: (source, number) for source in ("", *SOURCES) for number in range(60)}


Files = tuple[tuple[int, ...], ...]
"""Numbers of the problems of each shard; a number may occur in several."""


def shard(rng: random.Random, numbers: Sequence[int]) -> Files:
    """Distribute problems over shards in any order, some of them twice."""
    rows = [*numbers, *(number for number in numbers if rng.random() < 0.1)]
    rng.shuffle(rows)
    cuts = sorted(rng.randrange(len(rows) + 1) for _ in range(rng.choice((0, 1, 3, 12))))
    return tuple(tuple(rows[a:b]) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True))


def edit(rng: random.Random, history: list[Files]) -> Files:
    """Return the files after an edit of the newest of all files so far."""
    numbers = sorted({number for part in history[-1] for number in part})
    kind = rng.choice(("shard", "shard", "remove", "add", "replace", "restore"))
    if kind == "restore":
        return rng.choice(history)
    if kind in ("remove", "replace"):
        numbers = [number for number in numbers if rng.random() < 0.8] or numbers[:1]
    if kind in ("add", "replace"):
        numbers = sorted({*numbers, *(rng.randrange(60) for _ in range(rng.randint(1, 5)))})
    return shard(rng, numbers)


# One run


@dataclass(frozen=True)
class Step:
    """A step that was taken: its uses, and the launch that it belongs to."""

    uses: tuple[Use, ...]
    launch: "Launch"


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch that was not refused."""

    config: Config
    indexes: dict[str, DatasetIndex]
    """Source -> its problems."""
    ids: dict[str, frozenset[str]]

    @property
    def shares(self) -> dict[str, Fraction]:
        return {name: source.share for name, source in self.config.training_sources.items()}


@dataclass
class Lineage:
    """Steps that led to a point of the run, and the state that follows from them."""

    steps: list[Step] = field(default_factory=list)
    of_source: dict[str, "SourceLineage"] = field(default_factory=dict)
    drawn: Counter[str] = field(default_factory=Counter)
    """Problems of each source since the shares last changed."""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Lineage":
        lineage = cls()
        for step in steps:
            lineage.add(step)
        return lineage

    def add(self, step: Step) -> None:
        """Add a step, and assert that it may follow."""
        if self.steps and self.steps[-1].launch.shares != step.launch.shares:
            self.drawn.clear()
        self.drawn.update(origins()[each][0] for _, each in step.uses)
        for source, share in step.launch.shares.items():
            ahead = self.drawn[source] - share * self.drawn.total()
            assert abs(ahead) < max(1, len(step.launch.shares) - 1), f"{source} is {float(ahead):+.2f} from its share"
        for source in sorted({origins()[each][0] for _, each in step.uses}):
            uses = tuple(use for use in step.uses if origins()[use[1]][0] == source)
            self.of_source.setdefault(source, SourceLineage(source)).add(Step(uses, step.launch))
        self.steps.append(step)


@dataclass
class SourceLineage:
    """Uses of one source."""

    source: str
    used: dict[int, set[str]] = field(default_factory=dict)
    last_launch: dict[int, Launch] = field(default_factory=dict)
    """Epoch -> launch of its newest use."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Id -> epochs of its groups, in order."""
    skips: set[int] = field(default_factory=set)
    """Values of `data.skip_solved` of the launches so far."""

    def add(self, step: Step) -> None:
        """Add the uses of a step, and assert that they may follow."""
        open_before = max(self.used, default=0)
        for epoch, each in step.uses:
            known = step.launch.ids.get(self.source, frozenset())
            assert each in known, f"problem {origins()[each]} is not in the dataset of the launch"
            used = self.used.setdefault(epoch, set())
            assert each not in used, f"problem {origins()[each]} is used twice in epoch {epoch}"
            used.add(each)
        if step.launch.config.data.skip_solved:
            self.skips.add(step.launch.config.data.skip_solved)
        newest = max(self.used, default=0)
        for epoch, _ in step.uses:
            self.last_launch[epoch] = step.launch
        for epoch in range(open_before, newest):
            self.assert_epoch_is_whole(epoch, step.launch)
        for epoch, each in step.uses:
            self.groups.setdefault(each, []).append(epoch)

    def assert_epoch_is_whole(self, epoch: int, now: Launch) -> None:
        """Assert that each problem of an epoch that was left has been used, or may have been skipped."""
        ids = now.ids[self.source]
        if epoch in self.last_launch:
            ids &= self.last_launch[epoch].ids[self.source]
        for each in ids - self.used.get(epoch, set()):
            assert self.may_be_skipped(each, epoch), f"problem {origins()[each]} is missing in epoch {epoch}"

    def may_be_skipped(self, each: str, epoch: int) -> bool:
        before = sorted(past for past in self.groups.get(each, ()) if past < epoch)
        if not self.skips or not before or before[-1] != epoch - 1:
            return False
        last = before[-min(self.skips) :]
        return len(last) == min(self.skips) and all(verdicts(each, past) == (1.0, 1.0) for past in last)


def verdicts(problem_id: str, epoch: int) -> tuple[float, ...]:
    """Return the invented verdicts of a group of two; unknown for a third of the boolean problems."""
    _, number = origins()[problem_id]
    if number % 15 == 0:  # data.boolean_share leaves the group out of the loss
        return (math.nan, math.nan)
    kind = (number * 7 + epoch * 3 + number // 4) % 5
    return ((1.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0))[kind]


@functools.cache
def base_config() -> Config:
    return load_config(None, ["run.name=run", "grpo.num_generations=2", "run.best_metric=reward/mean"])


def config_of(**sections: dict[str, Any]) -> Config:
    """Return the base config with other values in some sections; far quicker than parsing overrides."""
    base = base_config()
    return replace(base, **{name: replace(getattr(base, name), **values) for name, values in sections.items()})


class History:
    """A run whose life follows from a seed."""

    def __init__(self, seed: int, folder: Path, counts: Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.counts = counts
        self.scratch = folder
        self.folder = RunFolder(str(folder), "run")
        self.prompts = self.rng.choice((2, 3, 4, 6))
        self.parts = self.rng.choice((1, 1, 1, 2, 3))
        """Optimizer steps on a generation batch, between which nothing is drawn, recorded or saved."""
        self.limit = self.rng.choice((None, None, None, 5, 12))
        self.seed = self.rng.randrange(3)
        self.is_mixture = self.rng.random() < 1 / 3
        names = SOURCES if self.is_mixture else ("",)
        self.files = {name: [shard(self.rng, self.rng.sample(range(40), self.rng.randint(1, 25)))] for name in names}
        """Source -> all versions of its files."""
        self.weights = self.draw_weights()
        self.longest = self.rng.choice((LENGTHS, LENGTHS, 7))
        self.steps_of: dict[str, tuple[Step, ...]] = {}
        """Name of a checkpoint -> the steps that led to it."""
        self.open_of: dict[str, tuple[Any, dict[int, frozenset[Use]]]] = {}
        """Name of a checkpoint -> all that determines the order of problems, and the uses of each later step whose
        batch had been drawn."""
        self.recorded: frozenset[str] | None = None
        """Problems of the last launch that was not refused."""
        self.is_damaged = False
        """True once a launch has found all checkpoints damaged, until the run is set aside."""

    def live(self) -> None:
        """Launch the run several times, with changes in between."""
        for number in range(self.rng.randint(1, 6)):
            if number:
                self.change()
            self.launch()

    def draw_weights(self) -> dict[str, float]:
        """Return the weights of some sources; those of a single dataset have no effect."""
        names = self.rng.sample(SOURCES, self.rng.randint(1, 3)) if self.is_mixture else [""]
        return {name: self.rng.choice((0.1, 1.0, 2.0, 3.0)) for name in names}

    def change(self) -> None:
        """Change data, options or stored checkpoints between two launches."""
        rng = self.rng
        for versions in self.files.values():
            if rng.random() < 0.4 / len(self.files):
                versions.append(edit(rng, versions))
        if self.is_mixture and rng.random() < 0.3:
            self.weights = self.draw_weights()
            self.counts["changed mixtures"] += 1
        if rng.random() < 0.15:
            self.longest = rng.choice((3, 5, 7, LENGTHS))
        if rng.random() < 0.15:
            ids = [
                problem_of(name, n).id
                for name, versions in self.files.items()
                for n in sorted({number for part in versions[-1] for number in part})
            ]
            self.folder.write_json([each for each in ids if rng.random() < 0.2], UNVERIFIABLE_FILE)
        stored = checkpoints.list_checkpoints(self.folder)
        if stored and rng.random() < 0.15:
            self.damage(stored[-1].name)
        if rng.random() < 0.1:
            (self.scratch / "run" / "checkpoint-000099.part").mkdir(parents=True, exist_ok=True)

    def damage(self, name: str) -> None:
        """Flip, cut off or delete what a checkpoint needs."""
        self.counts["damaged checkpoints"] += 1
        ledgers = ("ledger-a.npz", "mixture.json") if self.is_mixture else ("ledger.npz", "ledger.npz")
        path = self.scratch / "run" / name / self.rng.choice((*ledgers, checkpoints.MANIFEST))
        if not path.exists():  # deleted before
            return
        data = path.read_bytes()
        match self.rng.choice(("flip", "cut", "delete")):
            case "flip":
                at = self.rng.randrange(len(data)) if path.suffix == ".npz" else 0
                path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            case "cut":
                path.write_bytes(data[: len(data) // 2])
            case "delete":
                path.unlink()

    def draw_config(self) -> Config:
        choose = self.rng.choice
        workers = choose([n for n in (1, 2, 3) if self.prompts % n == 0])
        rounds = choose((0, 0, 1, 2))
        staleness = choose((0, 0, 1, 2, 5)) if rounds == 0 and self.parts == 1 else 0
        return config_of(
            rollout={"max_staleness": staleness},
            run={"seed": self.seed, "resume": choose(("latest", "latest", "best"))},
            cluster={"num_workers": workers},
            data={
                "train": {name: SourceConfig(path="arithmetic", weight=each) for name, each in self.weights.items()}
                if self.is_mixture
                else "arithmetic",
                "limit": self.limit,
                "skip_solved": choose((None, None, 1, 2)),
                "prefer_mixed": choose((False, True)),
                "keep_unverifiable": choose((False, False, True)),
                "accept_changes": choose((False, True)),
            },
            grpo={
                "prompts_per_step": self.prompts,
                "steps_per_generation": self.parts,
                "dynamic_sampling": rounds,
                "save_steps": self.parts * choose((1, 2, 3)),
                "max_steps": 1000 * self.parts,
                "logging_steps": self.parts,
            },
        )

    def launch(self) -> None:
        """Launch the run: checks, then up to three attempts, with any number of workers each."""
        config = self.draw_config()
        self.counts["launches"] += 1
        stored = checkpoints.list_checkpoints(self.folder)
        try:
            indexes = {name: self.index(config, name) for name in config.training_sources}
        except DataError:
            self.counts["refused: no problems"] += 1
            return
        ids_of = {name: frozenset(each.id for each in index.split.read()) for name, index in indexes.items()}
        ids = frozenset().union(*ids_of.values())
        changed = bool(stored) and self.recorded is not None and ids != self.recorded
        fingerprint = DatasetIndexes(indexes, {}).training_fingerprint
        try:
            context: Any = SimpleNamespace(config=config, folder=self.folder)
            check_dataset(context, fingerprint)
        except ConfigError:
            assert changed and not config.data.accept_changes, "an unchanged dataset was refused"
            self.counts["refused: changed"] += 1
            return
        assert not changed or config.data.accept_changes, "a changed dataset was accepted"
        record_dataset(self.folder, fingerprint)
        self.counts["changed datasets"] += changed
        self.recorded = ids
        checkpoints.prune_checkpoints(self.folder, config.run.best_metric, 2)
        stored = checkpoints.list_checkpoints(self.folder)
        last_serial = stored[-1].serial if stored else 0
        launch = Launch(config, indexes, ids_of)
        self.counts["mixtures"] += self.is_mixture
        for _ in range(self.rng.randint(1, 3)):
            count = self.rng.choice([n for n in (1, 2, 3) if self.prompts % n == 0])
            try:
                self.attempt(launch, config.with_workers(count), last_serial)
                return
            except Killed:
                self.counts["kills"] += 1
            except CheckpointError as error:
                assert "all checkpoints are damaged" in str(error), error
                self.counts["refused: damaged"] += 1
                self.is_damaged = self.rng.random() < 0.5  # the same command again
                if not self.is_damaged:
                    self.start_over()
                return

    def start_over(self) -> None:
        """Set the run aside, as a launch with `run.resume=never` does."""
        self.folder.set_aside()
        self.steps_of, self.open_of, self.recorded = {}, {}, None

    def open_after(self, start: Any, launch: Launch) -> dict[int, frozenset[Use]]:
        """Return the uses of the steps after a checkpoint that a launch must repeat: none if its data differ."""
        if start.checkpoint is None or launch.config.grpo.dynamic_sampling:
            return {}
        order, open_uses = self.open_of[start.checkpoint.name]
        return open_uses if order == self.order_of(launch) else {}

    def order_of(self, launch: Launch) -> Any:
        """Return all that determines the order of a launch's problems; the files may hold the same in another order."""
        return launch.ids, launch.shares, launch.config.data, [parts[-1] for parts in self.files.values()]

    def index(self, config: Config, source: str) -> DatasetIndex:
        shards: list[Any] = [NumberShard(numbers) for numbers in self.files[source][-1]]
        if source:
            shards = [SourceShard(each, source, None) for each in shards]
        excluded = read_unverifiable(config, self.folder)
        index = build_index(Split("some", shards, limit=config.data.limit, excluded_ids=excluded))
        numbers = (n for part in self.files[source][-1] for n in part)
        overlong = [problem_of(source, n).id for n in numbers if 1 + n % LENGTHS > self.longest]
        return index.without_overlong(np.unique(ids_to_uint64(overlong)))

    def attempt(self, launch: Launch, config: Config, last_serial: int) -> None:
        """Train from the start point until the attempt is killed or stops."""
        start = choose_start(config, self.folder, last_serial, lambda text: None)
        assert not self.is_damaged, "a run without intact checkpoints began anew"
        lineage = Lineage.of(self.steps_of[start.checkpoint.name] if start.checkpoint else ())
        path = self.scratch / "run" / start.checkpoint.name if start.checkpoint else None
        Attempt(self, launch, config, start, lineage, path).run()


class Attempt:
    """One attempt: workers that draw, record and save."""

    def __init__(
        self, history: History, launch: Launch, config: Config, start: Any, lineage: Lineage, path: Path | None
    ) -> None:
        rng = history.rng
        self.history, self.launch, self.config, self.start, self.lineage = history, launch, config, start, lineage
        self.workers = Workers(config.cluster.max_workers)
        indexes = launch.indexes
        self.ledger = load_ledger(
            path,
            launch.shares,
            {name: index.ids for name, index in indexes.items()},
            {name: index.fingerprint for name, index in indexes.items()},
        )
        self.readers = {
            name: make_epoch_reader(index.split, config.run.seed, config.data.prefer_mixed)
            for name, index in indexes.items()
        }
        self.plan: EpochPlan | MixturePlan | None = None
        self.serial = start.last_serial
        parts = config.grpo.steps_per_generation
        self.last_step = start.step + parts * rng.randint(1, 12)
        self.kill_step = start.step + parts * rng.randint(1, 12)
        """Last step on the generation batch under way when the attempt is killed."""
        self.kill = rng.choice(KILLS)
        self.rounds = [rng.randint(0, config.grpo.dynamic_sampling) for _ in range(13)]
        self.expected = history.open_after(start, launch)
        """Step -> uses of its batch, which was drawn before the checkpoint."""

    def run(self) -> None:
        workers = self.workers
        with replaced(problem_loader, all_gather_object=workers.gather, is_rank_zero=lambda: workers.rank == 0):
            workers.run(self.work)

    def publish(self, plan: EpochPlan | MixturePlan) -> None:
        self.plan = plan

    def rows(self, rank: int) -> Iterator[dict[str, Any]]:
        """Yield a worker's rows of the plan: blocks go to workers in turn, as `StepDataConfig` has Ray Data do it."""
        plan = self.plan
        assert plan is not None
        if isinstance(plan, MixturePlan):
            rows = list(read_mixture(self.readers, plan))
        else:
            rows = list(self.readers[""].read_epoch(plan))
        share = self.config.sizes.prompts_per_worker
        for number, first in enumerate(range(0, len(rows), share)):
            if number % self.workers.count == rank:
                yield from rows[first : first + share]

    def maybe_kill(self, step: int, moment: str) -> None:
        if (step, moment) == (self.kill_step, self.kill):
            raise Killed

    def work(self, rank: int) -> None:
        loader = ProblemLoader(
            self.config, self.ledger.copy(), self.history.folder, self.publish, lambda: self.rows(rank), self.start.step
        )
        parts = self.config.grpo.steps_per_generation
        prompts = self.config.sizes.prompts_per_worker * parts
        batches = GroupBatches(loader.problems(), prompts, num_generations=2, repeats=1)
        iterator, ahead = iter(batches), list[Any]()
        for number, step in enumerate(range(self.start.step + 1, self.last_step + 1, parts), start=1):
            last = step + parts - 1  # the last step on this batch
            drawn = ahead.pop(0) if ahead else next(iterator)
            for _ in range(self.rounds[number]):
                drawn = [*drawn, *batches.draw()]
            self.maybe_kill(last, "drawn")
            groups = [record(row, step) for row in drawn[::2]]
            loader.record(groups)
            self.maybe_kill(last, "recorded")
            uses = [use for part in self.workers.gather([(g.epoch, g.problem) for g in groups]) for use in part]
            if rank == 0:
                if step in self.expected:
                    assert frozenset(uses) == self.expected[step], "a step drew other problems than before the kill"
                    self.history.counts["open batches drawn again"] += 1
                self.lineage.add(Step(tuple(uses), self.launch))
                self.history.counts["steps"] += 1
                if step == self.start.step + 1:
                    remove_leftovers(
                        SimpleNamespace(folder=self.history.folder, notify=lambda text: None),  # type: ignore[arg-type]
                        self.start,
                    )
            saves = last % self.config.grpo.save_steps == 0
            while len(ahead) < self.config.rollout.max_staleness:
                ahead.append(next(iterator))
            if saves or last == self.last_step:
                self.save(loader, last, rank, [[(row["epoch"], row["id"]) for row in rows[::2]] for rows in ahead])

    def save(self, loader: ProblemLoader, step: int, rank: int, ahead: list[list[Use]]) -> None:
        parts = zip(*self.workers.gather(ahead), strict=True)
        open_uses = [frozenset(use for part in parts_of_step for use in part) for parts_of_step in parts]
        with tempfile.TemporaryDirectory(dir=self.history.scratch) as local:
            write_rollouts = loader.settle(Path(local))
            self.maybe_kill(step, "settled")
            if rank == 0:
                self.commit(local, step, write_rollouts, dict(enumerate(open_uses, step + 1)))
        self.workers.gather(None)
        self.maybe_kill(step, "committed")

    def commit(
        self, local: str, step: int, write_rollouts: Callable[[], None], open_uses: dict[int, frozenset[Use]]
    ) -> None:
        folder = self.history.folder
        name = checkpoints.checkpoint_name(folder, step)
        self.serial += 1

        def before_commit() -> None:
            self.maybe_kill(step, "files written")
            write_rollouts()
            self.history.steps_of[name] = tuple(self.lineage.steps)
            self.history.open_of[name] = (self.history.order_of(self.launch), open_uses)
            self.maybe_kill(step, "rollouts written")

        metrics = {"step": step, "reward/mean": (step * 7 % 5) / 5}
        CheckpointUploader(folder, 0, 1, metrics, self.serial, 1.0, lambda text: None, before_commit)(
            Checkpoint.from_directory(local), name
        )
        self.history.counts["checkpoints"] += 1


def record(row: dict[str, Any], step: int) -> GroupRecord:
    correct = verdicts(row["id"], row["epoch"])
    return GroupRecord(
        step=step, epoch=row["epoch"], problem=row["id"], source=row.get(SOURCE, ""), rewards=correct,
        correct=correct, lengths=(1, 1), truncated=(False, False),
    )  # fmt: skip


# Many runs


def find_faults_here(checkpoint: checkpoints.CheckpointInfo) -> list[str]:
    return checkpoint_integrity.find_faults(checkpoint)


def run_history(seed: int, counts: Counter[str] | None = None) -> None:
    """Live one history; an AssertionError or any other error is a fault, and names the seed."""
    folder = Path(tempfile.mkdtemp(prefix="history-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        with (
            replaced(stream, map_shards=map_shards_here),
            replaced(start_point, _find_faults=find_faults_here),
        ):
            History(seed, folder, Counter() if counts is None else counts).live()
    except (Exception, Killed) as error:
        error.add_note(f"history of seed {seed}: python tests/helpers/run_histories.py --first {seed} --histories 1")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--histories", type=int, default=10_000)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    begun = time.perf_counter()
    for seed in range(arguments.first, arguments.first + arguments.histories):
        run_history(seed, counts)
    print(f"{arguments.histories} histories in {time.perf_counter() - begun:.0f} s: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
