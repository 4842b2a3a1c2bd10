"""MLflow: a run of the tracking server in `MLFLOW_TRACKING_URI`, or of `mlflow.db` beside the run folder.

MLflow can only append metrics. A step that is taken again therefore keeps its first metrics, and parameters keep the
values of the first launch; the artifact `config.json` has the current ones. The run is found by a tag that holds its
id, and its last step is read from MLflow, so no step is lost or sent twice.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_ray.observers.trackers.tracker import (
    HELDOUT_STEP,
    SAMPLE_COLUMNS,
    Position,
    StepEntry,
    TrackedRun,
    Tracker,
    flatten,
)
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.measures import heldout_part

ID_TAG = "grpo_ray.run_id"
PARAMS_PER_CALL, METRICS_PER_CALL = 100, 900
"""Most parameters, and metrics, in one call; MLflow's limits are 100 and 1000."""


class MlflowTracker(Tracker):
    """Run of MLflow."""

    @staticmethod
    def missing_setting(storage_path: str) -> str | None:
        if "://" in storage_path and "MLFLOW_TRACKING_URI" not in os.environ:
            return "set MLFLOW_TRACKING_URI; only runs in a file system have a default, mlflow.db beside the run folder"
        return None

    def open(self, run: TrackedRun, saved: Position) -> Position:
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it lists the tables that it creates
        uri, artifacts = _locations(run.folder)
        self._client = MlflowClient(tracking_uri=uri)
        experiment_id = self._experiment_id(run.project_in("MLFLOW_EXPERIMENT_NAME"), artifacts)
        found = self._client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {ID_TAG: run.id, "grpo_ray.run_folder": run.folder.uri, **run.tags}
            if run.group is not None:
                tags["grpo_ray.group"] = run.group
            self._id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        self._log_config(run.config)
        return self._position()

    def _experiment_id(self, name: str, artifacts: str | None) -> str:
        """Return the id of an experiment; create the experiment if there is none."""
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name, artifacts))

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        params = iter(Param(name, str(value)) for key, value in config.items() if (name := _clean(key)) not in known)
        while part := list(islice(params, PARAMS_PER_CALL)):
            self._client.log_batch(self._id, params=part)
        self._client.log_dict(self._id, dict(config), "config.json")

    def _position(self) -> Position:
        """Return the last steps that MLflow has."""
        latest = self._client.get_run(self._id).data.metrics
        return Position(int(latest.get("step", 0)), int(latest.get(HELDOUT_STEP, -1)))

    def log(self, entry: StepEntry) -> None:
        if entry.samples:
            rows = [[getattr(sample, column) for column in SAMPLE_COLUMNS] for sample in entry.samples]
            self._client.log_dict(
                self._id,
                {"columns": list(SAMPLE_COLUMNS), "data": rows},
                f"completions/step-{entry.step:08d}.json",
            )
        marks = {HELDOUT_STEP: float(entry.step)} if heldout_part(entry.metrics) else {}
        self._log_metrics(entry.step, {**entry.metrics, **marks, "step": float(entry.step)}, entry.at)

    def log_heldout(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._log_metrics(step, {**metrics, HELDOUT_STEP: float(step)}, at)

    def _log_metrics(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log metrics in order; callers put those that `_position` reads last, so that they confirm all others."""
        from mlflow.entities import Metric

        entries = iter(Metric(_clean(name), value, int(at * 1000), step) for name, value in metrics.items())
        while part := list(islice(entries, METRICS_PER_CALL)):
            self._client.log_batch(self._id, metrics=part)

    def log_events(self, step: int, events: Sequence[str]) -> None:
        self._client.log_text(self._id, "\n".join(events) + "\n", "events.txt")

    def finish(self, step: int, summary: Mapping[str, Any]) -> None:
        self._client.log_dict(self._id, dict(flatten(summary)), "summary.json")
        tags = self._client.get_run(self._id).data.tags
        for name in ("best_checkpoint", "latest_checkpoint", "stopped"):
            tag = f"grpo_ray.{name}"
            if summary.get(name):
                self._client.set_tag(self._id, tag, str(summary[name]))
            elif tag in tags:  # of an earlier launch, such as the signal that stopped it
                self._client.delete_tag(self._id, tag)

    def close(self, *, is_complete: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_complete else "FAILED")


def _locations(folder: RunFolder) -> tuple[str | None, str | None]:
    """Return the address of the tracking store and the folder of artifacts; None: MLflow's own choice."""
    if "MLFLOW_TRACKING_URI" in os.environ:
        return None, None
    parent = Path(folder.storage_path)
    parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{parent / 'mlflow.db'}", str(parent / "mlflow-artifacts")


def _clean(name: str) -> str:
    """Replace the characters that MLflow does not accept in names."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
