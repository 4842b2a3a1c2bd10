"""Choice of the segments that prove a round, and their comparison with the learner."""

from dataclasses import dataclass, field

import pytest
import torch

from grpo_ray.errors import SyncError
from grpo_ray.learner.batch import Batch
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.sync_probe import PROBE_TOKENS, Segment, SyncProbe, choose_probes


def segment(number: int, age: int = 0, shard: int = 0, tokens: int = 3) -> Segment:
    """Return a segment whose context is its number."""
    return Segment([number], [5] * tokens, [-float(number)] * tokens, age, shard)


@dataclass
class Passes:
    """Learner whose log-probability of each token is minus the first token of its context."""

    compared: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def logps(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        return -batch["prompt_ids"][:, :1].expand(batch["completion_ids"].shape).float()

    def check_sync(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        self.compared.append((learner_logps, engine_logps, mask))
        if (learner_logps - engine_logps)[mask.bool()].abs().sum() > 0:
            raise SyncError("not in sync")


def probe(passes: Passes, rows_of_others: int = 0) -> SyncProbe:
    def gather(own: torch.Tensor) -> torch.Tensor:
        return torch.stack([own, torch.full_like(own, rows_of_others)])

    return SyncProbe(passes, Padding(0, None, 1.0), Workers(count=2, gather=gather))


def test_choose_probes_first_of_each_shard_and_age() -> None:
    ages = [1, 1, 2, 0, 0, 0, 1, 0]
    shards = [0, 0, 0, 0, 0, 0, 1, 1]
    segments = [segment(number, *place) for number, place in enumerate(zip(ages, shards, strict=True))]
    # Two new completions and one continued of each age, in each shard.
    assert [each.context[0] for each in choose_probes(segments)] == [0, 2, 3, 4, 6, 7]


def test_choose_probes_without_tokens_is_not_chosen() -> None:
    assert [each.context for each in choose_probes([segment(1, tokens=0), segment(2)])] == [[2]]


def test_prove_compares_first_tokens_of_each_segment() -> None:
    passes = Passes()
    probe(passes).prove([segment(3, tokens=40), segment(4, age=1, tokens=2)])
    [(_, engine, mask)] = passes.compared
    assert mask.sum(dim=1).tolist() == [PROBE_TOKENS, 2]
    assert engine[1].tolist()[:3] == [-4.0, -4.0, 0.0]


def test_prove_other_weights_raises() -> None:
    wrong = Segment([3], [5], [-3.5], 1, 0)
    with pytest.raises(SyncError):
        probe(Passes()).prove([segment(2), wrong])


def test_prove_scores_as_many_rows_as_other_workers() -> None:
    passes = Passes()
    probe(passes, rows_of_others=3).prove([segment(7)])
    [(learner, _, mask)] = passes.compared
    assert len(learner) == 3 and mask.sum(dim=1).tolist() == [3, 0, 0]


def test_prove_worker_without_segments_takes_part() -> None:
    passes = Passes()
    probe(passes, rows_of_others=1).prove([])
    [(_, _, mask)] = passes.compared
    assert mask.sum() == 0
    probe(passes).prove([])  # no worker has any
    assert len(passes.compared) == 1
