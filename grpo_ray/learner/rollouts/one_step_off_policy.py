"""Generation one step ahead (`grpo.generate_ahead`): the next step's completions are generated while the learner works.

In step s the engine gets the learner's weights and generates the completions of step s + 1 in a thread, while the
learner runs forward and backward over those of step s. They are complete before the optimizer step: the learner
computes their log-probabilities in one pass without gradient, and the sync is checked with them (proven weight sync).
The weights move only after that. So step s + 1 is taken on completions of weights one step older than its own. The
learner's log-probabilities from before the move become TRL's `old_per_token_logps`: TRL's clipping bounds how far the
policy has moved since, and the importance ratio compares learner and engine under the same weights. The gradient
differs from that of on-policy training, but equals TRL's gradient on any batch sampled by an older policy.

A step that ends with a checkpoint, and the last one, generate nothing ahead; the step after a checkpoint generates its
own completions first. So no completions are pending at a checkpoint, and a resumed run equals an uninterrupted one
(exactly-once, exact resume). A checkpoint at another step, when a run is stopped or leaves a machine, drops the
completions generated ahead; their problems are not used yet, and are drawn again.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from transformers import TrainerState

from grpo_ray.errors import ConfigError
from grpo_ray.learner.batch import Batch
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.exact_savings import is_noisy
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.rollout import Completions, Rows
from grpo_ray.learner.rollouts.sampler import OnPolicySampler, SingleTurn, WeightSync
from grpo_ray.telemetry.profiler import PhaseProfiler

T = TypeVar("T")


class PrefetchedBatches(Generic[T]):
    """Iterator over a dataloader's batches that can return the next one before it is drawn."""

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

    threading.Thread(target=run, name="generating ahead", daemon=True).start()
    return future


def require_deterministic_model(model: torch.nn.Module, device: torch.device) -> None:
    """Raise ConfigError if the learner would draw from the engine's random generator while the engine samples."""
    if device.type == "cpu" and is_noisy(model):
        raise ConfigError(
            "grpo.generate_ahead=true: on the CPU the learner's dropout and the engine would draw from the same "
            "generator at the same time, so no run could be repeated; set the dropout of the model, or of its adapter, "
            "to 0, or grpo.generate_ahead=false"
        )


class AheadProof(Protocol):
    """Methods of the learner that prove completions sampled ahead; collective."""

    def logps(self, batch: Batch) -> torch.Tensor:
        """Return the learner's log-probabilities of a batch's completions, (B, T) in nats, without gradient."""

    def compare_with_engine(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        """Compare log-probabilities under a mask, all (B, T). Raises SyncError if they differ."""


@dataclass(frozen=True)
class PendingCompletions:
    """Completions of the next step that are being sampled."""

    prompt_ids: list[list[int]]
    completions: Future[Completions]
    random_state: torch.Tensor
    """State of torch's generator on the CPU when sampling was started."""


class OneStepAheadSampler:
    """Sampler of one worker's completions one step ahead."""

    def __init__(
        self,
        sync: WeightSync,
        turn: SingleTurn,
        proof: AheadProof,
        padding: Padding,
        *,
        workers: Workers,
        profiler: PhaseProfiler,
    ) -> None:
        self.on_policy = OnPolicySampler(sync, turn, workers, profiler)
        self.sync = sync
        self.turn = turn
        self.proof = proof
        self.padding = padding
        self.profiler = profiler
        self.batches: PrefetchedBatches[Rows] = PrefetchedBatches(())
        self.pending: PendingCompletions | None = None
        self.ready: Completions | None = None
        """Completions of the next step, proven under the weights that they were sampled with."""
        device = padding.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def attach(self, batches: Iterable[Rows]) -> Iterable[Rows]:
        self.batches = PrefetchedBatches(batches)
        return self.batches

    def sample(self, rows: Rows) -> Completions:
        """Return the completions sampled ahead; sample now if there are none.

        Raises:
            RuntimeError: they were sampled for other prompts.
        """
        if self.ready is None:
            return self.on_policy.sample(rows)
        ready, self.ready = self.ready, None
        if self.turn.render(rows) != ready.prompt_ids:
            raise RuntimeError("the step's prompts are not those that completions were sampled for ahead")
        return ready

    def start_ahead(self, state: TrainerState) -> None:
        """Sample for the next step in a thread, with the weights that the current step began with."""
        if is_followed_by_checkpoint(state):
            return
        rows = self.batches.peek()
        prompt_ids = self.turn.render(rows)
        self.sync.update()
        random_state = torch.get_rng_state()
        sampled = run_in_thread(lambda: self.turn.answer(rows, prompt_ids), self._stream)
        self.pending = PendingCompletions(prompt_ids, sampled, random_state)

    def finish_ahead(self) -> None:
        """Wait for pending completions, and prove that they come from the weights that the learner still has."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        with self.profiler.span("generate"):  # the part of the generation that outlasts the learner's work
            completions = pending.completions.result()
        if self.padding.device.type == "cpu":
            # vLLM's sampler on the CPU draws numbers from this generator that it does not use. The learner draws none
            # meanwhile (`require_deterministic_model`), but gradient checkpointing may have reset the state.
            torch.set_rng_state(pending.random_state)
        batch = self.padding.columns(completions)
        learner_logps = self.proof.logps(batch)
        engine_logps = self.padding.logps(completions.proof_logps)
        self.proof.compare_with_engine(learner_logps, engine_logps, batch["completion_mask"])
        self.ready = replace(completions, learner_logps=learner_logps)


def is_followed_by_checkpoint(state: TrainerState) -> bool:
    """Return True if the step under way ends with a checkpoint, or is the last, so that nothing is sampled ahead."""
    step = state.global_step + 1
    return step % state.save_steps == 0 or step >= state.max_steps
