"""Generation one step ahead (`grpo.generate_ahead`): the next step's completions are generated while the learner works.

In step s the engine gets the learner's weights and generates the completions of step s + 1 in a thread, while the
learner runs forward and backward over those of step s. Before the optimizer step they are there: the learner computes
their log-probabilities in one pass without gradient, and the sync is checked with them (proven weight sync). Only then
do the weights move. So step s + 1 is taken on completions of weights one step older than its own. The learner's
log-probabilities from before the move become TRL's `old_per_token_logps`: TRL's clipping bounds how far the policy has
moved since, and the importance ratio compares learner and engine under the same weights. The gradient differs from
that of on-policy training, but it is the one that TRL takes on any batch that its policy has moved away from.

A step that ends with a checkpoint, and the last one, generate nothing ahead; the step after a checkpoint generates its
own completions first. So no completions are pending at a checkpoint, and a resumed run equals an uninterrupted one
(exactly-once, exact resume). A checkpoint at another step, when a run is stopped or leaves a machine, drops the
completions generated ahead; their problems are not used yet, and are drawn again.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from grpo_ray.errors import ConfigError
from grpo_ray.learner.batch import Batch, pad_completions, pad_logps
from grpo_ray.learner.exact_savings import is_noisy
from grpo_ray.telemetry.profiler import PhaseProfiler

T = TypeVar("T")

Rows = list[dict[str, Any]]
"""A batch of the dataloader: one row for each completion to generate."""


class Generation(NamedTuple):
    """Completions of the engine: B of them, T_b tokens in completion b. Log-probabilities are in nats."""

    completion_ids: list[list[int]]
    """(B, T_b)"""
    logps: list[list[float | None]]
    """(B, T_b), with which the tokens were sampled; None where the engine returned none."""
    unprocessed_logps: list[list[float | None]] | None = None
    """(B, T_b), before filters and penalties; None if they are the same."""

    @property
    def proof_logps(self) -> list[list[float | None]]:
        """Log-probabilities that the learner's must equal, (B, T_b)."""
        return self.logps if self.unprocessed_logps is None else self.unprocessed_logps


class PrefetchedBatches(Generic[T]):
    """Batches of a dataloader, the next of which can be seen before it is drawn."""

    def __init__(self, batches: Iterable[T]) -> None:
        self._source = iter(batches)
        self._seen: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._seen.pop() if self._seen else next(self._source)

    def peek(self) -> T:
        """Return the next batch. Drawing it can be collective, so all workers must call this together."""
        if not self._seen:
            self._seen.append(next(self._source))
        return self._seen[0]


def run_in_thread(work: Callable[[], T], stream: "torch.cuda.Stream | None" = None) -> Future[T]:
    """Call a function in a daemon thread, which does not keep the process alive.

    Args:
        work: the function.
        stream: CUDA stream for its work, after all work that the caller has queued by now; None without a GPU. The
            default stream of a thread is one that all threads share.

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
                stream.synchronize()  # from now on the weights may be written again
        except BaseException as error:  # raised again in the thread that waits, whatever it is
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="generating ahead", daemon=True).start()
    return future


def require_deterministic_model(model: torch.nn.Module, device: torch.device) -> None:
    """Raise ConfigError if the learner would draw from the engine's random generator at the same time."""
    if device.type == "cpu" and is_noisy(model):
        raise ConfigError(
            "grpo.generate_ahead=true: on the CPU the learner's dropout and the engine would draw from the same "
            "generator at the same time, so no run could be repeated; set the model's dropout (model.lora.dropout) to "
            "0, or grpo.generate_ahead=false"
        )


@dataclass(frozen=True)
class PendingCompletions:
    """Completions of the next step that are being generated."""

    prompt_ids: list[list[int]]
    generation: Future[Generation]
    random_state: torch.Tensor
    """State of torch's generator on the CPU when the generation was started."""


@dataclass(frozen=True)
class ReadyCompletions:
    """Completions of the next step, checked under the weights that they were generated with."""

    prompt_ids: list[list[int]]
    generation: Generation
    learner_logps: torch.Tensor
    """(B, T), the learner's log-probabilities under the engine's weights, nats."""


@dataclass(frozen=True)
class AheadOperations:
    """Operations of the learner that generation ahead consists of, in their order."""

    next_rows: Callable[[], Rows]
    """Return the next batch without drawing it; collective."""
    prepare: Callable[[Rows], tuple[list[list[int]], Callable[[], Generation]]]
    """Give the engine the learner's weights; return the rows' prompts and the function that generates for them."""
    score: Callable[[Batch], torch.Tensor]
    """Return the learner's log-probabilities of a batch's completions, (B, T) in nats, without gradient."""
    check_sync: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """Compare log-probabilities of learner and engine under a mask, all (B, T); raise SyncError if they differ."""


class AheadGenerator:
    """Generator of one worker's completions one step ahead."""

    def __init__(
        self, operations: AheadOperations, *, pad_token_id: int, device: torch.device, profiler: PhaseProfiler
    ) -> None:
        self.operations = operations
        self.pad_token_id = pad_token_id
        self.device = device
        self.profiler = profiler
        self.pending: PendingCompletions | None = None
        self.ready: ReadyCompletions | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self) -> None:
        """Generate for the next step in a thread, with the weights that the current step began with."""
        prompt_ids, generate = self.operations.prepare(self.operations.next_rows())
        random_state = torch.get_rng_state()
        self.pending = PendingCompletions(prompt_ids, run_in_thread(generate, self._stream), random_state)

    def finish(self) -> None:
        """Wait for pending completions, and check that they come from the weights that the learner still has."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        with self.profiler.span("generate"):  # the part that the learner's own work did not hide
            generation = pending.generation.result()
        if self.device.type == "cpu":
            # vLLM's sampler on the CPU draws noise from this generator, which it does not use. The learner draws
            # nothing meanwhile (`require_deterministic_model`), but gradient checkpointing may have reset the state.
            torch.set_rng_state(pending.random_state)
        batch = pad_completions(pending.prompt_ids, generation.completion_ids, self.pad_token_id, self.device)
        learner_logps = self.operations.score(batch)
        engine_logps = pad_logps(generation.proof_logps, learner_logps.size(1), self.device)
        self.operations.check_sync(learner_logps, engine_logps, batch["completion_mask"])
        self.ready = ReadyCompletions(pending.prompt_ids, generation, learner_logps)

    def generation_for(self, prompt_ids: list[list[int]]) -> Generation | None:
        """Return the completions generated ahead for a step's prompts; None if there are none.

        Raises:
            RuntimeError: they were generated for other prompts.
        """
        if self.ready is None:
            return None
        if prompt_ids != self.ready.prompt_ids:
            raise RuntimeError("the step's prompts are not those that completions were generated for ahead")
        return self.ready.generation
