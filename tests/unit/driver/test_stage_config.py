"""Tests of the configs of stages: shared sections, changes of one stage, overrides and refusals."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_ray.config.loader import load_config
from grpo_ray.driver.stage_config import Stages, has_stages, load_stages
from grpo_ray.errors import ConfigError

SHARED: dict[str, Any] = {
    "run": {"name": "math", "storage_path": "/runs", "seed": 7},
    "grpo": {"max_steps": 100, "beta": 0.1},
}
TWO = [{"name": "easy"}, {"name": "hard", "grpo": {"max_steps": 400}, "engine": {"max_model_len": 8192}}]


def load(tmp_path: Path, stages: Any, *overrides: str, shared: dict[str, Any] = SHARED) -> Stages:
    """Write a YAML with stages and load it."""
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump(shared | {"stages": stages}))
    assert has_stages(path)
    return load_stages(path, overrides)


def test_stages_share_sections_and_have_run_folders_of_their_own(tmp_path: Path) -> None:
    easy, hard = load(tmp_path, TWO)
    assert [stage.folder_name for stage in (easy, hard)] == ["01-easy", "02-hard"]
    assert easy.config.run.storage_path == hard.config.run.storage_path == "/runs/math"
    assert (easy.config.run.seed, hard.config.run.seed) == (7, 7)
    assert (easy.config.grpo.max_steps, hard.config.grpo.max_steps) == (100, 400)
    assert hard.config.grpo.trl == {"beta": 0.1}  # a section of a stage changes single fields
    assert (easy.config.engine.max_model_len, hard.config.engine.max_model_len) == (None, 8192)
    assert hard.begin_with("/runs/math/01-easy/checkpoint-000100").config.model.path.endswith("checkpoint-000100")


def test_folders_in_a_store_keep_its_query(tmp_path: Path) -> None:
    shared = {"run": {"name": "math", "storage_path": "s3://bucket/runs?region=eu"}}
    (easy,) = load(tmp_path, [{"name": "easy"}], shared=shared)
    assert easy.config.run.storage_path == "s3://bucket/runs/math?region=eu"


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["grpo.max_steps=5"], (5, 5)),
        (["stages.hard.grpo.max_steps=6"], (100, 6)),
        (["stages.hard.grpo.max_steps=6", "grpo.max_steps=5"], (5, 6)),
    ],
)
def test_overrides_apply_to_all_stages_or_to_one(tmp_path: Path, overrides: list[str], steps: tuple[int, int]) -> None:
    easy, hard = load(tmp_path, TWO, *overrides)
    assert (easy.config.grpo.max_steps, hard.config.grpo.max_steps) == steps


def test_override_of_a_stage_whose_name_has_dots(tmp_path: Path) -> None:
    both = load(tmp_path, [{"name": "a"}, {"name": "a.b"}], "stages.a.b.grpo.max_steps=3", "run.name=other")
    assert [stage.config.grpo.max_steps for stage in both] == [100, 3]
    assert both.name == "other" and both.stages[0].config.run.storage_path == "/runs/other"


def test_override_of_one_entry_of_one_stage_keeps_the_others(tmp_path: Path) -> None:
    rewards = {"functions": ["correctness", "soft_overlong"], "settings": {"soft_overlong": {"max_length": 9}}}
    override = "stages.hard.rewards.settings.soft_overlong.buffer=3"
    both = load(tmp_path, TWO, override, shared=SHARED | {"rewards": rewards})
    assert [stage.config.rewards.settings["soft_overlong"] for stage in both] == [
        {"max_length": 9},
        {"max_length": 9, "buffer": 3},
    ]


@pytest.mark.parametrize("overrides", [[], ["stages.easy.model.path=c/d"]])
def test_later_stages_are_checked_with_the_policy_of_the_first(tmp_path: Path, overrides: list[str]) -> None:
    both = load(tmp_path, [{"name": "easy", "model": {"path": "a/b"}}, {"name": "hard"}], *overrides)
    assert [stage.config.model.path for stage in both] == ["c/d" if overrides else "a/b"] * 2


def test_kind_of_a_stage_is_that_of_its_run(tmp_path: Path) -> None:
    warm, hard = load(tmp_path, [{"name": "warm", "kind": "sft", "data": {"train": "a.jsonl"}}, {"name": "hard"}])
    assert (warm.config.run.kind, hard.config.run.kind) == ("sft", "grpo")


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (["run.kind=grpo"], ("grpo", "grpo")),
        (["run.kind=grpo", "stages.warm.run.kind=sft"], ("sft", "grpo")),
        (["stages.warm.run.kind=grpo"], ("grpo", "grpo")),
        (["run.kind=sft"], ("sft", "sft")),
    ],
)
def test_overrides_win_over_the_kind_of_a_stage(tmp_path: Path, overrides: list[str], kinds: tuple[str, str]) -> None:
    warm, hard = load(tmp_path, [{"name": "warm", "kind": "sft"}, {"name": "hard"}], "data.train=a.jsonl", *overrides)
    assert (warm.config.run.kind, hard.config.run.kind) == kinds


@pytest.mark.parametrize(
    ("stages", "overrides", "message"),
    [
        ([], [], r"stages must be a list of stages, each with a `name`; got \[\]"),
        ({"easy": {}}, [], "stages must be a list"),
        (["easy"], [], r"entry 1 must be a mapping with a `name`; got 'easy'"),
        ([{"name": "a/b"}], [], r"the name of entry 1 must have letters, .*; got 'a/b'"),
        ([{"kind": "sft"}], [], "the name of entry 1 must have letters"),
        ([{"name": "a"}, {"name": "a"}], [], "the name a is used twice"),
        ([{"name": f"s{n}"} for n in range(100)], [], "at most 99 entries; got 100"),
        ([{"name": "a", "gpro": {}}], [], "stage a: unknown key gpro; did you mean grpo"),
        ([{"name": "a", "kind": "dpo"}], [], "stage a: run.kind='dpo' must be"),
        ([{"name": "a", "grpo": 3}], [], "stage a: grpo=3 must be a section with fields"),
        ([{"name": "a", "grpo": {"max_steps": 0}}], [], "stage a: grpo.max_steps=0 must be"),
        ([{"name": "a", "run": {"name": "b"}}], [], "stage a: run.name cannot be set for one stage"),
        ([{"name": "a", "run": {"storage_path": "/b"}}], [], "stage a: run.storage_path cannot be set for one stage"),
        ([{"name": "a"}, {"name": "b", "model": {"path": "c"}}], [], "stage b: model.path cannot be set for one stage"),
        (TWO, ["stages.hrad.grpo.max_steps=1"], "there is no stage hrad, but easy, hard; did you mean hard"),
        (TWO, ["stages.hard=3"], "stages.hard=3 names no setting of stage hard; write stages.hard.section.field=value"),
        (
            [{"name": "a"}, {"name": "a.b"}],
            ["stages.a.b=3"],
            "stages.a.b=3 names no setting of stage a.b; write stages.",
        ),
        (TWO, ["stages.hard.model.path=a"], "stage hard: model.path cannot be set for one stage: a later stage begins"),
        (TWO, ["run.from_checkpoint=/a"], "run.from_checkpoint has no place in a file with stages"),
        (TWO, ["gpro.max_steps=1"], "unknown key gpro; did you mean grpo"),
    ],
)
def test_wrong_stages_are_refused_in_one_line(tmp_path: Path, stages: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(tmp_path, stages, *overrides)
    assert "\n" not in str(refused.value)


def test_mistakes_of_all_stages_are_listed(tmp_path: Path) -> None:
    wrong = [{"name": name, "grpo": {"max_steps": 0}} for name in "ab"]
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, wrong)
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == ["stage a", "stage b"]


def test_stages_without_a_name_of_their_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.name must be set in a file with stages"):
        load(tmp_path, TWO, shared={})


def test_plain_run_refuses_a_file_with_stages(tmp_path: Path) -> None:
    load(tmp_path, TWO)
    with pytest.raises(ConfigError, match="has stages, which only grpo-ray train and check"):
        load_config(tmp_path / "stages.yaml")
    assert not has_stages(None)
