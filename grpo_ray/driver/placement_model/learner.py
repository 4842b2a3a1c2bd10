"""Duration of the learner's work on a batch: proportional to the tokens of its busiest rank, and a fixed cost."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from grpo_ray.driver.placement_model.lengths import Batch


@dataclass(frozen=True, kw_only=True)
class LearnerSpeed:
    """Durations of the learner's work."""

    token_seconds: float
    """Seconds in which one GPU computes all passes over one token."""
    update_seconds: float = 0.0
    """Fixed cost of an optimizer step: the exchange of gradients, and the optimizer."""
    updates: int = 1
    """Optimizer steps on a batch; each has an equal part of its groups."""
    gpus_per_rank: int = 1
    """GPUs that share a sequence."""
    prompt_tokens: int = 0
    """Tokens of each prompt, which are computed with every completion."""
    keeps_groups: bool = True
    """True if the completions of a group are on one rank."""

    def seconds(self, batch: Batch, gpus: int) -> float:
        """Return the seconds of a batch on some GPUs."""
        groups = -(-len(batch) // self.updates)
        parts = [batch[first : first + groups] for first in range(0, len(batch), groups)]
        return sum(self._update(part, gpus) for part in parts)

    def _update(self, groups: Batch, gpus: int) -> float:
        ranks = max(1, gpus // self.gpus_per_rank)
        rows = [[length + self.prompt_tokens for length in group] for group in groups]
        # With fewer groups than ranks, groups are divided.
        whole = self.keeps_groups and len(rows) >= ranks
        pieces = [sum(row) for row in rows] if whole else [length for row in rows for length in row]
        return largest_share(pieces, ranks) * self.token_seconds / self.gpus_per_rank + self.update_seconds


def largest_share(pieces: Iterable[int], ranks: int) -> int:
    """Return the tokens of the busiest rank when the largest pieces are dealt first, each to the least busy rank."""
    loads = [0] * ranks
    for piece in sorted(pieces, reverse=True):
        heapq.heapreplace(loads, loads[0] + piece)
    return max(loads)
