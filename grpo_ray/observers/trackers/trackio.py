"""Trackio: a run in Trackio's local store, or in the Space or server that its own environment variables select.

In the local store a step that is taken again replaces its first metrics. A Space (`TRACKIO_SPACE_ID`) or a server
(`TRACKIO_SERVER_URL`) cannot remove metrics: there a step that is taken again keeps its first ones.
"""

import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from grpo_ray.observers.trackers.tracker import (
    SAMPLE_COLUMNS,
    CompletionSample,
    Position,
    StepEntry,
    TrackedRun,
    Tracker,
    as_code,
    flatten,
)

REMOTE_VARIABLES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
BUSY_SECONDS = 30.0
"""Longest wait for a locked database, seconds."""


class TrackioTracker(Tracker):
    """Run of Trackio."""

    def open(self, run: TrackedRun, saved: Position) -> Position:
        self._tracked = run
        self._init()
        # The last step is the one before the run's next step.
        return Position(max(0, self._run._next_step - 1), saved.heldout)

    def _init(self) -> None:
        import trackio

        # Trackio finds a run by its name alone, so the name has to be unique.
        self._run = trackio.init(
            project=self._tracked.project_in(),
            name=self._tracked.id,
            group=self._tracked.group or self._tracked.name,
            config={"run_folder": self._tracked.folder.uri, **self._tracked.tags, **self._tracked.config},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, entry: StepEntry) -> None:
        self._run.log({**entry.metrics, **_table(entry.samples)}, step=entry.step)

    def log_heldout(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._run.log(dict(metrics), step=step)

    def rewind(self, step: int) -> bool:
        if any(os.environ.get(name) for name in REMOTE_VARIABLES):
            return False
        from trackio.sqlite_storage import SQLiteStorage

        self._run.finish()  # writes the queued entries
        path = SQLiteStorage.get_project_db_path(self._tracked.project_in())
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as database, database:
            database.execute("DELETE FROM metrics WHERE run_id = ? AND step > ?", (self._run.id, step))
        self._init()
        return True

    def log_events(self, step: int, events: Sequence[str]) -> None:
        self._log_text("run/events", "\n".join(events), step)

    def finish(self, step: int, summary: Mapping[str, Any]) -> None:
        self._log_text("run/summary", "\n".join(f"{name}: {value}" for name, value in flatten(summary)), step)

    def _log_text(self, name: str, text: str, step: int) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(as_code(text))}, step=step)

    def close(self, *, is_complete: bool) -> None:
        self._run.finish()


def _table(samples: Sequence[CompletionSample]) -> dict[str, Any]:
    """Return the table of completions; its texts are code blocks, since Trackio renders cells as Markdown."""
    if not samples:
        return {}
    import trackio

    rows = [
        [as_code(value) if isinstance(value := getattr(sample, column), str) else value for column in SAMPLE_COLUMNS]
        for sample in samples
    ]
    return {"completions": trackio.Table(columns=list(SAMPLE_COLUMNS), data=rows)}
