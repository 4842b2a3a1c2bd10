"""Steps of one worker with a real sampler of bounded staleness, without a trainer."""

from collections.abc import Iterator
from typing import Any

from transformers import TrainerState

from grpo_ray.learner.rollouts.bounded_staleness import BoundedStalenessSampler
from grpo_ray.learner.rollouts.rollout import Completions


class SampledSteps:
    """Steps of a run; subclasses create sampler and batches."""

    sampler: BoundedStalenessSampler
    batches: Iterator[Any]
    version: int
    """Number of steps taken."""
    max_steps: int

    def step(self) -> Completions:
        """Sample a batch and the round of its step."""
        completions = self.sampler.sample(next(self.batches))
        self.sampler.start_ahead(TrainerState(global_step=self.version, max_steps=self.max_steps))
        self.sampler.finish_ahead()
        self.version += 1
        return completions

    def steps(self, count: int) -> list[Completions]:
        return [self.step() for _ in range(count)]
