"""Repeated reading of a run folder: each call reads only the files that have changed."""

from dataclasses import dataclass

from grpo_ray.pages.report.read import RunData, RunReader
from grpo_ray.pages.watch.heldout import HeldoutReader, HeldoutSet
from grpo_ray.pages.watch.rollouts import RolloutIndex, RolloutReader
from grpo_ray.storage.run_folder import RunFolder


class FolderGoneError(OSError):
    """The run folder has no file of a run any more."""


@dataclass(frozen=True)
class Snapshot:
    """Contents of the run folder at one time."""

    number: int
    """Number of the state, from 1; it rises with each change."""
    run: RunData
    rollouts: RolloutIndex
    heldout: list[HeldoutSet]


class LiveRun:
    """Reader of a run in progress. One thread calls its methods; other threads may read its snapshots."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self._reader, self._rollouts, self._heldout = RunReader(folder), RolloutReader(folder), HeldoutReader(folder)
        self._number = 0
        self._was_interrupted = True
        """True if the last reading ended with an error, after some of the changes had been read."""

    def refresh(self) -> Snapshot | None:
        """Read the files that have changed.

        Returns:
            The new state; None if nothing has changed.

        Raises:
            FolderGoneError: The folder was deleted, moved or renamed. Later calls work again once it is back.
            OSError: The storage cannot be read.
            DamagedFileError: A file is larger than any that grpo_ray writes.
        """
        if not self._reader.has_files():
            raise FolderGoneError(f"{self.folder.uri} is not there any more: it was deleted, moved or renamed")
        changed, self._was_interrupted = [self._was_interrupted], True
        changed += [self._reader.refresh(), self._rollouts.refresh()]
        changed.append(self._heldout.refresh(self._reader.heldout_keys))
        self._was_interrupted = False
        if not any(changed):
            return None
        self._number += 1
        index = self._rollouts.index
        run = self._reader.contents(index.groups, notes=[*index.notes, *self._heldout.notes])
        return Snapshot(self._number, run, index, self._heldout.sets)
