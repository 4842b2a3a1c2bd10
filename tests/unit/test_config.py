import dataclasses
import itertools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from grpo_ray.config import SECTIONS, Config
from grpo_ray.errors import ConfigError
from grpo_ray.sections import ClusterConfig, GrpoConfig, RunConfig
from grpo_ray.settings import describe_fields, from_mapping, load, unknown_key

JOBS = Path(__file__).parents[2] / "jobs" / "configs"


def refusal(*overrides: str, path: Path | None = None) -> str:
    """What `load` says when it refuses."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def with_sizes(**sizes: int | None) -> Config:
    workers = sizes.pop("num_workers")
    return Config(cluster=ClusterConfig(num_workers=workers), grpo=GrpoConfig(**sizes))


# Loading and overriding


def test_without_a_file_the_defaults_stand():
    config = load()
    assert (config.run.name, config.cluster.num_workers, config.grpo.max_steps) == ("arithmetic", 2, 200)


def test_an_override_lies_over_the_file_and_leaves_its_neighbours(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: from-file, seed: 5}\ngrpo: {max_steps: 7}\n")
    config = load(path, ["run.name=from-override", "cluster.num_workers=4"])
    assert (config.run.name, config.run.seed, config.grpo.max_steps) == ("from-override", 5, 7)
    assert config.cluster.num_workers == 4


def test_of_two_overrides_of_one_field_the_last_counts():
    assert load(None, ["run.seed=1", "run.seed=2"]).run.seed == 2


@pytest.mark.parametrize(
    ("written", "number"),
    [("1e-6", 1e-6), ("3E-4", 3e-4), ("1.0e-6", 1e-6), ("2.e-5", 2e-5), ("+1e-6", 1e-6), ("0.001", 0.001)],
)
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path, written, number):
    path = tmp_path / "run.yaml"
    path.write_text(f"grpo: {{learning_rate: {written}}}\n")
    assert load(path).grpo.learning_rate == number
    assert load(None, [f"grpo.learning_rate={written}"]).grpo.learning_rate == number


def test_numbers_of_trl_in_scientific_notation_are_numbers_too():
    assert load(None, ["grpo.adam_epsilon=1e-8"]).grpo.trl["adam_epsilon"] == 1e-8


def test_reading_1e_6_as_a_number_does_not_change_yaml_for_everyone_else():
    load(None, ["grpo.learning_rate=1e-6"])
    assert yaml.safe_load("1e-6") == "1e-6"


def test_null_switches_a_setting_off():
    assert load(None, ["data.heldout=null", "data.heldout_limit=null"]).data.heldout is None


def test_lists_and_mappings_can_be_overridden():
    config = load(None, ["rewards.functions=[correctness, boxed_format]", "data.columns={prompt: question}"])
    assert list(config.rewards.functions) == ["correctness", "boxed_format"]
    assert dict(config.data.columns) == {"prompt": "question"}


@pytest.mark.parametrize(
    "text",
    [
        "Reason step by step, and put the answer within \\boxed{}.",
        "Note: the answer: boxed",
        "Answer: in a box",  # YAML alone would read a mapping
        "[unfinished",
        "a = b = c",
    ],
)
def test_free_text_is_taken_as_it_is_written(text):
    assert load(None, [f"data.system_prompt={text}"]).data.system_prompt == text


def test_text_that_looks_like_a_day_that_does_not_exist_is_text():
    assert load(None, ["run.name=2024-99-01"]).run.name == "2024-99-01"


def test_a_uri_keeps_its_colon():
    assert load(None, ["data.train=s3://bucket/train.jsonl"]).data.train == "s3://bucket/train.jsonl"


@pytest.mark.parametrize("override", ["grpo.max_steps", "max_steps=3", "=3", "grpo.=3", "--max-steps"])
def test_what_is_not_an_override_is_refused_with_an_example(override):
    said = refusal(override)
    assert repr(override) in said and "section.field=value" in said


def test_an_empty_section_stands_for_its_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data:\ngrpo:\n  max_steps: 3\n")
    assert load(path).data == Config().data


def test_an_empty_section_of_the_file_can_be_overridden(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data:\n")
    assert load(path, ["data.limit=3"]).data.limit == 3


def test_a_section_to_pass_over_is_passed_over(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("run: {seed: 3}\nversions: {torch: 2.0.0}\n")
    assert load(path, drop=("versions",)).run.seed == 3
    assert "unknown key versions" in refusal(path=path)


# What is refused, and in which words


def test_an_unknown_section_names_the_nearest():
    assert refusal("clster.num_workers=1") == "unknown key clster; did you mean cluster?"


def test_an_unknown_field_names_the_nearest_of_its_section():
    assert refusal("run.nmae=x") == "unknown key run.nmae; did you mean run.name?"


def test_a_field_in_the_wrong_section_is_found_in_its_own():
    assert unknown_key("model.num_workers") == "unknown key model.num_workers; did you mean cluster.num_workers?"


@pytest.mark.parametrize(("key", "meant"), [("cluster.seed", "run.seed"), ("engine.dtype", "model.dtype")])
def test_the_very_name_in_another_section_is_nearer_than_another_name_in_this_one(key, meant):
    assert unknown_key(key) == f"unknown key {key}; did you mean {meant}?"


def test_a_misspelt_field_of_trl_is_found_among_the_further_keys():
    assert unknown_key("grpo.los_type", ["grpo.loss_type"]) == "unknown key grpo.los_type; did you mean grpo.loss_type?"


def test_a_key_like_no_other_points_to_the_help():
    assert unknown_key("zzz") == "unknown key zzz; see grpo-ray train --help"


def test_each_mistake_has_a_line_of_its_own():
    lines = refusal("grpo.max_steps=many", "run.nmae=x", "clster.n=1", "engine.memory_share=[]").splitlines()
    for start in ("grpo.max_steps='many': ", "unknown key run.nmae", "unknown key clster", "engine.memory_share=[]: "):
        assert [line.startswith(start) for line in lines].count(True) == 1
    assert len(lines) == 4


@pytest.mark.parametrize("section", ["run", "grpo", "data"])
@pytest.mark.parametrize("value", ["[1, 2]", "3", "text"])
def test_a_section_that_is_not_a_mapping_is_refused_by_name(tmp_path, section, value):
    path = tmp_path / "run.yaml"
    path.write_text(f"{section}: {value}\n")
    assert f"{section}: must be a section with fields" in refusal(path=path)
    assert f"{section}: must be a section with fields" in refusal(f"{section}.x=1", path=path)


def test_one_name_where_a_list_of_rewards_belongs_is_refused():
    assert refusal("rewards.functions=correctness").startswith("rewards.functions='correctness': ")


def test_broken_yaml_is_refused_in_one_line_with_file_and_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run:\n  name: [\n")
    said = refusal(path=path)
    assert said.startswith(f"{path}: is not YAML: ") and "line 3" in said and "\n" not in said


def test_a_file_with_a_day_that_does_not_exist_is_refused_and_not_a_crash(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: 2024-99-01}\n")
    assert str(path) in refusal(path=path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- run\n", "just text\n"])
def test_a_file_without_sections_is_refused_with_the_sections_there_are(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    said = refusal(path=path)
    assert said.startswith(f"{path}: must hold sections") and all(name in said for name in SECTIONS)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
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
        "engine.memory_share=0",
        "engine.memory_share=1.5",
        "engine.cpu_cache_gib=0",
        "engine.max_context=0",
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
def test_a_value_out_of_its_range_is_refused_by_the_name_of_its_field(override):
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
        "engine.memory_share=0.01",
        "rewards.boolean_share=0",
        "rewards.boolean_share=1",
        "grpo.num_generations=2",
        "grpo.max_steps=1",
        "grpo.max_steps=1e3",
    ],
)
def test_a_value_at_the_edge_of_its_range_is_taken(override):
    load(None, [override])


# Sizes that do not divide


def test_a_worker_count_that_does_not_divide_is_refused_with_the_mend():
    # 16 = 3 x 5 + 1, so 15 is the nearest below that three workers can share.
    assert refusal("cluster.num_workers=3") == (
        "grpo.prompts_per_step=16 must be a multiple of cluster.num_workers=3; try grpo.prompts_per_step=15"
    )


def test_fewer_problems_than_workers_are_mended_upwards():
    assert refusal("cluster.num_workers=8", "grpo.prompts_per_step=3").endswith("try grpo.prompts_per_step=8")


def test_a_micro_batch_that_does_not_divide_the_step_is_refused_with_the_mend():
    # 16 x 8 = 128 completions; of the divisors that two workers can share, 32 is the largest up to 48.
    said = refusal("grpo.micro_batch_size=48")
    assert "grpo.micro_batch_size=48 must divide the step's 128 completions" in said
    assert said.endswith("try grpo.micro_batch_size=32")


def test_a_micro_batch_that_workers_cannot_share_is_refused_with_the_mend():
    # 1 divides 128 but not into two workers' parts; 2 is the nearest that does.
    assert refusal("grpo.micro_batch_size=1") == (
        "grpo.micro_batch_size=1 must be a multiple of cluster.num_workers=2; try grpo.micro_batch_size=2"
    )


def test_a_checkpoint_inside_a_batch_is_refused_with_the_mend():
    said = refusal("grpo.save_steps=50", "grpo.num_iterations=4")
    assert "grpo.save_steps=50" in said and "grpo.num_iterations=4" in said
    assert said.endswith("try grpo.save_steps=48")  # 12 x 4


MEND = re.compile(r"^(grpo\.\w+)=(\d+) must .*; try \1=(\d+)$")


def mend(message: str) -> tuple[str, int]:
    """The field and the value that a message tells the user to set."""
    found = MEND.match(message)
    assert found, f"names no mend: {message}"
    return found[1].removeprefix("grpo."), int(found[3])


def test_every_refused_size_is_accepted_after_the_mends_it_names():
    for workers, prompts, generations in itertools.product(range(1, 7), range(1, 14), (2, 3, 4, 7)):
        for micro in (None, *range(1, prompts * generations + 3, 2)):
            sizes = {
                "num_workers": workers,
                "prompts_per_step": prompts,
                "num_generations": generations,
                "micro_batch_size": micro,
            }
            step = prompts * generations
            fits = prompts % workers == 0 and (micro is None or (step % micro == 0 and micro % workers == 0))
            mended: list[str] = []
            while True:
                try:
                    config = with_sizes(**sizes)
                    break
                except ConfigError as error:
                    field, value = mend(str(error))
                    assert field not in mended, f"{field} is mended twice from {sizes}"
                    mended.append(field)
                    sizes[field] = value
            assert fits == (not mended), sizes
            assert config.prompts_per_worker * workers == config.grpo.prompts_per_step
            assert config.completions_per_step % config.micro_batch_size == 0
            assert config.micro_batch_size % workers == 0


def test_every_refused_save_interval_is_accepted_after_the_mend_it_names():
    for save, iterations in itertools.product(range(1, 20), range(1, 7)):
        try:
            Config(grpo=GrpoConfig(save_steps=save, trl={"num_iterations": iterations}))
            assert save % iterations == 0
        except ConfigError as error:
            field, value = mend(str(error))
            assert field == "save_steps" and save % iterations
            Config(grpo=GrpoConfig(save_steps=value, trl={"num_iterations": iterations}))


# What follows from the fields


def test_a_step_is_the_same_whatever_the_worker_count():
    sizes = [with_sizes(num_workers=n, prompts_per_step=8, num_generations=4) for n in (1, 2, 4)]
    assert [c.completions_per_step for c in sizes] == [32, 32, 32]
    assert [c.prompts_per_worker for c in sizes] == [8, 4, 2]


def test_a_pass_is_the_whole_step_or_on_the_cpu_what_fills_it():
    def of(**changed) -> int:
        sizes = {"prompts_per_step": 12, "num_generations": 4, "max_completion_length": 256} | changed
        cluster = ClusterConfig(num_workers=sizes.pop("workers", 2), use_gpu=sizes.pop("use_gpu", False))
        return Config(cluster=cluster, grpo=GrpoConfig(**sizes)).micro_batch_size

    assert of() == 8  # 4 for each worker: 1,024 tokens at most
    assert [of(workers=n) for n in (1, 3, 4, 6)] == [4, 12, 16, 24]
    assert of(workers=(1, 4)) == 24  # 12 is what 1, 2, 3 and 4 workers can share
    assert of(max_completion_length=40) == 48  # 26 for each worker are more than half
    assert of(max_completion_length=4096) == 2
    assert of(use_gpu=True) == of(trl={"loss_type": "bnpo"}) == 48
    assert of(micro_batch_size=6) == 6


def test_precision_follows_the_device_unless_it_is_set():
    assert load().dtype == "float32"
    assert load(None, ["cluster.use_gpu=true"]).dtype == "bfloat16"
    assert load(None, ["cluster.use_gpu=true", "model.dtype=float16"]).dtype == "float16"


def test_a_changed_copy_is_checked_again():
    with pytest.raises(ConfigError, match=r"cluster\.num_workers=3"):
        dataclasses.replace(load(), cluster=ClusterConfig(num_workers=3))


def test_a_config_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().run.name = "other"


# TRL's fields, and the way back to YAML


def test_fields_of_trl_pass_through_the_section_grpo():
    config = load(None, ["grpo.beta=0.04", "grpo.loss_type=dapo", "grpo.max_steps=5", "grpo.reward_weights=[1.0, 0.2]"])
    assert config.grpo.trl == {"beta": 0.04, "loss_type": "dapo", "reward_weights": [1.0, 0.2]}
    assert config.grpo.max_steps == 5


def test_the_number_of_iterations_is_trls_field():
    assert load().num_iterations == 1
    assert load(None, ["grpo.num_iterations=2"]).num_iterations == 2


def is_plain(value: object) -> bool:
    """Lists, dicts and scalars only, all the way down."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["rewards.functions=[correctness, boxed_format]"],
        ["data.columns={prompt: question, solution: answer}", "data.heldout=null"],
        ["grpo.beta=0.04", "grpo.loss_type=dapo", "grpo.reward_weights=[1.0]"],
        ["grpo.max_grad_norm=.inf"],
        ["grpo.learning_rate=1e-6", "model.dtype=bfloat16", "data.system_prompt='a: b'"],
    ],
)
def test_a_config_comes_back_the_same_from_its_own_yaml(tmp_path, overrides):
    config = load(None, overrides)
    plain = config.to_dict()
    assert is_plain(plain) and list(plain) == list(SECTIONS) and "trl" not in plain["grpo"]
    assert from_mapping(plain) == config
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(plain))
    assert load(path) == config


def test_from_mapping_does_not_change_what_it_is_given():
    settings = {"grpo": {"beta": 0.1, "max_steps": 3}, "data": None}
    from_mapping(settings)
    assert settings == {"grpo": {"beta": 0.1, "max_steps": 3}, "data": None}


# The help, the jobs, and what importing costs


def test_every_field_is_described_with_its_default():
    described = describe_fields()
    assert list(described) == list(SECTIONS)
    for section, cls in SECTIONS.items():
        names = [f.name for f in dataclasses.fields(cls) if f.name != "trl"]
        assert list(described[section]) == names
        for name, (default, text) in described[section].items():
            assert default == getattr(cls(), name)
            assert len(text) > 15 and "\n" not in text, f"{section}.{name} wants a docstring"


def test_a_description_is_the_docstring_below_its_own_field():
    default, text = describe_fields()["run"]["seed"]
    assert default == 0 and text.startswith("Decides the order of problems")


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_config_of_every_job_loads(path):
    config = load(path)
    assert isinstance(config.grpo.trl, Mapping) and config.run.name in path.stem


def test_there_are_configs_for_jobs():
    assert len(list(JOBS.glob("*.yaml"))) >= 2


def test_the_name_of_a_run_may_hold_everything_that_a_file_name_takes_everywhere():
    assert Config(run=RunConfig(name="A-z_0.9")).run.name == "A-z_0.9"


def test_importing_the_config_loads_no_heavy_library():
    heavy = ("torch", "ray", "vllm", "trl", "transformers", "pandas", "pyarrow", "numpy")
    code = f"import sys, grpo_ray.config; print([m for m in {heavy!r} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


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
def test_a_run_without_a_name_is_called_after_its_model_and_data(overrides, name):
    assert load(None, overrides).run.name == name


def test_a_range_of_workers_is_narrowed_to_those_that_divide_the_step():
    assert load(None, ["cluster.num_workers=[2, 4]"]).worker_counts == [2, 4]  # of 16 problems; 3 does not divide them
    assert load(None, ["cluster.num_workers=3", "grpo.prompts_per_step=6"]).worker_counts == [3]
    config = load(None, ["cluster.num_workers=[1, 8]", "grpo.micro_batch_size=4"])
    assert config.worker_counts == [1, 2, 4]  # 8 would have half a completion each
    assert config.with_workers(4).prompts_per_worker == 4 and config.to_dict()["cluster"]["num_workers"] == [1, 8]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cluster.num_workers=[4, 2]", "must name the least before the most"),
        ("cluster.num_workers=x", "must be a whole number, or two of them: [least, most]"),
        ("cluster.num_workers=[2, 3, 4]", "must be a whole number, or two of them: [least, most]"),
        ("cluster.num_workers=[3, 3]", "none of these numbers divides grpo.prompts_per_step=16"),
        ("cluster.num_workers=[0, 2]", "cluster.num_workers=0 must be at least 1"),
        ("run.hang_factor=1", "run.hang_factor=1.0 must be above 1"),
        ("run.hang_seconds=0", "run.hang_seconds=0.0 must be above 0 seconds"),
        ("run.storage_patience=-1", "run.storage_patience=-1.0 must be above 0 seconds"),
        ("run.max_bad_steps=-1", "run.max_bad_steps=-1 must be 0 or more"),
        ("data.skip_solved=0", "data.skip_solved=0 must be at least 1"),
    ],
)
def test_what_keeps_a_run_alive_is_checked_in_one_line(setting, said):
    with pytest.raises(ConfigError) as caught:
        load(None, [setting])
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_curriculum_needs_to_know_what_was_solved():
    with pytest.raises(ConfigError, match=r"data\.skip_solved and data\.prefer_mixed .* put correctness"):
        load(None, ["data.prefer_mixed=true", "rewards.functions=[boxed_format]"])
