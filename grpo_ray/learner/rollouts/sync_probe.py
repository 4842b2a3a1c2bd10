"""Proof of a round's weights with a few of its completions (proven weight sync).

Tokens of older weights cannot be checked when they are trained on: by then the learner has other weights. So a round is
proven at once, while the learner still has the version that the round was sampled with. It scores the first tokens of a
few of the round's segments in one pass, and compares them with the engine's log-probabilities. A segment of a continued
completion has the prompt and all earlier tokens as its context, so keys and values of older weights would be found too.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from grpo_ray.learner.batch import Batch
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.rollout import Completions

PROBE_TOKENS = 32
"""Tokens of a segment that the learner scores."""
FRESH_PROBES, CONTINUED_PROBES = 2, 1
"""Segments of each worker and shard that are scored: completions that the round began, and those of each age that it
continued."""


class ProbePasses(Protocol):
    """Methods of the learner that prove a round; collective."""

    def logps(self, batch: Batch) -> torch.Tensor:
        """Return the learner's log-probabilities of a batch's completions, (B, T) in nats, without gradient."""

    def check_sync(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        """Compare log-probabilities under a mask, all (B, T). Raises SyncError if they differ."""


@dataclass(frozen=True)
class Segment:
    """Tokens that one round has added to a completion. T tokens."""

    context: list[int]
    """Token ids of the prompt and of earlier segments."""
    token_ids: Sequence[int]
    """(T,)"""
    logps: Sequence[float | None]
    """(T,) the engine's log-probabilities before filters and penalties, nats."""
    age: int
    """Number of versions since the completion's first token; 0 if the round began it."""
    shard: int
    """Number of the shard of the round that it belongs to, which one engine has run."""


def choose_probes(segments: Iterable[Segment]) -> list[Segment]:
    """Select the segments to score: the first ones of each shard and age."""
    seen: Counter[tuple[int, int]] = Counter()
    chosen = []
    for segment in segments:
        place = (segment.shard, segment.age)
        if segment.token_ids and seen[place] < (CONTINUED_PROBES if segment.age else FRESH_PROBES):
            seen[place] += 1
            chosen.append(segment)
    return chosen


@dataclass(frozen=True)
class SyncProbe:
    """Prover of a round on one worker; collective."""

    passes: ProbePasses
    padding: Padding
    workers: Workers

    def prove(self, segments: Iterable[Segment]) -> None:
        """Compare learner and engine on a few segments of a round, with the weights that the round was sampled with.

        Raises:
            SyncError: they differ by more than `engine.logprob_tolerance`.
        """
        chosen = choose_probes(segments)
        own = torch.tensor([len(chosen)], device=self.workers.device)
        rows = int(self.workers.gather(own).max())
        if not rows:
            return
        # A sharded learner makes the same passes on all workers, so each of them scores as many rows.
        filler = Segment([self.padding.token], [self.padding.token], [0.0], age=0, shard=0)
        padded = [*chosen, *[filler] * (rows - len(chosen))]
        scored = Completions(
            [each.context for each in padded],
            [list(each.token_ids[:PROBE_TOKENS]) for each in padded],
            [list(each.logps[:PROBE_TOKENS]) for each in padded],
        )
        batch = self.padding.columns(scored)
        learner_logps = self.passes.logps(batch)
        mask = batch["completion_mask"].clone()
        mask[len(chosen) :] = 0
        self.passes.check_sync(learner_logps, batch["sampling_per_token_logps"], mask)
