"""Tests of a run's forecast; the figures are worked by hand from the rows of its steps."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.loader import from_mapping
from grpo_ray.config.schema import Config
from grpo_ray.driver.forecast import Forecast, forecast_config, smallest_gain, summarize_trial
from grpo_ray.errors import ConfigError
from grpo_ray.telemetry.measures import Measure


def run_of(**settings: Any) -> Config:
    grpo = {"prompts_per_step": 8, "max_steps": 100, "save_steps": 30} | settings.pop("grpo", {})
    return from_mapping({"grpo": grpo, **settings})


def row(seconds: float, equal: float, **others: float) -> dict[str, Any]:
    metrics = {"step/seconds": seconds, "group/equal_share": equal, "reward/mean": equal}
    return metrics | {"completion/length_mean": 10.0, "completion/truncated_share": 0.25} | others


def summarize(config: Config, rows: Sequence[dict[str, Any]], **others: Any) -> Forecast:
    given: dict[str, Any] = {"baseline": {}, "startup_seconds": 20.0, "gpus": 0, "folder": "folder"}
    return summarize_trial(config, rows, **given | others)


SAVED = {"phase/measure": 3.0, "phase/checkpoint": 2.0}
ROWS = [row(9.0, 0.5), row(2.0, 0.25), row(3.0, 0.75), row(7.0, 0.5, **SAVED)]


def test_forecast_of_hand_written_steps() -> None:
    found = summarize(run_of(), ROWS, baseline={"heldout": Measure(0.5, 0.4, 0.6)})
    assert (found.steps, found.groups) == (4, 32)
    assert found.signal.value == 0.5 and 0.33 < found.signal.low < 0.35  # 16 of 32, Wilson
    assert (found.reward, found.length, found.truncated_share) == (0.5, 10.0, 0.25)
    # The first step is slower: median of 2, 3 and 7 - 5.
    assert (found.step_seconds, found.saving_seconds) == (2.0, 5.0)
    # Checkpoints at 30, 60, 90 and 100.
    assert found.hours * 3600 == pytest.approx(20 + 100 * 2 + 4 * 5)
    assert (found.gpu_hours, found.cost) == (0.0, None)
    assert found.smallest_gain == {"heldout": pytest.approx(0.1 * math.sqrt(2))}


def test_forecast_counts_all_gpus() -> None:
    found = summarize(run_of(), ROWS, gpus=3, price=2.5)
    assert found.gpu_hours == pytest.approx(3 * 240 / 3600) and found.cost == pytest.approx(2.5 * 3 * 240 / 3600)


def test_forecast_steps_on_one_batch_are_averaged() -> None:
    # Only the first step on a batch generates, and has metrics of completions.
    config = run_of(grpo={"steps_per_generation": 2, "save_steps": 50})
    rows = [row(60.0, 0.25), {"step/seconds": 4.0}, row(50.0, 0.75), {"step/seconds": 5.0, "phase/checkpoint": 1.0}]
    found = summarize(config, rows)
    assert found.groups == 32 and found.signal.value == 0.5  # 16 groups a batch: 12 and 4 of them
    assert found.step_seconds == (50 + 4) / 2 and found.hours * 3600 == pytest.approx(20 + 100 * 27 + 2 * 1)


def test_forecast_counts_the_groups_of_all_rounds() -> None:
    rows = [row(1.0, 0.5, **{"group/rounds": 2.0}), row(1.0, 0.0, **{"group/rounds": 1.0})]
    found = summarize(run_of(grpo={"dynamic_sampling": 3}), rows)
    assert found.groups == 24 and found.signal.value == 16 / 24


def test_forecast_without_rewards_or_intervals_is_json() -> None:
    rows = [{name: value for name, value in each.items() if name != "reward/mean"} for each in ROWS]
    found = summarize(run_of(), rows, baseline={"heldout": Measure(1.0)})
    assert math.isnan(found.reward) and found.smallest_gain == {}
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["reward"] is None


def test_forecast_without_completions_is_refused() -> None:
    with pytest.raises(ConfigError, match="no metrics of completions"):
        summarize(run_of(), [{"step/seconds": 1.0}])


def test_trial_has_whole_batches_and_learns_nothing(tmp_path: Path) -> None:
    run = {"name": "r", "storage_path": str(tmp_path), "trackers": ["wandb"], "notify": "http://127.0.0.1/x"}
    config = run_of(run=run, grpo={"steps_per_generation": 3, "max_steps": 90, "learning_rate": 1e-5})
    trial = forecast_config(config, 4)
    assert (trial.grpo.max_steps, trial.grpo.save_steps, trial.grpo.learning_rate) == (6, 6, 0.0)
    assert forecast_config(run_of(run=run, grpo={"epochs": 5, "save_steps": 50}), 4).grpo.max_steps == 10
    assert trial.run.name == "r-forecast-1" and trial.run.trackers == () and trial.run.notify is None
    (tmp_path / "r-forecast-1").mkdir()
    assert forecast_config(config, 4).run.name == "r-forecast-2"


@pytest.mark.parametrize(
    "grpo",
    [
        {"lr_scheduler_type": "polynomial"},  # cannot end below a rate of 0
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}},  # divides by it
        {"epochs": 2, "save_steps": 50, "logging_steps": 2},
    ],
)
def test_trial_of_any_schedule_is_a_config(tmp_path: Path, grpo: dict[str, Any]) -> None:
    best = {"best_metric": "reward/mean"} if "epochs" in grpo else {}
    trial = forecast_config(run_of(run={"name": "r", "storage_path": str(tmp_path)} | best, grpo=grpo), 4)
    assert dict(trial.grpo.trl) == {"lr_scheduler_type": "constant"} and trial.run.best_metric == "heldout/accuracy"


def test_smallest_gain_of_an_unmeasured_set_is_unknown() -> None:
    assert math.isnan(smallest_gain(Measure(math.nan)))
