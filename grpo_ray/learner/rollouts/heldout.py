"""Solving of the held-out problems by the workers of a run, with the engines that they train with."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.confidence import IntervalEstimate, wilson_interval
from grpo_ray.evaluation.solve import solve_problems
from grpo_ray.learner.collectives import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_ray.inference.engine import Engine


@dataclass(frozen=True)
class HeldoutSolver:
    """Solver of held-out problems; its methods are collective."""

    config: Config
    engine: "Engine"
    tokenizer: "PreTrainedTokenizerBase"
    workers: Workers
    sync_weights: Callable[[], None]
    """Gives the engine the learner's weights, if it does not have them."""

    def solve(self, problems: list[Problem]) -> list[dict[str, Any]]:
        """Solve this worker's part of the problems, every n-th.

        Returns:
            A row for each of them, as `summarize_evaluation` takes it.
        """
        self.sync_weights()
        mine = problems[self.workers.rank :: self.workers.count]
        columns = solve_problems(mine, self.config, self.tokenizer, self.engine.run_heldout)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def accuracy(self, problems: list[Problem]) -> IntervalEstimate:
        """Return the share of correct completions; a problem whose solution cannot be parsed is ignored."""
        rows = [row["scores"] for row in self.solve(problems)]
        own = [sum(scores) / len(scores) for scores in rows if not any(map(math.isnan, scores))]
        # Sorted, so that the sum does not depend on the number of workers.
        return wilson_interval(sorted(score for scores in self.workers.gather_objects(own) for score in scores))
