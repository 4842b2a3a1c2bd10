"""Tests of the metric names: TRL's names become ours, and each metric is documented."""

import re
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.training.report_callback import METRICS, OWN_METRICS, ReportCallback, WatchdogCallback, rename_metrics


def test_rename_trl_names_become_ours():
    logs = {"reward": 0.5, "reward_std": 0.2, "frac_reward_zero_std": 0.25, "kl": 0.01, "grad_norm": 1.5}
    assert rename_metrics(logs) == {
        "reward/mean": 0.5,
        "reward/std": 0.2,
        "group/equal_share": 0.25,
        "policy/kl": 0.01,
        "learner/gradient_norm": 1.5,
    }


@pytest.mark.parametrize(("ours", "theirs"), [(ours, theirs) for ours, (theirs, _) in METRICS.items()])
def test_rename_every_metric_of_table_is_kept(ours, theirs):
    assert rename_metrics({theirs: 0.75}) == {ours: 0.75}


def test_rename_reward_functions_keep_mean_and_std():
    logs = {"rewards/correctness/mean": 0.5, "rewards/correctness/std": 0.5, "rewards/my.rewards:short/mean": 0.1}
    assert rename_metrics(logs) == {
        "reward/correctness_mean": 0.5,
        "reward/correctness_std": 0.5,
        "reward/my.rewards:short_mean": 0.1,
    }


def test_rename_own_metrics_are_unchanged():
    logs = {"reward/unparsed_share": 0.2, "engine/logprob_gap_max": 1e-6}
    assert rename_metrics(logs) == logs


def test_rename_unknown_metrics_are_dropped():
    assert rename_metrics({"epoch": 0.1, "num_tokens": 500.0, "clip_ratio/low_mean": 0.0, "step_time": 1.0}) == {}


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf")])
def test_rename_non_finite_values_are_dropped(value):
    assert rename_metrics({"reward": value, "rewards/correctness/mean": value, "kl": 0.0}) == {"policy/kl": 0.0}


def test_rename_zero_is_kept():
    assert rename_metrics({"reward": 0, "rewards/correctness/mean": 0.0}) == {
        "reward/mean": 0.0,
        "reward/correctness_mean": 0.0,
    }


def test_rename_values_become_floats():
    class Scalar:
        """Scalar as in NumPy or torch."""

        def __float__(self) -> float:
            return 0.5

    (value,) = rename_metrics({"reward": Scalar()}).values()
    assert type(value) is float and value == 0.5


def test_rename_leaves_its_argument_unchanged():
    logs = {"reward": 0.5, "kl": None}
    rename_metrics(logs)
    assert logs == {"reward": 0.5, "kl": None}


def test_metrics_descriptions_are_sentences():
    explained = {ours: text for ours, (_, text) in METRICS.items()} | OWN_METRICS
    for name, text in explained.items():
        assert text[0].isupper() and text.endswith(".") and len(text) > 15, name


def test_metrics_names_are_noun_slash_measure():
    for name in (*METRICS, *OWN_METRICS):
        assert name == "step" or re.fullmatch(r"[a-z]+/[a-z_]+", name), name


def test_metrics_names_are_unique():
    theirs = [name for name, _ in METRICS.values()]
    assert len(theirs) == len(set(theirs))
    assert not set(METRICS) & set(OWN_METRICS)


def test_metrics_readme_lists_all():
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    for name, text in [*OWN_METRICS.items(), *((name, text) for name, (_, text) in METRICS.items())]:
        assert f"| `{name}` | {text} |" in readme


def test_report_row_speed_counts_all_steps_since_the_last_report() -> None:
    config = load_config(None, ["grpo.prompts_per_step=4", "grpo.num_generations=2"])
    report = ReportCallback(
        config, None, None, rows=[], serial=1, measure=lambda: None, measured_on=DatasetFingerprint(1, "0"), board=None
    )  # type: ignore[arg-type]
    report._reported_step = 2
    row = report._row(TrainerState(global_step=5), {"reward/mean": 0.5})
    assert row["step/completions_per_second"] == pytest.approx(3 * 8 / row["step/seconds"])
    assert (row["step"], row["reward/mean"]) == (5, 0.5) and report.rows == [row]


@pytest.mark.parametrize(("saves", "kind"), [(True, "a checkpoint"), (False, "drawing problems")])
def test_pulse_step_end_names_the_next_phase(saves: bool, kind: str) -> None:
    beats: list[tuple[str, int]] = []

    class Listener:
        def beat(self, kind: str, step: int) -> None:
            beats.append((kind, step))

    pulse = WatchdogCallback(Listener())  # type: ignore[arg-type]
    pulse.on_step_end(None, TrainerState(global_step=3), TrainerControl(should_save=saves))  # type: ignore[arg-type]
    assert beats == [(kind, 3)]
