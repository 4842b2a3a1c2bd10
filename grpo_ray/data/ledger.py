"""Ledger of used problems: which problems each epoch has already trained on.

The ledger is saved in the same checkpoint as the weights. A run that resumes from any checkpoint therefore uses every
problem of an epoch exactly once (invariant: exactly-once, exact resume).

    ledger = Ledger(DatasetFingerprint.of(["00000000000000aa", "00000000000000bb"]))
    ledger.mark(0, ["00000000000000bb"])
    ledger.remaining(0)                   # 1
    ledger.mark(0, ["00000000000000aa"])  # all problems are used: epoch 0 closes
    ledger.epoch                          # 1

An open epoch stores the ids of its used, skipped, preferred and open problems as sorted 64-bit integers: 8 bytes per
id. A closed epoch takes no space. A bitmap would be smaller, but its bits stand for positions in the dataset: it needs
an index of the dataset, and it is wrong as soon as the dataset changes. An id is a hash of the problem's content, so
the ledger stays valid when files are reordered or re-sharded, when the number of workers changes, and when the dataset
grows.
"""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from grpo_ray.errors import CheckpointError, LedgerError

FILE_NAME = "ledger.npz"
FORMAT = 1
"""Version of the file format; a ledger file of another version is refused."""

IdArray = NDArray[np.uint64]
"""Problem ids as integers, (N,) uint64; see `ids_to_uint64`."""

_ID = re.compile("[0-9a-f]{16}")
_ARRAY_NAMES = ("used", "passed_over", "preferred", "absent", "open")
"""Names of an epoch's arrays in the file, in the order of the fields of `_EpochRecord`; part of the file format."""
_OPTIONAL_ARRAYS = ("absent", "open")
"""Arrays that are not written if they are empty."""
_READ_ERRORS = (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile)
"""Errors that numpy and zipfile raise for a file that is truncated or damaged, or is not a ledger."""


@dataclass(frozen=True)
class DatasetFingerprint:
    """Fingerprint of the set of problems in a dataset, independent of their order.

    Two datasets have equal fingerprints if they consist of the same problems.
    """

    count: int
    """Number of distinct problems."""
    checksum: str
    """32 hex digits: the sum, modulo 2**128, of a 128-bit hash of each problem's id."""

    @classmethod
    def of(cls, ids: Iterable[str]) -> "DatasetFingerprint":
        """Compute the fingerprint of a dataset.

        Args:
            ids: the id of every problem, each once, in any order.
        """
        count, total = 0, 0
        for each in ids:
            count += 1
            digest = hashlib.blake2b(each.encode(), digest_size=16, key=b"grpo_ray contents").digest()
            total += int.from_bytes(digest)
        return cls(count, f"{total % 2**128:032x}")

    def __add__(self, other: "DatasetFingerprint") -> "DatasetFingerprint":
        """Return the fingerprint of the union of two disjoint datasets."""
        total = int(self.checksum, 16) + int(other.checksum, 16)
        return DatasetFingerprint(self.count + other.count, f"{total % 2**128:032x}")


class _EpochRecord(NamedTuple):
    """Record of one open epoch: sorted, read-only id arrays."""

    used: IdArray
    skipped: IdArray
    preferred: IdArray
    absent: IdArray
    """Used problems that the dataset no longer contains. They count again once they are back in the dataset."""
    open: IdArray
    """Problems that have been drawn for steps after the checkpoint (`rollout.max_staleness`). They are drawn again
    after a resume, so they do not count as used."""

    @property
    def counted(self) -> int:
        """Number of problems that count towards the end of the epoch."""
        return len(self.used) + len(self.skipped)


def _read_only(ids: IdArray) -> IdArray:
    """Make an array read-only and return it, so that copies of a ledger can share it."""
    ids.flags.writeable = False
    return ids


_NO_IDS = _read_only(np.empty(0, dtype=np.uint64))
_EMPTY_EPOCH = _EpochRecord(_NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS)


class Ledger:
    """Record of the problems that each epoch has used.

    Epochs count from 0. An epoch closes when each of its problems is used or skipped; epochs close in order. All
    methods that return problems return sorted ids, (N,) uint64, read-only.
    """

    def __init__(self, fingerprint: DatasetFingerprint | None = None, closed_epochs: int = 0):
        """Create a ledger without open epochs.

        Args:
            fingerprint: of the dataset; None if it is not known yet.
            closed_epochs: number of epochs that are already closed.
        """
        self.closed_epochs = closed_epochs
        self._open: dict[int, _EpochRecord] = {}  # an epoch without any id has no entry
        self._fingerprint = fingerprint
        self._dataset: IdArray | None = None  # sorted; known only after `set_dataset`, and not saved

    @property
    def fingerprint(self) -> DatasetFingerprint | None:
        """Fingerprint of the dataset; its count decides when an epoch closes. None until it is known.

        Setting it closes the epochs that are complete with the new count, and never reopens a closed epoch: problems
        that were added to the dataset are first used in the open epoch.

        Raises:
            LedgerError: an open epoch has more used and skipped problems than the dataset has problems.
        """
        return self._fingerprint

    @fingerprint.setter
    def fingerprint(self, fingerprint: DatasetFingerprint | None) -> None:
        for epoch, record in self._open.items():
            _check_count(epoch, record.counted, fingerprint)
        self._fingerprint = fingerprint
        self._close_complete_epochs()

    @property
    def epoch(self) -> int:
        """The first epoch that is not closed."""
        return self.closed_epochs

    def set_curriculum(self, epoch: int, skipped: Iterable[str], preferred: Iterable[str]) -> None:
        """Record the curriculum of an epoch before its first step; an earlier curriculum of the epoch is replaced.

        Args:
            epoch: an open epoch without used problems.
            skipped: ids that the epoch leaves out; the epoch closes without them.
            preferred: ids that come first in the epoch; they affect the order only.

        Raises:
            LedgerError: the epoch is closed or has used problems, or an id in `skipped` occurs twice or is not in the
                dataset.
        """
        if len(used := self.used(epoch)):
            raise LedgerError(f"epoch {epoch} has begun: {len(used)} problems are used, too late for its curriculum")
        skipped_ids = np.sort(ids_to_uint64(skipped))
        _raise_if_any(epoch, _repeated(skipped_ids), "would be skipped twice")
        preferred_ids = np.unique(ids_to_uint64(preferred))
        self._require_known(epoch, skipped_ids)
        record = self._open.get(epoch, _EMPTY_EPOCH)
        self._set_record(epoch, record._replace(skipped=_read_only(skipped_ids), preferred=_read_only(preferred_ids)))

    def mark(self, epoch: int, ids: Iterable[str]) -> None:
        """Record problems as used; close the epoch if none is left.

        Raises:
            LedgerError: the epoch is closed; a problem is already used or skipped in it, occurs twice in `ids`, or is
                not in the dataset; or the epoch would have more problems than the dataset. In all cases the ledger is
                unchanged.
        """
        new = np.sort(ids_to_uint64(ids))
        record = self._open.get(epoch, _EMPTY_EPOCH)
        _raise_if_any(epoch, _repeated(new), "would be marked twice at once")
        _raise_if_any(epoch, new[isin_sorted(new, record.used)], "would be used twice")
        self._require_known(epoch, new)
        _raise_if_any(epoch, new[isin_sorted(new, record.skipped)], "would be used, though skipped")
        # Merges two sorted arrays: sorting the whole epoch at every step would take quadratic time over an epoch.
        used = np.insert(record.used, np.searchsorted(record.used, new), new)
        still_open = record.open[~isin_sorted(record.open, new)]
        self._set_record(epoch, record._replace(used=_read_only(used), open=_read_only(still_open)))

    def set_open(self, ids: Mapping[int, Iterable[str]]) -> None:
        """Record the problems that are drawn for later steps; they replace all earlier ones.

        Args:
            ids: epoch -> its open problems.

        Raises:
            LedgerError: an epoch is closed, or a problem is used in it. The ledger is then unchanged.
        """
        records = {}
        for epoch in {*self._open, *ids}:
            record = self._open.get(epoch, _EMPTY_EPOCH)
            drawn = np.unique(ids_to_uint64(ids.get(epoch, ())))
            if epoch < self.closed_epochs:
                _raise_if_any(epoch, drawn, "would be open, though the epoch is closed")
            _raise_if_any(epoch, drawn[isin_sorted(drawn, record.used)], "would be open, though used")
            records[epoch] = record._replace(open=_read_only(drawn))
        for epoch, record in records.items():
            self._replace_record(epoch, record)

    def open(self, epoch: int) -> IdArray:
        """Return the problems of an epoch that are drawn for steps after the checkpoint."""
        return self._open.get(epoch, _EMPTY_EPOCH).open

    def used(self, epoch: int) -> IdArray:
        """Return the problems that an epoch has used; empty for a closed epoch, whose record is dropped."""
        return self._open.get(epoch, _EMPTY_EPOCH).used

    @property
    def open_epochs(self) -> list[int]:
        """Epochs with a record, in order; closed epochs have none."""
        return sorted(self._open)

    def ever_used(self, epoch: int) -> IdArray:
        """Return the problems that an epoch has used, also those that the dataset no longer contains."""
        record = self._open.get(epoch, _EMPTY_EPOCH)
        return np.union1d(record.used, record.absent)

    def skipped(self, epoch: int) -> IdArray:
        """Return the problems that an epoch leaves out; empty for a closed epoch."""
        return self._open.get(epoch, _EMPTY_EPOCH).skipped

    def preferred(self, epoch: int) -> IdArray:
        """Return the problems that come first in an epoch; empty for a closed epoch."""
        return self._open.get(epoch, _EMPTY_EPOCH).preferred

    def is_used(self, epoch: int, ids: Iterable[str]) -> NDArray[np.bool_]:
        """Return which problems are used, (N,) bool.

        In a closed epoch all of them are, including skipped ones, because its record is dropped.
        """
        numbers = ids_to_uint64(ids)
        if epoch < self.closed_epochs:
            return np.ones(len(numbers), dtype=np.bool_)
        return isin_sorted(numbers, self.used(epoch))

    def remaining(self, epoch: int) -> int:
        """Return the number of problems that an epoch has yet to use.

        Raises:
            LedgerError: the fingerprint is not known, so the size of an epoch is not known either.
        """
        if epoch < self.closed_epochs:
            return 0
        if self.fingerprint is None:
            raise LedgerError("the size of an epoch is not known yet; set Ledger.fingerprint first")
        return self.fingerprint.count - self._open.get(epoch, _EMPTY_EPOCH).counted

    def contains(self, ids: Iterable[str]) -> NDArray[np.bool_]:
        """Return which problems the dataset of `set_dataset` contains, (N,) bool; all if the dataset is not known."""
        numbers = ids_to_uint64(ids)
        if self._dataset is None:
            return np.ones(len(numbers), dtype=np.bool_)
        return isin_sorted(numbers, self._dataset)

    def set_dataset(self, ids: IdArray, fingerprint: DatasetFingerprint) -> None:
        """Set the dataset with which the open epochs continue; it may have changed since the ledger was saved.

        Problems that were removed no longer count. A used problem that returns within the same epoch is still used.

        Args:
            ids: all problems of the dataset, sorted, (P,) uint64.
            fingerprint: of the same problems.
        """
        self._dataset = ids
        for epoch, record in list(self._open.items()):
            used = np.union1d(record.used, record.absent)
            is_present = isin_sorted(used, ids)
            arrays = (
                used[is_present],
                record.skipped[isin_sorted(record.skipped, ids)],
                record.preferred[isin_sorted(record.preferred, ids)],
                used[~is_present],
                record.open[isin_sorted(record.open, ids)],
            )
            self._replace_record(epoch, _EpochRecord(*map(_read_only, arrays)))
        self.fingerprint = fingerprint

    def copy(self) -> "Ledger":
        """Return an independent copy."""
        other = Ledger(self.fingerprint, self.closed_epochs)
        other._open = dict(self._open)
        other._dataset = self._dataset
        return other

    def save(self, folder: Path, name: str = FILE_NAME) -> None:
        """Write the ledger into a file of a checkpoint's folder; equal ledgers are written as equal bytes."""
        (folder / name).write_bytes(self._to_bytes())

    @classmethod
    def load(cls, folder: Path, name: str = FILE_NAME) -> "Ledger":
        """Read the ledger from a file of a checkpoint's folder.

        Raises:
            FileNotFoundError: the checkpoint has no ledger.
            CheckpointError: the file is damaged.
        """
        path = folder / name
        try:
            return cls._from_bytes(path.read_bytes())
        except FileNotFoundError:
            raise
        except _READ_ERRORS as error:
            raise CheckpointError(f"{path}: cannot be read as a ledger: {error}") from error

    def __eq__(self, other: object) -> bool:
        return self._to_bytes() == other._to_bytes() if isinstance(other, Ledger) else NotImplemented

    def __repr__(self) -> str:
        open_epochs = {n: tuple(map(len, record)) for n, record in sorted(self._open.items())}
        lengths = f"(used, skipped, preferred, absent, open)={open_epochs}"
        return f"Ledger({self.fingerprint}, closed_epochs={self.closed_epochs}, {lengths})"

    def _to_bytes(self) -> bytes:
        epochs = sorted(self._open)
        fingerprint = asdict(self.fingerprint) if self.fingerprint else None
        header = {"format": FORMAT, "closed": self.closed_epochs, "contents": fingerprint, "open": epochs}
        arrays = {
            f"{name}-{epoch}": ids
            for epoch in epochs
            for name, ids in zip(_ARRAY_NAMES, self._open[epoch], strict=True)
            if name not in _OPTIONAL_ARRAYS or len(ids)
        }
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)
        return file.getvalue()

    @classmethod
    def _from_bytes(cls, data: bytes) -> "Ledger":
        """Parse `_to_bytes`; raises one of `_READ_ERRORS` for any other bytes."""
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            # First, because the header of a damaged array can make numpy allocate any amount of memory.
            if damaged := file.zip.testzip():
                raise zipfile.BadZipFile(f"{damaged} is damaged")
            header = json.loads(file["header"].tobytes())
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}, not {FORMAT}")
            fingerprint = DatasetFingerprint(**header["contents"]) if header["contents"] else None
            ledger = cls(fingerprint, header["closed"])
            for epoch in header["open"]:
                keys = {name: f"{name}-{epoch}" for name in _ARRAY_NAMES}
                arrays = [
                    _NO_IDS if name in _OPTIONAL_ARRAYS and key not in file.files else file[key]
                    for name, key in keys.items()
                ]
                ledger._open[epoch] = _EpochRecord(*map(_read_only, arrays))
            return ledger

    def _set_record(self, epoch: int, record: _EpochRecord) -> None:
        """Replace the record of an open epoch, and close the epochs that are complete."""
        if epoch < self.closed_epochs:
            raise LedgerError(f"epoch {epoch} is closed: every problem of it is used")
        _check_count(epoch, record.counted, self.fingerprint)
        self._replace_record(epoch, record)
        self._close_complete_epochs()

    def _replace_record(self, epoch: int, record: _EpochRecord) -> None:
        """Replace the record of an open epoch; remove it if it holds no ids."""
        if any(map(len, record)):
            self._open[epoch] = record
        else:
            self._open.pop(epoch, None)

    def _require_known(self, epoch: int, ids: IdArray) -> None:
        """Raise a LedgerError if the dataset is known and lacks one of the problems."""
        if self._dataset is not None:
            _raise_if_any(epoch, ids[~isin_sorted(ids, self._dataset)], "are not in the dataset")

    def _close_complete_epochs(self) -> None:
        """Close epochs in order, from the first open one to the last complete one."""
        if self.fingerprint is None:
            return
        while (record := self._open.get(self.closed_epochs)) and record.counted == self.fingerprint.count:
            del self._open[self.closed_epochs]
            self.closed_epochs += 1


def ids_to_uint64(ids: Iterable[str]) -> IdArray:
    """Convert problem ids to integers, (N,) uint64, in the same order.

    Raises:
        ValueError: a string is not an id, 16 lower-case hex digits.
    """
    ids = list(ids)
    if (wrong := next((each for each in ids if not _ID.fullmatch(each)), None)) is not None:
        raise ValueError(f"a problem id is 16 hex digits, not {wrong!r}")
    return np.frombuffer(bytes.fromhex("".join(ids)), dtype=">u8").astype(np.uint64)


def uint64_to_ids(numbers: IdArray) -> list[str]:
    """Convert integers to problem ids, in the same order: the inverse of `ids_to_uint64`."""
    return [f"{number:016x}" for number in numbers.tolist()]


def isin_sorted(values: IdArray, sorted_values: IdArray) -> NDArray[np.bool_]:
    """Return which `values` occur in `sorted_values`, (len(values),) bool; `np.isin` by binary search."""
    if not len(sorted_values):
        return np.zeros(len(values), dtype=np.bool_)
    nearest = np.minimum(np.searchsorted(sorted_values, values), len(sorted_values) - 1)
    return sorted_values[nearest] == values


def _repeated(sorted_ids: IdArray) -> IdArray:
    """Return the ids that equal the one before them."""
    return sorted_ids[1:][sorted_ids[1:] == sorted_ids[:-1]]


def _raise_if_any(epoch: int, ids: IdArray, fault: str) -> None:
    """Raise a LedgerError with the first three ids, if there are any."""
    if len(ids):
        shown = ", ".join(uint64_to_ids(ids[:3])) + (" ..." if len(ids) > 3 else "")
        raise LedgerError(f"epoch {epoch}: {len(ids)} problems {fault}: {shown}")


def _check_count(epoch: int, counted: int, fingerprint: DatasetFingerprint | None) -> None:
    """Raise a LedgerError if an epoch has more problems than the dataset."""
    if fingerprint is not None and counted > fingerprint.count:
        raise LedgerError(
            f"epoch {epoch}: {counted} problems would be marked, but the dataset holds {fingerprint.count}"
        )
