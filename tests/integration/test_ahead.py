"""Generation one step ahead: the gradient is that of TRL on the batch that it would have made a step before."""

import os
import signal
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from failing_storage import wait_for
from faulty_runs import SETTINGS, outcome, same, start
from library_digest import digest
from small_runs import events_of, groups_of, rows_of, small_settings, used
from stock_trl import EQUAL, PARTLY, SIGNAL, HandMade, Ours, furthest, steps_of
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl_methods import BENEATH

from grpo_ray.ahead import Ahead, LookAhead, in_background, learner_class, refuse_noise
from grpo_ray.arguments import LOSS_TYPES
from grpo_ray.chaos import Fault
from grpo_ray.errors import ConfigError, TrainingError
from grpo_ray.settings import load

NEAR = 1e-12
"""Largest relative distance of a gradient; seen: 1e-14. One step more or less of age is past 1e-3."""


pytestmark = pytest.mark.usefixtures("one_thread")


def accumulated(steps: int) -> dict[str, int]:
    return {"gradient_accumulation_steps": steps, "steps_per_generation": steps}


class OneAhead(Ours, Ahead):
    """TRL's trainer with the savings, one step ahead; `proven` holds what was proven before each optimizer step."""

    def get_train_dataloader(self) -> LookAhead:
        self._upcoming = LookAhead(super().get_train_dataloader())
        return self._upcoming

    def prove_ahead(self, *args: Any) -> None:
        self.prove(*args)


class OneBehind(GRPOTrainer):
    """The same, in order and with nothing of ours: TRL makes the whole of the next batch before each optimizer step."""

    def get_train_dataloader(self) -> list[Any]:
        self.ready: dict[int, Any] = {}
        self.batches = list(super().get_train_dataloader())
        return self.batches

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return self.ready.pop(self.state.global_step, None) or self.make(inputs)

    def make(self, inputs: Any) -> Any:
        return super()._generate_and_score_completions(inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        step = self.state.global_step + 1
        ends = self._step % self.args.steps_per_generation == 0
        if ends and step % self.state.save_steps and step < self.state.max_steps:
            self.ready[step] = self.make(self.batches[self._step])
        return loss


def compare(folder: Path, **settings: Any) -> OneAhead:
    """Train both, the third step with a checkpoint and the fourth on its own completions; gives our trainer."""
    settings = {"max_steps": 4, "save_steps": 3, "epsilon": 0.02} | settings
    behind, _ = steps_of(OneBehind, folder, **settings)
    ahead, trainer = steps_of(OneAhead, folder, **settings)
    assert len(ahead.gradients) == 4
    assert furthest(ahead, behind) < NEAR
    return trainer


# Against TRL


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_is_trls_on_the_batch_that_was_made_before_the_weights_moved(
    tmp_path: Path, loss_type: str, accumulation: int
) -> None:
    trainer = compare(tmp_path, loss_type=loss_type, **accumulated(accumulation))
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
def test_other_settings_give_trls_gradient_too(tmp_path: Path, settings: dict[str, Any]) -> None:
    compare(tmp_path, **(accumulated(2) | settings))


def test_without_trls_correction_the_ratio_to_the_weights_that_generated_still_counts(tmp_path: Path) -> None:
    # TRL would take no old log-probabilities then, and the age of the batch would go unseen.
    settings = {"vllm_importance_sampling_correction": False, "max_steps": 2, "epsilon": 0.02}
    ahead, _ = steps_of(OneAhead, tmp_path, **settings)
    assert "sampling/importance_sampling_ratio/mean" not in ahead.logs[1]
    assert ahead.logs[0]["clip_ratio/region_mean"] == 0 < ahead.logs[1]["clip_ratio/region_mean"]


def test_the_batch_is_one_step_old(tmp_path: Path) -> None:
    at_once, _ = steps_of(Ours, tmp_path, max_steps=2)
    ahead, _ = steps_of(OneAhead, tmp_path, max_steps=2)
    first = [type(at_once)([diary.gradients[0]]) for diary in (ahead, at_once)]
    second = [type(at_once)([diary.gradients[1]]) for diary in (ahead, at_once)]
    assert furthest(*first) < NEAR
    assert furthest(*second) > 1e-3


def test_the_first_step_and_those_after_a_checkpoint_are_taken_with_the_weights_that_generated(tmp_path: Path) -> None:
    # A trust region so narrow that any step of age leaves it.
    ahead, _ = steps_of(OneAhead, tmp_path, rewards=[SIGNAL], max_steps=8, save_steps=3, epsilon=1e-6)
    on_policy = [step for step, log in enumerate(ahead.logs, 1) if log["clip_ratio/region_mean"] == 0]
    assert on_policy == [1, 4, 7]


def test_what_is_logged_is_of_the_batch_that_the_step_was_taken_on(tmp_path: Path) -> None:
    plain, _ = steps_of(GRPOTrainer, tmp_path, max_steps=4, loss_type="grpo")
    ahead, _ = steps_of(OneAhead, tmp_path, max_steps=4, loss_type="grpo")
    for mine, theirs in zip(ahead.logs, plain.logs, strict=True):
        names = [n for n in theirs if n.startswith(("completions/", "reward", "frac_")) or n == "num_tokens"]
        assert len(names) > 8
        assert {n: mine[n] for n in names} == {n: theirs[n] for n in names}
        assert sum(n.startswith("sampling/") for n in mine) == 5


def test_the_same_run_twice_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    first, second = (steps_of(OneAhead, tmp_path, max_steps=4, **accumulated(4))[0].gradients for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def take_steps(rank: int, folder: str, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",  # or accelerate takes more, which on a busy machine wait for each other for minutes
    }  # fmt: skip
    torch.set_num_threads(1)
    rewards = [SIGNAL, EQUAL, PARTLY, EQUAL, EQUAL, EQUAL, EQUAL, SIGNAL]
    compare(Path(folder), rewards=rewards, rank=rank, ddp_backend="gloo", **accumulated(2))
    torch.distributed.destroy_process_group()


def test_two_workers_take_trls_gradient(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(take_steps, args=(str(tmp_path), port), nprocs=2, start_method="spawn")


# In which order


class Listening(OneAhead):
    """Notes what happens, each with the step under way."""

    happened: list[tuple[str, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.happened = []
        super().__init__(*args, **kwargs)

    def note(self, what: str) -> None:
        self.happened.append((what, self.state.global_step + 1))

    def _begin(self) -> None:
        self.note("begin")
        super()._begin()

    def _compute_loss(self, *args: Any) -> torch.Tensor:
        self.note("loss")
        return super()._compute_loss(*args)

    def prove_ahead(self, *args: Any) -> None:
        self.note("prove")
        super().prove_ahead(*args)

    def _get_train_sampler(self, *args: Any) -> Any:
        trainer = self

        class Steps(TrainerCallback):
            def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                trainer.note("step")

            def on_save(self, *args: Any, **kwargs: Any) -> None:
                assert trainer._generating is None and trainer._generated is None
                trainer.happened.append(("save", trainer.state.global_step))

        self.add_callback(Steps())
        return super()._get_train_sampler(*args)


def test_completions_are_proven_before_the_weights_move_and_none_are_pending_at_a_checkpoint(tmp_path: Path) -> None:
    _, trainer = steps_of(Listening, tmp_path, max_steps=5, save_strategy="steps", save_steps=2)
    ahead = ["begin", "loss", "prove", "step"]
    expected = [(what, 1) for what in ahead] + [(what, 2) for what in ("loss", "step", "save")]
    expected += [(what, 3) for what in ahead] + [(what, 4) for what in ("loss", "step", "save")]
    # Nor does the last step look at problems that no step will be taken on.
    expected += [(what, 5) for what in ("loss", "step", "save")]
    assert trainer.happened == expected
    assert not [thread for thread in threading.enumerate() if thread.name == "generating ahead"]


def test_a_sync_that_is_not_proven_stops_the_run_before_the_weights_move(tmp_path: Path) -> None:
    class Unproven(OneAhead):
        def prove_ahead(self, *args: Any) -> None:
            raise RuntimeError("not in sync")

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            first = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            with pytest.raises(RuntimeError, match="not in sync"):
                super()._inner_training_loop(*args, **kwargs)
            assert all(torch.equal(first[name], p) for name, p in self.model.named_parameters())
            self.stopped = True

    assert steps_of(Unproven, tmp_path)[1].stopped


class Waiting(HandMade):
    """From its second call on it answers only once the learner is at its loss."""

    calls = 0
    learning = threading.Event()

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        self.calls += 1
        if self.calls > 1:
            assert self.learning.wait(timeout=120), "the learner waits for the engine"
        return super().generate(prompts, **kwargs)


def with_engine(kind: type[HandMade]) -> type[OneAhead]:
    class With(OneAhead):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            self.vllm_generation = kind(0, 12)
            return super()._inner_training_loop(*args, **kwargs)

        def _compute_loss(self, *args: Any) -> torch.Tensor:
            getattr(self.vllm_generation, "learning", threading.Event()).set()
            return super()._compute_loss(*args)

    return With


def test_the_engine_generates_while_the_learner_works(tmp_path: Path) -> None:
    diary, trainer = steps_of(with_engine(Waiting), tmp_path)
    assert len(diary.gradients) == trainer.vllm_generation.calls == 2


class Breaking(HandMade):
    """Raises where it generates ahead, as a bug would."""

    calls = 0

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        self.calls += 1
        if self.calls > 1:
            raise KeyError("a bug of the engine")
        return super().generate(prompts, **kwargs)


def test_an_error_of_the_engine_ends_training_with_its_own_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="a bug of the engine") as raised:
        steps_of(with_engine(Breaking), tmp_path)
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "training_step" in frames and frames[-1] == "generate"


def test_a_thread_that_never_ends_keeps_no_process_alive() -> None:
    import subprocess

    code = "import threading; from grpo_ray.ahead import in_background; in_background(threading.Event().wait)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_what_a_thread_raises_is_raised_where_its_result_is_asked_for() -> None:
    assert in_background(lambda: 7).result() == 7
    with pytest.raises(SystemExit):
        in_background(lambda: sys.exit(1)).result()


def test_a_look_ahead_changes_nothing_of_what_comes() -> None:
    batches = LookAhead(iter("abcd"))
    assert [next(batches), batches.peek(), batches.peek(), next(batches)] == ["a", "b", "b", "b"]
    assert list(batches) == ["c", "d"]
    with pytest.raises(StopIteration):
        batches.peek()


# What it goes together with


def test_without_the_option_the_learner_is_the_plain_one() -> None:
    names = [learner_class(load(None, [f"grpo.generate_ahead={on}"])).__name__ for on in ("false", "true")]
    assert names == ["Learner", "AheadLearner"]


@pytest.mark.parametrize(
    ("other", "mend"),
    [
        ("grpo.dynamic_sampling=2", "grpo.dynamic_sampling=0"),
        ("grpo.num_iterations=2", "grpo.num_iterations=1"),
        ("grpo.vllm_tensor_parallel_size=2", "grpo.vllm_tensor_parallel_size=1"),
        ("grpo.vllm_enable_sleep_mode=true", "grpo.vllm_enable_sleep_mode=false"),
        ("cluster.shard_learner=true", "cluster.shard_learner=false"),
    ],
)
def test_what_does_not_go_with_it_is_refused_with_a_mend(other: str, mend: str) -> None:
    settings = ["grpo.save_steps=2", other]
    load(None, settings)
    with pytest.raises(ConfigError, match=rf"grpo\.generate_ahead=true does not go with .* set {mend}, or"):
        load(None, [*settings, "grpo.generate_ahead=true"])


def test_dropout_is_refused_where_it_would_share_the_engines_generator() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.1))
    with pytest.raises(ConfigError, match=r"draw from the same generator .* dropout .* to 0"):
        refuse_noise(model, torch.device("cpu"))
    refuse_noise(model, torch.device("cuda"))
    refuse_noise(torch.nn.Sequential(torch.nn.Dropout(0.0)), torch.device("cpu"))


# The joint with TRL


def test_trl_has_not_changed_beneath_what_is_called_ahead() -> None:
    # When it fails: read TRL's change, see whether ours still holds, then write the new digest here.
    beneath = {GRPOTrainer._tokenize_prompts: "a31e6fde43e8", GRPOTrainer._generate: "5b18ab8db4bd"}
    assert {function: digest(function) for function in beneath} == beneath


def test_only_the_named_methods_of_trl_are_overridden() -> None:
    overridden = {name for name in vars(Ahead) if callable(getattr(Ahead, name)) and hasattr(GRPOTrainer, name)}
    assert overridden == {
        "_prepare_inputs", "_generate_single_turn", "_generate_and_score_completions", "training_step",
    }  # fmt: skip
    assert overridden <= {function.__name__ for function in BENEATH}


# Real runs


AHEAD = [*SETTINGS, "grpo.generate_ahead=true", "cluster.num_workers=2"]


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_one_that_nothing_happened_to(small_run: Callable[..., Any]) -> None:
    # Checkpoints at steps 3, 6 and 9. In step 4 the engine is killed at completions of step 5, in the thread.
    faults = [Fault("kill-backward", 2, 1), Fault("kill-generation", 4, 0), Fault("exception", 8, 1)]
    # A reward that every group has signal from, and a trust region so narrow that any step of age is seen.
    settings = [*AHEAD, "rewards.functions=['reward_spies:vary']", "grpo.epsilon=0.001"]
    whole, killed = (
        outcome(small_run, name, struck, *settings) for name, struck in (("whole", []), ("killed", faults))
    )
    assert len(events_of(killed["folder"], "training")) == 4
    same(killed, whole)
    rows = whole["rows"]
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 1e-4
    # The first step and those after a checkpoint are taken with the weights that generated, the others are not.
    on_policy = [row["step"] for row in rows if row["policy/clipped_share"] == 0]
    assert on_policy == [1, 4, 7, 10]
    groups = whole["groups"]
    assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, 11), 4)
    epochs = used(groups)
    assert [len(epochs[epoch]) for epoch in (0, 1, 2)] == [18, 18, 4]
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())


@pytest.mark.slow
def test_a_run_that_is_stopped_between_checkpoints_uses_every_problem_of_every_epoch_once(
    policy: Path, tmp_path: Path
) -> None:
    # 6 problems in steps of 4: whichever step it stops after, an epoch ends in the next one or has just ended.
    overrides = [
        *small_settings("stopped", tmp_path, policy), *AHEAD, "data.limit=6", "grpo.save_steps=10",
        "rewards.functions=['correctness', 'reward_spies:wait']",
        "rewards.settings={'reward_spies:wait': {seconds: 1}}",
    ]  # fmt: skip
    folder = tmp_path / "stopped"
    path = os.environ["PYTHONPATH"]
    run = start(overrides, PYTHONPATH=path)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) >= 3, "three steps", 600)
    os.kill(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=600)
    stopped = len(rows_of(folder))
    assert 3 <= stopped < 10, said
    run = start(overrides, PYTHONPATH=path)
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said
    assert [event["step"] for event in events_of(folder, "began")] == [0, stopped]
    groups = groups_of(folder)
    assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, 11), 4)
    epochs = used(groups)
    assert [len(epochs[epoch]) for epoch in range(7)] == [6] * 6 + [4]
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())


@pytest.mark.slow
def test_weights_that_do_not_arrive_stop_the_run(small_run: Callable[..., Any]) -> None:
    settings = [*AHEAD, "rewards.functions=['reward_spies:freeze_a_layer']", "run.max_failures=0"]
    with pytest.raises(TrainingError, match="SyncError"):
        small_run("frozen", *settings)
