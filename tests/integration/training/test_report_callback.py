"""Reports in the training loop of transformers: which steps have one, and whether it has the step's metrics."""

from pathlib import Path
from typing import Any

import pytest
from stock_trl import ScriptedLearner, train_steps
from transformers import TrainerControl, TrainerState, TrainingArguments

from grpo_ray.config.loader import load_config
from grpo_ray.training.metric_names import rename_metrics
from grpo_ray.training.report_callback import EndSignals, ReportCallback, ReportInputs, ReportTarget


class FakeCoordinator:
    """Coordinator that keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *args: Any, **fields: Any) -> None:
        pass


class RecordedReports(ReportCallback):
    """Reports that are recorded in place of Ray Train's, which needs workers."""

    def __init__(self, stop_at: int) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.saved: list[int] = []
        inputs = ReportInputs(settle=lambda folder: lambda: None, measure_heldout=dict, heldout_conditions={})
        target = ReportTarget(folder=None, coordinator=FakeCoordinator())  # type: ignore[arg-type]
        signals = EndSignals(stop_requested=lambda: len(self.steps) == stop_at)
        self.steps: list[int] = []
        super().__init__(load_config(), target, inputs, signals)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        super().on_step_end(args, state, control, **kwargs)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if "train_runtime" not in logs:
            self.rows[state.global_step] = rename_metrics(logs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.saved.append(state.global_step)


@pytest.mark.parametrize(
    ("stop_at", "rows", "saved"),
    [
        (0, [2, 3, 4, 6, 7], [2, 4, 6, 7]),  # logging_steps=3 divides neither the steps 2 and 4 nor the last one
        (5, [2, 3, 4, 5], [2, 4, 5]),  # stopped by a signal
    ],
)
def test_every_saved_step_has_a_row_with_its_metrics(
    tmp_path: Path, one_thread: None, stop_at: int, rows: list[int], saved: list[int]
) -> None:
    reports = RecordedReports(stop_at)
    settings: dict[str, Any] = {"max_steps": 7, "logging_steps": 3, "save_strategy": "steps", "save_steps": 2}
    train_steps(ScriptedLearner, tmp_path, callbacks=[reports], **settings)
    assert (list(reports.rows), reports.saved) == (rows, saved)
    needed = {"reward/mean", "completion/truncated_share", "learner/loss", "group/equal_share"}
    assert all(needed <= row.keys() for row in reports.rows.values())
