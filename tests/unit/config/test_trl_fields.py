"""Tests of the tables of TRL's fields, and of the messages for values that are not allowed."""

import ast
import re
from pathlib import Path

import pytest
from config_cases import config_error

from grpo_ray.config.fields import field_descriptions
from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config, GrpoConfig
from grpo_ray.config.trl_conditions import CONDITIONS
from grpo_ray.config.trl_fields import (
    LOSS_TYPES,
    OURS,
    PASSED,
    REFUSED,
    SCHEDULER_ARGUMENTS,
    allowed_values,
    find_mistake,
    trl_fields,
)

ROOT = Path(__file__).parents[3]


def test_tables_every_field_in_exactly_one() -> None:
    assert sorted([*OURS, *PASSED, *REFUSED]) == sorted(trl_fields())


def test_ours_names_existing_keys() -> None:
    for name, keys in OURS.items():
        for key in re.split(r", | and ", keys):
            assert key in field_descriptions(Config), f"{name}: {key}"


def test_ours_lists_every_key_that_has_a_name_of_trl() -> None:
    same_name = GrpoConfig.__dataclass_fields__.keys() & trl_fields().keys()
    assert same_name == {name for name, key in OURS.items() if key == f"grpo.{name}"}


@pytest.mark.parametrize("name", PASSED)
def test_passed_field_default_is_allowed_and_has_a_proof(name: str) -> None:
    assert find_mistake(name, trl_fields()[name].default) is None
    assert bool(PASSED[name].test) != bool(PASSED[name].reason)


def test_passed_fields_name_existing_tests() -> None:
    for name in {row.test for row in PASSED.values() if row.test}:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


@pytest.mark.parametrize("name", REFUSED)
def test_refused_field_gives_reason_and_alternative(name: str) -> None:
    message = config_error(f"grpo.{name}=true")
    assert message == f"grpo.{name} {REFUSED[name]}"
    assert message.count("\n") == 0 and re.match(r"grpo\.\w+ [a-z]", message) and not message.endswith(".")


def test_refused_field_value_is_not_repeated() -> None:
    assert "s3cret" not in config_error("grpo.hub_token=s3cret")


@pytest.mark.parametrize(
    "setting",
    [
        "temperature=hot",
        "temperature=0",
        "temperature=.inf",
        "temperature=.nan",
        "epsilon=abc",
        "epsilon=-0.1",
        "max_grad_norm=abc",
        "max_grad_norm=.inf",
        "scale_rewards=foo",
        "scale_rewards=1",
        "importance_sampling_level=foo",
        "loss_type=ppo",
        "reward_weights=1",
        "reward_weights=[one]",
        "vllm_tensor_parallel_size=0",
        "vllm_tensor_parallel_size=two",
        "num_iterations=0",
        "num_iterations=1.0",
        "optim=galore_adamw",
        "lr_scheduler_type=greedy",
        "top_p=1.5",
        "beta=true",
        "beta='0.04'",
        "mask_truncated_completions=1",
        "model_init_kwargs=eager",
        "pad_to_multiple_of=8.0",
        "pad_to_multiple_of=none",
    ],
)
def test_load_value_not_allowed_names_field_and_values(setting: str) -> None:
    name = setting.partition("=")[0]
    message = config_error(f"grpo.{setting}")
    assert message.startswith(f"grpo.{name}=") and f" must be {allowed_values(name)}; the default is " in message
    assert "\n" not in message


def test_load_loss_type_message_is_one_full_line() -> None:
    assert config_error("grpo.loss_type=ppo") == (
        'grpo.loss_type=\'ppo\' must be "grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo" or "vespo"; '
        'the default is "dapo"'
    )


def test_load_several_mistakes_in_trl_fields_one_line_each() -> None:
    lines = config_error("grpo.betta=1", "grpo.temperature=hot", "grpo.use_vllm=true", "grpo.max_steps=0").splitlines()
    assert len(lines) == 4
    for start in ("unknown key grpo.betta; did you mean grpo.beta?", "grpo.temperature='hot'", "grpo.use_vllm has no"):
        assert [line.startswith(start) for line in lines].count(True) == 1


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("grpo.temprature", "grpo.temperature"),
        ("run.beta", "grpo.beta"),
        ("grpo.prompt_per_step", "grpo.prompts_per_step"),
    ],
)
def test_load_unknown_key_suggests_fields_of_trl_too(key: str, meant: str) -> None:
    assert config_error(f"{key}=1") == f"unknown key {key}; did you mean {meant}?"


def test_config_created_directly_checks_fields_of_trl() -> None:
    with pytest.raises(ValueError, match=r"grpo\.temperature='hot' must be a number of at least 0\.01"):
        Config(grpo=GrpoConfig(trl={"temperature": "hot"}))


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["grpo.adam_beta1=0.5", "grpo.optim=sgd"], "grpo.optim=adamw_torch"),
        (["grpo.warmup_steps=5", "grpo.lr_scheduler_type=constant"], "grpo.lr_scheduler_type=constant_with_warmup"),
        (["grpo.gradient_checkpointing_kwargs={every_n_layers: 2}"], "grpo.gradient_checkpointing=true"),
        (
            ["grpo.gradient_checkpointing_kwargs={every_n_layers: 2}", "cluster.use_gpu=true"],  # may be off there too
            "grpo.gradient_checkpointing=true",
        ),
        (["grpo.fsdp_config={reshard_after_forward: false}"], "cluster.shard_learner=true"),
        (["grpo.vllm_enable_sleep_mode=true"], "cluster.use_gpu=true"),
        (["grpo.epsilon=0.3", "grpo.loss_type=sapo"], "grpo.loss_type=dapo"),
        (["grpo.sync_ref_model=true"], "grpo.beta=0.04"),
        (["grpo.sync_ref_model=true", "grpo.beta=0.1", "model.lora={}"], "model.lora=null"),
        (["grpo.entropy_target=0.5"], "grpo.use_adaptive_entropy=true"),
    ],
)
def test_load_field_without_effect_is_refused_and_remedy_helps(overrides: list[str], remedy: str) -> None:
    message = config_error(*overrides)
    name = overrides[0].partition("=")[0]
    assert message.startswith(f"{name}=") and " has no effect with " in message
    assert f"set {remedy}, or leave {name} out" in message
    load_config(None, [*overrides, remedy])


def test_load_field_without_effect_at_its_default_is_accepted() -> None:
    assert load_config(None, ["grpo.sapo_temperature_pos=1.0"]).grpo.trl == {"sapo_temperature_pos": 1.0}


def test_conditions_name_passed_fields_and_known_keys() -> None:
    for condition in CONDITIONS:
        assert set(condition.fields) <= PASSED.keys()
        section, _, name = condition.key.partition(".")
        assert condition.key in field_descriptions(Config) or (section == "grpo" and name in PASSED), condition.key


@pytest.mark.parametrize("kind", SCHEDULER_ARGUMENTS)
def test_load_every_schedule_loads_with_its_arguments(kind: str) -> None:
    needed = {"warmup_stable_decay": {"num_decay_steps": 5}}
    arguments = needed.get(kind, {"min_lr_rate": 0.1} if "min_lr_rate" in SCHEDULER_ARGUMENTS[kind] else {})
    load_config(None, [f"grpo.lr_scheduler_type={kind}", f"grpo.lr_scheduler_kwargs={arguments}"])
    assert "'zzz' is no argument" in config_error(f"grpo.lr_scheduler_type={kind}", "grpo.lr_scheduler_kwargs={zzz: 1}")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["grpo.lr_scheduler_type=cosine_with_min_lr"], "requires either min_lr or min_lr_rate"),
        (["grpo.lr_scheduler_type=warmup_stable_decay"], "set grpo.lr_scheduler_kwargs={num_decay_steps: 20}"),
        (["grpo.optim=sgd", "grpo.optim_args=momentum=fast"], "momentum must be a number"),
        (["grpo.optim=sgd", "grpo.optim_args='momentum=0.9,nesterov=maybe'"], "nesterov must be true or false"),
        (["grpo.optim=sgd", "grpo.optim_args=lr=0.9"], "'lr' is no argument of grpo.optim=sgd"),
        (["grpo.model_init_kwargs={revision: main}"], "set model.path to its folder"),
        (["grpo.vllm_importance_sampling_mode=token_truncate", "grpo.vllm_importance_sampling_clip_max=null"], "bound"),
    ],
)
def test_load_arguments_that_transformers_ignores_are_refused(overrides: list[str], part: str) -> None:
    assert part in config_error(*overrides)


def test_load_optimizer_arguments_are_accepted() -> None:
    load_config(None, ["grpo.optim=sgd", "grpo.optim_args='momentum=0.9, nesterov=true'"])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_load_every_loss_type_is_accepted(loss_type: str) -> None:
    load_config(None, [f"grpo.loss_type={loss_type}", "grpo.vllm_importance_sampling_mode=token_truncate"])


@pytest.mark.parametrize(
    "setting",
    [
        "run.seed=-1",
        "run.seed=2147483648",
        "run.hang_seconds=.inf",
        "run.hang_seconds=1e10",
        "run.hang_factor=.inf",
        "run.storage_retry_seconds=.nan",
        "rewards.time_limit=.inf",
        "engine.logprob_tolerance=0",
        "engine.logprob_tolerance=.nan",
        "grpo.learning_rate=.nan",
        "grpo.learning_rate=-1e-6",
        "model.lora={dropout: .nan}",
    ],
)
def test_load_number_out_of_range_is_refused(setting: str) -> None:
    assert " must be a" in config_error(setting)


@pytest.mark.parametrize("workers", ["1", "[1, 2]"])
def test_load_shard_learner_with_one_worker_is_refused(workers: str) -> None:
    assert "needs at least 2 workers" in config_error("cluster.shard_learner=true", f"cluster.num_workers={workers}")


def test_load_derived_field_names_the_keys_to_set() -> None:
    assert config_error("grpo.fsdp=true") == "grpo.fsdp is derived; set cluster.shard_learner"
