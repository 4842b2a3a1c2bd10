"""Solving of the held-out problems by the workers of a run, with the engines that they train with."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.metrics import EvaluationResult, summarize_sets, unique_problems
from grpo_ray.evaluation.records import problems_with_texts
from grpo_ray.evaluation.solve import solve_problems
from grpo_ray.inference.sampling import Completion, OnFinished, ignore_finished
from grpo_ray.learner.collectives import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_ray.inference.conversation_source import ConversationSource
    from grpo_ray.inference.engine import Engine
    from grpo_ray.tools.conversation import Conversation


@dataclass(frozen=True)
class HeldoutSolver:
    """Solver of held-out problems; its methods are collective."""

    config: Config
    engine: "Engine"
    tokenizer: "PreTrainedTokenizerBase"
    workers: Workers
    sync_weights: Callable[[], None]
    """Gives the engine the learner's weights, if it does not have them."""
    source: "ConversationSource | None" = None
    """Sampler of multi-turn completions; None in a run of single turns."""

    def solve(
        self, problems: list[Problem], recorded: Collection[str] = (), on_finished: OnFinished = ignore_finished
    ) -> list[dict[str, Any]]:
        """Solve this worker's part of the problems, every n-th of them with n workers.

        Args:
            recorded: ids of the problems whose texts are returned.
            on_finished: called for each completion as soon as it is finished.

        Returns:
            A row for each problem of this worker, with the columns of `score_completions`.
        """
        self.sync_weights()
        mine = problems[self.workers.rank :: self.workers.count]

        def run_requests(prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[Completion]:
            with self.engine.heldout_rounds() as run_round:
                return run_round(prompts, sampling, on_finished)

        def converse(rows: list[dict[str, Any]], sampling: dict[str, Any]) -> "list[Conversation]":
            return self._converse(rows, sampling, on_finished)

        turns = None if self.source is None else converse
        columns = solve_problems(mine, self.config, self.tokenizer, run_requests, recorded, turns)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _converse(
        self, rows: list[dict[str, Any]], sampling: dict[str, Any], on_finished: OnFinished
    ) -> "list[Conversation]":
        assert self.source is not None
        with self.engine.heldout_rounds() as run_round:
            return self.source.sample(
                rows,
                sampling,
                run_round,
                is_any_active=self.engine.is_any_active,
                on_ended=lambda row, conversation: on_finished(row, conversation.token_ids),
                on_result=self.engine.profiler.note_progress,
            )

    def evaluate(
        self, sets: Mapping[str, list[Problem]], on_finished: OnFinished = ignore_finished
    ) -> dict[str, EvaluationResult]:
        """Evaluate the policy on held-out sets, given and returned by key, on all workers.

        Args:
            on_finished: called for each of this worker's completions as soon as it is finished.
        """
        own = self.solve(unique_problems(sets), problems_with_texts(sets), on_finished)
        rows_of_workers = self.workers.gather_objects(own)
        rows = [row for rows in rows_of_workers for row in rows]
        return summarize_sets(rows, sets, self.config.heldout.num_samples)
