"""Weights & Biases: one run, whose metrics are plotted over the run's steps.

W&B's own steps cannot go back, so each call of `log` takes the next one, and charts use `step` as their axis, or
`heldout/step` for held-out metrics, which may arrive later. No metric can be replaced: a step that is taken again keeps
its first metrics. Address, key and mode come from W&B's own environment variables and settings; `WANDB_MODE=offline`
writes into the run folder, for a later `wandb sync`.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
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
from grpo_ray.telemetry.measures import heldout_part

STEP = "step"
"""Metric with the step of all other metrics."""
BLOCK_BYTES, FILE_HEADER_BYTES, RECORD_HEADER = 32768, 7, struct.Struct("<IHB")
"""Layout of an offline run's file: blocks of records as in LevelDB's log, each with checksum, size and kind."""
WHOLE, LAST_PART = 1, 4
"""Kinds of records that end a message."""


class WandbTracker(Tracker):
    """Run of W&B."""

    def __init__(self) -> None:
        self._prefixes: set[str] = set()

    @staticmethod
    def missing_setting(storage_path: str) -> str | None:
        import wandb

        if wandb.setup().settings.mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False):
            return None
        return "no API key is configured; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"

    def open(self, run: TrackedRun, saved: Position) -> Position:
        import wandb

        local = run.folder.local
        self._run = wandb.init(
            id=run.id,
            name=run.name,
            group=run.group,
            project=run.project_in("WANDB_PROJECT"),
            resume="allow",
            config={"run_folder": run.folder.uri, **run.config},
            tags=list(run.tags.values()),
            dir=str(local) if local is not None and "WANDB_DIR" not in os.environ else None,
            reinit="create_new",
            # W&B records nothing else: not the terminal, the command, the code, or the machine.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            ),
        )
        self._run.define_metric("heldout/*", step_metric=HELDOUT_STEP)
        if self._run.offline:
            return offline_position(Path(self._run.settings.wandb_dir), run.id)
        latest: Any = self._run.summary if self._run.resumed else {}
        return Position(int(latest.get(STEP, 0)), int(latest.get(HELDOUT_STEP, -1)))

    def log(self, entry: StepEntry) -> None:
        import wandb

        self._plot_over_steps(entry.metrics)
        data: dict[str, Any] = {**entry.metrics, STEP: entry.step}
        if heldout_part(entry.metrics):
            data[HELDOUT_STEP] = entry.step
        if entry.samples:
            rows = [[getattr(sample, column) for column in SAMPLE_COLUMNS] for sample in entry.samples]
            data["completions"] = wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)
        self._run.log(data)

    def _plot_over_steps(self, metrics: Mapping[str, float]) -> None:
        """Define the step as the axis of these metrics' charts."""
        for prefix in {name.partition("/")[0] for name in metrics if "/" in name} - self._prefixes - {"heldout"}:
            self._run.define_metric(f"{prefix}/*", step_metric=STEP)
            self._prefixes.add(prefix)

    def log_heldout(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._run.log({**metrics, HELDOUT_STEP: step})

    def log_events(self, step: int, events: Sequence[str]) -> None:
        import wandb

        self._run.log({"run/events": wandb.Table(columns=["event"], data=[[line] for line in events])})

    def finish(self, step: int, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"run/{name}": value for name, value in flatten(summary)})

    def close(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


def offline_position(folder: Path, run_id: str) -> Position:
    """Return the last steps in the files of an offline run, for which W&B has no API.

    Args:
        folder: W&B's folder, with a subfolder for each time that the run was opened.
    """
    latest = {STEP: 0.0, HELDOUT_STEP: -1.0}
    for file in folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"):
        for metrics in offline_history(file):
            for name in latest:
                latest[name] = max(latest[name], float(metrics.get(name, -1)))
    return Position(int(latest[STEP]), int(latest[HELDOUT_STEP]))


def offline_history(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the calls of `log` in an offline run's file, up to its end or to a record that a crash cut off."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # set by protobuf's version

    data, at, message = file.read_bytes(), FILE_HEADER_BYTES, b""
    while at + RECORD_HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - at % BLOCK_BYTES
        if left_in_block < RECORD_HEADER.size:  # padding
            at += left_in_block
            continue
        _, size, kind = RECORD_HEADER.unpack_from(data, at)
        at += RECORD_HEADER.size
        if at + size > len(data):
            return
        message += data[at : at + size]
        at += size
        if kind not in (WHOLE, LAST_PART):
            continue
        record = Record()
        try:
            record.ParseFromString(message)
        except DecodeError:
            return
        message = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
