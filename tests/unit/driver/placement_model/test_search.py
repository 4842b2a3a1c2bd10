"""Tests of the search for the best split, and of durations from a model's sizes."""

import pytest

from grpo_ray.driver.placement_model.engine import EngineSpeed
from grpo_ray.driver.placement_model.hardware import H100, ModelSize, engine_speed, learner_token_seconds
from grpo_ray.driver.placement_model.learner import LearnerSpeed
from grpo_ray.driver.placement_model.lengths import RecordedLengths
from grpo_ray.driver.placement_model.placements import Workload
from grpo_ray.driver.placement_model.search import compare_placements, possible_splits

SMALL = ModelSize(parameters=1e9, active=1e9, cache_bytes=1e5)


def test_splits_are_whole_engines_and_possible_learners() -> None:
    assert list(possible_splits(8)) == [(2, 6), (3, 5), (4, 4), (5, 3), (6, 2)]
    assert list(possible_splits(8, gpus_per_engine=2)) == [(2, 6), (4, 4), (6, 2)]
    # A learner of 3, 5 or 6 GPUs could not divide the step.
    assert list(possible_splits(8, fits=lambda learner: 16 % learner == 0)) == [(4, 4), (6, 2)]
    assert list(possible_splits(2)) == [(1, 1)]
    assert list(possible_splits(1)) == []


def work_of(longest: int) -> Workload:
    """Return the work of 8 groups with one long completion each, on engines of 10 ms per decode step."""
    return Workload(
        draw=RecordedLengths(groups=8, recorded=[[longest, 100]]),
        longest=longest,
        prompt_tokens=0,
        engine=EngineSpeed(step_seconds=0.01, sequence_seconds=0, context_seconds=0, prefill_seconds=0),
        learner=LearnerSpeed(token_seconds=1e-3),
    )


def test_comparison_finds_the_split_worked_by_hand() -> None:
    found = compare_placements(work_of(1000), 8, (1, 2, 4))
    assert found is not None
    assert found.colocated.seconds == pytest.approx(10 + 1.1)  # one group of 1,100 tokens on each GPU
    # k = 4: rounds of 2.5 s; learners of 6 or 5 GPUs have two groups on the busiest one, 2.2 s.
    assert [split.step.seconds for split in found.dedicated] == pytest.approx([10, 5, 2.5])
    assert found.best.staleness == 4 and found.gain(found.best) == pytest.approx(11.1 / 2.5)


def test_comparison_of_equal_splits_prefers_less_staleness() -> None:
    work = work_of(1000)
    slow = Workload(**{**vars(work), "learner": LearnerSpeed(token_seconds=1.0)})
    found = compare_placements(slow, 8, (4, 2, 1))
    assert found is not None and found.best.staleness == 1


def test_comparison_without_a_split_is_none() -> None:
    assert compare_placements(work_of(1000), 1, (1,)) is None
    assert compare_placements(work_of(1000), 8, ()) is None


def test_engine_speed_of_a_model() -> None:
    speed = engine_speed(SMALL, H100, overhead_seconds=0.001)
    assert speed.step_seconds == pytest.approx(0.001 + 2e9 / (3.35e12 * 0.8))  # 16-bit weights are read once a step
    assert speed.sequence_seconds == pytest.approx(2e9 / (989e12 * 0.5))
    assert speed.context_seconds == pytest.approx(1e5 / (3.35e12 * 0.8))
    assert speed.cache_tokens == pytest.approx((80e9 * 0.8 - 2e9) / 1e5)
    two = engine_speed(SMALL, H100, gpus=2, overhead_seconds=0.001)
    assert two.step_seconds - 0.001 == pytest.approx((speed.step_seconds - 0.001) / 2)
    assert two.cache_tokens > 2 * speed.cache_tokens  # the weights are there once


def test_learner_seconds_of_a_token() -> None:
    assert learner_token_seconds(SMALL, H100) == pytest.approx(8e9 / (989e12 * 0.4))
