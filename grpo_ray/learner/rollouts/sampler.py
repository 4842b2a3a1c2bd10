"""Sampling of a step's completions: the interface between the collector and the engine.

A `Sampler` takes rows (problems with their epoch and index, from which each completion's seed follows) and returns
`Completions`: token ids, behaviour log-probabilities and, with tools, the turns. Its callers do not depend on where the
engine runs, or on when the completions were sampled.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import TrainerState

from grpo_ray.config.schema import Config
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.sampling import Completion, OnFinished, RunRound, ignore_finished, limit_tokens
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.rollout import Completions, Rows
from grpo_ray.models.tokenizer import tokenize_prompts
from grpo_ray.telemetry.profiler import PhaseProfiler
from grpo_ray.tools.conversation import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_ray.inference.conversation_source import ConversationSource
    from grpo_ray.inference.engine import Engine

StartGrading = Callable[[Any, str | list[dict[str, Any]]], None]
"""Function that starts grading a row's text or messages while other completions are still sampled."""

Metrics = Callable[[dict[str, float]], None]
"""Function that appends values to the metrics of a step."""


class Sampler(Protocol):
    """Source of a worker's completions. Its methods are collective."""

    def attach(self, batches: Iterable[Rows]) -> Iterable[Rows]:
        """Take the dataloader's batches, and return those that the trainer iterates over."""

    def sample(self, rows: Rows) -> Completions:
        """Return a completion for each row."""

    def start_ahead(self, state: TrainerState) -> None:
        """Start sampling for later steps; called before the first micro-batch of a step is read."""

    def finish_ahead(self) -> None:
        """Wait for completions of later steps; called after the last micro-batch, before the weights move."""

    def save(self, folder: Path) -> None:
        """Write the completions of later steps into a checkpoint's folder."""

    def load(self, folder: Path) -> None:
        """Read the completions of later steps from a checkpoint's folder; called before the first step."""


class Turns(Protocol):
    """Sampling of single-turn or multi-turn completions with the engine's present weights."""

    def sample(self, rows: Rows) -> Completions:
        """Return a completion for each row."""


class WeightSync:
    """Sync of the engine with the learner's weights of the current step, proven before each use; collective."""

    def __init__(self, engine: "Engine", step: Callable[[], int]) -> None:
        """
        Args:
            step: returns the number of optimizer steps taken.
        """
        self.engine = engine
        self.step = step
        self._loaded_step: int | None = None

    def update(self) -> None:
        """Copy the learner's weights into the engine unless it has those of this step, and prove that it holds them.

        Raises:
            SyncError: the engine does not hold the learner's weights.
        """
        proofs = self.engine.proofs
        if self._loaded_step != self.step():
            self.engine.sync_weights()
            self._loaded_step = self.step()
        if self.engine.proofs == proofs:  # no sync was due, or it did not prove the weights
            self.engine.prove_weights()


class OnPolicySampler:
    """Sampler that generates with the current weights, when the step needs its completions."""

    def __init__(self, sync: WeightSync, turns: Turns, workers: Workers, profiler: PhaseProfiler) -> None:
        self.sync = sync
        self.turns = turns
        self.workers = workers
        self.profiler = profiler

    def attach(self, batches: Iterable[Rows]) -> Iterable[Rows]:
        return batches

    def sample(self, rows: Rows) -> Completions:
        self.sync.update()
        completions = self.turns.sample(rows)
        with self.profiler.span("wait_workers"):  # the next collective would wait too; here the time is measured
            self.workers.wait()
        return completions

    def start_ahead(self, state: TrainerState) -> None:
        pass

    def finish_ahead(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        pass

    def load(self, folder: Path) -> None:
        pass


@dataclass(frozen=True)
class SingleTurn:
    """Completions of one turn: the policy's answer to a prompt."""

    config: Config
    engine: "Engine"
    tokenizer: "PreTrainedTokenizerBase"
    start_grading: StartGrading | None
    """None if no reward is graded early."""

    def render(self, rows: Rows) -> list[list[int]]:
        """Return the token ids of the rows' prompts, (B, P_b); held-out measuring renders with the same function."""
        prompts = [row["prompt"] for row in rows]
        return tokenize_prompts(self.tokenizer, prompts, self.config.chat_template_kwargs)

    def sample(self, rows: Rows) -> Completions:
        """Sample a completion for each row, with the row's seed."""
        prompt_ids = self.render(rows)
        requests = [self.engine.training_sampling | {"seed": self._seed(row)} for row in rows]
        grade = ignore_finished
        if self.start_grading is not None:  # otherwise texts are not needed yet

            def grade(index: int, token_ids: list[int]) -> None:
                self.grade(rows[index], token_ids)

        sampled = self.engine.run_requests(prompt_ids, requests, grade)
        is_processed = bool(self.config.sampling.processing)
        return Completions(
            prompt_ids,
            [each.token_ids for each in sampled],
            [each.logps for each in sampled],
            [each.unprocessed_logps for each in sampled] if is_processed else None,
        )

    def run_segments(
        self,
        rows: Rows,
        contexts: list[list[int]],
        limits: Sequence[int],
        segments: Sequence[int],
        on_finished: OnFinished,
    ) -> list[Completion]:
        """Sample the next segment of each row's completion.

        Args:
            contexts: (B,) token ids of the prompt and of earlier segments.
            limits: (B,) largest number of tokens of the segment.
            segments: (B,) number of the segment in its completion, from 0.
        """
        requests = [
            limit_tokens(self.engine.training_sampling, limit) | {"seed": self._seed(row, segment)}
            for row, limit, segment in zip(rows, limits, segments, strict=True)
        ]
        return self.engine.run_requests(contexts, requests, on_finished)

    def _seed(self, row: Mapping[str, Any], segment: int = 0) -> int:
        return request_seed(self.config.run.seed, row["id"], row["epoch"], row["index"], segment)

    def grade(self, row: Mapping[str, Any], token_ids: list[int]) -> None:
        """Start grading a finished completion, if a reward is graded early."""
        if self.start_grading is not None:
            self.start_grading(row, self.tokenizer.decode(token_ids, skip_special_tokens=True))


@dataclass(frozen=True)
class MultiTurn:
    """Multi-turn completions: with tools or an environment between the turns (`inference/conversation_sampler.py`), or
    by a function of the user (`inference/rollout_function.py`)."""

    config: Config
    engine: "Engine"
    source: "ConversationSource"
    start_grading: StartGrading | None
    """None if no reward is graded early."""
    workers: Workers
    profiler: PhaseProfiler
    append_metrics: Metrics

    @contextmanager
    def generating(self) -> Iterator[RunRound]:
        """Wake the engine up, and yield a function that generates a turn for each prompt."""
        with self.profiler.span("tools"), self.engine.rounds() as run_round:

            def generate(
                prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished
            ) -> list[Completion]:
                with self.profiler.span("generate"):
                    completions = run_round(prompts, sampling, on_finished)
                self.profiler.count_tokens("engine", sum(len(each.token_ids) for each in completions))
                return completions

            yield generate

    def sample(self, rows: Rows) -> Completions:
        with self.generating() as generate:
            sampled = self.source.sample(
                rows,
                self.engine.training_sampling,
                generate,
                is_any_active=self.engine.is_any_active,
                on_ended=lambda row, conversation: self.grade(rows[row], conversation),
                on_result=self.profiler.note_progress,
            )
        self.report(sampled)
        is_processed = bool(self.config.sampling.processing)
        return Completions(
            [each.prompt_ids for each in sampled],
            [each.token_ids for each in sampled],
            [each.logps for each in sampled],
            [each.unprocessed_logps or [] for each in sampled] if is_processed else None,
            [each.own for each in sampled],
            sampled,
        )

    def report(self, conversations: Sequence[Conversation]) -> None:
        """Append the metrics of a step's conversations; collective."""
        with self.profiler.span("wait_workers"):  # workers differ in their turns
            summaries = self.workers.gather_objects([each.summary for each in conversations])
        self.append_metrics(self.source.metrics([each for worker in summaries for each in worker]))

    def grade(self, row: Any, conversation: Conversation) -> None:
        """Start grading a conversation that has ended, if a reward is graded early."""
        if self.start_grading is not None:
            self.start_grading(row, conversation.messages)
