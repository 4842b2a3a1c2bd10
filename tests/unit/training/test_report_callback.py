"""Callbacks: the row of a report, and the watchdog's heartbeats."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.metrics import summarize_sets
from grpo_ray.resilience.elastic import PreemptionNotice
from grpo_ray.storage.checkpoint_upload import CheckpointUploader
from grpo_ray.storage.records.heldout_files import read_measurements
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.training.report_callback import (
    EndSignals,
    ReportCallback,
    ReportInputs,
    ReportTarget,
    WatchdogCallback,
)


@pytest.mark.parametrize(("overrides", "epochs"), [([], 1), (["grpo.epochs=2"], 2), (["grpo.num_iterations=2"], 2)])
def test_report_row_speed_counts_all_steps_since_the_last_report(overrides: list[str], epochs: int) -> None:
    """Completions count once, although the learner reads them in each epoch."""
    config = load_config(None, ["grpo.prompts_per_step=4", "grpo.num_generations=2", *overrides])
    target = ReportTarget(folder=None, coordinator=None)  # type: ignore[arg-type]
    inputs = ReportInputs(
        settle=lambda folder: lambda: None,
        measure_heldout=dict,
        heldout_conditions={},
    )
    report = ReportCallback(config, target, inputs)
    report._reported_step = 2
    row = report._row(TrainerState(global_step=5), {"reward/mean": 0.5})
    assert row["step/completions_per_second"] == pytest.approx(3 * 8 / epochs / row["step/seconds"])
    assert (row["step"], row["reward/mean"]) == (5, 0.5) and list(target.history) == [row]


@pytest.mark.parametrize("overrides", [["grpo.steps_per_generation=2", "grpo.epochs=2"], ["grpo.num_iterations=4"]])
@pytest.mark.parametrize("preempted", [False, True])
def test_callback_stop_in_the_middle_of_a_batch_waits_for_its_end(overrides: list[str], preempted: bool) -> None:
    config = load_config(None, [*overrides, "grpo.save_steps=8"])
    inputs = ReportInputs(settle=lambda folder: lambda: None, measure_heldout=dict, heldout_conditions={})
    notice = PreemptionNotice() if preempted else None
    signals = EndSignals(preemption=notice, stop_requested=lambda: not preempted)
    if notice is not None:
        notice.announced = True
    report = ReportCallback(config, ReportTarget(folder=None, coordinator=None), inputs, signals)  # type: ignore[arg-type]
    for step in range(5, 9):
        control = TrainerControl()
        report.on_step_end(None, TrainerState(global_step=step), control)
        assert control.should_save == control.should_log == (step == 8)
        assert control.should_training_stop == (step == 8 and not preempted)


@pytest.mark.parametrize(("pause_at", "saved"), [(None, []), (6, [6]), (8, [])])
def test_callback_pauses_after_exactly_its_step(pause_at: int | None, saved: list[int]) -> None:
    """At `grpo.max_steps=8` transformers saves and ends by itself, so the callback of a pause there is as without."""
    overrides = ["grpo.max_steps=8", "grpo.save_steps=8", *([] if pause_at is None else [f"run.pause_at={pause_at}"])]
    config = load_config(None, overrides)
    inputs = ReportInputs(settle=lambda folder: lambda: None, measure_heldout=dict, heldout_conditions={})
    report = ReportCallback(config, ReportTarget(folder=None, coordinator=None), inputs)  # type: ignore[arg-type]
    ends = []
    for step in range(1, 8):
        control = TrainerControl()
        report.on_step_end(None, TrainerState(global_step=step), control)
        assert control.should_save == control.should_log == control.should_training_stop
        ends += [step] if control.should_training_stop else []
    # A launch that finds itself beyond the step of a pause would end after its first step; the driver starts none.
    assert ends == (saved and [6, 7])
    assert not report._ends_early  # a pause is measured, unlike a stop


@pytest.mark.parametrize(("saves", "kind"), [(True, "a checkpoint"), (False, "drawing problems")])
def test_callback_step_end_names_the_next_phase(saves: bool, kind: str) -> None:
    beats: list[tuple[str, int]] = []

    class FakeWatchdog:
        def heartbeat(self, kind: str, step: int) -> None:
            beats.append((kind, step))

    callback = WatchdogCallback(FakeWatchdog())  # type: ignore[arg-type]
    callback.on_step_end(None, TrainerState(global_step=3), TrainerControl(should_save=saves))
    assert beats == [(kind, 3)]


def test_on_save_held_out_records_are_written_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, problem = RunFolder(str(tmp_path), "run"), Problem(id="a" * 16, prompt=[], solution="$1$")
    row = {"id": problem.id, "scores": [1.0], "answers": ["1"], "truncated": [False], "seconds": 1.0}
    results = summarize_sets([row | {"lengths": [2], "texts": ["1"]}], {"heldout": [problem]}, 1)
    order: list[str] = []
    uploads: list[CheckpointUploader] = []

    class Report(ReportCallback):
        def _report_checkpoint(self, local: Path, row: dict[str, Any], uploader: CheckpointUploader) -> None:
            uploads.append(uploader)

    inputs = ReportInputs(
        settle=lambda folder: lambda: order.append("rollouts"),
        measure_heldout=lambda: results,
        heldout_conditions={"heldout": {"count": 1}},
    )
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr("ray.train.get_context", lambda: context)
    report = Report(load_config(None, ["run.measure=inline"]), ReportTarget(folder=folder, coordinator=None), inputs)
    arguments = SimpleNamespace(output_dir=str(tmp_path / "scratch"), max_steps=9)
    report.on_save(arguments, TrainerState(global_step=5), TrainerControl())
    assert read_measurements(folder, "heldout") == [] and not order
    uploads[0].before_commit()
    (measured,) = read_measurements(folder, "heldout")
    assert (measured.file.step, measured.policy, order) == (5, "checkpoint-000005", ["rollouts"])
