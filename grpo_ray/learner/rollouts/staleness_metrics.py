"""Metrics of bounded staleness: age of the tokens trained on, repeated work, and times in which a part waits."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from grpo_ray.learner.collectives import Workers
from grpo_ray.storage.records.open_rollouts import OpenRollout


def staleness_metrics(
    rollouts: Sequence[OpenRollout],
    prompt_ids: Sequence[Sequence[int]],
    version: int,
    max_staleness: int,
    workers: Workers,
) -> dict[str, float]:
    """Compute the metrics of the batch that a step trains on, over all workers; collective.

    Args:
        rollouts: (B,) this worker's completions.
        prompt_ids: (B, P_b)
        version: number of optimizer steps taken.
        max_staleness: largest age of a token.
    """
    ages: Counter[int] = Counter()
    segments = recomputed = 0
    for rollout, prompt in zip(rollouts, prompt_ids, strict=True):
        before = 0
        for number, (sampled_with, tokens) in enumerate(rollout.runs):
            ages[version - sampled_with] += tokens
            recomputed += len(prompt) + before if number else 0
            before += tokens
        segments += len(rollout.runs)
    own = [recomputed, segments, len(rollouts), *(ages[age] for age in range(max_staleness + 1))]
    gathered = workers.gather(torch.tensor(own, device=workers.device)).sum(dim=0).tolist()
    recomputed, segments, count, *by_age = gathered
    tokens = max(1, sum(by_age))
    shares = {f"rollout/staleness_{age}": each / tokens for age, each in enumerate(by_age)}
    return shares | {"rollout/segments_mean": segments / count, "rollout/recomputed_share": recomputed / tokens}


@dataclass
class RoundTimes:
    """Times of one worker since the last optimizer step, in seconds."""

    since: float | None = None
    """Reading of the clock; None before the first step."""
    waited: float = 0.0
    """Time in which the learner waited for the engine."""
    rounds: list[float] = field(default_factory=list)
    """Time of each call of the engine."""

    def start(self) -> None:
        """Start the clock with the first step."""
        if self.since is None:
            self.since = time.perf_counter()

    def add_round(self, seconds: float) -> None:
        """Add a call of the engine."""
        self.rounds.append(seconds)

    def take(self, workers: Workers) -> dict[str, float]:
        """Compute the metrics of the time since the last call, over all workers, and begin anew; collective."""
        now = time.perf_counter()
        elapsed = max(now - (now if self.since is None else self.since), 1e-9)
        own = [self.waited / elapsed, max(0.0, 1 - sum(self.rounds) / elapsed), max(self.rounds, default=0.0)]
        waited, idle, longest = workers.gather(torch.tensor(own, device=workers.device)).unbind(dim=1)
        self.since, self.waited, self.rounds = now, 0.0, []
        return {
            "learner/idle_share": waited.mean().item(),
            "engine/idle_share": idle.mean().item(),
            "engine/round_seconds_max": longest.max().item(),
        }
