"""Tests of the trials of a sweep file: grids, lists, draws, and the config of each."""

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.sweep_file import DrawConfig, RungsConfig, SweepConfig, load_sweep
from grpo_ray.errors import ConfigError
from grpo_ray.sweep.trials import SweepTrial, TrialConfigs, draw_values, list_trials

ROOT = Path(__file__).parents[3]


def sweep(**fields: Any) -> SweepConfig:
    from grpo_ray.config.fields import type_adapter

    found: SweepConfig = type_adapter(SweepConfig).validate_python({"name": "rates", **fields})
    return found


def test_grid_has_every_combination_in_order() -> None:
    trials = list_trials(sweep(vary={"grpo.learning_rate": [1e-4, 3e-4], "grpo.beta": [0.0, 0.04]}))
    assert [each.name for each in trials] == ["trial-01", "trial-02", "trial-03", "trial-04"]
    assert [tuple(each.overrides.values()) for each in trials] == [(1e-4, 0.0), (1e-4, 0.04), (3e-4, 0.0), (3e-4, 0.04)]
    assert trials[1].text == "learning_rate=0.0001 beta=0.04"


def test_listed_trials_have_their_names() -> None:
    trials = list_trials(sweep(trials=[{"name": "fast", "grpo.learning_rate": 1e-3}, {"run.seed": 3}]))
    assert trials == [
        SweepTrial(name="fast", overrides={"grpo.learning_rate": 1e-3}),
        SweepTrial(name="trial-02", overrides={"run.seed": 3}),
    ]
    with pytest.raises(ConfigError, match="two trials are named fast"):
        list_trials(sweep(trials=[{"name": "fast"}, {"name": "fast"}]))


def test_value_that_the_record_would_not_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^trial-02: run\.project has a date, or a key that is no text; put it in"):
        list_trials(sweep(vary={"run.project": ["2026", datetime.date(2026, 1, 31)]}))


DRAW = {
    "seed": 5,
    "space": {
        "grpo.learning_rate": {"log_uniform": [1e-5, 1e-3]},
        "grpo.beta": {"uniform": [0, 0.1]},
        "run.seed": {"int": [1, 2]},
        "grpo.warmup_steps": {"log_int": [1, 100]},
        "grpo.loss_type": {"choice": ["grpo", "dapo"]},
    },
}


def test_more_draws_keep_the_first_ones() -> None:
    few, many = (draw_values(sweep(draw={"n": n, **DRAW}).draw) for n in (3, 200))  # type: ignore[arg-type]
    assert many[:3] == few
    assert draw_values(sweep(draw={"n": 3, **DRAW, "seed": 6}).draw) != few  # type: ignore[arg-type]
    rates = sorted(each["grpo.learning_rate"] for each in many)
    assert 1e-5 <= rates[0] < 2e-5 and 5e-4 < rates[-1] <= 1e-3
    assert 5e-5 < rates[100] < 2e-4  # the median of a logarithmic scale is 1e-4
    assert {each["run.seed"] for each in many} == {1, 2}  # both bounds
    assert {each["grpo.loss_type"] for each in many} == {"grpo", "dapo"}
    assert all(isinstance(each["grpo.warmup_steps"], int) and 1 <= each["grpo.warmup_steps"] <= 100 for each in many)
    assert all(type(each["grpo.beta"]) is float for each in many)


def test_config_of_a_trial_is_the_base_with_its_overrides(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(f"run: {{name: mine, storage_path: {tmp_path}}}\ngrpo: {{max_steps: 8, save_steps: 4}}\n")
    configs = TrialConfigs(str(base), ["grpo.max_steps=6"], "rates")
    base.write_text("changed: {}")  # the file is read once
    trial = SweepTrial(name="trial-01", overrides={"grpo.learning_rate": 1e-5, "rewards.functions": ["correctness"]})
    config = configs.config_of(trial)
    assert (config.run.storage_path, config.run.name, config.run.group) == (f"{tmp_path}/rates", "trial-01", "rates")
    assert (config.grpo.max_steps, config.grpo.save_steps) == (6, 4)
    assert config.grpo.learning_rate == 1e-5
    assert configs.folder == (str(tmp_path), "rates")


def test_metric_of_the_rungs_ranks_the_checkpoints_of_every_trial() -> None:
    configs = TrialConfigs(None, [], "rates", "reward/mean")
    assert configs.config_of(SweepTrial(name="a", overrides={})).ranking_metric == "reward/mean"
    with pytest.raises(ConfigError, match=r"run\.best_metric=loss must be one of"):
        TrialConfigs(None, [], "rates", "loss")


def test_example_has_four_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = load_sweep("jobs/sweeps/arithmetic.yaml")
    assert sweep.name == "arithmetic-rates"  # not the folder of the base config's run
    configs = TrialConfigs(sweep.base, [], sweep.name)
    found = [configs.config_of(trial) for trial in list_trials(sweep)]
    assert [config.grpo.learning_rate for config in found] == [1e-4, 3e-4, 1e-3, 3e-3]
    assert sweep.rungs is not None and sweep.rungs.steps[-1] < found[0].grpo.max_steps


def test_page_describes_every_key() -> None:
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    names = [field.name for field in dataclasses.fields(SweepConfig)]
    assert [name for name in names if f"`{name}" not in rows] == []
    for key, each in (("draw", DrawConfig), ("rungs", RungsConfig)):
        assert f"`{key}: {{{', '.join(field.name for field in dataclasses.fields(each))}}}`" in rows


def test_mistake_of_a_trial_names_it() -> None:
    configs = TrialConfigs(None, [], "rates")
    with pytest.raises(ConfigError, match=r"^trial-02: grpo\.learning_rate=-1 must be "):
        configs.config_of(SweepTrial(name="trial-02", overrides={"grpo.learning_rate": -1}))
    with pytest.raises(ConfigError, match=r"^trial-02-clone-1: trials cannot vary run\.name"):
        configs.config_of(SweepTrial(name="trial-02-clone-1", overrides={"run.name": "x"}))
    with pytest.raises(ConfigError, match=r"^x: trials cannot vary run\.resume; a trial always continues from its lat"):
        configs.config_of(SweepTrial(name="x", overrides={"run.resume": "never"}))


@pytest.mark.parametrize(
    ("override", "metric", "reason"),
    [
        ("run.name=mine", None, "it is set by the key `name` of an entry of `trials`, and that of the sweep by `name`"),
        ("run.resume=never", None, "a trial always continues from its latest checkpoint"),
        ("run.pause_at=50", None, "it is set by `rungs` or `turns`"),
        ("run.group=mine", None, "it is set by `name`, the sweep's"),
        ("run.best_metric=reward/mean", "heldout/low", "it is set by `rungs.metric` or the base config"),
    ],
)
def test_override_without_effect_is_refused(override: str, metric: str | None, reason: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError) as error:
        TrialConfigs(None, ["grpo.max_steps=8", override], "rates", metric)
    assert str(error.value).startswith(f"{key} has no effect on the command line of a sweep; {reason}")


def test_metric_may_be_set_on_the_command_line_without_one_of_the_rungs() -> None:
    assert TrialConfigs(None, ["run.best_metric=reward/mean"], "rates").base.ranking_metric == "reward/mean"


@pytest.mark.parametrize("text", ["😀 #1", "é\u2028\x7f", 'a "quoted" \\ud83d', "plain"])
def test_text_of_an_override_is_taken_as_it_is(text: str) -> None:
    configs = TrialConfigs(None, [], "rates")
    config = configs.config_of(SweepTrial(name="a", overrides={"data.system_prompt": text}))
    assert config.data.system_prompt == text


def test_query_of_a_storage_uri_stays_at_its_end() -> None:
    configs = TrialConfigs(None, ["run.storage_path=s3://bucket/runs?endpoint_override=localhost:9000"], "rates")
    config = configs.config_of(SweepTrial(name="a", overrides={}))
    assert config.run.storage_path == "s3://bucket/runs/rates?endpoint_override=localhost:9000"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("requests", "a trial cannot be named requests, as the sweep's own folder has it"),
        ("driver", "a trial cannot be named driver"),
        (None, "trials: the name of entry 2 is null; set one, or leave `name` out"),
    ],
)
def test_name_that_a_trial_cannot_have_is_refused(name: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        list_trials(sweep(trials=[{"run.seed": 1}, {"name": name, "run.seed": 2}]))
    assert str(error.value).startswith(message)
