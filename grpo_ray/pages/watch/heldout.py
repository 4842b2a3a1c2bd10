"""Held-out measurements for the viewer: outcome of each problem, and completions of checkpoints side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from grpo_ray.config.heldout_keys import heldout_label
from grpo_ray.errors import DataError
from grpo_ray.pages.report.conversation_view import show_in_json
from grpo_ray.storage.records.heldout_files import (
    HeldoutFile,
    Measurement,
    comparable,
    compare_measurements,
    list_heldout_files,
    read_heldout,
    read_measurement,
)
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.display import safe_text

MAX_TEXT_CHARS = 8192
MAX_ID_CHARS = 64
PROMPT_CHARS = 120
"""Characters of a prompt in a list."""
MAX_COMPLETIONS = 16
"""Completions of one problem and checkpoint that are shown."""
MAX_SIDE_BY_SIDE = 6
"""Checkpoints whose completions are shown side by side."""

Kind = Literal["solved", "lost", "right", "wrong"]


@dataclass(frozen=True)
class HeldoutSet:
    """Measurements of one held-out set."""

    key: str
    measurements: list[Measurement]
    """Measurements in the order of steps, all under the conditions of the latest one."""
    omitted: int
    """Measurements under other conditions, which are not compared."""

    def at(self, step: int) -> Measurement | None:
        """Return the measurement of a step; None if there is none."""
        return next((each for each in self.measurements if each.file.step == step), None)

    def describe(self) -> dict[str, Any]:
        """Return the accuracy of each measurement as JSON."""
        return {
            "key": self.key,
            "label": heldout_label(self.key),
            "omitted": self.omitted,
            "measurements": [
                {
                    "step": each.file.step,
                    "policy": safe_text(each.policy, MAX_ID_CHARS),
                    "accuracy": _mean(each.accuracy),
                    "problems": len(each.problems),
                }
                for each in self.measurements
            ],
        }

    def changes(
        self, folder: RunFolder, earlier: Measurement, later: Measurement, kind: Kind, skip: int, limit: int
    ) -> dict[str, Any]:
        """Return the problems whose outcome is of one kind, as one page of JSON.

        Args:
            folder: The run folder.
            earlier, later: Two measurements of this set.
            kind: Solved in the later one only, in the earlier one only, in both, or in neither.
            skip: Problems before the page.
            limit: Most problems on the page.

        Raises:
            DataError: The file of the later one, from which prompts are read, cannot be read.
        """
        prompts = dict(zip(later.problems, read_heldout(folder, later.file)["prompt"].to_pylist(), strict=False))
        changes = compare_measurements(earlier, later)
        before = dict(zip(earlier.problems, earlier.accuracy.tolist(), strict=True))
        after = dict(zip(later.problems, later.accuracy.tolist(), strict=True))
        changed = {*changes.solved, *changes.lost}
        unchanged = [
            each
            for each, accuracy in after.items()
            if each not in changed and not np.isnan(accuracy) and not np.isnan(before.get(each, np.nan))
        ]
        problems: dict[str, Sequence[str]] = {
            "solved": changes.solved,
            "lost": changes.lost,
            "right": [each for each in unchanged if after[each] > 0.5],
            "wrong": [each for each in unchanged if after[each] <= 0.5],
        }
        return {
            "counts": {name: len(ids) for name, ids in problems.items()},
            "problems": [
                {
                    "problem": safe_text(each, MAX_ID_CHARS),
                    "before": before[each],
                    "after": after[each],
                    "prompt": safe_text(" ".join((prompts.get(each) or "").split()), PROMPT_CHARS),
                }
                for each in problems[kind][skip : skip + limit]
            ],
        }


def describe_problem(folder: RunFolder, heldout: HeldoutSet, problem: str, steps: Sequence[int]) -> dict[str, Any]:
    """Return the completions of one problem at some checkpoints, and its outcome at all of them, as JSON.

    Raises:
        DataError: A file cannot be read.
    """
    prompt, solution = "", ""
    columns = []
    for step in steps[:MAX_SIDE_BY_SIDE]:
        measurement = heldout.at(step)
        if measurement is None or problem not in measurement.problems:
            continue
        row = read_heldout(folder, measurement.file).slice(measurement.problems.index(problem), 1).to_pylist()[0]
        prompt, solution = prompt or row["prompt"] or "", solution or row["solution"] or ""
        texts, correct = row["completions"], row["correct"] or []
        columns.append(
            {
                "step": step,
                "completions": [
                    {
                        "text": None if texts is None else safe_text(texts[index] or "", MAX_TEXT_CHARS),
                        "correct": {1.0: True, 0.0: False}.get(verdict),
                        "length": (row["lengths"] or [])[index] if index < len(row["lengths"] or []) else None,
                        "truncated": bool((row["truncated"] or [])[index : index + 1] == [True]),
                        **show_in_json(row, index, MAX_TEXT_CHARS),
                    }
                    for index, verdict in enumerate(correct[:MAX_COMPLETIONS])
                    if texts is None or index < len(texts)
                ],
            }
        )
    history = [
        {"step": each.file.step, "accuracy": _finite(each.accuracy[each.problems.index(problem)])}
        for each in heldout.measurements
        if problem in each.problems
    ]
    return {
        "problem": safe_text(problem, MAX_ID_CHARS),
        "prompt": safe_text(prompt, MAX_TEXT_CHARS),
        "solution": safe_text(solution, MAX_TEXT_CHARS),
        "columns": columns,
        "history": history,
    }


@dataclass
class HeldoutReader:
    """Reader of the held-out measurements that reads only files that are new or have changed."""

    folder: RunFolder
    sets: list[HeldoutSet] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _read: dict[HeldoutFile, Measurement | None] = field(default_factory=dict)
    """Each listed file -> its measurement; None if the file cannot be read."""
    _is_incomplete: bool = False
    """True if the storage failed while a file was read, so that it is read again."""

    def refresh(self, keys: Sequence[str]) -> bool:
        """Read new and changed files of the sets; return True if the measurements or notes have changed.

        Raises OSError if they cannot be listed.
        """
        files = [file for key in keys for file in list_heldout_files(self.folder, key)]
        if files == list(self._read) and not self._is_incomplete:
            return False
        read: dict[HeldoutFile, Measurement | None] = {}
        notes, is_incomplete = [], False
        for file in files:
            try:
                read[file] = self._read.get(file) or read_measurement(self.folder, file)
            except DataError as error:
                read[file] = None
                is_incomplete |= isinstance(error.__cause__, OSError)
                notes.append(f"held-out records cannot be read: {error}")
        changed = files != list(self._read) or notes != self.notes
        self._read, self.notes, self._is_incomplete = read, notes, is_incomplete
        self.sets = [each for key in keys if (each := _heldout_set(key, list(read.values()))).measurements]
        return changed


def _heldout_set(key: str, measurements: Sequence[Measurement | None]) -> HeldoutSet:
    found = [each for each in measurements if each is not None and each.file.key == key]
    kept = comparable(found)
    return HeldoutSet(key, kept, len(found) - len(kept))


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
