"""Tests of overlong prompts: the limit, what is left out, the file of the run folder, and what makes it stale."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.data.files import file_shards
from grpo_ray.data.stream import DatasetIndex, Split, build_index
from grpo_ray.driver.preflight import overlong
from grpo_ray.driver.preflight.overlong import (
    OVERLONG_FILE,
    PolicyTokenizer,
    PromptLimit,
    engine_context,
    evaluated_policy,
    leave_out_overlong,
    prompt_limit,
)
from grpo_ray.errors import ConfigError, DataError
from grpo_ray.models.warm_up import build_tokenizer
from grpo_ray.storage.run_folder import RunFolder

LENGTHS = (3, 9, 5, 12, 7)
"""Digits of each prompt; the template adds three tokens."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the config and tokenizer of a policy with a context of 100 tokens."""
    folder = tmp_path_factory.mktemp("policy")
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 100}))
    return folder


def write_problems(path: Path) -> str:
    rows = [{"prompt": "7" * length, "solution": f"{length}"} for length in LENGTHS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    return build_index(Split("some", file_shards(write_problems(tmp_path / "some.jsonl"))))


def config_of(policy: Path, *overrides: str) -> Config:
    return load_config(None, [f"model.path={policy}", "grpo.max_completion_length=20", *overrides])


def solutions(index: DatasetIndex) -> list[str]:
    return [problem.solution for problem in index.split.read()]


def test_prompt_limit_is_the_context_without_a_completion() -> None:
    config = load_config(None, ["grpo.max_completion_length=20"])
    limit = prompt_limit(config, 100)
    assert limit == PromptLimit(80, "the engine's context of 100 minus 20 for the completion")
    config = load_config(None, ["data.max_prompt_length=7"])
    assert prompt_limit(config, 100) == PromptLimit(7, "data.max_prompt_length")


def test_prompt_limit_completion_that_fills_the_context_raises() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.max_completion_length=100 leaves no room for a prompt"):
        prompt_limit(load_config(None, ["grpo.max_completion_length=100"]), 100)


def test_prompt_limit_that_fills_the_context_raises() -> None:
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length=100 must be below the engine's context of 100"):
        prompt_limit(load_config(None, ["data.max_prompt_length=100"]), 100)


def test_engine_context_comes_from_settings_then_from_the_policy(policy: Path) -> None:
    def context(*overrides: str) -> int:
        config = config_of(policy, *overrides)
        return engine_context(config, PolicyTokenizer(str(policy), False))

    assert context() == 100
    assert context("engine.max_model_len=50") == 50
    assert engine_context(load_config(), PolicyTokenizer("tiny-arithmetic", False)) == 8192


def test_leave_out_overlong_drops_counts_and_names(policy: Path, index: DatasetIndex, tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    filtered = leave_out_overlong(config_of(policy, "data.max_prompt_length=11"), "training", index, folder)
    assert solutions(filtered.index) == ["3", "5", "7"]  # 9 + 3 and 12 + 3 tokens are more than 11
    assert filtered.index.fingerprint.count == len(filtered.index.ids) == 3
    text = filtered.notice
    assert text.startswith("leaving out 2 of 5 training problems, whose prompts have more than 11 tokens")
    assert "(12)" in text and "(15)" in text and OVERLONG_FILE in text
    kept = json.loads(folder.read_text(OVERLONG_FILE))["training"]
    assert kept["max_prompt_length"] == 11 and sorted(row["tokens"] for row in kept["problems"]) == [12, 15]


def test_leave_out_overlong_none_gives_the_same_index(policy: Path, index: DatasetIndex, tmp_path: Path) -> None:
    filtered = leave_out_overlong(config_of(policy), "training", index, RunFolder(str(tmp_path), "run"))
    assert filtered.index is index and filtered.notice == ""


def test_leave_out_overlong_error_refuses_with_count_and_ids(policy: Path, index: DatasetIndex) -> None:
    config = config_of(policy, "data.max_prompt_length=11", "data.overlong_prompts=error")
    with pytest.raises(
        DataError, match=r"some: 2 of 5 training problems, .* \(data\.max_prompt_length\): [0-9a-f]{16}"
    ):
        leave_out_overlong(config, "training", index, None)


def test_leave_out_overlong_all_raises(policy: Path, index: DatasetIndex) -> None:
    with pytest.raises(DataError, match="all prompts are too long"):
        leave_out_overlong(config_of(policy, "data.max_prompt_length=1"), "training", index, None)


def test_leave_out_overlong_limit_counts_them(policy: Path, tmp_path: Path) -> None:
    """Another maximum length never brings in a problem beyond the limit."""
    split = Split("some", file_shards(write_problems(tmp_path / "some.jsonl")), limit=4)
    filtered = leave_out_overlong(config_of(policy, "data.max_prompt_length=11"), "training", build_index(split), None)
    assert solutions(filtered.index) == ["3", "5"]


def test_leave_out_overlong_measures_again_only_what_changed(
    policy: Path, index: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    map_shards = overlong.map_shards

    def count(*args: Any) -> Any:
        measured.append("once")
        return map_shards(*args)

    monkeypatch.setattr(overlong, "map_shards", count)
    folder = RunFolder(str(tmp_path), "run")

    def measures(*overrides: str, name: str = "training") -> int:
        measured.clear()
        leave_out_overlong(config_of(policy, *overrides), name, index, folder)
        return len(measured)

    assert measures() == 1 and measures() == 0
    assert measures(name="held-out") == 1 and measures() == 0 and measures(name="held-out") == 0
    assert measures("engine.max_model_len=50") == 1
    assert measures("data.max_prompt_length=30") == 0  # 50 - 20, as before
    assert measures("grpo.chat_template_kwargs={x: 1}") == 1
    assert measures("data.system_prompt=Think.") == 1
    for damaged in ('{"training"', "[1]", '{"training": 1}', '{"training": {"key": 1}}'):
        folder.write_text(damaged, OVERLONG_FILE)
        assert measures("data.system_prompt=Think.") == 1


def test_evaluated_policy_of_an_adapter_is_the_runs(policy: Path, tmp_path: Path) -> None:
    config = config_of(policy)
    assert evaluated_policy(config, str(tmp_path)) == str(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert evaluated_policy(config, str(tmp_path)) == str(policy)
