"""The methods of TRL that we override or rely on, and the arguments that TRL is given."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from library_digest import digest
from stock_trl import ScriptedLearner, train_steps
from trl import GRPOTrainer
from trl_methods import CALLED, EXTENDED

from grpo_ray.config.loader import load_config
from grpo_ray.errors import RewardError
from grpo_ray.learner import learner
from grpo_ray.learner.learner import Learner
from grpo_ray.learner.trl_config import trl_arguments
from grpo_ray.learner.trl_internals import PRIVATE_ATTRIBUTES
from grpo_ray.training.metric_names import rename_metrics


@pytest.mark.parametrize("function", EXTENDED | CALLED, ids=lambda function: function.__qualname__)
def test_trl_method_we_rely_on_unchanged(function: Callable[..., Any]) -> None:
    assert digest(function) == (EXTENDED | CALLED)[function]


@pytest.mark.parametrize("name", PRIVATE_ATTRIBUTES)
def test_trl_has_private_attribute_we_rely_on(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(GRPOTrainer) or callable(getattr(GRPOTrainer, name))


def test_learner_overrides_only_named_trl_methods() -> None:
    assert Learner.__bases__ == (GRPOTrainer,)
    overridden = {name for name in vars(Learner) if hasattr(GRPOTrainer, name) and callable(getattr(Learner, name))}
    assert overridden == {
        "__init__",
        "create_accelerator_and_postprocess",
        "get_train_dataloader",
        "_prepare_inputs",
        "training_step",
        "_compute_loss",
        "get_high_entropy_mask",
        "_get_per_token_logps_and_entropies",
        "_clip_grad_norm",
        "_save_checkpoint",
        "save_model",
        "_save_optimizer_and_scheduler",
        "_save",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "create_model_card",
        "create_optimizer",
    }
    assert overridden - {"__init__"} <= {function.__name__ for function in EXTENDED}
    assert all(f"`{name}`" in learner.__doc__ for name in overridden)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_trl_arguments_any_worker_count_same_step_size(workers: int) -> None:
    config = load_config(
        None,
        [
            f"cluster.num_workers={workers}",
            "grpo.prompts_per_step=8",
            "grpo.num_generations=4",
            "grpo.micro_batch_size=16",
        ],
    )
    args = trl_arguments(config, "out")
    # 8 x 4 = 32 completions in 2 micro-batches of 16
    assert args.per_device_train_batch_size * workers * args.gradient_accumulation_steps == 32
    assert args.per_device_train_batch_size * workers == 16
    assert args.steps_per_generation == args.gradient_accumulation_steps == 2


def test_trl_arguments_shard_learner_sets_fsdp2() -> None:
    settings = ["cluster.shard_learner=true", "grpo.fsdp_config={reshard_after_forward: false}"]
    args = trl_arguments(load_config(None, settings), "out")
    assert args.fsdp_plugin_args["fsdp_version"] == 2
    assert args.fsdp_plugin_args["state_dict_type"] == "SHARDED_STATE_DICT"
    assert args.fsdp_plugin_args["cpu_ram_efficient_loading"] is True
    assert args.fsdp_plugin_args["reshard_after_forward"] is False
    assert args.accelerator_config.gradient_accumulation_kwargs["sync_each_batch"] is True
    assert "mixed_precision_policy" not in args.fsdp_plugin_args  # float32
    assert trl_arguments(load_config(None, []), "out").fsdp_plugin_args is None


def test_trl_arguments_carry_the_configs_values() -> None:
    args = trl_arguments(load_config(None, ["grpo.learning_rate=3e-5", "grpo.temperature=0.7"]), "out")
    assert (args.learning_rate, args.temperature) == (3e-5, 0.7)
    assert args.scale_rewards == "group"  # as TRL's default: advantages are scaled within a group
    assert args.ignore_data_skip is True  # the ledger decides which problems come next


def test_learner_syncs_once_for_measuring_after_a_step(tmp_path: Path, one_thread: None) -> None:
    """The collector syncs before it samples, so after the optimizer step the engine is one step behind."""
    _, learner = train_steps(ScriptedLearner, tmp_path, max_steps=1)
    before = len(learner.engine.syncs)
    for _ in range(2):  # twice at one step: the weights are the same
        learner.sync.update()
    assert len(learner.engine.syncs) == before + 1


def test_learner_metrics_and_columns_of_a_reward_arrive_or_are_announced(tmp_path: Path, one_thread: None) -> None:
    notices: list[str] = []

    class NotifyingLearner(ScriptedLearner):
        def __init__(self, **trl_trainer: Any) -> None:
            super().__init__(**trl_trainer)
            self.hooks = replace(self.hooks, notify=notices.append)

    def pay_and_log(completions: list[Any], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        log_metric("loss", 2.0)  # the name of a metric of TRL's
        log_metric("reward/steps", 1.0)
        log_metric("steps", 4.0)
        log_extra("text", ["a"] * len(completions))
        return [float(row % 2) for row in range(len(completions))]

    record, _ = train_steps(NotifyingLearner, tmp_path, reward=pay_and_log)
    for log in record.logs:
        metrics = rename_metrics(log)
        assert metrics["reward/loss"] == 2.0 and metrics["learner/loss"] != 2.0
        assert metrics["reward/steps"] == 2.5  # the mean of 1 and 4
        assert metrics["reward/mean"] == 0.5
    assert notices == ["a reward calls log_extra('text'), whose values are not kept; record a number with log_metric"]


def test_learner_metric_of_a_reward_with_our_name_raises(tmp_path: Path, one_thread: None) -> None:
    def overwrite(completions: list[Any], log_metric: Any, **columns: Any) -> list[float]:
        log_metric("overwrite_mean", 1.0)
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"reward/overwrite_mean is a metric of the run itself"):
        train_steps(ScriptedLearner, tmp_path, reward=overwrite)
