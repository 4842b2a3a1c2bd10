"""The joint with TRL: what is overridden, what it relies on, and the batches that the learner makes."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from library_digest import digest
from trl import GRPOConfig, GRPOTrainer
from trl_methods import BENEATH

from grpo_ray.arguments import DERIVED, LOSS_TYPES, trl_arguments, trl_fields
from grpo_ray.course import GroupBatches
from grpo_ray.errors import ConfigError, DataError
from grpo_ray.learner import Learner
from grpo_ray.problem import Problem
from grpo_ray.settings import load
from grpo_ray.thrift import Thrift


@pytest.mark.parametrize("function", BENEATH, ids=lambda function: function.__qualname__)
def test_trl_has_not_changed_beneath_what_is_extended(function: Callable[..., Any]) -> None:
    assert digest(function) == BENEATH[function]


def test_only_the_named_methods_of_trl_are_overridden() -> None:
    def overridden(ours: type) -> set[str]:
        return {name for name in vars(ours) if callable(getattr(ours, name)) and hasattr(GRPOTrainer, name)}

    assert overridden(Learner) == {
        "__init__",
        "get_train_dataloader",
        "_generate_and_score_completions",
        "_calculate_rewards",
        "training_step",
        "_generate_single_turn",
        "_clip_grad_norm",
        "_save_checkpoint",
        "create_accelerator_and_postprocess",
        "_save",
        "_load_from_checkpoint",
        "create_model_card",
    }
    assert overridden(Thrift) == {
        "_generate_and_score_completions",
        "_prepare_inputs",
        "_get_per_token_logps_and_entropies",
        "_compute_loss",
        "training_step",
    }


def test_the_loss_types_are_those_that_trl_computes() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    compared = re.findall(r"self\.loss_type (?:==|in) (\[[^]]*\]|\"\w+\")", source)
    assert {name for text in compared for name in re.findall(r"\w+", text)} == set(LOSS_TYPES)


def test_every_derived_field_is_one_that_trl_has() -> None:
    assert set(DERIVED) <= set(GRPOConfig.__dataclass_fields__)
    assert not set(DERIVED) & set(trl_fields())


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_sizes_are_shared_out_so_that_the_step_stays_the_same(workers: int) -> None:
    config = load(
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


def test_a_field_of_trl_goes_through_and_ours_are_refused() -> None:
    assert trl_arguments(load(None, ["grpo.beta=0.04", "grpo.epsilon=0.3"]), "out").beta == 0.04
    with pytest.raises(ConfigError, match=r"grpo\.use_vllm is derived"):
        trl_arguments(load(None, ["grpo.use_vllm=false"]), "out")


def test_workers_that_cannot_share_engines_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"vllm_tensor_parallel_size=2 .* cluster\.num_workers=3 is no multiple"):
        trl_arguments(
            load(None, ["grpo.vllm_tensor_parallel_size=2", "cluster.num_workers=3", "grpo.prompts_per_step=6"]), "out"
        )


def test_a_learner_is_sharded_over_several_workers_by_fsdp2() -> None:
    settings = ["cluster.shard_learner=true", "grpo.fsdp_config={reshard_after_forward: false}"]
    args = trl_arguments(load(None, settings), "out")
    assert args.fsdp_plugin_args["fsdp_version"] == 2
    assert args.fsdp_plugin_args["state_dict_type"] == "FULL_STATE_DICT"
    assert args.fsdp_plugin_args["reshard_after_forward"] is False
    assert trl_arguments(load(None, []), "out").fsdp_plugin_args is None
    for workers in ("1", "[1, 2]"):
        with pytest.raises(ConfigError, match="needs at least 2 workers"):
            trl_arguments(load(None, [*settings, f"cluster.num_workers={workers}"]), "out")
    with pytest.raises(ConfigError, match=r"grpo\.fsdp is derived; set cluster\.shard_learner"):
        trl_arguments(load(None, ["grpo.fsdp=true"]), "out")


def problems(count: int) -> list[tuple[Problem, int]]:
    made = [
        Problem(
            id=f"{n:016x}", prompt=[{"role": "user", "content": f"{n}?"}], solution=f"${n}$", columns={"topic": "t"}
        )
        for n in range(count)
    ]
    return [(problem, 0) for problem in made]


def test_a_batch_holds_whole_groups_and_comes_as_often_as_trl_asks() -> None:
    batches = list(GroupBatches(problems(4), prompts=2, num_generations=3, repeats=2))
    assert len(batches) == 4  # 2 steps, each twice
    assert batches[0] is batches[1] and batches[2] is batches[3]
    assert [(row["solution"], row["index"]) for row in batches[0]] == [
        ("$0$", 0), ("$0$", 1), ("$0$", 2), ("$1$", 0), ("$1$", 1), ("$1$", 2),
    ]  # fmt: skip
    assert batches[2][0]["topic"] == "t" and batches[2][0]["epoch"] == 0


def test_a_step_that_is_topped_up_draws_on_from_the_same_stream() -> None:
    batches = GroupBatches(problems(6), prompts=2, num_generations=1, repeats=2)
    steps = iter(batches)
    assert [row["solution"] for row in next(steps)] == ["$0$", "$1$"]
    assert [row["solution"] for row in batches.draw()] == ["$2$", "$3$"]
    assert [row["solution"] for row in next(steps)] == ["$0$", "$1$"]  # the step's second pass
    assert [row["solution"] for row in next(steps)] == ["$4$", "$5$"]
    with pytest.raises(DataError, match="0 of a step's 2 problems"):
        batches.draw()


def test_a_stream_that_ends_inside_a_step_is_an_error() -> None:
    with pytest.raises(DataError, match="1 of a step's 2 problems"):
        list(GroupBatches(problems(3), prompts=2, num_generations=2, repeats=1))
