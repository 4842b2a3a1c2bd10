"""Sampling by weights that are at most k optimizer steps old (`rollout.max_staleness`), while the learner works.

In step t the engine gets the learner's weights and samples round t of the schedule (`staleness_schedule.py`) in a
thread: one call with the rows of all batches of the round, in fixed order. Before the optimizer step the round has
ended, and is proven with the weights that the learner still has (`sync_probe.py`). A continued completion is a new
request with prompt and earlier tokens as its prompt, and a seed of its own. Keys and values are computed again: those
of older weights are never used.

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
from grpo_ray.inference.sampling import Completion
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.exact_savings import is_noisy
from grpo_ray.learner.rollouts.rollout import Completions, Rows
from grpo_ray.learner.rollouts.sampler import SingleTurn, WeightSync
from grpo_ray.learner.rollouts.staleness_metrics import RoundTimes, staleness_metrics
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule
from grpo_ray.learner.rollouts.sync_probe import Segment, SyncProbe
from grpo_ray.storage.records.open_rollouts import (
    OpenRollout,
    RolloutKey,
    load_open_rollouts,
    optional_logps,
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
        "run.seed": config.run.seed,
        # `generation_kwargs` may hold mappings with integers as keys, which JSON turns into texts.
        "sampling options": {name: repr(value) for name, value in sorted(config.sampling.changed.items())},
    }


@dataclass(frozen=True)
class OpenBatch:
    """One worker's rows of a step's batch, with their completions so far. B rows."""

    step: int
    """Number of optimizer steps before the one that trains on it."""
    rows: Rows
    """(B,)"""
    prompt_ids: list[list[int]]
    """(B, P_b)"""
    rollouts: list[OpenRollout]
    """(B,)"""


@dataclass(frozen=True)
class SegmentRequest:
    """Request to the engine for the next segment of a completion."""

    row: dict[str, Any]
    context: list[int]
    """Token ids of the prompt and of earlier segments."""
    rollout: OpenRollout
    limit: int
    """Largest number of tokens."""
    shard: int


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
        turn: SingleTurn,
        probe: SyncProbe,
        *,
        num_generations: int,
        shards: int,
        repeats: int,
        workers: Workers,
        profiler: PhaseProfiler,
        append_metrics: Callable[[Mapping[str, float]], None],
        notify: Callable[[str], None],
    ) -> None:
        """
        Args:
            num_generations: rows of a group, which are next to each other.
            shards: largest number of engines that share a round; group g of a step belongs to shard g modulo `shards`.
            repeats: number of times that the dataloader yields each batch.
            notify: shows the user a line; called on rank 0.
        """
        self.schedule = schedule
        self.sync = sync
        self.turn = turn
        self.probe = probe
        self.num_generations = num_generations
        self.shards = shards
        self.repeats = repeats
        self.workers = workers
        self.profiler = profiler
        self.append_metrics = append_metrics
        self.notify = notify
        self.settings = rollout_settings(turn.config)
        self.batches: PrefetchedBatches[Rows] = PrefetchedBatches(())
        self.open: dict[int, OpenBatch] = {}
        """Batches of later steps that have begun, by step."""
        self.saved = SavedRollouts({}, 0)
        self.pending: Future[list[Completion]] | None = None
        """Completions of the round that is being sampled."""
        self._requests: list[SegmentRequest] = []
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
        return self._completions(batch, is_on_policy=missing == total)

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
                completions = pending.result()
            self._times.waited += time.perf_counter() - waits_since
            if self.workers.device.type == "cpu":
                # vLLM's sampler on the CPU draws numbers from this generator that it does not use. The learner draws
                # none meanwhile (`require_deterministic_model`), but gradient checkpointing may have reset the state.
                torch.set_rng_state(self._random_state)
            segments = self._add(self._requests, completions, self.sync.step())
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
        changed = [name for name, value in self.settings.items() if settings.get(name) != value]
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
        prompt_ids = self.turn.render(rows)
        rollouts = [
            self.saved.take(OpenRollout(key=_key(row), batch=step, prompt=prompt_digest(ids)))
            for row, ids in zip(rows, prompt_ids, strict=True)
        ]
        return OpenBatch(step, rows, prompt_ids, rollouts)

    def _next_requests(self, batches: Sequence[OpenBatch], version: int) -> list[SegmentRequest]:
        """Return the requests of a round for the unfinished completions of some batches, in order."""
        first_group = [self.workers.rank * (len(batch.rows) // self.num_generations) for batch in batches]
        return [
            SegmentRequest(
                row,
                [*ids, *rollout.token_ids],
                rollout,
                self.schedule.token_limit(
                    batch.step, rollout.began if rollout.runs else version, len(rollout.token_ids)
                ),
                (first + place // self.num_generations) % self.shards,
            )
            for batch, first in zip(batches, first_group, strict=True)
            for place, (row, ids, rollout) in enumerate(zip(batch.rows, batch.prompt_ids, batch.rollouts, strict=True))
            if not rollout.finished
        ]

    def _sample_now(self, requests: list[SegmentRequest], version: int, *, is_proven_by_loss: bool) -> None:
        """Sample the completions that the step's batch lacks, while the learner waits."""
        waits_since = time.perf_counter()
        self._requests = requests
        segments = self._add(requests, self._run(), version)
        self._requests = []
        self._times.waited += time.perf_counter() - waits_since
        with self.profiler.span("wait_workers"):
            self.workers.wait()
        if not is_proven_by_loss:  # the loss compares learner and engine only if all tokens are of its own weights
            self.probe.prove(segments)

    def _run(self) -> list[Completion]:
        """Sample the requests of a round; in a round's thread, or in the learner's."""
        requests = self._requests

        def grade(number: int, token_ids: list[int]) -> None:
            # Certainly finished; whether one of this length has ended is known only with the round.
            if len(token_ids) < requests[number].limit:
                self._grade(requests[number], token_ids)

        began = time.perf_counter()
        completions = self.turn.run_segments(
            [each.row for each in requests],
            [each.context for each in requests],
            [each.limit for each in requests],
            [len(each.rollout.runs) for each in requests],
            [each.shard for each in requests] if self.shards > 1 else None,
            grade,
        )
        self._times.add_round(time.perf_counter() - began)
        return completions

    def _add(
        self, requests: Sequence[SegmentRequest], completions: Sequence[Completion], version: int
    ) -> list[Segment]:
        """Add the tokens of a round to their completions, and return them as segments."""
        segments = []
        for request, completion in zip(requests, completions, strict=True):
            rollout, length = request.rollout, len(completion.token_ids)
            age = version - rollout.began if rollout.runs else 0
            # A completion without space in the engine's context is cut off before its limit.
            is_cut_here = completion.truncated and length == request.limit
            rollout.finished = not is_cut_here or len(rollout.token_ids) + length >= self.schedule.longest
            if rollout.finished and length == request.limit:  # shorter ones are graded as soon as they end
                self._grade(request, completion.token_ids)
            rollout.add_segment(version, completion.token_ids, completion.logps, completion.unprocessed_logps)
            proof = completion.unprocessed_logps or completion.logps
            segments.append(Segment(request.context, completion.token_ids, proof, age, request.shard))
        return segments

    def _grade(self, request: SegmentRequest, token_ids: list[int]) -> None:
        """Start grading a finished completion, given its last segment."""
        self.turn.grade(request.row, [*request.rollout.token_ids, *token_ids])

    def _completions(self, batch: OpenBatch, *, is_on_policy: bool) -> Completions:
        is_processed = bool(self.turn.config.sampling.processing)
        return Completions(
            batch.prompt_ids,
            [each.token_ids.tolist() for each in batch.rollouts],
            [optional_logps(each.logps) for each in batch.rollouts],
            [optional_logps(each.unprocessed_logps) for each in batch.rollouts] if is_processed else None,
            is_on_policy=is_on_policy,
        )


def _key(row: Mapping[str, Any]) -> RolloutKey:
    """Return the identity of a row's completion."""
    return RolloutKey(row.get(SOURCE, ""), row["id"], row["epoch"], row["index"])
