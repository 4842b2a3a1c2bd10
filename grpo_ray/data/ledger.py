"""The ledger: which problems of which epoch have been trained on. It lies in the same checkpoint as the weights.

An epoch that is not whole yet keeps the ids of its problems as sorted 64-bit numbers: 8 bytes a problem, and an epoch
that is whole costs nothing. A bitmap would be smaller, but its bits stand for places in the dataset, so it would need
an index of the dataset and be wrong as soon as that changes. An id is the problem's content: the record holds when
files are reordered or cut anew, when the number of workers changes, and when the dataset has grown.
"""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_ray.errors import CheckpointError, LedgerError

FILE_NAME = "ledger.npz"
FORMAT = 1
"""Of the file; a ledger of another format is refused."""

_ID = re.compile("[0-9a-f]{16}")
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile)
"""What numpy and zipfile raise for a file that is cut short, spoilt, or something else."""


@dataclass(frozen=True)
class DatasetFingerprint:
    """What a dataset holds, whatever its order: two datasets of the same problems have equal contents."""

    count: int
    """Distinct problems."""
    checksum: str
    """32 hex digits: the sum, modulo 2**128, of a 128-bit hash of each problem's id."""

    @classmethod
    def of(cls, ids: Iterable[str]) -> "DatasetFingerprint":
        """The contents of a dataset by the ids of its problems, each once."""
        count, total = 0, 0
        for each in ids:
            count += 1
            digest = hashlib.blake2b(each.encode(), digest_size=16, key=b"grpo_ray contents").digest()
            total += int.from_bytes(digest)
        return cls(count, f"{total % 2**128:032x}")

    def __add__(self, other: "DatasetFingerprint") -> "DatasetFingerprint":
        """The contents of two parts together; they must have no problem in common."""
        total = int(self.checksum, 16) + int(other.checksum, 16)
        return DatasetFingerprint(self.count + other.count, f"{total % 2**128:032x}")


class _Epoch(NamedTuple):
    """The record of one open epoch: sorted numbers of problems, never changed in place."""

    used: np.ndarray
    passed_over: np.ndarray
    preferred: np.ndarray

    @property
    def marked(self) -> int:
        return len(self.used) + len(self.passed_over)


def _frozen(numbers: np.ndarray) -> np.ndarray:
    """The same array, read-only: copies of a ledger share their arrays."""
    numbers.flags.writeable = False
    return numbers


_EMPTY = _Epoch(*[_frozen(np.empty(0, dtype=np.uint64))] * 3)


class Ledger:
    """What each epoch has used of its problems. Epochs count from 0 and close in order."""

    def __init__(self, contents: DatasetFingerprint | None = None, closed: int = 0):
        self.closed = closed
        """Epochs before this one are whole."""
        self._open: dict[int, _Epoch] = {}  # without epochs of which there is nothing to say
        self._contents = contents

    @property
    def contents(self) -> DatasetFingerprint | None:
        """What the dataset holds, and so how many problems make an epoch whole; None until it is known.

        Setting it closes what it makes whole, and opens no closed epoch again: what a dataset gained since is first
        used in the open one. Raises LedgerError if an open epoch has more problems marked than there are.
        """
        return self._contents

    @contents.setter
    def contents(self, contents: DatasetFingerprint | None) -> None:
        for epoch, record in self._open.items():
            _check_room(epoch, record.marked, contents)
        self._contents = contents
        self._close()

    @property
    def epoch(self) -> int:
        """The first epoch that is not whole."""
        return self.closed

    def open_round(self, epoch: int, passed_over: Iterable[str], preferred: Iterable[str]) -> None:
        """Record the curriculum of an epoch that begins; what was recorded of its curriculum before is replaced.

        passed_over: problems that the epoch leaves out; it is whole without them.
        preferred: problems that come first; it matters for their order only.
        Raises LedgerError if the epoch is closed, a problem of it is used already, or one is passed over twice.
        """
        if len(used := self.used(epoch)):
            raise LedgerError(f"epoch {epoch} has begun: {len(used)} problems are used, too late for its curriculum")
        left_out = np.sort(to_numbers(passed_over))
        _refuse(epoch, left_out[1:][left_out[1:] == left_out[:-1]], "would be passed over twice")
        self._put(epoch, _Epoch(_EMPTY.used, _frozen(left_out), _frozen(np.unique(to_numbers(preferred)))))

    def mark(self, epoch: int, ids: Iterable[str]) -> None:
        """Record problems as used; the epoch closes when none is left.

        Raises LedgerError, and records nothing, if the epoch is closed, if a problem of it is used or passed over
        already or comes twice in `ids`, or if the epoch does not have so many problems.
        """
        new = np.sort(to_numbers(ids))
        record = self._open.get(epoch, _EMPTY)
        _refuse(epoch, new[1:][new[1:] == new[:-1]], "would be marked twice at once")
        _refuse(epoch, new[within(record.used, new)], "would be used twice")
        _refuse(epoch, new[within(record.passed_over, new)], "would be used, though passed over")
        # Both are sorted, so this is one merge: no mark sorts the epoch again.
        used = np.insert(record.used, np.searchsorted(record.used, new), new)
        self._put(epoch, record._replace(used=_frozen(used)))

    def used(self, epoch: int) -> np.ndarray:
        """Sorted numbers of the problems used; none for a closed epoch, whose record is gone."""
        return self._open.get(epoch, _EMPTY).used

    def passed_over(self, epoch: int) -> np.ndarray:
        """Sorted numbers of the problems that the epoch leaves out; none for a closed epoch."""
        return self._open.get(epoch, _EMPTY).passed_over

    def preferred(self, epoch: int) -> np.ndarray:
        """Sorted numbers of the problems that come first; none for a closed epoch."""
        return self._open.get(epoch, _EMPTY).preferred

    def is_used(self, epoch: int, ids: Iterable[str]) -> np.ndarray:
        """Whether each problem is used, (N,) bool; in a closed epoch all are, but for what it passed over."""
        numbers = to_numbers(ids)
        return np.ones(len(numbers), dtype=bool) if epoch < self.closed else within(self.used(epoch), numbers)

    def remaining(self, epoch: int) -> int:
        """Problems that the epoch has yet to use. Raises LedgerError if `contents` is not known."""
        if epoch < self.closed:
            return 0
        if self.contents is None:
            raise LedgerError("what the dataset holds is not known yet, so neither is what remains of an epoch")
        return self.contents.count - self._open.get(epoch, _EMPTY).marked

    def keep_only(self, numbers: np.ndarray) -> None:
        """Forget the problems that a changed dataset no longer holds; then set `contents` to what it holds.

        numbers: (N,) uint64, all problems of the dataset.
        """
        for epoch, record in list(self._open.items()):
            self._put(epoch, _Epoch(*(_frozen(each[np.isin(each, numbers)]) for each in record)))

    def copy(self) -> "Ledger":
        """A ledger that goes its own way from here."""
        other = Ledger(self.contents, self.closed)
        other._open = dict(self._open)
        return other

    def save(self, folder: Path) -> None:
        """Write the ledger into a checkpoint's folder; equal ledgers give equal bytes."""
        (folder / FILE_NAME).write_bytes(self._bytes())

    @classmethod
    def load(cls, folder: Path) -> "Ledger":
        """Read the ledger of a checkpoint. FileNotFoundError if it has none, CheckpointError if it is spoilt."""
        path = folder / FILE_NAME
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                if spoilt := file.zip.testzip():  # before numpy believes it
                    raise zipfile.BadZipFile(f"{spoilt} is spoilt")
                header = json.loads(file["header"].tobytes())
                if header["format"] != FORMAT:
                    raise ValueError(f"format {header['format']}, not {FORMAT}")
                ledger = cls(DatasetFingerprint(**header["contents"]) if header["contents"] else None, header["closed"])
                for epoch in header["open"]:
                    ledger._open[epoch] = _Epoch(*(_frozen(file[f"{name}-{epoch}"]) for name in _Epoch._fields))
                return ledger
        except FileNotFoundError:
            raise
        except _UNREADABLE as error:
            raise CheckpointError(f"{path}: cannot be read as a ledger: {error}") from error

    def __eq__(self, other: object) -> bool:
        return self._bytes() == other._bytes() if isinstance(other, Ledger) else NotImplemented

    def __repr__(self) -> str:
        open_epochs = {n: tuple(map(len, record)) for n, record in sorted(self._open.items())}
        return f"Ledger({self.contents}, closed={self.closed}, (used, passed_over, preferred)={open_epochs})"

    def _bytes(self) -> bytes:
        epochs = sorted(self._open)
        contents = asdict(self.contents) if self.contents else None
        header = {"format": FORMAT, "closed": self.closed, "contents": contents, "open": epochs}
        arrays = {f"{name}-{n}": numbers for n in epochs for name, numbers in self._open[n]._asdict().items()}
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)
        return file.getvalue()

    def _put(self, epoch: int, record: _Epoch) -> None:
        """Replace the record of an open epoch, and close what is whole."""
        if epoch < self.closed:
            raise LedgerError(f"epoch {epoch} is closed: every problem of it is used")
        _check_room(epoch, record.marked, self.contents)
        if any(map(len, record)):
            self._open[epoch] = record
        else:
            self._open.pop(epoch, None)
        self._close()

    def _close(self) -> None:
        """Close epochs from the first open one on, as far as they are whole."""
        while self._contents and (record := self._open.get(self.closed)) and record.marked == self._contents.count:
            del self._open[self.closed]
            self.closed += 1


def to_numbers(ids: Iterable[str]) -> np.ndarray:
    """Problem ids as numbers, (N,) uint64, in the order given. Raises ValueError for what is no id."""
    ids = list(ids)
    if (wrong := next((each for each in ids if not _ID.fullmatch(each)), None)) is not None:
        raise ValueError(f"a problem id is 16 hex digits, not {wrong!r}")
    return np.frombuffer(bytes.fromhex("".join(ids)), dtype=">u8").astype(np.uint64)


def to_ids(numbers: np.ndarray) -> list[str]:
    """Numbers as problem ids, in the order given."""
    return [f"{number:016x}" for number in numbers.tolist()]


def within(known: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Which numbers are among the sorted `known` ones, (N,) bool."""
    if not len(known):
        return np.zeros(len(numbers), dtype=bool)
    return known[np.minimum(np.searchsorted(known, numbers), len(known) - 1)] == numbers


def _refuse(epoch: int, numbers: np.ndarray, what: str) -> None:
    """Raise LedgerError if there are any such problems."""
    if len(numbers):
        shown = ", ".join(to_ids(numbers[:3])) + (" ..." if len(numbers) > 3 else "")
        raise LedgerError(f"epoch {epoch}: {len(numbers)} problems {what}: {shown}")


def _check_room(epoch: int, marked: int, contents: DatasetFingerprint | None) -> None:
    if contents is not None and marked > contents.count:
        raise LedgerError(f"epoch {epoch}: {marked} problems would be marked, but the dataset holds {contents.count}")
