"""Tests of the comparison of the engine's and the learner's log-probabilities, with one worker and with two."""

import pytest
import torch

from grpo_ray.errors import SyncError
from grpo_ray.inference.sync_proof import LogprobGap, measure_logprob_gap, require_synced


class FakeAccelerator:
    """Accelerator of a single worker, or of several workers that all have the same values."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return values * self.workers

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value.repeat(self.workers)


LEARNER = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -9.0, -9.0]])
ENGINE = torch.tensor([[-1.5, -2.0, 0.0], [-2.0, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])  # gaps 0.5, 0 and 1


def gap(learner: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, workers: int = 1) -> LogprobGap:
    return measure_logprob_gap(learner, engine, mask, FakeAccelerator(workers))


def test_measure_logprob_gap_ignores_padding() -> None:
    assert gap(LEARNER, ENGINE, MASK) == LogprobGap(mean=0.5, max=1.0, tokens=3)


def test_measure_logprob_gap_includes_all_workers() -> None:
    assert gap(LEARNER, ENGINE, MASK, workers=2) == LogprobGap(mean=0.5, max=1.0, tokens=6)


def test_measure_logprob_gap_without_tokens_is_zero() -> None:
    assert gap(LEARNER, ENGINE, torch.zeros(2, 3)) == LogprobGap(mean=0.0, max=0.0, tokens=0)


@pytest.mark.parametrize("mean", [0.0, 0.01])
def test_require_synced_up_to_the_tolerance_passes(mean: float) -> None:
    require_synced(LogprobGap(mean=mean, max=5.0, tokens=3), tolerance=0.01, step=7)


@pytest.mark.parametrize("mean", [0.0101, float("inf"), float("nan")])
def test_require_synced_above_the_tolerance_or_nan_raises(mean: float) -> None:
    with pytest.raises(SyncError, match=r"step 7: .*logprob_tolerance is 0\.01"):
        require_synced(LogprobGap(mean=mean, max=5.0, tokens=3), tolerance=0.01, step=7)


def test_measure_logprob_gap_nan_is_not_lost() -> None:
    mean = gap(torch.tensor([[float("nan"), 1.0]]), torch.ones(1, 2), torch.ones(1, 2)).mean
    assert mean != mean
