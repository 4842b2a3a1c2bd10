"""Tests of the run's config: defaults, overrides, YAML, error messages and derived values."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import example, given, settings

from grpo_ray.config.fields import type_adapter
from grpo_ray.config.loader import describe_fields, from_mapping, load_config, unknown_key
from grpo_ray.config.schema import SECTIONS, ClusterConfig, Config, GrpoConfig, LoraConfig, ModelConfig, RunConfig
from grpo_ray.config.validation import CHECKS
from grpo_ray.errors import ConfigError

JOBS = Path(__file__).parents[3] / "jobs" / "configs"


def some(count: int) -> settings:
    """Return hypothesis settings for this number of examples, the same ones in each run."""
    return settings(max_examples=count, deadline=None, derandomize=True)


def refusal(*overrides: str, path: Path | None = None) -> str:
    """Return the message of the ConfigError that load_config raises."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def with_sizes(**sizes: int | None) -> Config:
    workers = sizes.pop("num_workers")
    return Config(cluster=ClusterConfig(num_workers=workers), grpo=GrpoConfig(**sizes))


# Loading and overriding


def test_load_without_file_gives_defaults():
    config = load_config()
    assert (config.run.name, config.cluster.num_workers, config.grpo.max_steps) == ("arithmetic", 2, 200)


def test_load_override_replaces_one_field_of_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: from-file, seed: 5}\ngrpo: {max_steps: 7}\n")
    config = load_config(path, ["run.name=from-override", "cluster.num_workers=4"])
    assert (config.run.name, config.run.seed, config.grpo.max_steps) == ("from-override", 5, 7)
    assert config.cluster.num_workers == 4


def test_load_two_overrides_of_a_field_last_wins():
    assert load_config(None, ["run.seed=1", "run.seed=2"]).run.seed == 2


@given(written=st.from_regex(r"[-+]?[0-9]{1,3}(\.[0-9]{0,5})?[eE][-+]?[0-9]{1,2}", fullmatch=True))
@example(written="1e-6")  # text in YAML 1.1, which requires a dot and a sign
@example(written="3E-4")
@example(written="1.0e-6")
@example(written="2.e-5")
@example(written="+1e-6")
@example(written="0.001")
@some(40)
def test_load_number_any_notation_is_float(written):
    text = f"grpo: {{learning_rate: {written}, adam_epsilon: {written}}}\n"
    for config in (
        load_config("run.yaml", text=text),
        load_config(None, [f"grpo.learning_rate={written}", f"grpo.adam_epsilon={written}"]),
    ):
        assert config.grpo.learning_rate == config.grpo.trl["adam_epsilon"] == float(written)


def test_load_leaves_the_yaml_library_unchanged():
    load_config(None, ["grpo.learning_rate=1e-6"])
    assert yaml.safe_load("1e-6") == "1e-6"


def test_load_override_null_is_none():
    assert load_config(None, ["data.heldout=null", "data.heldout_limit=null"]).data.heldout is None


def test_load_override_takes_lists_and_mappings():
    config = load_config(None, ["rewards.functions=[correctness, boxed_format]", "data.columns={prompt: question}"])
    assert list(config.rewards.functions) == ["correctness", "boxed_format"]
    assert dict(config.data.columns) == {"prompt": "question"}


@given(
    text=st.one_of(
        st.integers().map(str),
        st.floats().map(repr),
        st.booleans().map(str),
        st.dates().map(str),
        st.lists(st.integers()).map(str),
    )
)
@example(text="Reason step by step, and put the answer within \\boxed{}.")
@example(text="Note: the answer: boxed")
@example(text="Answer: in a box")  # a mapping in YAML
@example(text="[unfinished")
@example(text="a = b = c")
@example(text="yes")
@example(text="2024-99-01")  # looks like a date, but there is no such date
@some(40)
def test_load_override_of_text_field_is_kept_as_text(text):
    assert load_config(None, [f"data.system_prompt={text}"]).data.system_prompt == text


@given(text=st.text(max_size=40))
@some(40)
def test_load_override_quoted_text_is_unquoted(text):
    quoted = yaml.safe_dump(text, default_style='"', width=float("inf")).strip()
    assert load_config(None, [f"data.system_prompt={quoted}"]).data.system_prompt == text


def test_load_override_impossible_date_is_text():
    assert load_config(None, ["run.name=2024-99-01"]).run.name == "2024-99-01"


def test_load_override_uri_is_kept():
    assert load_config(None, ["data.train=s3://bucket/train.jsonl"]).data.train == "s3://bucket/train.jsonl"


@pytest.mark.parametrize("override", ["grpo.max_steps", "max_steps=3", "=3", "grpo.=3", "--max-steps"])
def test_load_malformed_override_raises_with_an_example(override):
    message = refusal(override)
    assert repr(override) in message and "section.field=value" in message


def test_load_empty_section_gives_its_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data:\ngrpo:\n  max_steps: 3\n")
    assert load_config(path).data == Config().data


def test_load_empty_section_takes_an_override(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data:\n")
    assert load_config(path, ["data.limit=3"]).data.limit == 3


def test_load_drop_ignores_the_section(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("run: {seed: 3}\nversions: {torch: 2.0.0}\n")
    assert load_config(path, drop=("versions",)).run.seed == 3
    assert "unknown key versions" in refusal(path=path)


# Error messages


def test_load_unknown_section_suggests_the_nearest():
    assert refusal("clster.num_workers=1") == "unknown key clster; did you mean cluster?"


def test_load_unknown_field_suggests_the_nearest():
    assert refusal("run.nmae=x") == "unknown key run.nmae; did you mean run.name?"


def test_unknown_key_in_wrong_section_suggests_the_right_one():
    assert unknown_key("model.num_workers") == "unknown key model.num_workers; did you mean cluster.num_workers?"


@pytest.mark.parametrize(("key", "meant"), [("cluster.seed", "run.seed"), ("engine.dtype", "model.dtype")])
def test_unknown_key_prefers_same_name_in_other_section(key, meant):
    assert unknown_key(key) == f"unknown key {key}; did you mean {meant}?"


def test_unknown_key_searches_further_keys():
    assert unknown_key("grpo.los_type", ["grpo.loss_type"]) == "unknown key grpo.los_type; did you mean grpo.loss_type?"


def test_unknown_key_without_a_match_refers_to_help():
    assert unknown_key("zzz") == "unknown key zzz; see grpo-ray train --help"


def test_load_several_mistakes_one_line_each():
    lines = refusal("grpo.max_steps=many", "run.nmae=x", "clster.n=1", "engine.gpu_memory_utilization=[]").splitlines()
    starts = (
        "grpo.max_steps='many' must",
        "engine.gpu_memory_utilization=[] must",
        "unknown key run.nmae",
        "unknown key clster",
    )
    for start in starts:
        assert [line.startswith(start) for line in lines].count(True) == 1
    assert len(lines) == 4


@pytest.mark.parametrize("section", ["run", "grpo", "data"])
@pytest.mark.parametrize("value", ["[1, 2]", "3", "text"])
def test_load_section_not_a_mapping_raises(tmp_path, section, value):
    path = tmp_path / "run.yaml"
    path.write_text(f"{section}: {value}\n")
    message = f"{section}={yaml.safe_load(value)!r} must be a section with fields"
    assert refusal(path=path) == refusal(f"{section}.x=1", path=path) == message


def test_load_reward_functions_not_a_list_raises():
    assert refusal("rewards.functions=correctness") == (
        "rewards.functions='correctness' must be a non-empty list of texts; the default is [\"correctness\"]"
    )


def test_load_invalid_yaml_names_file_and_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run:\n  name: [\n")
    message = refusal(path=path)
    assert message.startswith(f"{path}: is not YAML: ") and "line 3" in message and "\n" not in message


def test_load_file_with_impossible_date_raises(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: 2024-99-01}\n")
    assert str(path) in refusal(path=path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- run\n", "just text\n"])
def test_load_file_without_sections_names_the_sections(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    message = refusal(path=path)
    assert message.startswith(f"{path}: must hold sections") and all(name in message for name in SECTIONS)


def test_load_unreadable_file_raises_with_its_path(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"run: {name: \xff}\n")
    for path in (tmp_path / "none.yaml", tmp_path, binary):
        assert refusal(path=path).startswith(f"{path}: cannot be read: ")


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
def test_config_value_out_of_range_names_the_field(override):
    assert override.partition("=")[0] in refusal(override)


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
def test_config_value_at_range_limit_is_accepted(override):
    load_config(None, [override])


# Sizes that do not divide


def test_config_workers_not_dividing_prompts_raises():
    # 16 = 3 x 5 + 1, so 15 is the nearest below that three workers can share.
    assert refusal("cluster.num_workers=3") == (
        "grpo.prompts_per_step=16 must be a multiple of cluster.num_workers=3; try grpo.prompts_per_step=15"
    )


def test_config_fewer_prompts_than_workers_suggests_more():
    assert refusal("cluster.num_workers=8", "grpo.prompts_per_step=3").endswith("try grpo.prompts_per_step=8")


def test_config_micro_batch_not_dividing_step_raises():
    # 16 x 8 = 128 completions; 32 is the largest divisor up to 48 that two workers can share.
    message = refusal("grpo.micro_batch_size=48")
    assert "grpo.micro_batch_size=48 must divide the step's 128 completions" in message
    assert message.endswith("try grpo.micro_batch_size=32")


def test_config_micro_batch_not_shareable_raises():
    # 1 divides 128, but two workers cannot share it; 2 is the nearest number that they can.
    assert refusal("grpo.micro_batch_size=1") == (
        "grpo.micro_batch_size=1 must be a multiple of cluster.num_workers=2; try grpo.micro_batch_size=2"
    )


def test_config_checkpoint_inside_a_batch_raises():
    message = refusal("grpo.save_steps=50", "grpo.num_iterations=4")
    assert "grpo.save_steps=50" in message and "grpo.num_iterations=4" in message
    assert message.endswith("try grpo.save_steps=48")  # 12 x 4


SUGGESTION = re.compile(r"^(grpo\.\w+)=(\d+) must .*; try \1=(\d+)$")


def suggestion(message: str) -> tuple[str, int]:
    """Return the field and the value that an error message suggests."""
    found = SUGGESTION.match(message)
    assert found, f"no suggestion in: {message}"
    return found[1].removeprefix("grpo."), int(found[3])


@given(
    workers=st.integers(1, 8),
    prompts=st.integers(1, 20),
    generations=st.integers(2, 8),
    share=st.floats(0, 1.1) | st.none(),
)
@some(400)
def test_config_refused_size_suggestion_is_accepted(workers, prompts, generations, share):
    step = prompts * generations
    micro = None if share is None else 1 + int(share * step)
    sizes = {
        "num_workers": workers,
        "prompts_per_step": prompts,
        "num_generations": generations,
        "micro_batch_size": micro,
    }
    fits = prompts % workers == 0 and (micro is None or (step % micro == 0 and micro % workers == 0))
    changed: list[str] = []
    while True:
        try:
            config = with_sizes(**sizes)
            break
        except ConfigError as error:
            field, value = suggestion(str(error))
            assert field not in changed, f"{field} is changed twice"
            changed.append(field)
            sizes[field] = value
    assert fits == (not changed)
    assert config.prompts_per_worker * workers == config.grpo.prompts_per_step
    assert config.completions_per_step % config.micro_batch_size == 0
    assert config.micro_batch_size % workers == 0


@given(save=st.integers(1, 40), iterations=st.integers(1, 8))
@some(100)
def test_config_refused_save_interval_suggestion_is_accepted(save, iterations):
    try:
        Config(grpo=GrpoConfig(save_steps=save, trl={"num_iterations": iterations}))
        assert save % iterations == 0
    except ConfigError as error:
        field, value = suggestion(str(error))
        assert field == "save_steps" and save % iterations
        Config(grpo=GrpoConfig(save_steps=value, trl={"num_iterations": iterations}))


# Derived values


def test_config_step_size_is_independent_of_workers():
    sizes = [with_sizes(num_workers=n, prompts_per_step=8, num_generations=4) for n in (1, 2, 4)]
    assert [c.completions_per_step for c in sizes] == [32, 32, 32]
    assert [c.prompts_per_worker for c in sizes] == [8, 4, 2]


def test_config_micro_batch_default_by_device_and_length():
    def of(**changed) -> int:
        sizes = {"prompts_per_step": 12, "num_generations": 4, "max_completion_length": 256} | changed
        cluster = ClusterConfig(num_workers=sizes.pop("workers", 2), use_gpu=sizes.pop("use_gpu", False))
        return Config(cluster=cluster, grpo=GrpoConfig(**sizes)).micro_batch_size

    assert of() == 8  # 4 for each worker: 1,024 tokens at most
    assert [of(workers=n) for n in (1, 3, 4, 6)] == [4, 12, 16, 24]
    assert of(workers=(1, 4)) == 24  # 12 is the least that 1, 2, 3 and 4 workers can share
    assert of(max_completion_length=40) == 48  # a full pass takes 26 for each worker, more than half of the step
    assert of(max_completion_length=4096) == 2
    assert of(use_gpu=True) == of(trl={"loss_type": "bnpo"}) == 48
    assert of(micro_batch_size=6) == 6


def test_config_dtype_follows_device_unless_set():
    assert load_config().dtype == "float32"
    assert load_config(None, ["cluster.use_gpu=true"]).dtype == "bfloat16"
    assert load_config(None, ["cluster.use_gpu=true", "model.dtype=float16"]).dtype == "float16"


def test_config_replace_checks_again():
    with pytest.raises(ConfigError, match=r"cluster\.num_workers=3"):
        dataclasses.replace(load_config(), cluster=ClusterConfig(num_workers=3))


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config().run.name = "other"


# TRL's fields, and dumping to YAML


def test_load_trl_fields_are_kept_in_grpo():
    config = load_config(
        None, ["grpo.beta=0.04", "grpo.loss_type=dapo", "grpo.max_steps=5", "grpo.reward_weights=[1.0, 0.2]"]
    )
    assert config.grpo.trl == {"beta": 0.04, "loss_type": "dapo", "reward_weights": [1.0, 0.2]}
    assert config.grpo.max_steps == 5


def test_config_num_iterations_is_a_trl_field():
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
    "grpo.reward_weights=[1.0]",
    "grpo.max_grad_norm=.inf",
    "grpo.learning_rate=1e-6",
    "grpo.micro_batch_size=32",
    "grpo.generate_ahead=true",
]
"""Valid settings of all sections, one or more of each type; any of them go together."""


@given(overrides=st.lists(st.sampled_from(OVERRIDES), unique=True))
@example(overrides=[])
@example(overrides=OVERRIDES)
@some(60)
def test_config_dumped_to_yaml_loads_equal(overrides):
    config = load_config(None, overrides)
    plain = config.to_dict()
    assert is_plain(plain) and list(plain) == list(SECTIONS) and "trl" not in plain["grpo"]
    assert from_mapping(plain) == config
    assert load_config("config.yaml", text=yaml.safe_dump(plain)) == config


def test_config_written_to_a_file_loads_equal(tmp_path):
    config = load_config(None, ["data.system_prompt='où: π'", "grpo.learning_rate=1e-6"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_dict(), allow_unicode=True), encoding="utf-8")
    assert load_config(path) == config


def test_from_mapping_leaves_its_argument_unchanged():
    settings = {"grpo": {"beta": 0.1, "max_steps": 3}, "data": None}
    from_mapping(settings)
    assert settings == {"grpo": {"beta": 0.1, "max_steps": 3}, "data": None}


# Help texts, jobs and names


def test_describe_fields_has_default_and_docstring():
    described = describe_fields()
    assert list(described) == list(SECTIONS)
    for section, cls in SECTIONS.items():
        names = [f.name for f in dataclasses.fields(cls) if f.name != "trl"]
        assert list(described[section]) == names
        for name, (default, text) in described[section].items():
            assert default == getattr(cls(), name)
            assert len(text) > 15 and "\n" not in text, f"{section}.{name} has no docstring"


def test_describe_fields_text_is_the_field_docstring():
    default, text = describe_fields()["run"]["seed"]
    assert default == 0 and text.startswith("Seed of the problem order")


def test_job_configs_all_load():
    paths = sorted(JOBS.glob("*.yaml"))
    assert len(paths) >= 2
    for path in paths:
        config = load_config(path)
        assert isinstance(config.grpo.trl, Mapping) and config.run.name in path.stem, path


def test_config_run_name_takes_portable_characters():
    assert Config(run=RunConfig(name="A-z_0.9")).run.name == "A-z_0.9"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "arithmetic"),
        (["data.train=../x/olympiadbench.jsonl"], "olympiadbench"),
        (["model.path=Qwen/Qwen2.5-0.5B", "data.train=deepmath"], "Qwen2.5-0.5B-deepmath"),
        (["data.train=s3://bucket/a b*.parquet"], "a-b"),
        (["run.name=mine", "data.train=x.csv"], "mine"),
    ],
)
def test_load_run_name_default_is_model_and_data(overrides, name):
    assert load_config(None, overrides).run.name == name


def test_config_worker_counts_are_those_dividing_the_step():
    assert load_config(None, ["cluster.num_workers=[2, 4]"]).worker_counts == [
        2,
        4,
    ]  # of 16 problems; 3 does not divide them
    assert load_config(None, ["cluster.num_workers=3", "grpo.prompts_per_step=6"]).worker_counts == [3]
    config = load_config(None, ["cluster.num_workers=[1, 8]", "grpo.micro_batch_size=4"])
    assert config.worker_counts == [1, 2, 4]  # 8 workers cannot share 4 completions
    assert config.with_workers(4).prompts_per_worker == 4 and config.to_dict()["cluster"]["num_workers"] == [1, 8]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cluster.num_workers=[4, 2]", "must be [min, max]; set cluster.num_workers=[2, 4]"),
        ("cluster.num_workers=x", "must be a whole number of at least 1, or a list of 2 whole numbers of at least 1"),
        ("cluster.num_workers=[2, 3, 4]", "or a list of 2 whole numbers of at least 1; the default is 2"),
        ("cluster.num_workers=[3, 3]", "none of these numbers divides both grpo.prompts_per_step=16"),
        ("cluster.num_workers=[0, 2]", "cluster.num_workers=[0, 2] must be a whole number of at least 1"),
        ("run.hang_factor=1", "run.hang_factor=1 must be a number above 1; the default is 20.0"),
        ("run.hang_seconds=0", "run.hang_seconds=0 must be a number above 0; the default is 900.0"),
        ("run.storage_retry_seconds=-1", "run.storage_retry_seconds=-1 must be a number above 0"),
        ("run.max_bad_steps=-1", "run.max_bad_steps=-1 must be a whole number of at least 0"),
        ("data.skip_solved=0", "data.skip_solved=0 must be a whole number of at least 1, or null; the default is null"),
    ],
)
def test_load_bad_fault_tolerance_setting_raises_one_line(setting, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_config_curriculum_without_correctness_raises():
    with pytest.raises(ConfigError, match=r"data\.prefer_mixed=True require .* put correctness"):
        load_config(None, ["data.prefer_mixed=true", "rewards.functions=[boxed_format]"])


# Configs that no YAML went through


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
def test_config_built_directly_checks_ranges(section, message):
    (name,) = [name for name, cls in SECTIONS.items() if isinstance(section, cls)]
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Config(**{name: section})
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        dataclasses.replace(load_config(), **{name: section})


def test_config_section_of_wrong_type_raises():
    with pytest.raises(ConfigError, match=r"^grpo=3 must be a section with fields$"):
        Config(grpo=3)  # type: ignore[arg-type]


def test_config_built_directly_keeps_its_values():
    section = RunConfig(hang_seconds=900)
    assert Config(run=section).run is section  # checked, but neither copied nor converted


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.columns={prompt: 3}",
            "data.columns={'prompt': 3} must be a mapping from text to texts; the default is {}",
        ),
        ("run.resume=soon", 'run.resume=\'soon\' must be "latest", "best" or "never"; the default is "latest"'),
        ("model.lora=8", "model.lora=8 must be a section with fields, or null; the default is null"),
        ("model.lora={rnk: 8}", "unknown key model.lora.rnk; did you mean model.lora.rank?"),
        ("cluster.use_gpu=3", "cluster.use_gpu=3 must be true or false; the default is false"),
        ("data.limit=1.5", "data.limit=1.5 must be a whole number of at least 1, or null; the default is null"),
    ],
)
def test_load_refused_value_message_is_one_full_line(override, message):
    assert refusal(override) == message


@pytest.mark.parametrize(("text", "key"), [("3: {seed: 1}", "3"), ("run: {3: 1}", "run.3")])
def test_load_key_that_is_no_text_is_unknown(text, key):
    with pytest.raises(ConfigError, match=f"^unknown key {key}; "):
        load_config("run.yaml", text=text)


def test_load_and_dump_build_no_validator_twice():
    load_config().to_dict()
    built = type_adapter.cache_info().misses
    load_config(None, ["run.seed=2"]).with_workers(4).to_dict()
    assert type_adapter.cache_info().misses == built


def test_checks_are_named_and_described():
    names = [check.__name__ for check in CHECKS]
    assert len(set(names)) == len(CHECKS)
    assert all((check.__doc__ or "").startswith(("Require ", "Refuse ")) for check in CHECKS)
