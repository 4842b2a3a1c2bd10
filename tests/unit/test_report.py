import re
from pathlib import Path

import pytest

from grpo_ray.report import METRICS, OWN_METRICS, rename


def test_trls_names_become_ours():
    logs = {"reward": 0.5, "reward_std": 0.2, "frac_reward_zero_std": 0.25, "kl": 0.01, "grad_norm": 1.5}
    assert rename(logs) == {
        "reward/mean": 0.5,
        "reward/std": 0.2,
        "group/equal_share": 0.25,
        "policy/kl": 0.01,
        "learner/gradient_norm": 1.5,
    }


@pytest.mark.parametrize(("ours", "theirs"), [(ours, theirs) for ours, (theirs, _) in METRICS.items()])
def test_every_metric_of_the_table_is_taken_over(ours, theirs):
    assert rename({theirs: 0.75}) == {ours: 0.75}


def test_each_reward_function_has_a_mean_and_a_spread_of_its_own():
    logs = {"rewards/correctness/mean": 0.5, "rewards/correctness/std": 0.5, "rewards/my.rewards:short/mean": 0.1}
    assert rename(logs) == {
        "reward/correctness_mean": 0.5,
        "reward/correctness_std": 0.5,
        "reward/my.rewards:short_mean": 0.1,
    }


def test_the_rewards_and_the_engines_own_metrics_keep_their_names():
    logs = {"reward/unparsed_share": 0.2, "engine/logprob_gap_max": 1e-6}
    assert rename(logs) == logs


def test_what_has_no_name_of_ours_is_left_out():
    assert rename({"epoch": 0.1, "num_tokens": 500.0, "clip_ratio/low_mean": 0.0, "step_time": 1.0}) == {}


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_finite_number_is_left_out(value):
    assert rename({"reward": value, "rewards/correctness/mean": value, "kl": 0.0}) == {"policy/kl": 0.0}


def test_zero_is_a_number():
    assert rename({"reward": 0, "rewards/correctness/mean": 0.0}) == {
        "reward/mean": 0.0,
        "reward/correctness_mean": 0.0,
    }


def test_values_come_out_as_plain_floats():
    class Scalar:
        """A number of NumPy's or torch's kind."""

        def __float__(self) -> float:
            return 0.5

    (value,) = rename({"reward": Scalar()}).values()
    assert type(value) is float and value == 0.5


def test_renaming_does_not_change_the_logs():
    logs = {"reward": 0.5, "kl": None}
    rename(logs)
    assert logs == {"reward": 0.5, "kl": None}


def test_every_metric_is_explained_in_a_sentence():
    explained = {ours: text for ours, (_, text) in METRICS.items()} | OWN_METRICS
    for name, text in explained.items():
        assert text[0].isupper() and text.endswith(".") and len(text) > 15, name


def test_every_metric_is_a_noun_and_a_measure():
    for name in (*METRICS, *OWN_METRICS):
        assert name == "step" or re.fullmatch(r"[a-z]+/[a-z_]+", name), name


def test_no_two_metrics_are_the_same_thing():
    theirs = [name for name, _ in METRICS.values()]
    assert len(theirs) == len(set(theirs))
    assert not set(METRICS) & set(OWN_METRICS)


def test_the_readme_explains_every_metric():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for name, text in [*OWN_METRICS.items(), *((name, text) for name, (_, text) in METRICS.items())]:
        assert f"| `{name}` | {text} |" in readme
