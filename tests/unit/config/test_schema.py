"""Tests of the config schema: ranges, paths, held-out sets, and conversion to YAML."""

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any, get_type_hints

import hypothesis.strategies as st
import pytest
import yaml
from config_cases import config_error, examples
from hypothesis import example, given

from grpo_ray.config.loader import from_mapping, load_config
from grpo_ray.config.schema import (
    SECTIONS,
    ClusterConfig,
    Config,
    GrpoConfig,
    LoraConfig,
    ModelConfig,
    RewardsConfig,
    RunConfig,
)
from grpo_ray.config.sources import BUILT_IN_DATASETS, HeldoutSource, derived_heldout_share
from grpo_ray.errors import ConfigError


@pytest.mark.parametrize(
    "override",
    [
        "run.name=a/b",
        "run.name=",
        "run.name=..",
        "run.name=-x",
        "run.name=a b",
        "run.resume=sometimes",
        "run.max_failures=-2",
        "run.keep_checkpoints=0",
        "cluster.num_workers=0",
        "cluster.cpus_per_worker=0",
        "cluster.threads_per_worker=0",
        "model.dtype=float8",
        "data.heldout_share=0",
        "data.heldout_share=1",
        "data.heldout_share=.nan",
        "data.limit=0",
        "data.heldout_limit=-1",
        "rewards.functions=[]",
        "rewards.boolean_share=-0.1",
        "rewards.boolean_share=1.1",
        "rewards.boolean_share=.nan",
        "rewards.time_limit=0",
        "rewards.time_limit=.nan",
        "engine.gpu_memory_utilization=0",
        "engine.gpu_memory_utilization=1.5",
        "engine.cpu_cache_gib=0",
        "engine.max_model_len=0",
        "grpo.prompts_per_step=0",
        "grpo.num_generations=1",
        "grpo.micro_batch_size=0",
        "grpo.max_steps=0",
        "grpo.max_steps=1.5",
        "grpo.save_steps=0",
        "grpo.logging_steps=0",
        "grpo.max_completion_length=0",
        "grpo.num_iterations=0",
        "grpo.num_iterations=null",
        "grpo.num_iterations=several",
    ],
)
def test_config_value_out_of_range_names_the_field(override: str) -> None:
    assert override.partition("=")[0] in config_error(override)


@pytest.mark.parametrize(
    "override",
    [
        "run.name=Qwen2.5_0.5b-x",
        "run.max_failures=-1",
        "run.max_failures=0",
        "cluster.threads_per_worker=1",
        "data.heldout_share=0.999",
        "data.limit=1",
        "engine.cpu_cache_gib=1",
        "engine.gpu_memory_utilization=0.01",
        "rewards.boolean_share=0",
        "rewards.boolean_share=1",
        "grpo.num_generations=2",
        "grpo.max_steps=1",
        "grpo.max_steps=1e3",
    ],
)
def test_config_value_at_range_limit_is_accepted(override: str) -> None:
    load_config(None, [override])


def test_config_dtype_follows_device_unless_set() -> None:
    assert load_config().dtype == "float32"
    assert load_config(None, ["cluster.use_gpu=true"]).dtype == "bfloat16"
    assert load_config(None, ["cluster.use_gpu=true", "model.dtype=float16"]).dtype == "float16"


def test_config_replace_checks_again() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.num_workers=3"):
        dataclasses.replace(load_config(), cluster=ClusterConfig(num_workers=3))


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config().run.name = "other"  # type: ignore[misc]


def test_config_num_iterations_is_a_trl_field() -> None:
    assert load_config().num_iterations == 1
    assert load_config(None, ["grpo.num_iterations=2"]).num_iterations == 2


def is_plain(value: object) -> bool:
    """Return whether a value consists of lists, dicts and scalars only."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


OVERRIDES = [
    "run.name=Qwen2.5_0.5b-x",
    "run.storage_path='s3://bucket/a b'",
    "run.max_failures=-1",
    "cluster.num_workers=[2, 4]",
    "cluster.threads_per_worker=3",
    "model.dtype=bfloat16",
    "model.lora={}",
    "model.lora={rank: 8, target_modules: [q_proj, v_proj]}",
    "data.heldout=null",
    "data.columns={prompt: question, solution: answer}",
    "data.system_prompt='a: b'",
    "rewards.functions=[correctness, boxed_format]",
    "rewards.settings={soft_overlong: {max_length: 2048}}",
    "engine.logprob_tolerance=1e-3",
    "grpo.beta=0.04",
    "grpo.loss_type=dapo",
    "grpo.max_grad_norm=0.5",
    "grpo.learning_rate=1e-6",
    "grpo.micro_batch_size=32",
    "rollout.max_turns=3",
    "rollout.max_staleness=1",
]
"""Valid settings of all sections, one or more of each type; any of them go together."""


@given(overrides=st.lists(st.sampled_from(OVERRIDES), unique=True))
@example(overrides=[])
@example(overrides=OVERRIDES)
@example(overrides=["rollout.environment={a: 'games:Guess'}", "rollout.settings={'games:Guess': {limit: 5}}"])
@examples(60)
def test_config_dumped_to_yaml_loads_equal(overrides: list[Any]) -> None:
    config = load_config(None, overrides)
    plain = config.to_dict()
    assert is_plain(plain) and list(plain) == list(SECTIONS) and "trl" not in plain["grpo"]
    assert from_mapping(plain) == config
    assert load_config("config.yaml", text=yaml.safe_dump(plain)) == config


def test_config_written_to_a_file_loads_equal(tmp_path: Path) -> None:
    config = load_config(None, ["data.system_prompt='où: π'", "grpo.learning_rate=1e-6"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_dict(), allow_unicode=True), encoding="utf-8")
    assert load_config(path) == config


def test_config_run_name_takes_portable_characters() -> None:
    assert Config(run=RunConfig(name="A-z_0.9")).run.name == "A-z_0.9"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (GrpoConfig(max_steps=0), "grpo.max_steps=0 must be a whole number of at least 1; the default is 200"),
        (
            ModelConfig(lora=LoraConfig(dropout=1.0)),
            "model.lora.dropout=1.0 must be a number of at least 0 and below 1",
        ),
        (RunConfig(name="a/b"), "run.name='a/b' must be letters, digits, '.', '_' and '-'"),
        (ClusterConfig(num_workers=(0, 2)), "cluster.num_workers=(0, 2) must be a whole number of at least 1"),
    ],
)
def test_config_built_directly_checks_ranges(section: Any, message: str) -> None:
    (name,) = [name for name, cls in SECTIONS.items() if isinstance(section, cls)]
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Config(**{name: section})
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        dataclasses.replace(load_config(), **{name: section})


def test_config_section_of_wrong_type_raises() -> None:
    with pytest.raises(ConfigError, match=r"^grpo=3 must be a section with fields$"):
        Config(grpo=3)  # type: ignore[arg-type]


def test_config_built_directly_keeps_its_values() -> None:
    section = RunConfig(storage_path="/runs", hang_seconds=900)
    assert Config(run=section).run is section  # checked, but neither copied nor converted


# Held-out problems


@pytest.mark.parametrize("train", BUILT_IN_DATASETS)
def test_heldout_sources_built_in_train_has_its_own_split(train: str) -> None:
    (source,) = load_config(None, [f"data.train={train}"]).heldout_sources.values()
    assert (source.dataset, source.is_part_of_training) == (train, False)


@pytest.mark.parametrize("train", ["/data/mine.jsonl", "owner/problems", "s3://bucket/*.parquet"])
def test_heldout_sources_other_train_holds_out_a_part_of_it(train: str) -> None:
    sources = load_config(None, [f"data.train={train}"]).heldout_sources
    assert sources == {"heldout": HeldoutSource(train, True, "data.heldout=auto: a part of data.train")}


def test_heldout_sources_null_is_a_part_of_any_train() -> None:
    (source,) = load_config(None, ["data.train=gsm8k", "data.heldout=null"]).heldout_sources.values()
    assert (source.dataset, source.is_part_of_training) == ("gsm8k", True)


def test_heldout_sources_named_sets_are_their_own() -> None:
    sources = load_config(None, ["data.heldout={a: gsm8k, b: /b.jsonl}"]).heldout_sources
    assert {key: (each.dataset, each.is_part_of_training) for key, each in sources.items()} == {
        "heldout/a": ("gsm8k", False),
        "heldout/b": ("/b.jsonl", False),
    }


@pytest.mark.parametrize(
    ("heldout", "rows", "share"),
    [("auto", 100, 0.05), ("auto", 10_000, 0.05), ("auto", 100_000, 0.005), ("auto", 0, 0.05), (None, 100, 0.005)],
)
def test_derived_heldout_share(heldout: str | None, rows: int, share: float) -> None:
    assert derived_heldout_share(heldout, rows) == share


# Paths


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of problems and the folders of a policy and of a reward model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/a")
    (tmp_path / "mine.jsonl").touch()
    (tmp_path / "owner" / "policy").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.storage_path=runs", "{folder}/runs"),
        ("run.storage_path=~/runs", "/home/a/runs"),
        ("run.storage_path=s3://bucket/runs", "s3://bucket/runs"),
        ("run.from_checkpoint=runs/a", "{folder}/runs/a"),
        ("run.from_checkpoint=gs://bucket/runs/a", "gs://bucket/runs/a"),
        ("model.path=owner/policy", "{folder}/owner/policy"),  # as transformers: a folder that exists
        ("model.path=owner/other", "owner/other"),
        ("model.path=./other", "{folder}/other"),
        ("model.path=../other/", "{parent}/other"),
        ("model.path=~/policy", "/home/a/policy"),
        ("model.path=tiny-arithmetic", "tiny-arithmetic"),
        ("data.train=mine.jsonl", "{folder}/mine.jsonl"),
        ("data.train=later.parquet", "{folder}/later.parquet"),
        ("data.train=data/*.jsonl", "{folder}/data/*.jsonl"),
        ("data.train=owner", "{folder}/owner"),
        ("data.train=owner/problems", "owner/problems"),
        ("data.train=gsm8k", "gsm8k"),
        ("data.train=hf://datasets/owner/problems/*.jsonl", "hf://datasets/owner/problems/*.jsonl"),
        ("data.heldout=mine.jsonl", "{folder}/mine.jsonl"),
        ("data.heldout={a: mine.jsonl, b: gsm8k}", {"a": "{folder}/mine.jsonl", "b": "gsm8k"}),
        ("rewards.functions=[correctness, ./judge]", ("correctness", "{folder}/judge")),
        ("rewards.functions=[owner/policy, owner/judge]", ("{folder}/owner/policy", "owner/judge")),
        ("rewards.functions=['my.rewards:short']", ("my.rewards:short",)),
    ],
)
def test_config_local_paths_are_absolute(folder: Path, override: str, expected: Any) -> None:
    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("{folder}", str(folder)).replace("{parent}", str(folder.parent))
        if isinstance(value, tuple):
            return tuple(map(fill, value))
        return {name: fill(each) for name, each in value.items()} if isinstance(value, dict) else value

    section, _, name = override.partition("=")[0].partition(".")
    config = load_config(None, [override])
    assert getattr(getattr(config, section), name) == fill(expected)
    plain, filled = config.to_dict()[section][name], fill(expected)
    assert plain == (list(filled) if isinstance(filled, tuple) else filled)


def test_config_settings_follow_the_path_of_their_reward(folder: Path) -> None:
    rewards = RewardsConfig(functions=("./judge",), settings={"./judge": {"a": 1}})
    assert Config(rewards=rewards).rewards.settings == {f"{folder}/judge": {"a": 1}}


def test_config_paths_stay_where_another_process_unpickles_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["run.storage_path=runs", "data.train=mine.jsonl"])
    monkeypatch.chdir("/")
    received = pickle.loads(pickle.dumps(config)).with_workers(1)
    assert received.run.storage_path == f"{folder}/runs"
    assert received.data.train == f"{folder}/mine.jsonl"


def test_every_text_field_is_a_known_path_or_none() -> None:
    """A new field that may hold a path has to be made absolute."""
    texts = {
        f"{section}.{name}"
        for section, cls in SECTIONS.items()
        for name, hint in get_type_hints(cls).items()
        if "str" in str(hint) and "Literal" not in str(hint) and "ClassVar" not in str(hint)
    }
    assert texts == PATHS | NO_PATHS


PATHS = {
    "run.storage_path", "run.from_checkpoint", "model.path", "data.train", "data.heldout", "rewards.functions",
    "rewards.settings",
}  # fmt: skip
NO_PATHS = {
    "run.name", "run.takeover", "run.best_metric", "run.group", "run.project", "run.notify",
    "data.columns", "data.system_prompt",
    "rollout.tools", "rollout.environment", "rollout.function", "rollout.settings",  # package.module:name
    "heldout.score",
    "rollout.sandbox_provider",  # a name, or package.module:name
    "rollout.sandbox_url", "rollout.sandbox_token_variable",
    "rollout.variables",  # names
    "grpo.advantages",  # a name, or package.module:name
    "engine.compile_cache",  # absolute, or with ~ for the home folder of each node
    "engine.vllm", "grpo.trl", "model.peft",  # in the libraries' terms
}  # fmt: skip
