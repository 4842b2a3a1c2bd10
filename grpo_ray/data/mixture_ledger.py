"""Ledgers of all sources of a run, and the draws of a mixture, as each checkpoint saves them.

A run on a single dataset has one ledger, `ledger.npz`. A mixture has `ledger-<source>.npz` for each of its sources, and
`mixture.json` with the problems drawn since the shares last changed. The ledger of a source that is no longer in the
mixture is kept, so that the source continues where it stopped if it returns.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from grpo_ray.data.ledger import FILE_NAME, DatasetFingerprint, IdArray, Ledger, uint64_to_ids
from grpo_ray.data.mixture import Draws
from grpo_ray.errors import CheckpointError

DRAWS_FILE = "mixture.json"
"""File of a checkpoint with the shares of the sources, and the problems drawn under them."""
MAX_FILE_BYTES = 1 << 20
_SOURCE_FILE = re.compile(r"ledger-(?P<source>[A-Za-z0-9][A-Za-z0-9._-]*)\.npz")


@dataclass
class MixtureLedger:
    """Ledger of each source, and the draws of the mixture."""

    ledgers: dict[str, Ledger]
    """Source -> its ledger; a single dataset is the source ""."""
    draws: Draws
    absent: dict[str, Ledger] = field(default_factory=dict)
    """Ledgers of sources that the mixture no longer has."""

    @classmethod
    def load(cls, folder: Path | None, shares: Mapping[str, Fraction]) -> "MixtureLedger":
        """Read the ledgers of a checkpoint.

        Args:
            folder: the checkpoint's files; None: no problem has been used.
            shares: share of each source of this launch; a new source begins with an empty ledger. If the shares differ
                from those of the checkpoint, the draws are counted anew.

        With `run.from_checkpoint`, one of the two runs may have a single dataset and the other a mixture. The ledgers
        are then empty, since no problem of this run has been used.

        Raises:
            FileNotFoundError: the checkpoint has no ledger.
            CheckpointError: a file is damaged.
        """
        is_single = list(shares) == [""]
        if folder is None or is_single == (folder / DRAWS_FILE).exists():
            return cls({name: Ledger() for name in shares}, Draws(shares))
        if is_single:
            return cls({"": Ledger.load(folder)}, Draws(shares))
        found = {
            source: Ledger.load(folder, name) for name, source in ledger_files(_names_in(folder)).items() if source
        }
        ledgers = {name: found.get(name) or Ledger() for name in shares}
        absent = {name: ledger for name, ledger in found.items() if name not in shares}
        return cls(ledgers, _draws_under(_read_draws(folder / DRAWS_FILE), shares), absent)

    @classmethod
    def single(cls, ledger: Ledger) -> "MixtureLedger":
        """Return the ledger of a run on a single dataset."""
        return cls({"": ledger}, Draws({"": Fraction(1)}))

    def save(self, folder: Path) -> None:
        """Write the ledgers into a checkpoint's folder; equal ledgers are written as equal bytes."""
        for name, ledger in sorted({**self.absent, **self.ledgers}.items()):
            ledger.save(folder, f"ledger-{name}.npz" if name else FILE_NAME)
        if not self.is_single:
            content = {"shares": {k: str(v) for k, v in self.draws.shares.items()}, "drawn": dict(self.draws.drawn)}
            (folder / DRAWS_FILE).write_text(json.dumps(content, sort_keys=True), encoding="utf-8")

    @property
    def is_single(self) -> bool:
        """True for a single dataset."""
        return list(self.ledgers) == [""]

    def copy(self) -> "MixtureLedger":
        """Return an independent copy."""
        return MixtureLedger({name: ledger.copy() for name, ledger in self.ledgers.items()}, self.draws, self.absent)

    def set_datasets(self, ids: Mapping[str, IdArray], fingerprints: Mapping[str, DatasetFingerprint]) -> None:
        """Set the problems of each source with which the open epochs continue (`Ledger.set_dataset`)."""
        for name, ledger in self.ledgers.items():
            ledger.set_dataset(ids[name], fingerprints[name])

    def mark(self, source: str, epoch: int, ids: Sequence[str]) -> None:
        """Record problems of a source as used, and count them as drawn.

        Raises:
            LedgerError: as in `Ledger.mark`.
        """
        self.ledgers[source].mark(epoch, ids)
        self.draws = with_drawn(self.draws, [source] * len(ids))

    def add_open(self, drawn: Iterable[tuple[str, int, str]]) -> None:
        """Record the problems that are drawn for later steps, as source, epoch and id.

        Problems of an earlier attempt stay open until they are used: a run that continues with a smaller
        `rollout.max_staleness` draws them later, and by the same curriculum.

        Raises:
            LedgerError: as in `Ledger.set_open`.
        """
        open_ids = {
            name: {epoch: uint64_to_ids(ledger.open(epoch)) for epoch in ledger.open_epochs}
            for name, ledger in self.ledgers.items()
        }
        for source, epoch, problem in drawn:
            open_ids[source].setdefault(epoch, []).append(problem)
        for name, ledger in self.ledgers.items():
            ledger.set_open(open_ids[name])

    def clear_open(self) -> None:
        """Forget which problems are drawn for later steps."""
        for ledger in self.ledgers.values():
            ledger.set_open({})


def ledger_files(names: Iterable[str]) -> dict[str, str]:
    """Return the files of a checkpoint that are ledgers -> the source of each; a single dataset is the source ""."""
    matches = {name: _SOURCE_FILE.fullmatch(name) for name in sorted(names)}
    return {name: match["source"] if match else "" for name, match in matches.items() if match or name == FILE_NAME}


def _names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def with_drawn(draws: Draws, sources: Iterable[str]) -> Draws:
    """Return the draws after further problems of these sources."""
    drawn = dict(draws.drawn)
    for name in sources:
        drawn[name] = drawn.get(name, 0) + 1
    return Draws(draws.shares, drawn)


def _draws_under(recorded: Draws, shares: Mapping[str, Fraction]) -> Draws:
    """Return the recorded draws if they were made under these shares; else none, so that the new shares hold at once.

    With the old counts, a source that was added would be drawn alone until it had caught up.
    """
    return recorded if dict(recorded.shares) == dict(shares) else Draws(shares)


def _read_draws(path: Path) -> Draws:
    """Read the file of `MixtureLedger.save`. Raises CheckpointError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("it is too large")
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        shares = {str(name): Fraction(share) for name, share in content["shares"].items()}
        drawn = {str(name): int(count) for name, count in content["drawn"].items()}
        if any(count < 0 for count in drawn.values()) or any(share <= 0 for share in shares.values()):
            raise ValueError("a number is negative")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: cannot be read as the draws of a mixture: {error}") from error
    return Draws(shares, drawn)
