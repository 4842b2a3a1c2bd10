"""Memory of driver, coordinator and worker over many steps; `tests/benchmarks/bench_long_run.py` measures 10^5."""

import gc
import json
import tracemalloc
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState

from grpo_ray.config.loader import load_config
from grpo_ray.driver.summary import HeldoutSummary, summarize_run
from grpo_ray.observers.feed import RunFeed
from grpo_ray.observers.follower import RunFiles, RunFollower
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.storage.jsonl import HISTORY_ROWS, read_metrics, save_metrics_history
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.coordinator import RunCoordinator
from grpo_ray.text import redaction
from grpo_ray.training.report_callback import LOG_HISTORY_ROWS, ReportCallback, ReportInputs, ReportTarget


class LongRun:
    """Steps of a run as far as they leave state in driver, coordinator and worker, without Ray between them."""

    def __init__(self, folder: RunFolder) -> None:
        self.config = load_config(None, ["grpo.max_steps=1000000"])
        self.folder = folder
        self.coordinator = RunCoordinator()
        self.files = RunFiles(folder, print)
        self.follower = RunFollower(None, RunFeed([self.files, ProgressLine(10**6)]), 10**6)
        inputs = ReportInputs(
            settle=lambda folder: lambda: None,
            measure_heldout=dict,
            heldout_conditions={},
        )
        self.report = ReportCallback(self.config, ReportTarget(folder=folder, coordinator=None), inputs)
        self.state = TrainerState()
        self.coordinator.record_event("began", rows=[], workers=1, step=0, checkpoint=None)

    def take_steps(self, count: int) -> None:
        for _ in range(count):
            self.state.global_step += 1
            logs = {f"metric_{number}": self.state.global_step / 7 for number in range(20)}
            self.state.log_history.append(logs)
            saving = TrainerControl(should_save=True)  # `on_save` reports the row
            self.report.on_log(None, self.state, saving, logs)
            self.coordinator.record_metrics(self.report._row(self.state, {"reward/mean": 0.5, **logs}))
            _, entries = self.coordinator.read(self.follower._entries_read)
            self.follower._entries_read += len(entries)
            for entry in entries:
                self.follower._handle(entry)


def traced_bytes() -> int:
    """Return the memory in use, without the cache of texts without secrets, which has a fixed number of entries."""
    redaction._redact_short.cache_clear()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.long
def test_long_run_memory_and_checkpoints_stay_flat(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.check_writable()
    run = LongRun(folder)
    run.take_steps(100)
    tracemalloc.start()
    run.take_steps(HISTORY_ROWS)  # the history is full, and all of its rows are traced
    before = traced_bytes()
    run.take_steps(800)
    after = traced_bytes()
    tracemalloc.stop()
    run.take_steps(1)
    # A row takes about 2.5 kB: 800 rows held anywhere would be 2 MB.
    assert after - before < 200_000
    assert len(run.report.target.history) == HISTORY_ROWS
    assert len(run.state.log_history) == LOG_HISTORY_ROWS
    assert len(run.coordinator._entries) <= 1
    assert not run.files.metrics._pending and not run.files.events._pending
    save_metrics_history(tmp_path, run.report.target.history)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == HISTORY_ROWS
    assert len(json.dumps(run.state.log_history)) < 500_000
    steps = [row["step"] for row in read_metrics(folder)]
    assert steps == list(range(1, HISTORY_ROWS + 902))
    summary = summarize_run(run.config, folder, {"heldout": HeldoutSummary(problems=1, before={}, after={})}, 1.0)
    assert (summary.steps, summary.reward_first, summary.reward_last) == (HISTORY_ROWS + 901, 0.5, 0.5)
