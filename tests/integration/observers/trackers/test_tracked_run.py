"""Test of a real run that is killed and resumed: one continuous run in each tracker."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from faulty_runs import SETTINGS, same, start, undisturbed
from faulty_runs import outcome_of as outcome
from small_runs import rows_of, small_settings
from tracker_readers import (
    mlflow_run,
    mlflow_series,
    mlflow_text,
    tensorboard_series,
    tensorboard_texts,
    trackio_series,
    wandb_files,
    wandb_series,
)

from grpo_ray.resilience.chaos import Fault

LONG = 600.0
"""Time limit for an event on a busy machine, seconds."""


@pytest.mark.slow
def test_tracked_run_killed_twice_is_one_run(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    """A worker is killed at step 5, the driver at step 8; the same command continues to step 10."""
    overrides = [
        *small_settings("tracked", tmp_path, policy), *SETTINGS, "run.trackers=[tensorboard,wandb,mlflow,trackio]",
        "run.hang_seconds=600",
    ]  # fmt: skip
    folder = tmp_path / "tracked"
    hang = Fault("hang", step=8)
    run = start(overrides, [Fault("kill-backward", step=5), hang])
    wait_for((folder / "chaos" / hang.marker).exists, "step 8", LONG)
    wait_for((folder / "checkpoint-000006" / "manifest.json").exists, "the checkpoint of step 6", LONG)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    run = start(overrides)
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, output
    assert "run.trackers" not in output, output
    same(outcome(folder), undisturbed(small_run))  # the trackers change nothing

    rows = rows_of(folder)
    accuracy = [(row["step"], row["heldout/accuracy"]) for row in rows if "heldout/accuracy" in row]
    series = {
        "tensorboard": tensorboard_series(folder / "tensorboard"),
        "wandb": wandb_series(folder),
        "mlflow": mlflow_series(tmp_path),
        "trackio": trackio_series("tracked"),
    }
    for name, values in series.items():
        for metric in ("reward/mean", "completion/length_mean", "learner/loss"):
            want: list[Any] = [(row["step"], pytest.approx(row[metric], rel=1e-5, abs=1e-7)) for row in rows]
            assert sorted(values[metric]) == want, (name, metric)
        assert [step for step, _ in sorted(values["phase/generate"])] == list(range(1, 11)), name
        measured = sorted(values["heldout/accuracy"])
        near: list[Any] = [(step, pytest.approx(value)) for step, value in accuracy]
        assert measured[0][0] == 0 and measured[1:] == near, name
    assert mlflow_run(tmp_path).data.tags["grpo_ray.best_checkpoint"].startswith(str(folder))
    assert len(wandb_files(folder)) == 2
    texts = tensorboard_texts(folder / "tensorboard", "run/events")
    for events in (texts[max(texts)], mlflow_text(tmp_path, "events.txt")):
        assert events.count("launched") == 2 and "failed" in events and "training from step 6" in events
    assert sorted(tensorboard_texts(folder / "tensorboard", "completions")) == [3, 6, 9, 10]
