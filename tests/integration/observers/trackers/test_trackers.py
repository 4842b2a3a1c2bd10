"""Tests of every tracker with its real library: one run over several drivers, read back by the tracker's own reader."""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tracker_readers import (
    mlflow_run,
    mlflow_series,
    mlflow_text,
    tensorboard_events,
    tensorboard_series,
    tensorboard_texts,
    trackio_logs,
    trackio_series,
    wandb_files,
    wandb_history,
    wandb_records,
    wandb_series,
)

from grpo_ray.observers.feed import RunFeed
from grpo_ray.observers.follower import RunFiles
from grpo_ray.observers.trackers.dispatcher import TrackerDispatcher
from grpo_ray.observers.trackers.history import EventList, TrackerFile
from grpo_ray.observers.trackers.tracker import TrackedRun, flatten
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.rollout_files import write_rollouts
from grpo_ray.storage.run_folder import RunFolder

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
LONG = 600.0
"""Time limit for a tracker on a busy machine, seconds."""
HOSTILE = "<script>alert(1)</script> | **bold** \u202e\n```\n# title"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "demo")


class Driver:
    """One driver of a run of 6 steps with checkpoints at 2, 4 and 6: its files and its trackers."""

    def __init__(self, folder: RunFolder, trackers: Sequence[str] = TRACKERS, settings: Mapping[str, Any] = {}) -> None:
        self.folder = folder
        self.notices: list[str] = []

        def describe(run_id: str) -> TrackedRun:
            return TrackedRun(
                id=run_id,
                name=folder.name,
                project=None,
                config=dict(flatten({"grpo": {"learning_rate": 1e-4}, "run": {"seed": 3, "trace": False}, **settings})),
                tags={"model": "tiny", "data": "arithmetic"},
                folder=folder,
                group="rates",
            )

        file = TrackerFile(folder, folder.name)
        self.trackers = TrackerDispatcher(
            trackers, file, EventList(folder), describe, self.notices.append, close_seconds=LONG
        )
        self.feed = RunFeed([RunFiles(folder, self.notices.append), self.trackers])
        self.feed.event({"event": "launched", "at": time.time()})

    def attempt(self, start: int, *steps: int, change: float = 0.0) -> "Driver":
        """Take steps from a checkpoint on."""
        self.feed.event({"event": "began", "at": time.time(), "step": start, "workers": 2})
        self.feed.resumed(start, [])
        for step in steps:
            row: dict[str, Any] = {"step": step, "reward/mean": step / 10 + change, "phase/generate": 0.5}
            if step % 2 == 0:
                self.write_rollouts(step)
                accuracy = step / 8
                row |= {"heldout/accuracy": accuracy, "heldout/low": accuracy - 0.125, "heldout/high": accuracy + 0.125}
                row["checkpoint"] = f"checkpoint-{step}"
            self.feed.step(row, time.time())
        return self

    def write_rollouts(self, step: int) -> None:
        rewards, text = (1.0, 0.0), f"{HOSTILE} of step {step}"
        write_rollouts(
            self.folder,
            [
                GroupRecord(
                    step=each, epoch=0, problem="p", rewards=rewards, correct=(1.0, math.nan), lengths=(5, 7),
                    truncated=(False, True), prompt="1 + 1", completions=(text, "no"),
                )
                for each in (step - 1, step)
            ],
        )  # fmt: skip

    def fail(self) -> "Driver":
        self.feed.event({"event": "failed", "at": time.time(), "rank": 1, "what": "CUDA error"})
        return self

    def end(self, *, finished: bool) -> None:
        self.feed.flush()
        if finished:
            summary = {"steps": 6, "best_checkpoint": "file:///runs/demo/checkpoint-6", "price": {"goodput": 0.5}}
            self.feed.finished(summary)
        self.feed.close()
        assert self.notices == []
        time.sleep(1.1)  # W&B names an offline run's folder after the second


@pytest.mark.slow
@pytest.mark.parametrize("change", [pytest.param(0.0, id="equal"), pytest.param(1.0, id="different")])
def test_trackers_run_killed_twice_is_one_continuous_run(folder: RunFolder, tmp_path: Path, change: float) -> None:
    """Workers fail within a driver, and the driver ends twice; steps are taken again with equal or other values."""
    first = Driver(folder)
    first.feed.event(
        {"event": "baseline", "at": time.time(), "metrics": {"heldout/accuracy": 0.0, "heldout/low": 0.0,
                                                            "heldout/high": 0.125}}
    )  # fmt: skip
    first.attempt(0, 1, 2, 3).fail().attempt(2, 3, change=change).end(finished=False)
    Driver(folder).attempt(2, 3, 4, 5, change=change).end(finished=False)
    Driver(folder, settings={"grpo": {"learning_rate": 2e-4}}).attempt(4, 5, 6, change=2 * change).end(finished=True)

    late = (6, 0.6 + 2 * change)
    overwritten = [(1, 0.1), (2, 0.2), (3, 0.3 + change), (4, 0.4 + change), (5, 0.5 + 2 * change), late]
    kept = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4 + change), (5, 0.5 + change), late]
    heldout = [(0, 0.0), (2, 0.25), (4, 0.5), (6, 0.75)]
    series = {
        "tensorboard": tensorboard_series(tmp_path / "demo" / "tensorboard"),
        "wandb": wandb_series(tmp_path / "demo"),
        "mlflow": mlflow_series(tmp_path),
        "trackio": trackio_series("demo"),
    }
    for name, values in series.items():
        want = overwritten if name in ("tensorboard", "trackio") else kept
        near: list[Any] = [(step, pytest.approx(value)) for step, value in want]
        assert sorted(values["reward/mean"]) == near, name
        assert sorted(values["heldout/accuracy"]) == heldout, name
        assert [step for step, _ in sorted(values["heldout/low"])] == [0, 2, 4, 6], name
        assert [step for step, _ in sorted(values["phase/generate"])] == [1, 2, 3, 4, 5, 6], name

    folder.require_plain_files()  # no tracker leaves a link that every other command refuses
    run_id = json.loads((tmp_path / "demo" / "trackers.json").read_text())["id"]
    assert_tensorboard(tmp_path / "demo" / "tensorboard")
    assert_wandb(tmp_path / "demo", run_id)
    assert_mlflow(tmp_path, run_id)
    assert_trackio()


EVENTS = ("launched", "training from step 2 with 2 workers", "worker 1 failed: CUDA error")


def assert_tensorboard(folder: Path) -> None:
    events = tensorboard_texts(folder, "run/events")
    assert all(text in events[max(events)] for text in EVENTS)
    completions = tensorboard_texts(folder, "completions")
    assert sorted(completions) == [2, 4, 6]
    # Every line is in a code block, which shows it as it is.
    assert "of step 4" in completions[4] and all(line.startswith("    ") for line in completions[4].split("\n"))
    assert "⟨U+202E⟩" in completions[4]
    assert "best_checkpoint: file:///runs/demo/checkpoint-6" in tensorboard_texts(folder, "run/summary")[6]
    metadata = tensorboard_events(folder).SummaryMetadata("_hparams_/session_start_info")
    assert metadata.plugin_data.plugin_name == "hparams" and b"grpo.learning_rate" in metadata.plugin_data.content


def assert_wandb(folder: Path, run_id: str) -> None:
    assert len(wandb_files(folder)) == 3
    rows = wandb_history(folder)
    assert [row["step"] for row in rows if "step" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["completions.nrows"] for row in rows if "completions.nrows" in row] == [4, 8, 8]
    assert [row["run/events.nrows"] for row in rows if "run/events.nrows" in row][-1] >= 8
    for file in wandb_files(folder):
        records = list(wandb_records(file))
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        config = {each.key: json.loads(each.value_json) for each in run.config.update}
        assert run.run_id == run_id and run.display_name == "demo" and list(run.tags) == ["tiny", "arithmetic"]
        assert config["run.seed"] == 3 and run.run_group == "rates"
    last = [record.summary for record in records if record.WhichOneof("record_type") == "summary"]
    summary = {
        (each.key or ".".join(each.nested_key)): json.loads(each.value_json) for part in last for each in part.update
    }
    assert summary["run/best_checkpoint"] == "file:///runs/demo/checkpoint-6"
    assert summary["run/price.goodput"] == 0.5
    table = next(folder.glob("wandb/offline-run-*/files/media/table/completions_*.table.json"))
    assert "<script>" in table.read_text()  # a JSON text, which W&B shows as text


def assert_mlflow(storage: Path, run_id: str) -> None:
    run = mlflow_run(storage)
    assert run.info.status == "FINISHED" and run.info.run_name == "demo"
    assert run.data.tags["grpo_ray.run_id"] == run_id and run.data.tags["model"] == "tiny"
    assert run.data.tags["grpo_ray.group"] == "rates"
    assert run.data.tags["grpo_ray.best_checkpoint"] == "file:///runs/demo/checkpoint-6"
    assert run.data.params["grpo.learning_rate"] == "0.0001"  # that of the first launch
    assert json.loads(mlflow_text(storage, "config.json"))["grpo.learning_rate"] == 2e-4
    assert all(text in mlflow_text(storage, "events.txt") for text in EVENTS)
    table = json.loads(mlflow_text(storage, "completions/step-00000004.json"))
    assert table["columns"][0] == "step" and len(table["data"]) == 8
    assert json.loads(mlflow_text(storage, "summary.json"))["price.goodput"] == 0.5


def assert_trackio() -> None:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("grpo_ray")
    config = SQLiteStorage.get_run_config("grpo_ray", name)
    assert config is not None and config["grpo.learning_rate"] == 2e-4
    assert config["_Group"] == "rates"
    rows = trackio_logs("demo")
    tables = {row["step"]: row["completions"]["_value"] for row in rows if "completions" in row}
    assert sorted(tables) == [2, 4, 6] and len(tables[4]) == 8
    assert tables[4][0]["completion"].startswith("    <script>")
    events = [row["run/events"]["_value"] for row in rows if "run/events" in row]
    assert all(text in events[-1] for text in EVENTS)
    (summary,) = [row["run/summary"]["_value"] for row in rows if "run/summary" in row]
    assert "best_checkpoint: file:///runs/demo/checkpoint-6" in summary


def test_trackers_heldout_metrics_measured_later_are_added_once(folder: RunFolder, tmp_path: Path) -> None:
    """An evaluation beside training ends after later steps, and another one after the workers."""
    driver = Driver(folder)
    driver.feed.event({"event": "began", "at": time.time(), "step": 0, "workers": 2})
    driver.feed.resumed(0, [])
    for step in (1, 2, 3):
        driver.feed.step({"step": step, "reward/mean": 0.5}, time.time())
    driver.feed.measured(2, {"heldout/accuracy": 0.25})
    driver.feed.step({"step": 4, "reward/mean": 0.5}, time.time())
    driver.feed.measured(4, {"heldout/accuracy": 0.75})
    driver.end(finished=False)
    again = Driver(folder)
    again.attempt(4)
    again.end(finished=True)
    values = [(2, 0.25), (4, 0.75)]
    assert tensorboard_series(tmp_path / "demo" / "tensorboard")["heldout/accuracy"] == values
    assert wandb_series(tmp_path / "demo")["heldout/accuracy"] == values
    assert mlflow_series(tmp_path)["heldout/accuracy"] == values
    assert trackio_series("demo")["heldout/accuracy"] == values


KILLED = """
import os, sys, time
sys.path[:0] = {path!r}
from tests_driver import Driver, RunFolder
driver = Driver(RunFolder({storage!r}, "demo"))
driver.feed.event({{"event": "began", "at": time.time(), "step": 0, "workers": 2}})
driver.feed.resumed(0, [])
for step in range(1, 10**6):
    driver.feed.step({{"step": step, "reward/mean": step / 8}}, time.time())
    print(step, flush=True)
    time.sleep(0.02)
"""


def test_trackers_killed_driver_loses_and_doubles_nothing(folder: RunFolder, tmp_path: Path) -> None:
    """A driver is killed with SIGKILL between two steps; the next one continues from the last step of its files."""
    copy = tmp_path / "code" / "tests_driver.py"
    copy.parent.mkdir()
    copy.write_text(Path(__file__).read_text())
    script = KILLED.format(path=[str(copy.parent), *sys.path], storage=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        deadline = time.monotonic() + LONG
        while not (tmp_path / "trackio" / "grpo_ray.db").exists() or not positions(folder) >= set(TRACKERS):
            assert process.stdout.readline() and time.monotonic() < deadline
    finally:
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        process.wait()
    rows = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]["step"]
    driver = Driver(folder)
    driver.attempt(last)
    driver.feed.step({"step": last + 1, "reward/mean": (last + 1) / 8}, time.time())
    driver.end(finished=True)
    want = [(step, step / 8) for step in range(1, last + 2)]
    assert tensorboard_series(tmp_path / "demo" / "tensorboard")["reward/mean"] == want
    assert mlflow_series(tmp_path)["reward/mean"] == want
    assert sorted(trackio_series("demo")["reward/mean"]) == want
    assert wandb_series(tmp_path / "demo")["reward/mean"] == want


def positions(folder: RunFolder) -> set[str]:
    """Return the trackers that have saved a step."""
    if not folder.exists("trackers.json"):
        return set()
    saved = folder.read_json("trackers.json")["positions"]
    return {name for name, position in saved.items() if position["step"] > 0}
