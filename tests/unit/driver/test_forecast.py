"""Tests of a run's forecast; the figures are worked by hand from the rows of its steps."""

import math
from typing import Any

import pytest

from grpo_ray.config.loader import from_mapping
from grpo_ray.config.schema import Config
from grpo_ray.driver.forecast import forecast_config, smallest_gain, summarize_trial
from grpo_ray.telemetry.measures import Measure


def run_of(**settings: Any) -> Config:
    grpo = {"prompts_per_step": 8, "max_steps": 100, "save_steps": 30} | settings.pop("grpo", {})
    return from_mapping({"grpo": grpo, **settings})


def row(seconds: float, equal: float, **phases: float) -> dict[str, Any]:
    metrics = {"step/seconds": seconds, "group/equal_share": equal, "reward/mean": equal}
    return metrics | {"completion/length_mean": 10.0, "completion/truncated_share": 0.25} | phases


ROWS = [row(9.0, 0.5), row(2.0, 0.25), row(3.0, 0.75), row(7.0, 0.5, **{"phase/measure": 3.0, "phase/checkpoint": 2.0})]


def test_forecast_of_hand_written_steps() -> None:
    baseline = {"heldout": Measure(0.5, 0.4, 0.6)}
    found = summarize_trial(run_of(), ROWS, baseline, 20.0, "folder")
    assert (found.steps, found.groups) == (4, 32)
    assert found.signal.value == 0.5 and 0.33 < found.signal.low < 0.35  # 16 of 32, Wilson
    assert (found.reward, found.length, found.truncated_share) == (0.5, 10.0, 0.25)
    # The first step is slower: median of 2, 3 and 7 - 5.
    assert (found.step_seconds, found.saving_seconds) == (2.0, 5.0)
    # Checkpoints at 30, 60, 90 and 100.
    assert found.hours * 3600 == pytest.approx(20 + 100 * 2 + 4 * 5)
    assert (found.gpu_hours, found.cost) == (0.0, None)
    assert found.smallest_gain == {"heldout": pytest.approx(0.1 * math.sqrt(2))}


def test_forecast_counts_the_gpus_of_all_workers() -> None:
    config = run_of(cluster={"num_workers": [2, 4], "use_gpu": True})
    found = summarize_trial(config, ROWS, {}, 20.0, "folder", price=2.5)
    assert found.gpu_hours == pytest.approx(4 * 240 / 3600) and found.cost == pytest.approx(2.5 * 4 * 240 / 3600)


def test_forecast_steps_on_one_batch_count_its_groups_once() -> None:
    config = run_of(grpo={"steps_per_generation": 2, "epochs": 1, "save_steps": 50})
    rows = [row(4.0, 0.25), {"step/seconds": 1.0}, row(4.0, 0.75), {"step/seconds": 2.0, "phase/checkpoint": 1.0}]
    found = summarize_trial(config, rows, {}, 0.0, "folder")
    assert found.groups == 32 and found.signal.value == 0.5  # 16 groups a batch: 12 and 4 of them
    assert found.step_seconds == 1.0 and found.hours * 3600 == pytest.approx(100 * 1.0 + 2 * 1.0)


def test_trial_has_whole_batches_and_learns_nothing(tmp_path: Any) -> None:
    run = {"name": "r", "storage_path": str(tmp_path), "trackers": ["wandb"], "notify": "http://127.0.0.1/x"}
    config = run_of(run=run, grpo={"steps_per_generation": 3, "max_steps": 90, "learning_rate": 1e-5})
    trial = forecast_config(config, 4)
    assert (trial.grpo.max_steps, trial.grpo.save_steps, trial.grpo.learning_rate) == (6, 6, 0.0)
    assert trial.run.name == "r-forecast-1" and trial.run.trackers == () and trial.run.notify is None
    (tmp_path / "r-forecast-1").mkdir()
    assert forecast_config(config, 4).run.name == "r-forecast-2"


def test_smallest_gain_of_an_unmeasured_set_is_unknown() -> None:
    assert math.isnan(smallest_gain(Measure(math.nan)))
