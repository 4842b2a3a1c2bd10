"""Sampling by weights that are at most k optimizer steps old (`rollout.max_staleness`), while the learner works.

In step t the engine gets the learner's weights and samples round t of the schedule (`staleness_schedule.py`) in a
thread: one call with the rows of all batches of the round, in fixed order. Before the optimizer step the round has
ended, and is proven with the weights that the learner still has (`sync_probe.py`). A continued completion is a new
request with all earlier tokens in its prompt. Keys and values are computed again: those of older weights are never
used.

The end of a step is a consistent cut: nothing is being sampled, and all completions of later steps are open rollouts,
finished or not. A checkpoint holds them (`storage/records/open_rollouts.py`). After a resume, the same problems are
drawn in the same order, and each worker takes the completions of the problems that it draws; those of a problem that is
no longer drawn are discarded. So a resumed run equals an uninterrupted one (exactly-once, exact resume).
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from transformers import TrainerState

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import SOURCE
from grpo_ray.errors import ConfigError
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.exact_savings import is_noisy
from grpo_ray.learner.rollouts.rollout import Completions, Rows
from grpo_ray.learner.rollouts.rounds import OpenBatch, RoundRequest, Rounds
from grpo_ray.learner.rollouts.sampler import WeightSync
from grpo_ray.learner.rollouts.staleness_metrics import RoundTimes, staleness_metrics
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule
from grpo_ray.learner.rollouts.sync_probe import SyncProbe
from grpo_ray.storage.records.open_rollouts import (
    OpenRollout,
    RolloutKey,
    load_open_rollouts,
    prompt_digest,
    save_open_rollouts,
)
from grpo_ray.telemetry.profiler import PhaseProfiler

T = TypeVar("T")


class PrefetchedBatches(Generic[T]):
    """Iterator over a dataloader's batches, each of which comes `repeats` times in a row, that can look ahead."""

    def __init__(self, batches: Iterable[T], repeats: int = 1) -> None:
        self._source = iter(batches)
        self._repeats = repeats
        self._seen: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._seen.pop(0) if self._seen else next(self._source)

    def peek(self, number: int = 1) -> T | None:
        """Return a later batch, the next one for 1, between two batches; None if the batches end before it.

        Drawing can be collective, so all workers must call this together.
        """
        place = (number - 1) * self._repeats
        while len(self._seen) <= place:
            try:
                self._seen.append(next(self._source))
            except StopIteration:
                return None
        return self._seen[place]


def run_in_thread(work: Callable[[], T], stream: "torch.cuda.Stream | None" = None) -> Future[T]:
    """Call a function in a daemon thread, which does not keep the process alive.

    Args:
        work: the function.
        stream: CUDA stream for its work, which waits for all work that the caller has queued so far; None without a
            GPU. It is needed because all threads share one default stream.

    Returns:
        Future with the function's result, or the error that it raised.
    """
    future: Future[T] = Future()
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))

    def run() -> None:
        try:
            with torch.cuda.stream(stream):  # does nothing if there is none
                result = work()
            if stream is not None:
                stream.synchronize()  # the caller may change the weights after this
        except BaseException as error:  # raised again in the thread that waits, whatever it is
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="sampling a round", daemon=True).start()
    return future


def require_deterministic_model(model: torch.nn.Module, device: torch.device) -> None:
    """Raise ConfigError if the learner would draw from the engine's random generator while the engine samples."""
    if device.type == "cpu" and is_noisy(model):
        raise ConfigError(
            "rollout.max_staleness: on the CPU the learner's dropout and the engine would draw from the same "
            "generator at the same time, so no run could be repeated; set the dropout of the model, or of its adapter, "
            "to 0, or rollout.max_staleness=0"
        )


def rollout_settings(config: Config) -> dict[str, Any]:
    """Return the settings that open rollouts depend on, in JSON types; with others, they are discarded."""
    return {
        "rollout.max_staleness": config.rollout.max_staleness,
        "grpo.max_completion_length": config.grpo.max_completion_length,
        # A shorter context may have no space for the rest of a completion, or for its tokens so far.
        "engine.max_model_len": config.engine.max_model_len,
        "run.seed": config.run.seed,
        # `generation_kwargs` may hold mappings with integers as keys, which JSON turns into texts.
        "sampling options": {name: repr(value) for name, value in sorted(config.sampling.changed.items())},
    }


@dataclass
class SavedRollouts:
    """Open rollouts of the checkpoint that the attempt has started from, of all workers."""

    rollouts: dict[RolloutKey, OpenRollout]
    total: int
    taken: int = 0
    """Number of those that this worker has taken."""

    def take(self, rollout: OpenRollout) -> OpenRollout:
        """Return the saved completion of a new one's row, or the new one if there is none."""
        saved = self.rollouts.get(rollout.key)
        if saved is None or (saved.batch, saved.prompt) != (rollout.batch, rollout.prompt):
            return rollout
        self.taken += 1
        return saved


class BoundedStalenessSampler:
    """Sampler of one worker's completions, begun up to k steps before they are trained on."""

    def __init__(
        self,
        schedule: StalenessSchedule,
        sync: WeightSync,
        rounds: Rounds,
        probe: SyncProbe,
        *,
        repeats: int,
        workers: Workers,
        profiler: PhaseProfiler,
        append_metrics: Callable[[Mapping[str, float]], None],
        notify: Callable[[str], None],
    ) -> None:
        """
        Args:
            repeats: number of times that the dataloader yields each batch.
            notify: shows the user a line; called on rank 0.
        """
        self.schedule = schedule
        self.sync = sync
        self.rounds = rounds
        self.probe = probe
        self.repeats = repeats
        self.workers = workers
        self.profiler = profiler
        self.append_metrics = append_metrics
        self.notify = notify
        self.settings = rollout_settings(rounds.config) | rounds.settings
        self.batches: PrefetchedBatches[Rows] = PrefetchedBatches(())
        self.open: dict[int, OpenBatch] = {}
        """Batches of later steps that have begun, by step."""
        self.saved = SavedRollouts({}, 0)
        self.pending: Future[Sequence[Any]] | None = None
        """Completions of the round that is being sampled."""
        self._requests: list[RoundRequest] = []
        self._random_state = torch.get_rng_state()
        """State of torch's generator on the CPU when the round was started."""
        self._times = RoundTimes()
        device = workers.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def attach(self, batches: Iterable[Rows]) -> Iterable[Rows]:
        self.batches = PrefetchedBatches(batches, self.repeats)
        return self.batches

    # Steps

    def sample(self, rows: Rows) -> Completions:
        """Return the completions of the step's batch; those that have not begun are sampled now.

        Raises:
            RuntimeError: the step's batch was begun for other rows.
        """
        self._times.start()
        version = self.sync.step()
        batch = self.open.pop(version, None) or self._begin(rows, version)
        if [each.key for each in batch.rollouts] != list(map(_key, rows)):
            raise RuntimeError(f"step {version + 1}: the rows are not those that its completions were begun for")
        requests = self._next_requests([batch], version)
        missing, total = self._sums(len(requests), len(rows))
        if missing:
            self.sync.update()
            self._sample_now(requests, version, is_proven_by_loss=missing == total)
        self.append_metrics(
            staleness_metrics(batch.rollouts, batch.prompt_ids, version, self.schedule.max_staleness, self.workers)
        )
        return self.rounds.completions(batch, is_on_policy=missing == total)

    def start_ahead(self, state: TrainerState) -> None:
        """Begin the round of the current step in a thread, with the weights that the step began with."""
        version = self.sync.step()
        batches = [batch for step in self.schedule.batches(version) if (batch := self._batch(step, version))]
        self._report_discarded()
        self._requests = self._next_requests(batches, version)
        (requests,) = self._sums(len(self._requests))
        if not requests:
            return
        self.sync.update()
        self._random_state = torch.get_rng_state()
        self.pending = run_in_thread(self._run, self._stream)

    def finish_ahead(self) -> None:
        """Wait for the round, and prove that it was sampled with the weights that the learner still has."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            waits_since = time.perf_counter()
            with self.profiler.span("generate"):  # the part of the round that outlasts the learner's work
                results = pending.result()
            self._times.waited += time.perf_counter() - waits_since
            if self.workers.device.type == "cpu" and not self.rounds.config.engine.is_dedicated:
                # vLLM's sampler on the CPU draws numbers from this generator that it does not use. The learner draws
                # none meanwhile (`require_deterministic_model`), but gradient checkpointing may have reset the state.
                torch.set_rng_state(self._random_state)
            segments = self.rounds.add(self._requests, results, self.sync.step())
            self._requests = []
            self.probe.prove(segments)
        self.append_metrics(self._times.take(self.workers))

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Write the open rollouts of all workers into a checkpoint's folder, on rank 0; between two steps."""
        assert self.pending is None
        own = [rollout for _, batch in sorted(self.open.items()) for rollout in batch.rollouts]
        gathered = self.workers.gather_objects(own)
        if self.workers.rank == 0:
            rollouts = sorted((each for rollouts in gathered for each in rollouts), key=lambda each: each.batch)
            save_open_rollouts(folder, rollouts, self.settings)

    def load(self, folder: Path) -> None:
        """Read the open rollouts of the checkpoint that the attempt starts from; before the first step."""
        rollouts, settings = load_open_rollouts(folder)
        names = dict.fromkeys([*self.settings, *settings])
        changed = [name for name in names if settings.get(name) != self.settings.get(name)]
        if rollouts and changed:
            self._announce(
                f"{len(rollouts)} completions of later steps in the checkpoint were sampled with another "
                f"{', '.join(changed)}; they are discarded, and their problems are drawn again"
            )
        elif rollouts:
            unfinished = sum(not each.finished for each in rollouts)
            self._announce(f"{len(rollouts)} completions of later steps are in the checkpoint, {unfinished} unfinished")
            self.saved = SavedRollouts({each.key: each for each in rollouts}, len(rollouts))

    def _report_discarded(self) -> None:
        """Discard the saved completions that no batch has taken, and report their number; collective at the first call.

        The first round has drawn all batches that an earlier round can have begun.
        """
        if not self.saved.total:
            return
        (taken,) = self._sums(self.saved.taken)
        if taken < self.saved.total:
            self._announce(
                f"{self.saved.total - taken} of {self.saved.total} completions of later steps in the checkpoint "
                "belong to problems that are not drawn in the same step again; they are discarded"
            )
        self.saved = SavedRollouts({}, 0)

    def _announce(self, line: str) -> None:
        if self.workers.rank == 0:
            self.notify(line)

    # Parts

    def _sums(self, *own: int) -> list[int]:
        """Add up numbers over the workers; collective."""
        gathered = self.workers.gather(torch.tensor(own, device=self.workers.device))
        return [int(each) for each in gathered.sum(dim=0)]

    def _batch(self, step: int, version: int) -> OpenBatch | None:
        """Return a later step's batch, begun if it is new; None if the dataloader's batches end before it."""
        if step not in self.open:
            rows = self.batches.peek(step - version)
            if rows is None:
                return None
            self.open[step] = self._begin(rows, step)
        return self.open[step]

    def _begin(self, rows: Rows, step: int) -> OpenBatch:
        """Return a batch with the completions that the checkpoint holds, and empty ones for its other rows."""
        prompt_ids = self.rounds.render(rows)
        rollouts = [
            self.saved.take(OpenRollout(key=_key(row), batch=step, prompt=prompt_digest(ids)))
            for row, ids in zip(rows, prompt_ids, strict=True)
        ]
        return OpenBatch(step, rows, prompt_ids, rollouts)

    def _next_requests(self, batches: Sequence[OpenBatch], version: int) -> list[RoundRequest]:
        """Return the requests of a round for the unfinished completions of some batches, in order."""
        return [
            RoundRequest(row, ids, rollout, self.rounds.limit(rollout, batch.step, version))
            for batch in batches
            for row, ids, rollout in zip(batch.rows, batch.prompt_ids, batch.rollouts, strict=True)
            if not rollout.finished
        ]

    def _sample_now(self, requests: list[RoundRequest], version: int, *, is_proven_by_loss: bool) -> None:
        """Sample the completions that the step's batch lacks, while the learner waits."""
        waits_since = time.perf_counter()
        self._requests = requests
        segments = self.rounds.add(requests, self._run(), version)
        self._requests = []
        self._times.waited += time.perf_counter() - waits_since
        with self.profiler.span("wait_workers"):
            self.workers.wait()
        if not is_proven_by_loss:  # the loss compares learner and engine only if all tokens are of its own weights
            self.probe.prove(segments)

    def _run(self) -> Sequence[Any]:
        """Sample the requests of a round; in a round's thread, or in the learner's."""
        began = time.perf_counter()
        results = self.rounds.run(self._requests)
        self._times.add_round(time.perf_counter() - began)
        return results


def _key(row: Mapping[str, Any]) -> RolloutKey:
    """Return the identity of a row's completion."""
    return RolloutKey(row.get(SOURCE, ""), row["id"], row["epoch"], row["index"])
