"""Callbacks: the row of a report, and the watchdog's heartbeats."""

import pytest
from transformers import TrainerControl, TrainerState

from grpo_ray.config.loader import load_config
from grpo_ray.training.report_callback import ReportCallback, ReportInputs, ReportTarget, WatchdogCallback


def test_report_row_speed_counts_all_steps_since_the_last_report() -> None:
    config = load_config(None, ["grpo.prompts_per_step=4", "grpo.num_generations=2"])
    target = ReportTarget(folder=None, coordinator=None)  # type: ignore[arg-type]
    inputs = ReportInputs(
        settle=lambda folder: lambda: None,
        measure_heldout=dict,
        heldout_conditions={},
    )
    report = ReportCallback(config, target, inputs)
    report._reported_step = 2
    row = report._row(TrainerState(global_step=5), {"reward/mean": 0.5})
    assert row["step/completions_per_second"] == pytest.approx(3 * 8 / row["step/seconds"])
    assert (row["step"], row["reward/mean"]) == (5, 0.5) and list(target.history) == [row]


@pytest.mark.parametrize(("saves", "kind"), [(True, "a checkpoint"), (False, "drawing problems")])
def test_callback_step_end_names_the_next_phase(saves: bool, kind: str) -> None:
    beats: list[tuple[str, int]] = []

    class FakeWatchdog:
        def heartbeat(self, kind: str, step: int) -> None:
            beats.append((kind, step))

    callback = WatchdogCallback(FakeWatchdog())  # type: ignore[arg-type]
    callback.on_step_end(None, TrainerState(global_step=3), TrainerControl(should_save=saves))  # type: ignore[arg-type]
    assert beats == [(kind, 3)]
