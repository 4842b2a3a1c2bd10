"""Inputs of trackers from the run folder: the run's id, their positions, the events, and samples."""

import json
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from grpo_ray.errors import DamagedFileError, DataError
from grpo_ray.observers.trackers.tracker import CompletionSample, Position, format_time, numbers_of
from grpo_ray.storage.jsonl import read_events
from grpo_ray.storage.records.rollout_files import read_steps
from grpo_ray.storage.retry import single_attempt
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.events import event_line
from grpo_ray.telemetry.measures import heldout_part
from grpo_ray.text.display import one_line, safe_text
from grpo_ray.text.redaction import redact

FILE = "trackers.json"
MAX_EVENTS = 100
"""Latest events that trackers list."""
SAMPLED_STEPS, SAMPLED_GROUPS, SAMPLED_COMPLETIONS, SAMPLE_CHARS = 4, 4, 4, 2000
"""Latest steps sampled at a checkpoint; most groups, completions of each group, and characters of each text."""


class TrackerFile:
    """`trackers.json` of a run folder: the run's id in its trackers, and each tracker's position. Thread-safe.

    A damaged file is replaced: the run then begins anew in its trackers.

    Args:
        name: of the run; its id begins with it.
    """

    def __init__(self, folder: RunFolder, name: str):
        self._folder, self._name = folder, name
        self._lock = threading.Lock()
        self._content: dict[str, Any] | None = None

    def _load(self) -> dict[str, Any]:
        if self._content is not None:
            return self._content
        try:
            content = self._folder.read_json(FILE)
        except (FileNotFoundError, DamagedFileError):
            content = None
        if not isinstance(content, dict) or not isinstance(content.get("id"), str):
            content = {"id": f"{redact(self._name[:80])}-{uuid.uuid4().hex[:8]}", "positions": {}}
            self._write(content)
        if not isinstance(content.get("positions"), dict):
            content["positions"] = {}
        self._content = content
        return content

    def run_id(self) -> str:
        """Return the run's id in all of its trackers; a new one is written before it is used."""
        with self._lock:
            return str(self._load()["id"])

    def position(self, tracker: str) -> Position:
        """Return the position that was saved for a tracker."""
        with self._lock:
            saved = self._load()["positions"].get(tracker)
        try:
            return Position(int(saved["step"]), int(saved["heldout"]))
        except (TypeError, KeyError, ValueError):  # nothing saved yet, or a damaged entry
            return Position()

    def save(self, tracker: str, position: Position) -> None:
        """Save the position of a tracker, unless storage cannot be written now: a later call saves it too."""
        with self._lock:
            content = self._load()
            content["positions"][tracker] = asdict(position)
            with single_attempt(), suppress(OSError):  # other trackers must not wait for storage
                self._write(content)

    def _write(self, content: Mapping[str, Any]) -> None:
        # `write_json` would hide secrets, and a secret that only a later launch has could then change the run's id.
        self._folder.write_text(json.dumps(content, indent=2) + "\n", FILE)


class EventList:
    """Latest events of the run over all launches, as lines. Thread-safe.

    Args:
        folder: run folder with the events of earlier launches, and of this one so far.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._lock, self._load_lock = threading.Lock(), threading.Lock()
        self._is_loaded = False
        self._lines: dict[tuple[float, str], str] = {}
        self.baseline: dict[str, float] = {}
        """Held-out metrics of the initial policy; empty until `load`, or if they were not measured yet."""
        self.step_times: dict[int, float] = {}
        """Step -> time of its report, seconds since 1970."""

    def load(self) -> None:
        """Read `events.jsonl`, once."""
        with self._load_lock:
            if self._is_loaded:
                return
            for entry in read_events(self._folder):
                if entry["event"] == "step":
                    self.step_times[int(entry["step"])] = entry["at"]
                else:
                    self.add(entry)
            self._is_loaded = True

    def add(self, entry: Mapping[str, Any]) -> bool:
        """Add an event; return False if trackers do not list it. Does not wait for `load`."""
        if entry["event"] == "baseline" and isinstance(entry.get("metrics"), Mapping):
            self.baseline = heldout_part(numbers_of(entry["metrics"]))
        if (line := describe_event(entry)) is None:
            return False
        with self._lock:
            # An event may come twice, from the file and from the run.
            self._lines[entry["at"], line] = line
            if len(self._lines) > 2 * MAX_EVENTS:
                self._lines = {key: self._lines[key] for key in sorted(self._lines)[-MAX_EVENTS:]}
        return True

    def lines(self) -> list[str]:
        """Return the latest events, oldest first."""
        with self._lock:
            return [self._lines[key] for key in sorted(self._lines)][-MAX_EVENTS:]


def describe_event(entry: Mapping[str, Any]) -> str | None:
    """Return an event's line with its time; None if trackers do not list it."""
    line = event_line(entry, "trackers")
    return None if line is None else f"{format_time(entry['at'])}  {one_line(line)}"


def read_samples(folder: RunFolder, step: int) -> list[CompletionSample]:
    """Read completions of the last steps up to a checkpoint; empty if they cannot be read now."""
    try:
        with single_attempt():
            groups = read_steps(folder, step - SAMPLED_STEPS + 1, step, samples_only=True).to_pylist()
    except (DataError, OSError):  # the texts stay in the run folder; a tracker shows none of this checkpoint
        return []
    return [sample for group in groups[-SAMPLED_GROUPS:] for sample in _samples(group)]


def _samples(group: Mapping[str, Any]) -> list[CompletionSample]:
    """Return the first completions of a group."""
    verdicts = group["correct"] or []
    return [
        CompletionSample(
            step=group["step"],
            problem=safe_text(group["problem"], 100),
            reward=group["rewards"][index],
            correct=verdicts[index] if index < len(verdicts) and verdicts[index] == verdicts[index] else None,
            tokens=group["lengths"][index],
            prompt=safe_text(group["prompt"], SAMPLE_CHARS),
            completion=safe_text(text, SAMPLE_CHARS),
        )
        for index, text in enumerate(group["completions"][:SAMPLED_COMPLETIONS])
        if index < min(len(group["rewards"]), len(group["lengths"]))
    ]
