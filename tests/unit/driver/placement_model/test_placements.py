"""Tests of the schedules: every completion is generated whole, and no schedule is faster than its bounds."""

import random
from dataclasses import replace

import pytest

from grpo_ray.driver.placement_model.engine import Engine, EngineSpeed, Request
from grpo_ray.driver.placement_model.learner import LearnerSpeed, largest_share
from grpo_ray.driver.placement_model.lengths import LogNormalLengths, RecordedLengths
from grpo_ray.driver.placement_model.placements import (
    Clocked,
    ClockedRun,
    OpenBatch,
    Workload,
    clocked_step,
    colocated_step,
    dedicated_step,
)

PLAIN = EngineSpeed(step_seconds=0.01, sequence_seconds=0.0, context_seconds=0.0, prefill_seconds=0.0)
"""An engine whose decode step takes 10 ms, with any number of completions."""


def work_of(**changed: object) -> Workload:
    settings: dict[str, object] = {
        "draw": LogNormalLengths(groups=16, completions=4, mean=250, longest=1000),
        "longest": 1000,
        "prompt_tokens": 50,
        "engine": PLAIN,
        "learner": LearnerSpeed(token_seconds=1e-4),
    }
    return Workload(**(settings | changed))  # type: ignore[arg-type]


FIXED = RecordedLengths(groups=4, recorded=[[1000, 200]])
"""Batches of 4 groups with completions of 1,000 and 200 tokens."""


def test_colocated_step_is_generation_and_learning() -> None:
    work = work_of(draw=FIXED, switch_seconds=3.0)
    step = colocated_step(work, gpus=2)
    # 1,000 steps of 10 ms; 2,400 tokens on each GPU.
    assert (step.engine_seconds, step.learner_seconds) == pytest.approx((10, 0.24))
    assert step.seconds == pytest.approx(10 + 0.24 + 3)


def test_dedicated_on_policy_step_waits_for_both() -> None:
    step = dedicated_step(work_of(draw=FIXED, publish_seconds=3.0), 1, 1, staleness=0)
    assert step.seconds == pytest.approx(10 + 0.48 + 3)


@pytest.mark.parametrize(("staleness", "seconds"), [(1, 10.0), (2, 5.0), (4, 2.5)])
def test_dedicated_round_is_the_longest_segment(staleness: int, seconds: float) -> None:
    step = dedicated_step(work_of(draw=FIXED, publish_seconds=1.0), 2, 2, staleness)
    assert step.seconds == pytest.approx(seconds + 1) and step.learner_seconds == pytest.approx(0.24)


def test_dedicated_step_waits_for_a_slow_learner() -> None:
    work = work_of(draw=FIXED, learner=LearnerSpeed(token_seconds=0.1))
    assert dedicated_step(work, 2, 2, staleness=1).seconds == pytest.approx(240)


def test_dedicated_step_counts_tokens_computed_again() -> None:
    # Of 4,800 tokens of a batch, those of 4 long completions are generated in halves: prompt and 500 tokens again.
    step = dedicated_step(work_of(draw=FIXED), 2, 2, staleness=2)
    assert step.recomputed_share == pytest.approx(4 * (50 + 500) / 4800)


@pytest.mark.parametrize("staleness", [1, 2, 3, 4, 7])
def test_open_batch_is_complete_after_k_rounds(staleness: int) -> None:
    work = work_of()
    batch = OpenBatch(next(work.batches()))
    for _ in range(staleness):
        assert not batch.is_complete
        for _, request in batch.next_round(work, staleness, shards=3):
            assert 0 < request.tokens <= -(-1000 // staleness)
    assert batch.is_complete and batch.next_round(work, staleness, shards=3) == []
    assert sum(map(sum, batch.done)) == sum(map(sum, batch.lengths))
    assert sum(map(len, batch.lengths)) == 64


def test_open_batch_groups_stay_on_their_shard() -> None:
    work = work_of(draw=FIXED)
    batch = OpenBatch(next(work.batches()))
    rounds = [[shard for shard, _ in batch.next_round(work, 2, shards=3)] for _ in range(2)]
    assert rounds == [[0, 0, 1, 1, 2, 2, 0, 0], [0, 1, 2, 0]]  # groups 0 to 3; only long completions go on


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("gpus", [2, 16, 64])
def test_dedicated_step_is_within_its_bounds(staleness: int, gpus: int) -> None:
    work = work_of(publish_seconds=0.5)
    half = gpus // 2
    step = dedicated_step(work, half, half, staleness)
    segment = -(-1000 // staleness) * PLAIN.step_seconds
    assert step.engine_seconds <= segment + 1e-9
    assert step.seconds >= max(step.engine_seconds, step.learner_seconds) + 0.5 - 1e-9
    assert dedicated_step(work, half, half, staleness=0).seconds >= step.seconds


@pytest.mark.parametrize("gpus", [2, 8, 32])
def test_dedicated_on_policy_is_never_faster_than_colocated(gpus: int) -> None:
    engine = EngineSpeed(step_seconds=0.01, sequence_seconds=0.001, context_seconds=1e-6, prefill_seconds=1e-5)
    work = work_of(engine=engine)
    splits = [dedicated_step(work, gpus - learner, learner, staleness=0) for learner in range(1, gpus)]
    assert min(step.seconds for step in splits) >= colocated_step(work, gpus).seconds


def test_no_schedule_beats_the_longest_completion_over_k() -> None:
    work = work_of(draw=FIXED, learner=LearnerSpeed(token_seconds=1e-9))
    for staleness in (1, 2, 4):
        bound = 1000 * PLAIN.step_seconds / staleness
        assert dedicated_step(work, 64, 64, staleness).seconds >= bound - 1e-9
        # By the clock a batch that begins k versions ahead may take k + 1 steps.
        clocked = clocked_step(work, 64, 64, Clocked(staleness=staleness), steps=8)
        assert clocked >= 1000 * PLAIN.step_seconds / (staleness + 1) - 1e-6


def test_clocked_run_trains_on_every_group_once() -> None:
    work = work_of()
    run = ClockedRun(work, 4, 4, Clocked(staleness=1.5))
    run.run(versions=6)
    assert run.version_times == sorted(run.version_times) and len(run.version_times) == 6
    assert run.trained == 6 * 16
    assert run.begun <= 16 * (6 + 1 + 1.5)
    # At most the tokens of the groups that were begun.
    batches = work.batches()
    groups = [group for _ in range(10) for group in next(batches)]
    generated = sum(engine.generated for engine in run.engines)
    assert generated <= sum(map(sum, groups[: run.begun])) + 1


def test_clocked_step_without_staleness_waits_for_the_learner() -> None:
    work = work_of(draw=FIXED)
    # One part: 10 s of generation, then 0.24 s of learning.
    assert clocked_step(work, 2, 2, Clocked(staleness=0)) == pytest.approx(10.24, rel=1e-3)


def test_clocked_step_that_waits_for_completions_is_not_faster() -> None:
    work = work_of()
    free, waiting = (clocked_step(work, 2, 2, Clocked(staleness=1, interrupts=each)) for each in (True, False))
    assert free < waiting


def test_learner_whole_groups_make_ranks_uneven() -> None:
    batch = [[100, 100], [10, 10], [10, 10], [10, 10]]
    speed = LearnerSpeed(token_seconds=1.0, update_seconds=5.0)
    assert speed.seconds(batch, gpus=2) == 200 + 5
    assert replace(speed, keeps_groups=False).seconds(batch, gpus=2) == 130 + 5  # 100 and three of 10 on each
    assert replace(speed, updates=2).seconds(batch, gpus=2) == 200 + 20 + 2 * 5
    assert replace(speed, prompt_tokens=1).seconds(batch, gpus=8) == 101 + 5  # divided, with as many ranks as rows


def test_largest_share_deals_the_largest_first() -> None:
    assert largest_share([1, 5, 3, 3], ranks=2) == 6


@pytest.mark.parametrize(("mean", "longest"), [(100, 1000), (600, 1000), (900, 1000)])
def test_lengths_have_the_mean_after_they_are_cut_off(mean: float, longest: int) -> None:
    draw = LogNormalLengths(groups=4000, completions=2, mean=mean, longest=longest)
    lengths = [length for group in draw(random.Random(1)) for length in group]
    assert max(lengths) <= longest and sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.03)


def test_lengths_refuse_an_impossible_mean() -> None:
    with pytest.raises(ValueError, match="between 0 and the longest, 100; got 100"):
        LogNormalLengths(groups=1, completions=1, mean=100, longest=100)(random.Random(0))


def test_same_seed_draws_the_same_batches() -> None:
    work = work_of()
    assert next(work.batches()) == next(work.batches()) != next(replace(work, seed=1).batches())


def test_round_of_one_shard_is_one_engine_call() -> None:
    work = work_of(draw=FIXED, engine=replace(PLAIN, sequence_seconds=0.001))
    batch = OpenBatch(next(work.batches()))
    rows: list[Request] = [request for _, request in batch.next_round(work, 1, shards=1)]
    seconds = dedicated_step(work, 1, 1, staleness=1, steps=1).engine_seconds
    assert seconds == pytest.approx(Engine(work.engine).run(rows))
