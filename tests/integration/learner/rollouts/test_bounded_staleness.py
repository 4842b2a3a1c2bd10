"""Training on tokens of older weights: the gradient is TRL's on the same batch, and nothing overtakes a proof."""

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from stale_learners import BehaviourLearner, OlderLearner, SegmentEngine, StaleLearner, compare_stale
from stock_trl import EQUAL, PARTLY, SIGNAL, ScriptedLearner, StoppedByProof, accumulated, train_steps
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer
from worker_cases import train_stale, wait_in_background
from worker_group import run_workers, start_processes

from grpo_ray.config.trl_fields import LOSS_TYPES
from grpo_ray.errors import ConfigError, SyncError
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.sampling import Completion
from grpo_ray.inference.sync_proof import LogprobGap
from grpo_ray.learner.rollouts.bounded_staleness import (
    BoundedStalenessSampler,
    PrefetchedBatches,
    require_deterministic_model,
    run_in_thread,
)
from grpo_ray.learner.rollouts.sampler import OnPolicySampler

pytestmark = pytest.mark.usefixtures("one_thread")

TRUNCATED: dict[str, Any] = {
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
ICE_POP: dict[str, Any] = {
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_clip_max": 5.0,
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncated": TRUNCATED,
    "IcePop": ICE_POP,
    "off-policy mask": {**TRUNCATED, "off_policy_mask_threshold": 0.05},
}


# Gradients


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("kind", [OlderLearner, BehaviourLearner], ids=["proximal", "behaviour"])
def test_staleness_loss_type_same_gradient_as_trl(
    tmp_path: Path, kind: type[ScriptedLearner], loss_type: str, correction: str
) -> None:
    trainer = compare_stale(kind, tmp_path, loss_type=loss_type, **CORRECTIONS[correction])
    assert trainer.savings.one_pass and trainer.savings.rows


@pytest.mark.parametrize(
    "settings",
    [
        {"vllm_importance_sampling_mode": "sequence_mask"},
        {"vllm_importance_sampling_mode": "sequence_truncate", "importance_sampling_level": "sequence"},
        {**TRUNCATED, "pad_to_multiple_of": 8},
        {**TRUNCATED, "mask_truncated_completions": True},
        {**TRUNCATED, "beta": 0.1},
        {**TRUNCATED, "gradient_checkpointing": True},
        {**TRUNCATED, "scale_rewards": "batch", **accumulated(4)},
        {"vllm_importance_sampling_correction": False},
    ],
    ids=str,
)
def test_staleness_other_settings_same_gradient_as_trl(tmp_path: Path, settings: dict[str, Any]) -> None:
    compare_stale(StaleLearner, tmp_path, **(accumulated(2) | settings))


@pytest.mark.parametrize("kind", [OlderLearner, BehaviourLearner], ids=["proximal", "behaviour"])
def test_staleness_without_savings_same_gradient_as_trl(tmp_path: Path, kind: type[ScriptedLearner]) -> None:
    class WastefulLearner(kind):  # type: ignore[valid-type, misc]
        overrides = (*kind.overrides, "grpo.exact_savings=false")

    assert not compare_stale(WastefulLearner, tmp_path, **TRUNCATED).savings.one_pass


def test_staleness_two_workers_same_gradient_as_trl(tmp_path: Path) -> None:
    run_workers(train_stale, 2, str(tmp_path), [SIGNAL, EQUAL, PARTLY, EQUAL, EQUAL, EQUAL, EQUAL, SIGNAL])


def test_staleness_behaviour_anchor_clips_by_age(tmp_path: Path) -> None:
    proximal, _ = train_steps(OlderLearner, tmp_path, max_steps=2, epsilon=0.02, **TRUNCATED)
    behaviour, _ = train_steps(BehaviourLearner, tmp_path, max_steps=2, epsilon=0.02, **TRUNCATED)
    assert proximal.logs[1]["clip_ratio/region_mean"] == 0 < behaviour.logs[1]["clip_ratio/region_mean"]


def test_staleness_metrics_are_of_the_batch_trained_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "loss_type": "grpo", **TRUNCATED}
    plain, _ = train_steps(GRPOTrainer, tmp_path, **settings)
    stale, _ = train_steps(OlderLearner, tmp_path, **settings)
    for mine, theirs in zip(stale.logs, plain.logs, strict=True):
        names = [n for n in theirs if n.startswith(("completions/", "reward", "frac_")) or n == "num_tokens"]
        assert len(names) > 8
        assert {n: mine[n] for n in names} == {n: theirs[n] for n in names}
        assert sum(n.startswith("sampling/") for n in mine) == 5
        assert sum(mine[f"rollout/staleness_{age}"] for age in range(4)) == pytest.approx(1)
    first, *_, last = stale.logs
    assert (
        first["rollout/staleness_0"] == first["rollout/segments_mean"] == 1 and first["rollout/recomputed_share"] == 0
    )
    # At most four of twelve tokens in each of three rounds.
    assert last["rollout/staleness_0"] == 0 < last["rollout/staleness_1"] < last["rollout/staleness_3"]
    assert 1 < last["rollout/segments_mean"] < 3 and last["rollout/recomputed_share"] > 0


def test_staleness_same_run_twice_bitwise_equal(tmp_path: Path) -> None:
    first, second = (
        train_steps(OlderLearner, tmp_path, max_steps=4, **TRUNCATED, **accumulated(4))[0].gradients for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_staleness_rounds_have_the_limits_of_the_schedule(tmp_path: Path) -> None:
    _, trainer = train_steps(OlderLearner, tmp_path, max_steps=5, **TRUNCATED)
    first, start, *rounds = trainer.engine.rounds
    assert set(first) == {12}  # the first batch, with the weights that are trained on it
    assert [start[row] for row in (0, 8, 16)] == [12, 6, 4] and len(start) == 24  # the next three begin together
    assert all(set(limits) <= {6, 4} for limits in rounds)
    assert len(rounds) == 3  # none in the last step


# Order


class EventEngine(SegmentEngine):
    """Engine that records its checks of the sync among the events of its learner."""

    record: Callable[[str], None]

    def prove_sync(self, *args: Any, **kwargs: Any) -> LogprobGap:
        self.record("prove")
        return super().prove_sync(*args, **kwargs)


class EventLearner(StaleLearner):
    """Learner that records its actions, each with the number of the step."""

    engine_class = EventEngine

    def __init__(self, **trl_trainer: Any) -> None:
        self.events: list[tuple[str, int]] = []
        super().__init__(**trl_trainer)

    def record(self, name: str) -> None:
        self.events.append((name, self.state.global_step + 1))

    def _compute_loss(self, *args: Any) -> torch.Tensor:
        self.record("loss")
        return super()._compute_loss(*args)

    def _get_train_sampler(self, *args: Any) -> Any:
        learner = self
        learner.engine.record = learner.record
        sampler = cast(BoundedStalenessSampler, learner.collector.sampler)
        start = sampler.start_ahead

        def start_and_record(state: TrainerState) -> None:
            start(state)
            if sampler.pending is not None:
                learner.record("begin")

        sampler.start_ahead = start_and_record  # type: ignore[method-assign]

        class Steps(TrainerCallback):
            def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                learner.record("step")

            def on_save(self, *args: Any, **kwargs: Any) -> None:
                assert sampler.pending is None
                learner.events.append(("save", learner.state.global_step))

        self.add_callback(Steps())
        return super()._get_train_sampler(*args)


def test_staleness_proves_before_step_and_nothing_pending_at_save(tmp_path: Path) -> None:
    _, learner = train_steps(EventLearner, tmp_path, max_steps=4, save_strategy="steps", save_steps=2, **TRUNCATED)
    # In the first step the loss's own pass is compared too, in all others only the round, before the optimizer step.
    steps = [
        ("begin", "loss", "prove", "prove", "step"),
        ("begin", "loss", "prove", "step", "save"),
        ("begin", "loss", "prove", "step"),
        ("loss", "step", "save"),  # no step would be taken on a batch begun in the last one
    ]
    assert learner.events == [(name, step) for step, names in enumerate(steps, 1) for name in names]
    assert not [thread for thread in threading.enumerate() if thread.name == "sampling a round"]


def test_staleness_syncs_weights_before_the_thread_starts(tmp_path: Path) -> None:
    # The first two of four batches are generated with the same weights. A sync in the thread would race with the step.
    _, trainer = train_steps(StaleLearner, tmp_path, max_steps=4, **TRUNCATED)
    assert trainer.engine.syncs == [threading.main_thread()] * 3


class SeedEngine(SegmentEngine):
    """Engine that records the seeds with which each round is sampled."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.used: list[tuple[int, ...]] = []

    def run_requests(self, prompts: Any, sampling: list[dict[str, Any]], on_finished: Any) -> list[Completion]:
        self.used.append(tuple(each["seed"] for each in sampling))
        return super().run_requests(prompts, sampling, on_finished)


def test_staleness_batch_ahead_is_sampled_with_its_own_seeds(tmp_path: Path) -> None:
    class SeedLearner(StaleLearner):
        engine_class = SeedEngine

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            rows.append(tuple(request_seed(0, row["id"], row["epoch"], row["index"]) for row in generation_batch))
            return super()._prepare_inputs(generation_batch)

    rows: list[tuple[int, ...]] = []
    _, learner = train_steps(SeedLearner, tmp_path, max_steps=4, **TRUNCATED)
    assert learner.engine.used == list(dict.fromkeys(rows))
    assert len(learner.engine.used) == 4


class StaleEngine(SegmentEngine):
    """Engine that fails its second check, which is that of the round."""

    def prove_sync(self, *args: Any, **kwargs: Any) -> LogprobGap:
        if self.proven:
            raise SyncError("not in sync")
        return super().prove_sync(*args, **kwargs)


def test_staleness_failed_proof_raises_before_weights_move(tmp_path: Path) -> None:
    class StoppedLearner(StoppedByProof, StaleLearner):
        engine_class = StaleEngine

    assert train_steps(StoppedLearner, tmp_path)[1].stopped


class WaitingEngine(SegmentEngine):
    """Engine whose calls after the first wait until the learner has begun to compute its loss."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.learning = threading.Event()

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        if self.rounds[1:]:
            assert self.learning.wait(timeout=120), "the learner waits for the engine"
        return super().generate(prompts, **kwargs)


class FailingEngine(SegmentEngine):
    """Engine that raises an error in a round."""

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        if self.rounds[1:]:
            raise KeyError("a bug of the engine")
        return super().generate(prompts, **kwargs)


def with_engine(kind: type[SegmentEngine]) -> type[StaleLearner]:
    class EngineLearner(StaleLearner):
        engine_class = kind

        def _compute_loss(self, *args: Any) -> torch.Tensor:
            getattr(self.engine, "learning", threading.Event()).set()
            return super()._compute_loss(*args)

    return EngineLearner


def test_staleness_engine_generates_while_learner_works(tmp_path: Path) -> None:
    record, trainer = train_steps(with_engine(WaitingEngine), tmp_path)
    assert len(record.gradients) == len(trainer.engine.rounds) == 2


def test_staleness_engine_error_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="a bug of the engine") as raised:
        train_steps(with_engine(FailingEngine), tmp_path)
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "training_step" in frames and frames[-1] == "generate"


# Parts


def test_run_in_thread_endless_work_does_not_keep_process() -> None:
    [process] = start_processes(wait_in_background, [()])
    process.join(300)
    ended = process.exitcode
    process.kill()
    assert ended == 0


def test_run_in_thread_error_is_raised_by_result() -> None:
    assert run_in_thread(lambda: 7).result() == 7
    with pytest.raises(SystemExit):
        run_in_thread(lambda: sys.exit(1)).result()


def test_prefetched_batches_peek_does_not_consume() -> None:
    batches = PrefetchedBatches(iter("abcd"))
    assert [next(batches), batches.peek(), batches.peek(2), next(batches)] == ["a", "b", "c", "b"]
    assert [batches.peek(2), batches.peek(3)] == ["d", None]
    assert list(batches) == ["c", "d"] and batches.peek() is None


def test_prefetched_batches_peek_counts_repeated_ones_once() -> None:
    batches = PrefetchedBatches(iter("aabbcc"), repeats=2)
    assert [next(batches), next(batches), batches.peek(1), batches.peek(2), batches.peek(3)] == [*"aabc", None]
    assert list(batches) == [*"bbcc"]


def test_learner_max_staleness_chooses_sampler(tmp_path: Path) -> None:
    sources = [
        train_steps(kind, tmp_path, max_steps=1)[1].collector.sampler for kind in (ScriptedLearner, StaleLearner)
    ]
    assert [type(source) for source in sources] == [OnPolicySampler, BoundedStalenessSampler]


def test_require_deterministic_model_dropout_on_cpu_raises() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.1))
    with pytest.raises(ConfigError, match=r"draw from the same generator .* dropout .* to 0"):
        require_deterministic_model(model, torch.device("cpu"))
    require_deterministic_model(model, torch.device("cuda"))
    require_deterministic_model(torch.nn.Sequential(torch.nn.Dropout(0.0)), torch.device("cpu"))
