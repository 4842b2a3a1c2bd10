"""Generation one step ahead: the gradient is TRL's on the batch that it would have made one step earlier."""

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from one_step_ahead import OneStepOffPolicyLearner, compare_ahead
from stock_trl import (
    EQUAL,
    NEAR,
    PARTLY,
    SIGNAL,
    Record,
    ScriptedEngine,
    ScriptedLearner,
    accumulated,
    largest_difference,
    train_steps,
)
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer
from worker_cases import train_ahead, wait_in_background
from worker_group import run_workers, start_processes

from grpo_ray.config.trl_fields import LOSS_TYPES
from grpo_ray.errors import ConfigError, SyncError
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.sampling import Completion
from grpo_ray.inference.sync_proof import LogprobGap
from grpo_ray.learner.rollouts.one_step_off_policy import (
    OneStepAheadSampler,
    PrefetchedBatches,
    require_deterministic_model,
    run_in_thread,
)
from grpo_ray.learner.rollouts.sampler import OnPolicySampler

pytestmark = pytest.mark.usefixtures("one_thread")


# Gradients


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_step_off_policy_loss_type_same_gradient_as_trl(tmp_path: Path, loss_type: str, accumulation: int) -> None:
    trainer = compare_ahead(tmp_path, loss_type=loss_type, **accumulated(accumulation))
    assert not trainer.savings.one_pass and trainer.savings.rows


@pytest.mark.parametrize(
    "settings",
    [
        {"vllm_importance_sampling_mode": "token_truncate"},
        {"vllm_importance_sampling_mode": "token_mask", "pad_to_multiple_of": 8},
        {"vllm_importance_sampling_mode": "sequence_truncate", "importance_sampling_level": "sequence"},
        {"mask_truncated_completions": True},
        {"off_policy_mask_threshold": 0.1},
        {"beta": 0.1},
        {"gradient_checkpointing": True},
        {"scale_rewards": "batch", **accumulated(4)},
    ],
    ids=str,
)
def test_one_step_off_policy_other_settings_same_gradient_as_trl(tmp_path: Path, settings: dict[str, Any]) -> None:
    compare_ahead(tmp_path, **(accumulated(2) | settings))


def test_one_step_off_policy_two_workers_same_gradient_as_trl(tmp_path: Path) -> None:
    run_workers(train_ahead, 2, str(tmp_path), [SIGNAL, EQUAL, PARTLY, EQUAL, EQUAL, EQUAL, EQUAL, SIGNAL])


def test_one_step_off_policy_without_correction_clips_by_age(tmp_path: Path) -> None:
    # TRL computes no old log-probabilities without its correction, so it would ignore the age of the batch.
    settings: dict[str, Any] = {"vllm_importance_sampling_correction": False, "max_steps": 2, "epsilon": 0.02}
    ahead, _ = train_steps(OneStepOffPolicyLearner, tmp_path, **settings)
    assert "sampling/importance_sampling_ratio/mean" not in ahead.logs[1]
    assert ahead.logs[0]["clip_ratio/region_mean"] == 0 < ahead.logs[1]["clip_ratio/region_mean"]


def test_one_step_off_policy_second_batch_is_one_step_old(tmp_path: Path) -> None:
    at_once, _ = train_steps(ScriptedLearner, tmp_path, max_steps=2)
    ahead, _ = train_steps(OneStepOffPolicyLearner, tmp_path, max_steps=2)
    first, second = ([Record([record.gradients[step]]) for record in (ahead, at_once)] for step in (0, 1))
    assert largest_difference(*first) < NEAR
    assert largest_difference(*second) > 1e-3


def test_one_step_off_policy_first_step_and_after_checkpoint_on_policy(tmp_path: Path) -> None:
    # With so narrow a trust region, weights one step newer leave it.
    ahead, _ = train_steps(OneStepOffPolicyLearner, tmp_path, rewards=[SIGNAL], max_steps=8, save_steps=3, epsilon=1e-6)
    on_policy = [step for step, log in enumerate(ahead.logs, 1) if log["clip_ratio/region_mean"] == 0]
    assert on_policy == [1, 4, 7]


def test_one_step_off_policy_metrics_are_of_the_batch_trained_on(tmp_path: Path) -> None:
    plain, _ = train_steps(GRPOTrainer, tmp_path, max_steps=4, loss_type="grpo")
    ahead, _ = train_steps(OneStepOffPolicyLearner, tmp_path, max_steps=4, loss_type="grpo")
    for mine, theirs in zip(ahead.logs, plain.logs, strict=True):
        names = [n for n in theirs if n.startswith(("completions/", "reward", "frac_")) or n == "num_tokens"]
        assert len(names) > 8
        assert {n: mine[n] for n in names} == {n: theirs[n] for n in names}
        assert sum(n.startswith("sampling/") for n in mine) == 5


def test_one_step_off_policy_same_run_twice_bitwise_equal(tmp_path: Path) -> None:
    first, second = (
        train_steps(OneStepOffPolicyLearner, tmp_path, max_steps=4, **accumulated(4))[0].gradients for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# Order


class EventEngine(ScriptedEngine):
    """Engine that records its checks of the sync among the events of its learner."""

    record: Callable[[str], None]

    def prove_sync(self, *args: Any, **kwargs: Any) -> LogprobGap:
        self.record("prove")
        return super().prove_sync(*args, **kwargs)


class EventLearner(OneStepOffPolicyLearner):
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
        sampler = cast(OneStepAheadSampler, learner.collector.sampler)
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
                assert sampler.pending is None and sampler.ready is None
                learner.events.append(("save", learner.state.global_step))

        self.add_callback(Steps())
        return super()._get_train_sampler(*args)


def test_one_step_off_policy_proves_before_step_and_nothing_pending_at_save(tmp_path: Path) -> None:
    _, learner = train_steps(EventLearner, tmp_path, max_steps=5, save_strategy="steps", save_steps=2)
    # The first check is of the step's own batch, before its loss; the second one is of the batch generated ahead, which
    # is checked again, for the metrics, when its step begins.
    ahead, own = ("prove", "begin", "loss", "prove", "step"), ("prove", "loss", "step", "save")
    # The last step does not look ahead: no step would be taken on those problems.
    expected = [(name, step) for step, names in enumerate([ahead, own, ahead, own, own], 1) for name in names]
    assert learner.events == expected
    assert not [thread for thread in threading.enumerate() if thread.name == "generating ahead"]


def test_one_step_off_policy_syncs_weights_before_the_thread_starts(tmp_path: Path) -> None:
    # The first two of four batches are generated with the same weights. A sync in the thread would race with the step.
    _, trainer = train_steps(OneStepOffPolicyLearner, tmp_path, max_steps=4)
    assert trainer.engine.syncs == [threading.main_thread()] * 3


class SeedEngine(ScriptedEngine):
    """Engine that records the seeds with which each batch is generated."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.used: list[tuple[int, ...]] = []

    def run_requests(self, prompts: Any, sampling: list[dict[str, Any]], on_finished: Any) -> list[Completion]:
        self.used.append(tuple(each["seed"] for each in sampling))
        return super().run_requests(prompts, sampling, on_finished)


def test_one_step_off_policy_batch_ahead_is_sampled_with_its_own_seeds(tmp_path: Path) -> None:
    class SeedLearner(OneStepOffPolicyLearner):
        engine_class = SeedEngine

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            rows.append(tuple(request_seed(0, row["id"], row["epoch"], row["index"]) for row in generation_batch))
            return super()._prepare_inputs(generation_batch)

    rows: list[tuple[int, ...]] = []
    _, learner = train_steps(SeedLearner, tmp_path, max_steps=4)
    assert learner.engine.used == list(dict.fromkeys(rows))
    assert len(learner.engine.used) == 4


class StaleEngine(ScriptedEngine):
    """Engine that fails its second check, which is of the completions generated ahead."""

    def prove_sync(self, *args: Any, **kwargs: Any) -> LogprobGap:
        if self.proven:
            raise SyncError("not in sync")
        return super().prove_sync(*args, **kwargs)


def test_one_step_off_policy_failed_proof_raises_before_weights_move(tmp_path: Path) -> None:
    class StaleLearner(OneStepOffPolicyLearner):
        engine_class = StaleEngine

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            first = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            with pytest.raises(SyncError, match="not in sync"):
                super()._inner_training_loop(*args, **kwargs)
            assert all(torch.equal(first[name], p) for name, p in self.model.named_parameters())
            self.stopped = True

    assert train_steps(StaleLearner, tmp_path)[1].stopped


class WaitingEngine(ScriptedEngine):
    """Engine whose calls after the first wait until the learner has begun to compute its loss."""

    calls = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.learning = threading.Event()

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        self.calls += 1
        if self.calls > 1:
            assert self.learning.wait(timeout=120), "the learner waits for the engine"
        return super().generate(prompts, **kwargs)


class FailingEngine(ScriptedEngine):
    """Engine that raises an error where it generates ahead."""

    calls = 0

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        self.calls += 1
        if self.calls > 1:
            raise KeyError("a bug of the engine")
        return super().generate(prompts, **kwargs)


def with_engine(kind: type[ScriptedEngine]) -> type[OneStepOffPolicyLearner]:
    class EngineLearner(OneStepOffPolicyLearner):
        engine_class = kind

        def _compute_loss(self, *args: Any) -> torch.Tensor:
            getattr(self.engine, "learning", threading.Event()).set()
            return super()._compute_loss(*args)

    return EngineLearner


def test_one_step_off_policy_engine_generates_while_learner_works(tmp_path: Path) -> None:
    record, trainer = train_steps(with_engine(WaitingEngine), tmp_path)
    assert len(record.gradients) == trainer.engine.calls == 2


def test_one_step_off_policy_engine_error_keeps_its_traceback(tmp_path: Path) -> None:
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
    assert [next(batches), batches.peek(), batches.peek(), next(batches)] == ["a", "b", "b", "b"]
    assert list(batches) == ["c", "d"]
    with pytest.raises(StopIteration):
        batches.peek()


def test_learner_generate_ahead_chooses_sampler(tmp_path: Path) -> None:
    sources = [
        train_steps(kind, tmp_path, max_steps=1)[1].collector.sampler
        for kind in (ScriptedLearner, OneStepOffPolicyLearner)
    ]
    assert [type(source) for source in sources] == [OnPolicySampler, OneStepAheadSampler]


def test_require_deterministic_model_dropout_on_cpu_raises() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.1))
    with pytest.raises(ConfigError, match=r"draw from the same generator .* dropout .* to 0"):
        require_deterministic_model(model, torch.device("cpu"))
    require_deterministic_model(model, torch.device("cuda"))
    require_deterministic_model(torch.nn.Sequential(torch.nn.Dropout(0.0)), torch.device("cpu"))
