"""Greedy solving of the held-out problems by the workers of a run, with the engines that they train with."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo_ray.config.schema import RewardsConfig
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.confidence import IntervalEstimate, wilson_interval
from grpo_ray.evaluation.metrics import score_completions
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.group_recorder import find_truncated
from grpo_ray.models.tokenizer import tokenize_prompts
from grpo_ray.rewards.registry import heldout_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_ray.inference.engine import Engine


@dataclass(frozen=True)
class HeldoutSolver:
    """Solver of held-out problems; its methods are collective."""

    engine: "Engine"
    tokenizer: "PreTrainedTokenizerBase"
    rewards: RewardsConfig
    end_tokens: Collection[int]
    """Token ids with which a completion can end."""
    workers: Workers
    sync_weights: Callable[[], None]
    """Gives the engine the learner's weights, if it does not have them."""

    def solve(self, problems: list[Problem]) -> list[dict[str, Any]]:
        """Solve this worker's part of the problems, every n-th, greedily.

        Returns:
            A row for each of them, as `summarize_evaluation` takes it.
        """
        self.sync_weights()
        mine = problems[self.workers.rank :: self.workers.count]
        prompts = tokenize_prompts(self.tokenizer, [problem.prompt for problem in mine])
        begun = time.perf_counter()
        completions = self.engine.generate_greedy(prompts)
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        columns = score_completions(
            mine, texts, find_truncated(completions, self.end_tokens), heldout_reward(self.rewards), begun
        )
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def accuracy(self, problems: list[Problem]) -> IntervalEstimate:
        """Return the share of problems solved; a problem whose solution cannot be parsed is ignored."""
        known = [score for row in self.solve(problems) for score in row["scores"] if not math.isnan(score)]
        own = torch.tensor([float(sum(known)), float(len(known))], device=self.workers.device)
        solved, total = (int(value) for value in self.workers.gather(own).sum(dim=0).tolist())
        return wilson_interval([1.0] * solved + [0.0] * (total - solved))
