"""Generation one step ahead: the gradient is TRL's on the batch that it would have made one step earlier."""

import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from library_digest import digest
from one_step_ahead import AheadTrainer, compare_ahead
from stock_trl import (
    EQUAL,
    LONGEST,
    NEAR,
    PARTLY,
    SIGNAL,
    Record,
    SavingTrainer,
    ScriptedEngine,
    accumulated,
    largest_difference,
    train_steps,
)
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl_methods import EXTENDED
from worker_cases import train_ahead, wait_in_background
from worker_group import run_workers, start_processes

from grpo_ray.config.loader import load_config
from grpo_ray.errors import ConfigError
from grpo_ray.training.one_step_off_policy import (
    OneStepOffPolicy,
    PrefetchedBatches,
    learner_class,
    require_deterministic_model,
    run_in_thread,
)
from grpo_ray.training.trl_config import LOSS_TYPES

pytestmark = pytest.mark.usefixtures("one_thread")


# Gradients


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_ahead_loss_type_same_gradient_as_trl(tmp_path: Path, loss_type: str, accumulation: int) -> None:
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
def test_ahead_other_settings_same_gradient_as_trl(tmp_path: Path, settings: dict[str, Any]) -> None:
    compare_ahead(tmp_path, **(accumulated(2) | settings))


def test_ahead_two_workers_same_gradient_as_trl(tmp_path: Path) -> None:
    run_workers(train_ahead, 2, str(tmp_path), [SIGNAL, EQUAL, PARTLY, EQUAL, EQUAL, EQUAL, EQUAL, SIGNAL])


def test_ahead_without_correction_clips_by_age(tmp_path: Path) -> None:
    # TRL computes no old log-probabilities without its correction, so it would ignore the age of the batch.
    settings = {"vllm_importance_sampling_correction": False, "max_steps": 2, "epsilon": 0.02}
    ahead, _ = train_steps(AheadTrainer, tmp_path, **settings)
    assert "sampling/importance_sampling_ratio/mean" not in ahead.logs[1]
    assert ahead.logs[0]["clip_ratio/region_mean"] == 0 < ahead.logs[1]["clip_ratio/region_mean"]


def test_ahead_second_batch_is_one_step_old(tmp_path: Path) -> None:
    at_once, _ = train_steps(SavingTrainer, tmp_path, max_steps=2)
    ahead, _ = train_steps(AheadTrainer, tmp_path, max_steps=2)
    first, second = ([Record([record.gradients[step]]) for record in (ahead, at_once)] for step in (0, 1))
    assert largest_difference(*first) < NEAR
    assert largest_difference(*second) > 1e-3


def test_ahead_first_step_and_after_checkpoint_on_policy(tmp_path: Path) -> None:
    # With so narrow a trust region, weights one step newer leave it.
    ahead, _ = train_steps(AheadTrainer, tmp_path, rewards=[SIGNAL], max_steps=8, save_steps=3, epsilon=1e-6)
    on_policy = [step for step, log in enumerate(ahead.logs, 1) if log["clip_ratio/region_mean"] == 0]
    assert on_policy == [1, 4, 7]


def test_ahead_metrics_are_of_the_batch_trained_on(tmp_path: Path) -> None:
    plain, _ = train_steps(GRPOTrainer, tmp_path, max_steps=4, loss_type="grpo")
    ahead, _ = train_steps(AheadTrainer, tmp_path, max_steps=4, loss_type="grpo")
    for mine, theirs in zip(ahead.logs, plain.logs, strict=True):
        names = [n for n in theirs if n.startswith(("completions/", "reward", "frac_")) or n == "num_tokens"]
        assert len(names) > 8
        assert {n: mine[n] for n in names} == {n: theirs[n] for n in names}
        assert sum(n.startswith("sampling/") for n in mine) == 5


def test_ahead_same_run_twice_bitwise_equal(tmp_path: Path) -> None:
    first, second = (train_steps(AheadTrainer, tmp_path, max_steps=4, **accumulated(4))[0].gradients for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# Order


class EventTrainer(AheadTrainer):
    """Records what it does, each with the number of the step."""

    events: list[tuple[str, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.events = []
        super().__init__(*args, **kwargs)

    def record(self, name: str) -> None:
        self.events.append((name, self.state.global_step + 1))

    def _begin(self) -> None:
        self.record("begin")
        super()._begin()

    def _compute_loss(self, *args: Any) -> torch.Tensor:
        self.record("loss")
        return super()._compute_loss(*args)

    def prove_ahead(self, *args: Any) -> None:
        self.record("prove")
        super().prove_ahead(*args)

    def _get_train_sampler(self, *args: Any) -> Any:
        trainer = self

        class Steps(TrainerCallback):
            def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                trainer.record("step")

            def on_save(self, *args: Any, **kwargs: Any) -> None:
                assert trainer._generating is None and trainer._generated is None
                trainer.events.append(("save", trainer.state.global_step))

        self.add_callback(Steps())
        return super()._get_train_sampler(*args)


def test_ahead_proves_before_step_and_nothing_pending_at_save(tmp_path: Path) -> None:
    _, trainer = train_steps(EventTrainer, tmp_path, max_steps=5, save_strategy="steps", save_steps=2)
    ahead, own = ("begin", "loss", "prove", "step"), ("loss", "step", "save")
    # The last step does not look ahead: no step would be taken on those problems.
    expected = [(name, step) for step, names in enumerate([ahead, own, ahead, own, own], 1) for name in names]
    assert trainer.events == expected
    assert not [thread for thread in threading.enumerate() if thread.name == "generating ahead"]


def test_ahead_syncs_weights_before_the_thread_starts(tmp_path: Path) -> None:
    # The first two of four batches are generated with the same weights. A sync in the thread would race with the step.
    _, trainer = train_steps(AheadTrainer, tmp_path, max_steps=4)
    assert trainer.vllm_generation.syncs == [threading.main_thread()] * 3


def test_ahead_failed_proof_raises_before_weights_move(tmp_path: Path) -> None:
    class UnprovenTrainer(AheadTrainer):
        def prove_ahead(self, *args: Any) -> None:
            raise RuntimeError("not in sync")

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            first = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            with pytest.raises(RuntimeError, match="not in sync"):
                super()._inner_training_loop(*args, **kwargs)
            assert all(torch.equal(first[name], p) for name, p in self.model.named_parameters())
            self.stopped = True

    assert train_steps(UnprovenTrainer, tmp_path)[1].stopped


class WaitingEngine(ScriptedEngine):
    """From its second call on, answers only after the learner has begun to compute its loss."""

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
    """Raises where it generates ahead."""

    calls = 0

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        self.calls += 1
        if self.calls > 1:
            raise KeyError("a bug of the engine")
        return super().generate(prompts, **kwargs)


def with_engine(kind: type[ScriptedEngine]) -> type[AheadTrainer]:
    class EngineTrainer(AheadTrainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            self.vllm_generation = kind(0, LONGEST)
            return super()._inner_training_loop(*args, **kwargs)

        def _compute_loss(self, *args: Any) -> torch.Tensor:
            getattr(self.vllm_generation, "learning", threading.Event()).set()
            return super()._compute_loss(*args)

    return EngineTrainer


def test_ahead_engine_generates_while_learner_works(tmp_path: Path) -> None:
    record, trainer = train_steps(with_engine(WaitingEngine), tmp_path)
    assert len(record.gradients) == trainer.vllm_generation.calls == 2


def test_ahead_engine_error_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="a bug of the engine") as raised:
        train_steps(with_engine(FailingEngine), tmp_path)
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "training_step" in frames and frames[-1] == "generate"


# Parts


def test_in_background_endless_work_does_not_keep_process() -> None:
    [process] = start_processes(wait_in_background, [()])
    process.join(300)
    ended = process.exitcode
    process.kill()
    assert ended == 0


def test_in_background_error_is_raised_by_result() -> None:
    assert run_in_thread(lambda: 7).result() == 7
    with pytest.raises(SystemExit):
        run_in_thread(lambda: sys.exit(1)).result()


def test_look_ahead_peek_does_not_consume() -> None:
    batches = PrefetchedBatches(iter("abcd"))
    assert [next(batches), batches.peek(), batches.peek(), next(batches)] == ["a", "b", "b", "b"]
    assert list(batches) == ["c", "d"]
    with pytest.raises(StopIteration):
        batches.peek()


def test_learner_class_follows_generate_ahead() -> None:
    names = [learner_class(load_config(None, [f"grpo.generate_ahead={on}"])).__name__ for on in ("false", "true")]
    assert names == ["Learner", "AheadLearner"]


def test_refuse_noise_dropout_on_cpu_raises() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.1))
    with pytest.raises(ConfigError, match=r"draw from the same generator .* dropout .* to 0"):
        require_deterministic_model(model, torch.device("cpu"))
    require_deterministic_model(model, torch.device("cuda"))
    require_deterministic_model(torch.nn.Sequential(torch.nn.Dropout(0.0)), torch.device("cpu"))


# TRL's code beneath


def test_trl_methods_called_ahead_unchanged() -> None:
    # On failure: read TRL's change, check that our code still holds, then write the new digest here.
    expected = {GRPOTrainer._tokenize_prompts: "a31e6fde43e8", GRPOTrainer._generate: "5b18ab8db4bd"}
    assert {function: digest(function) for function in expected} == expected


def test_ahead_overrides_only_named_trl_methods() -> None:
    overridden = {
        name
        for name in vars(OneStepOffPolicy)
        if callable(getattr(OneStepOffPolicy, name)) and hasattr(GRPOTrainer, name)
    }
    assert overridden == {
        "_prepare_inputs", "_generate_single_turn", "_generate_and_score_completions", "training_step",
    }  # fmt: skip
    assert overridden <= {function.__name__ for function in EXTENDED}
