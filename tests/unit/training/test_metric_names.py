"""Names of metrics: TRL's names become ours, and each metric is documented."""

import re
from pathlib import Path

import pytest
from metrics_page import PAGE, main, render

from grpo_ray.config.checks import ranking_metrics
from grpo_ray.config.reward_names import reward_name
from grpo_ray.config.schema import Config, RewardsConfig
from grpo_ray.rewards.registry import load_reward
from grpo_ray.training.metric_names import METRICS, OWN_METRICS, rename_metrics


def test_rename_metrics_trl_names_become_ours() -> None:
    logs = {"reward": 0.5, "reward_std": 0.2, "frac_reward_zero_std": 0.25, "kl": 0.01, "grad_norm": 1.5}
    assert rename_metrics(logs) == {
        "reward/mean": 0.5,
        "reward/std": 0.2,
        "group/equal_share": 0.25,
        "policy/kl": 0.01,
        "learner/gradient_norm": 1.5,
    }


@pytest.mark.parametrize(("ours", "theirs"), [(ours, theirs) for ours, (theirs, _) in METRICS.items()])
def test_rename_metrics_every_metric_of_table_is_kept(ours: str, theirs: str) -> None:
    assert rename_metrics({theirs: 0.75}) == {ours: 0.75}


def test_rename_metrics_reward_functions_keep_mean_and_std() -> None:
    logs = {"rewards/correctness/mean": 0.5, "rewards/correctness/std": 0.5, "rewards/my.rewards:short/mean": 0.1}
    assert rename_metrics(logs) == {
        "reward/correctness_mean": 0.5,
        "reward/correctness_std": 0.5,
        "reward/my.rewards:short_mean": 0.1,
    }


def test_rename_metrics_own_metrics_are_unchanged() -> None:
    logs = {"reward/unparsed_share": 0.2, "engine/logprob_gap_max": 1e-6}
    assert rename_metrics(logs) == logs


def test_rename_metrics_ages_of_tokens_are_unchanged() -> None:
    logs = {"rollout/staleness_0": 0.25, "rollout/staleness_12": 0.75, "rollout/segments_mean": 2.0}
    assert rename_metrics(logs | {"rollout/staleness_x": 1.0}) == logs


def test_rename_metrics_those_of_tools_are_unchanged() -> None:
    logs = {"rollout/multiply/calls_mean": 1.5, "rollout/multiply/failed_share": 0.0}
    assert rename_metrics(logs | {"rollout/unknown": 1.0}) == logs


def test_rename_metrics_unknown_metrics_are_dropped() -> None:
    assert rename_metrics({"epoch": 0.1, "num_tokens": 500.0, "clip_ratio/low_mean": 0.0, "step_time": 1.0}) == {}


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf")])
def test_rename_metrics_non_finite_values_are_dropped(value: float | None) -> None:
    assert rename_metrics({"reward": value, "rewards/correctness/mean": value, "kl": 0.0}) == {"policy/kl": 0.0}


def test_rename_metrics_zero_is_kept() -> None:
    assert rename_metrics({"reward": 0, "rewards/correctness/mean": 0.0}) == {
        "reward/mean": 0.0,
        "reward/correctness_mean": 0.0,
    }


def test_rename_metrics_values_become_floats() -> None:
    class Scalar:
        """Scalar as in NumPy or torch."""

        def __float__(self) -> float:
            return 0.5

    (value,) = rename_metrics({"reward": Scalar()}).values()
    assert type(value) is float and value == 0.5


def test_rename_metrics_leaves_its_argument_unchanged() -> None:
    logs = {"reward": 0.5, "kl": None}
    rename_metrics(logs)
    assert logs == {"reward": 0.5, "kl": None}


def test_metrics_descriptions_are_sentences() -> None:
    explained = {ours: text for ours, (_, text) in METRICS.items()} | OWN_METRICS
    for name, text in explained.items():
        assert text[0].isupper() and text.endswith(".") and len(text) > 15, name


def test_metrics_names_are_noun_slash_measure() -> None:
    for name in (*METRICS, *OWN_METRICS):
        assert name == "step" or re.fullmatch(r"[a-z]+/[a-z_]+", name), name


def test_metrics_names_are_unique() -> None:
    theirs = [name for name, _ in METRICS.values()]
    assert len(theirs) == len(set(theirs))
    assert not set(METRICS) & set(OWN_METRICS)


def test_ranking_metrics_are_documented() -> None:
    rewards = RewardsConfig(functions=("correctness", "my.rewards:short", "org/model"))
    for name in ranking_metrics(Config(rewards=rewards)):
        assert name in {**METRICS, **OWN_METRICS} or re.fullmatch(r"reward/(correctness|short|model)_mean", name)


@pytest.mark.parametrize("function", ["correctness", "grpo_ray.rewards.format:boxed_format"])
def test_reward_name_is_name_that_trl_logs(function: str) -> None:
    assert reward_name(function) == vars(load_reward(function))["__name__"]


def test_metrics_page_is_up_to_date(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "metrics.md")]) == 0
    assert (tmp_path / "metrics.md").read_text() == render() == PAGE.read_text()
