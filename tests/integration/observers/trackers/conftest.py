"""Fixture of the trackers' tests: every tracker works offline, in folders of the test."""

import importlib
from pathlib import Path

import pytest
from tracker_readers import isolate_trackers

LIBRARIES = ("tensorboard", "wandb", "mlflow", "trackio")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for library in LIBRARIES:
        pytest.importorskip(library, reason=f"{library} is not installed; it belongs to the extra `test`")
    for name, value in isolate_trackers(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # A driver that is started by a test has a process of W&B of its own.
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    # Trackio reads the name of its folder when it is imported.
    for module in ("trackio", "trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(importlib.import_module(module), "TRACKIO_DIR", tmp_path / "trackio", raising=False)
