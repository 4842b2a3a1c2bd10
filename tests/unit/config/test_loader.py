"""Tests of config loading: YAML files, overrides, run names and errors of the file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from config_cases import config_error, examples
from hypothesis import example, given

from grpo_ray.config.loader import STAGES, from_mapping, load_config, read_yaml
from grpo_ray.config.schema import SECTIONS, Config

JOBS = Path(__file__).parents[3] / "jobs" / "configs"


def test_load_without_file_gives_defaults() -> None:
    config = load_config()
    assert (config.run.name, config.cluster.num_workers, config.grpo.max_steps) == ("arithmetic", 2, 200)


def test_load_override_replaces_one_field_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: from-file, seed: 5}\ngrpo: {max_steps: 7}\n")
    config = load_config(path, ["run.name=from-override", "cluster.num_workers=4"])
    assert (config.run.name, config.run.seed, config.grpo.max_steps) == ("from-override", 5, 7)
    assert config.cluster.num_workers == 4


def test_load_two_overrides_of_a_field_last_wins() -> None:
    assert load_config(None, ["run.seed=1", "run.seed=2"]).run.seed == 2


@given(written=st.from_regex(r"\+?[0-9]{1,3}(\.[0-9]{0,5})?[eE][-+]?[0-9]{1,2}", fullmatch=True))
@example(written="1e-6")  # text in YAML 1.1, which requires a dot and a sign
@example(written="3E-4")
@example(written="1.0e-6")
@example(written="2.e-5")
@example(written="+1e-6")
@example(written="0.001")
@examples(40)
def test_load_number_any_notation_is_float(written: str) -> None:
    text = f"grpo: {{learning_rate: {written}, entropy_coef: {written}}}\n"
    for config in (
        load_config("run.yaml", text=text),
        load_config(None, [f"grpo.learning_rate={written}", f"grpo.entropy_coef={written}"]),
    ):
        assert config.grpo.learning_rate == config.grpo.trl["entropy_coef"] == float(written)


def test_load_override_null_is_none() -> None:
    assert load_config(None, ["data.heldout=null", "data.heldout_limit=null"]).data.heldout is None


def test_load_override_takes_lists_and_mappings() -> None:
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
@example(text="Use #1")  # a comment in YAML
@example(text="#1 rule: be brief # really")
@example(text="2024-99-01")  # looks like a date, but there is no such date
@examples(40)
def test_load_override_of_text_field_is_kept_as_text(text: str) -> None:
    assert load_config(None, [f"data.system_prompt={text}"]).data.system_prompt == text


@given(text=st.text(max_size=40))
@examples(40)
def test_load_override_quoted_text_is_unquoted(text: str) -> None:
    quoted = yaml.safe_dump(text, default_style='"', width=float("inf")).strip()
    assert load_config(None, [f"data.system_prompt={quoted}"]).data.system_prompt == text


def test_load_override_comment_after_other_values_is_ignored() -> None:
    config = load_config(None, ["grpo.max_steps=30 # few", 'data.system_prompt="Use #1" # quoted'])
    assert (config.grpo.max_steps, config.data.system_prompt) == (30, "Use #1")


def test_load_override_sharp_in_trl_text_is_kept() -> None:
    assert "grpo.loss_type='run #3' must be" in config_error("grpo.loss_type=run #3")


def test_load_override_impossible_date_is_text() -> None:
    assert load_config(None, ["run.name=2024-99-01"]).run.name == "2024-99-01"


def test_load_override_uri_is_kept() -> None:
    assert load_config(None, ["data.train=s3://bucket/train.jsonl"]).data.train == "s3://bucket/train.jsonl"


@pytest.mark.parametrize("override", ["grpo.max_steps", "max_steps=3", "=3", "grpo.=3", "--max-steps"])
def test_load_malformed_override_raises_with_an_example(override: str) -> None:
    message = config_error(override)
    assert repr(override) in message and "section.field=value" in message


def test_load_empty_section_gives_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data:\ngrpo:\n  max_steps: 3\n")
    assert load_config(path).data == Config().data


def test_load_empty_section_takes_an_override(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data:\n")
    assert load_config(path, ["data.limit=3"]).data.limit == 3


def test_load_takes_the_config_that_a_run_has_written(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: {seed: 3}\nversions: {torch: 2.0.0}\n")
    assert load_config(path).run.seed == 3


@pytest.mark.parametrize(("text", "nested"), [("run.name: x", "`run: {name: ...}`"),
                                              ("grpo.temperature: 1", "`grpo: {temperature: ...}`")])  # fmt: skip
def test_load_key_with_dots_in_a_yaml_names_the_nested_form(tmp_path: Path, text: str, nested: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{text}\n")
    key = text.partition(":")[0]
    assert config_error(path=path) == f"unknown key {key}: in a YAML, sections are nested; write {nested}"


def test_load_override_without_section_is_malformed() -> None:
    assert config_error(".name=x").startswith("'.name=x' is not an override")


@pytest.mark.parametrize("section", ["run", "grpo", "data"])
@pytest.mark.parametrize("value", ["[1, 2]", "3", "text"])
def test_load_section_not_a_mapping_raises(tmp_path: Path, section: str, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{section}: {value}\n")
    message = f"{section}={yaml.safe_load(value)!r} must be a section with fields"
    assert config_error(path=path) == config_error(f"{section}.x=1", path=path) == message


def test_load_reward_functions_not_a_list_raises() -> None:
    assert config_error("rewards.functions=correctness") == (
        "rewards.functions='correctness' must be a non-empty list of texts; the default is [\"correctness\"]"
    )


def test_load_invalid_yaml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run:\n  name: [\n")
    message = config_error(path=path)
    assert message.startswith(f"{path}: is not YAML: ") and "line 3" in message and "\n" not in message


def test_load_file_with_impossible_date_raises(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: 2024-99-01}\n")
    assert str(path) in config_error(path=path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- run\n", "just text\n"])
def test_load_file_without_sections_names_the_sections(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    message = config_error(path=path)
    assert message.startswith(f"{path}: must hold sections") and all(name in message for name in SECTIONS)


def test_load_unreadable_file_raises_with_its_path(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"run: {name: \xff}\n")
    for path in (tmp_path / "none.yaml", tmp_path, binary):
        assert config_error(path=path).startswith(f"{path}: cannot be read: ")


def test_load_trl_fields_are_kept_in_grpo() -> None:
    config = load_config(
        None, ["grpo.beta=0.04", "grpo.loss_type=dapo", "grpo.max_steps=5", "grpo.reward_weights=[0.2]"]
    )
    assert config.grpo.trl == {"beta": 0.04, "loss_type": "dapo", "reward_weights": [0.2]}
    assert config.grpo.max_steps == 5


def test_from_mapping_leaves_its_argument_unchanged() -> None:
    settings = {"grpo": {"beta": 0.1, "max_steps": 3}, "data": None}
    from_mapping(settings)
    assert settings == {"grpo": {"beta": 0.1, "max_steps": 3}, "data": None}


def test_job_configs_all_load() -> None:
    paths = sorted(JOBS.glob("*.yaml"))
    assert len(paths) >= 2
    for path in paths:
        if STAGES in read_yaml(str(path), None):  # tests/unit/test_templates.py loads it
            continue
        config = load_config(path)
        assert isinstance(config.grpo.trl, Mapping) and config.run.name in path.stem, path


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
def test_load_run_name_default_is_model_and_data(overrides: list[Any], name: str) -> None:
    assert load_config(None, overrides).run.name == name


@pytest.mark.parametrize(
    ("value", "expected"),
    {
        "{math: /data/m.jsonl, gsm8k: gsm8k}": {"math": "/data/m.jsonl", "gsm8k": "gsm8k"},
        "gsm8k": "gsm8k",
        "2024-01-01": "2024-01-01",
        "123": "123",
        "null": None,
    }.items(),
)
def test_override_heldout_is_text_or_named_sets(value: str, expected: Any) -> None:
    assert load_config(None, [f"data.heldout={value}"]).data.heldout == expected


def test_override_mapping_for_text_field_stays_text() -> None:
    assert load_config(None, ["data.system_prompt={a: b}"]).data.system_prompt == "{a: b}"


@pytest.mark.parametrize(
    "value", ["{}", "[gsm8k]", "{'a b': gsm8k}", "{a/b: gsm8k}", "{-a: gsm8k}", "{a: null}", "{a: 1}"]
)
def test_config_heldout_sets_with_bad_name_or_dataset_raises(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"data:\n  heldout: {value}\n")
    assert config_error(path=path).endswith(
        " must be text, or a non-empty mapping from names to datasets (in a name: letters, digits, '.', '_' and '-'), "
        'or null; the default is "auto"'
    )


def test_config_heldout_sets_survive_the_run_folder() -> None:
    config = load_config(None, ["data.heldout={b: x.jsonl, a: y.jsonl}"])
    again = from_mapping(yaml.safe_load(yaml.safe_dump(config.to_dict(), sort_keys=False)))
    assert again == config and again.heldout_keys == ["heldout/b", "heldout/a"]  # the first one ranks checkpoints


def test_load_config_override_of_mapping_entry_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("grpo: {generation_kwargs: {skip_special_tokens: false, stop: [A]}}\nmodel: {lora: {rank: 4}}\n")
    overrides = ["grpo.generation_kwargs.stop=[B]", "grpo.chat_template_kwargs.thinking=false", "model.lora.alpha=9"]
    config = load_config(path, overrides)
    assert config.grpo.trl["generation_kwargs"] == {"skip_special_tokens": False, "stop": ["B"]}
    assert config.chat_template_kwargs == {"thinking": False}
    assert config.model.lora is not None and (config.model.lora.rank, config.model.lora.alpha) == (4, 9)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.generation_kwargs.stp=[B]", "grpo.generation_kwargs.stp is not supported; supported are "),
        ("model.lora.rnk=8", "unknown key model.lora.rnk; did you mean model.lora.rank?"),
        ("run.name.x=8", "run.name='n' must be a mapping, if an entry of it is set"),
        ("run.nmae.x=8", "unknown key run.nmae; did you mean run.name?"),
        ("grpo.qqq=1", "unknown key grpo.qqq; see grpo-ray train --help"),
        ("run..x=8", "'run..x=8' is not an override; write section.field=value, as in grpo.max_steps=100"),
    ],
)
def test_load_config_wrong_override_of_entry_raises(override: str, message: str) -> None:
    assert config_error("run.name=n", override).startswith(message)


# Repeated keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "grpo: {max_steps: 3}\nrun: {name: a}\ngrpo:\n  learning_rate: 1e-5\n",
            "line 3: repeats the key 'grpo' of line 1; merge them, or remove one",
        ),
        ("data:\n  limit: 3\n\n  limit: 3\n", "line 4: repeats the key 'limit' of line 2;"),
        ("data:\n  limit: 3\n  'limit': 4\n", "line 3: repeats the key 'limit' of line 2;"),
        ("data:\n  columns: {prompt: a,\n            prompt: b}\n", "line 3: repeats the key 'prompt' of line 2;"),
        ("rewards:\n  settings:\n    f: {a: 1}\n    f: {b: 2}\n", "line 4: repeats the key 'f' of line 3;"),
    ],
)
def test_load_repeated_key_raises_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert config_error(path=path).startswith(f"{path}, {message}")


def test_override_repeated_key_raises() -> None:
    message = config_error("data.columns={prompt: a, prompt: b}")
    assert message.startswith("the value '{prompt: a, prompt: b}' repeats the key 'prompt' of line 1;")


def test_load_merged_key_may_be_set_again(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data:\n  columns: &columns {prompt: question, solution: answer}\n"
        "rewards:\n  functions: ['a:b']\n  settings: {'a:b': {<<: *columns, prompt: other}}\n"
    )
    assert load_config(path).rewards.settings == {"a:b": {"prompt": "other", "solution": "answer"}}
