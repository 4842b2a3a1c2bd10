"""Readers of what a run has in its trackers, through each tracker's own library."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Series = dict[str, list[tuple[int, float]]]
"""Metric -> its (step, value) pairs in the order in which the tracker has them."""


def tensorboard_events(folder: Path) -> Any:
    """Read event files with TensorBoard's own reader, keeping all values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def tensorboard_series(folder: Path) -> Series:
    """Return the scalars."""
    events = tensorboard_events(folder)
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard_texts(folder: Path, tag: str) -> dict[int, str]:
    """Return the texts of a tag by step; later ones replace earlier ones."""
    events = tensorboard_events(folder)
    values = events.Tensors(f"{tag}/text_summary")
    return {each.step: each.tensor_proto.string_val[0].decode() for each in values}


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run's file: blocks of LevelDB's log format with W&B's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # chosen when imported

    data, at, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_files(folder: Path) -> list[Path]:
    """Return the files of an offline run, in the order in which `wandb sync` reads them."""
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of an offline run over all of its files."""
    rows = []
    for file in wandb_files(folder):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        (each.key or ".".join(each.nested_key)): json.loads(each.value_json)
                        for each in record.history.item
                    }
                )
    return rows


def wandb_series(folder: Path) -> Series:
    """Return the numbers of an offline run."""
    series: Series = {}
    for row in wandb_history(folder):
        for name, value in row.items():
            axis = "heldout/step" if name.startswith("heldout/") else "step"
            if isinstance(value, int | float) and axis in row:
                series.setdefault(name, []).append((row[axis], value))
    return series


def mlflow_client(storage: Path) -> Any:
    """Open MLflow's store beside a run folder."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{storage / 'mlflow.db'}")


def mlflow_run(storage: Path, project: str = "grpo_ray") -> Any:
    """Return the only run of a project."""
    client = mlflow_client(storage)
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    return run


def mlflow_series(storage: Path, project: str = "grpo_ray") -> Series:
    """Return all metrics of the only run of a project."""
    client, run = mlflow_client(storage), mlflow_run(storage, project)
    return {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def mlflow_text(storage: Path, path: str) -> str:
    """Return an artifact of the only run."""
    run = mlflow_run(storage)
    return (Path(run.info.artifact_uri.removeprefix("file://")) / path).read_text()


def trackio_logs(name: str, project: str = "grpo_ray") -> list[dict[str, Any]]:
    """Return the rows of the run whose name begins with `name`, from Trackio's local store."""
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = [each for each in SQLiteStorage.get_runs(project) if each.startswith(f"{name}-")]
    return SQLiteStorage.get_logs(project, run)


def trackio_series(name: str, project: str = "grpo_ray") -> Series:
    """Return the numbers of that run."""
    series: Series = {}
    for row in trackio_logs(name, project):
        for key, value in row.items():
            if key not in ("step", "timestamp") and isinstance(value, int | float):
                series.setdefault(key, []).append((row["step"], value))
    return series


def isolate_trackers(folder: Path) -> dict[str, str]:
    """Return the environment in which trackers work offline, in a folder of their own."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_CONFIG_DIR": str(folder / "wandb-config"),
        "WANDB_CACHE_DIR": str(folder / "wandb-cache"),
        "WANDB_DATA_DIR": str(folder / "wandb-data"),
        "TRACKIO_DIR": str(folder / "trackio"),
    }
