"""Verdicts of a judge, kept in the run folder: a step that is taken again after a failure gets the same rewards.

A judge may answer the same question differently later. So each call of the reward writes its verdicts to a new file
before they are used, and a process reads the files of the run before its first question. Where two files have a verdict
about the same content, the older one counts.
"""

import itertools
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from grpo_ray.errors import DamagedFileError

if TYPE_CHECKING:
    from grpo_ray.storage.run_folder import RunFolder

FOLDER = "verdicts"
READERS = 16
"""Files that are read at the same time: there is one for each step and worker, and a store takes long for each."""
Verdict = float | None
"""Reward of a completion; None if the judge gave none."""


class VerdictStore:
    """Verdicts of this process's judges, and those that the run folder has from earlier attempts."""

    def __init__(self, folder: "RunFolder | None" = None, rank: int = 0) -> None:
        """
        Args:
            folder: None keeps the verdicts in memory only.
            rank: rank of this worker.
        """
        self._folder, self._rank = folder, rank
        self._numbers = itertools.count()
        self._verdicts: dict[str, Verdict] | None = None
        self._cost = 0.0
        self._counted: set[str] = set()
        """Files whose cost is part of `_cost`."""

    def cost_of_run(self) -> float:
        """Return the cost of all verdicts of the run so far, those of other workers included."""
        self._known()
        # The other workers' verdicts are not used: how many are written by now depends on the workers' speed.
        self._cost += sum(cost for _, cost in self._read_new())
        return self._cost

    def find(self, keys: list[str]) -> dict[str, Verdict]:
        """Return the known verdicts of some keys."""
        known = self._known()
        return {key: known[key] for key in keys if key in known}

    def add(self, verdicts: Mapping[str, Verdict], cost: float) -> None:
        """Write verdicts to the run folder, then keep them."""
        self._known()  # reads the folder before the new file is in it
        if self._folder is not None:
            # Names sort by time, then by rank.
            name = f"{time.time_ns():020d}-{self._rank:05d}-{next(self._numbers):06d}.json"
            self._folder.write_json({"verdicts": dict(verdicts), "cost": cost}, FOLDER, name)
            self._counted.add(name)
        known = self._known()
        for key, verdict in verdicts.items():
            known.setdefault(key, verdict)
        self._cost += cost

    def _known(self) -> dict[str, Verdict]:
        if self._verdicts is None:
            files = self._read_new()
            self._verdicts = {}
            for verdicts, cost in files:
                for key, verdict in verdicts.items():
                    self._verdicts.setdefault(key, verdict)
                self._cost += cost
        return self._verdicts

    def _read_new(self) -> list[tuple[dict[str, Verdict], float]]:
        """Return the verdicts and the cost of each file of the run folder that is not counted, the oldest first."""
        if self._folder is None:
            return []
        names = sorted(self._folder.file_sizes(FOLDER).keys() - self._counted)
        self._counted.update(names)
        with ThreadPoolExecutor(READERS, thread_name_prefix="verdicts") as threads:
            return list(threads.map(partial(_read, self._folder), names))


def _read(folder: "RunFolder", name: str) -> tuple[dict[str, Verdict], float]:
    """Return the verdicts and the cost of a file. Raises DamagedFileError."""
    content = folder.read_json(FOLDER, name)
    if (
        isinstance(content, dict)
        and isinstance(verdicts := content.get("verdicts"), dict)
        and all(each is None or isinstance(each, int | float) for each in verdicts.values())
        and isinstance(cost := content.get("cost"), int | float)
    ):
        return verdicts, cost
    where = folder.uri_of(FOLDER, name)
    raise DamagedFileError(f"{where} is damaged; delete it to have its completions judged again")


_store = VerdictStore()


def process_store() -> VerdictStore:
    """Return the store of this process: in memory, unless `keep_verdicts` was called."""
    return _store


def keep_verdicts(folder: "RunFolder", rank: int) -> None:
    """Keep the verdicts of this worker's process in the run folder."""
    global _store
    _store = VerdictStore(folder, rank)
