"""Completions that an engine samples with given seeds, and their batch as a learner reads it."""

from collections.abc import Sequence
from typing import Any

from grpo_ray.inference.sampling import Completion
from grpo_ray.learner.batch import Batch
from grpo_ray.learner.rollouts.rollout import Completions

Tokens = list[list[int]]
Logps = list[list[float | None]]


def complete(engine: Any, prompts: Tokens, seeds: Sequence[int]) -> list[Completion]:
    """Sample one completion per prompt as in training."""
    requests = [engine.training_sampling | {"seed": seed} for seed in seeds]
    sampled: list[Completion] = engine.run_requests(prompts, requests)
    return sampled


def sample(engine: Any, prompts: Tokens, seeds: Sequence[int]) -> tuple[Tokens, Logps]:
    """Return token ids and log-probabilities of one completion per prompt."""
    sampled = complete(engine, prompts, seeds)
    return [each.token_ids for each in sampled], [each.logps for each in sampled]


def batch_of(learner: Any, prompts: Tokens, completions: Tokens, logps: Logps | None = None) -> Batch:
    """Return the learner's batch of some completions; without log-probabilities of the engine they are 0."""
    known: Logps = [[0.0] * len(ids) for ids in completions] if logps is None else logps
    batch: Batch = learner.collector.padding.columns(Completions(prompts, completions, known))
    return batch
