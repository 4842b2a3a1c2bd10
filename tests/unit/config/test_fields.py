"""Tests of field descriptions and of the error messages made from them."""

import dataclasses

import pytest
from config_cases import config_error

from grpo_ray.config.fields import type_adapter
from grpo_ray.config.loader import describe_fields, load_config
from grpo_ray.config.schema import SECTIONS, unknown_key
from grpo_ray.errors import ConfigError


def test_load_unknown_section_suggests_the_nearest() -> None:
    assert config_error("clster.num_workers=1") == "unknown key clster; did you mean cluster?"


def test_load_unknown_field_suggests_the_nearest() -> None:
    assert config_error("run.nmae=x") == "unknown key run.nmae; did you mean run.name?"


def test_unknown_key_in_wrong_section_suggests_the_right_one() -> None:
    assert unknown_key("model.num_workers") == "unknown key model.num_workers; did you mean cluster.num_workers?"


@pytest.mark.parametrize(("key", "meant"), [("cluster.seed", "run.seed"), ("engine.dtype", "model.dtype")])
def test_unknown_key_prefers_same_name_in_other_section(key: str, meant: str) -> None:
    assert unknown_key(key) == f"unknown key {key}; did you mean {meant}?"


def test_unknown_key_without_a_match_refers_to_help() -> None:
    assert unknown_key("zzz") == "unknown key zzz; see grpo-ray train --help"


def test_load_section_without_its_required_field_names_it() -> None:
    assert config_error("model.adapter_optimizer={}") == (
        'model.adapter_optimizer.name is missing; it must be "loraplus" or "lorafa"'
    )


def test_load_several_mistakes_one_line_each() -> None:
    lines = config_error(
        "grpo.max_steps=many", "run.nmae=x", "clster.n=1", "engine.gpu_memory_utilization=[]"
    ).splitlines()
    starts = (
        "grpo.max_steps='many' must",
        "engine.gpu_memory_utilization=[] must",
        "unknown key run.nmae",
        "unknown key clster",
    )
    for start in starts:
        assert [line.startswith(start) for line in lines].count(True) == 1
    assert len(lines) == 4


def test_describe_fields_has_default_and_docstring() -> None:
    described = describe_fields()
    assert list(described) == list(SECTIONS)
    for section, cls in SECTIONS.items():
        names = [f.name for f in dataclasses.fields(cls) if f.name != "trl"]
        assert list(described[section]) == names
        for name, (default, text) in described[section].items():
            assert default == getattr(cls(), name)
            assert len(text) > 15 and "\n" not in text, f"{section}.{name} has no docstring"


def test_describe_fields_text_is_the_field_docstring() -> None:
    default, text = describe_fields()["run"]["seed"]
    assert default == 0 and text.startswith("Seed of the problem order")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cluster.num_workers=[4, 2]", "must be [min, max]; set cluster.num_workers=[2, 4]"),
        ("cluster.num_workers=x", "must be a whole number of at least 1, or a list of 2 whole numbers of at least 1"),
        ("cluster.num_workers=[2, 3, 4]", "or a list of 2 whole numbers of at least 1; the default is 2"),
        ("cluster.num_workers=[3, 3]", "none of these numbers divides both grpo.prompts_per_step=16"),
        ("cluster.num_workers=[0, 2]", "cluster.num_workers=[0, 2] must be a whole number of at least 1"),
        ("run.hang_factor=1", "run.hang_factor=1 must be a number above 1 and at most 10000; the default is 20.0"),
        (
            "run.hang_seconds=0",
            "run.hang_seconds=0 must be a number above 0 and at most 10000000",
        ),
        ("run.storage_retry_seconds=-1", "run.storage_retry_seconds=-1 must be a number above 0"),
        ("run.max_bad_steps=-1", "run.max_bad_steps=-1 must be a whole number of at least 0"),
        ("data.skip_solved=0", "data.skip_solved=0 must be a whole number of at least 1, or null; the default is null"),
    ],
)
def test_load_bad_fault_tolerance_setting_raises_one_line(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


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
def test_load_refused_value_message_is_one_full_line(override: str, message: str) -> None:
    assert config_error(override) == message


@pytest.mark.parametrize(("text", "key"), [("3: {seed: 1}", "3"), ("run: {3: 1}", "run.3")])
def test_load_key_that_is_no_text_is_unknown(text: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown key {key}; "):
        load_config("run.yaml", text=text)


def test_load_and_dump_build_no_validator_twice() -> None:
    load_config().to_dict()
    built = type_adapter.cache_info().misses
    load_config(None, ["run.seed=2"]).with_workers(4).to_dict()
    assert type_adapter.cache_info().misses == built
