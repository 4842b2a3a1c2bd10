"""Tests of a worker's access to the dedicated engines: the comparison of the workers' learners."""

import pytest
import torch

from grpo_ray.errors import SyncError
from grpo_ray.inference.dedicated_engine import require_equal_learners
from grpo_ray.inference.weight_proof import learner_sums


def digest(**weights: list[float]) -> str:
    """Return the digest of a learner with these weights."""
    return learner_sums([(name, torch.tensor(each)) for name, each in weights.items()], {}).digest


def test_equal_learners_pass() -> None:
    require_equal_learners([digest(a=[1.0, 2.0], b=[3.0])])
    require_equal_learners([digest(a=[1.0, 2.0], b=[3.0]), digest(b=[3.0], a=[1.0, 2.0])])


@pytest.mark.parametrize(
    "other",
    [digest(a=[1.0, 2.0], b=[4.0]), digest(a=[2.0, 1.0], b=[3.0]), digest(a=[1.0, 2.0]), digest(a=[3.0], b=[1.0, 2.0])],
    ids=["one value", "order of elements", "one weight less", "exchanged"],
)
def test_learner_of_another_worker_differs_raises(other: str) -> None:
    own = digest(a=[1.0, 2.0], b=[3.0])
    with pytest.raises(SyncError, match="those of worker 2 differ from those of worker 0"):
        require_equal_learners([own, own, other])
