"""Tests of the ledger: marking, epochs, curricula, files, and exact resume after any sequence of operations."""

import itertools
import os
import pickle
import random
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from grpo_ray.data.ledger import FILE_NAME, DatasetFingerprint, Ledger, ids_to_uint64, uint64_to_ids
from grpo_ray.errors import CheckpointError, GrpoRayError, LedgerError

IDS = st.integers(0, 2**64 - 1).map("{:016x}".format)
"""Any problem id."""


def examples(count: int) -> settings:
    """Return settings of a hypothesis test: this number of examples, the same ones in each run."""
    return settings(max_examples=count, deadline=None, derandomize=True)


def unique_ids(least: int = 0, most: int = 30) -> st.SearchStrategy[list[str]]:
    return st.lists(IDS, min_size=least, max_size=most, unique=True)


def problems(count: int, seed: int = 0) -> list[str]:
    """Return random problem ids, unsorted."""
    choice = random.Random(seed)
    return [f"{choice.getrandbits(64):016x}" for _ in range(count)]


A, B, C, D = (letter * 16 for letter in "abcd")
ABCD = DatasetFingerprint.of([A, B, C, D])


def names(numbers: np.ndarray) -> list[str]:
    """Convert an array of a ledger to ids; the array must be sorted."""
    assert numbers.dtype == np.uint64 and numbers.tolist() == sorted(set(numbers.tolist()))
    return uint64_to_ids(numbers)


def marked(epochs: dict[int, Iterable[str]], fingerprint: DatasetFingerprint | None = ABCD) -> Ledger:
    ledger = Ledger(fingerprint)
    for epoch, ids in epochs.items():
        ledger.mark(epoch, ids)
    return ledger


# Ids and numbers


@given(ids=st.lists(IDS))
@example(ids=["ffffffffffffffff", "0000000000000000", "00000000000000ff"])
@example(ids=[])
@examples(50)
def test_to_numbers_any_ids_convert_back_in_order(ids: list[Any]) -> None:
    numbers = ids_to_uint64(iter(ids))
    assert numbers.dtype == np.uint64 and numbers.tolist() == [int(each, 16) for each in ids]
    assert uint64_to_ids(numbers) == ids


@pytest.mark.parametrize(
    "wrong",
    ["", "abc", "a" * 17, "a" * 32, "A" * 16, "x" * 16, " " + "a" * 15, "0x" + "a" * 14, "a" * 16 + "\n", "é" * 16],
)
def test_to_numbers_malformed_id_raises(wrong: str) -> None:
    with pytest.raises(ValueError, match="a problem id is 16 hex digits, not ") as caught:
        ids_to_uint64([A, wrong, B])
    assert repr(wrong) in str(caught.value)


# The fingerprint of a dataset


@given(ids=unique_ids(), data=st.data())
@examples(50)
def test_fingerprint_of_any_order_are_equal(ids: list[str], data: st.DataObject) -> None:
    assert DatasetFingerprint.of(ids) == DatasetFingerprint.of(iter(data.draw(st.permutations(ids))))


@given(ids=unique_ids(), data=st.data())
@examples(50)
def test_fingerprint_of_shards_add_up_to_the_whole(ids: list[str], data: st.DataObject) -> None:
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5))), len(ids)]
    parts = [DatasetFingerprint.of(ids[begin:end]) for begin, end in itertools.pairwise(edges)]
    assert sum(parts[1:], parts[0]) == DatasetFingerprint.of(ids)


@given(ids=unique_ids(least=2), data=st.data())
@examples(50)
def test_fingerprint_with_one_other_problem_differ(ids: list[str], data: st.DataObject) -> None:
    # The last id is the other problem; it replaces one of the rest, or is added to them.
    *ids, other = ids
    position = data.draw(st.integers(0, len(ids) - 1))
    replaced = [*ids[:position], other, *ids[position + 1 :]]
    without = [*ids[:position], *ids[position + 1 :]]
    assert len({DatasetFingerprint.of(each) for each in (ids, replaced, without, [*ids, other])}) == 4


def test_fingerprint_of_ids_with_equal_sums_differ() -> None:
    # As numbers 1 + 4 = 2 + 3: a sum of the ids themselves would be equal.
    one, two, three, four = (f"{n:016x}" for n in (1, 2, 3, 4))
    assert DatasetFingerprint.of([one, four]) != DatasetFingerprint.of([two, three])


def test_fingerprint_checksum_is_the_same_in_every_version() -> None:
    # It is part of checkpoints: with another hash, the dataset of every old run would count as changed.
    assert DatasetFingerprint.of([]) == DatasetFingerprint(0, "0" * 32)
    assert DatasetFingerprint(4, "0622b2768768be5527bc58492fa54f29") == ABCD


# Marking


def test_ledger_mark_counts_in_its_epoch_only() -> None:
    ledger = marked({0: [C, A]})
    assert names(ledger.used(0)) == [A, C] and names(ledger.used(1)) == []
    assert ledger.is_used(0, [D, C, B, A]).tolist() == [False, True, False, True]
    assert ledger.is_used(1, [A, C]).tolist() == [False, False]
    assert (ledger.epoch, ledger.remaining(0), ledger.remaining(1)) == (0, 2, 4)


def test_ledger_empty_has_nothing_used_in_any_epoch() -> None:
    ledger = Ledger(ABCD)
    for numbers in (ledger.used(5), ledger.skipped(5), ledger.preferred(5)):
        assert names(numbers) == []
    answer = ledger.is_used(5, [A])
    assert answer.tolist() == [False] and answer.dtype == bool
    assert ledger.is_used(0, []).shape == (0,)
    assert ledger.remaining(5) == 4


@pytest.mark.parametrize(
    "ids, message",
    [
        ([B, A], f"epoch 0: 1 problems would be used twice: {A}"),
        ([C, D, C], f"epoch 0: 1 problems would be marked twice at once: {C}"),
        ([C, B], f"epoch 0: 1 problems would be used, though skipped: {B}"),
        ([C, D, "0" * 16], "epoch 0: 5 problems would be marked, but the dataset holds 4"),
    ],
)
def test_ledger_mark_twice_raises_and_changes_nothing(ids: list[Any], message: str) -> None:
    ledger = Ledger(ABCD)
    ledger.set_curriculum(0, skipped=[B], preferred=[])
    ledger.mark(0, [A])
    before = ledger.copy()
    with pytest.raises(LedgerError) as caught:
        ledger.mark(0, ids)
    assert str(caught.value) == message
    assert ledger == before
    ledger.mark(0, [C])


def test_ledger_mark_same_problem_in_next_epoch() -> None:
    assert marked({0: [A], 1: [A]}).remaining(1) == 3


def test_ledger_mark_many_twice_names_the_first_three() -> None:
    ids = sorted(problems(10))
    with pytest.raises(LedgerError, match=f"10 problems would be used twice: {ids[0]}, {ids[1]}, {ids[2]} ...$"):
        marked({0: ids}, None).mark(0, ids)


def test_ledger_mark_four_twice_names_the_first_three() -> None:
    with pytest.raises(LedgerError, match=f"4 problems would be used twice: {A}, {B}, {C} ...$"):
        marked({0: [A, B, C, D]}, None).mark(0, [D, C, B, A])


def test_ledger_mark_three_twice_names_all() -> None:
    with pytest.raises(LedgerError, match=f"3 problems would be used twice: {A}, {B}, {C}$"):
        marked({0: [A, B, C]}, None).mark(0, [C, B, A])


def test_ledger_epoch_closes_with_its_last_problem() -> None:
    ledger = marked({0: [A, B, C]})
    assert (ledger.closed_epochs, ledger.epoch) == (0, 0)
    ledger.mark(0, [D])
    assert (ledger.closed_epochs, ledger.epoch, ledger.remaining(0)) == (1, 1, 0)
    assert names(ledger.used(0)) == []
    assert ledger.is_used(0, [A, D]).tolist() == [True, True]
    with pytest.raises(LedgerError, match=r"^epoch 0 is closed: every problem of it is used$"):
        ledger.mark(0, [A])
    with pytest.raises(LedgerError, match=r"^epoch -1 is closed"):
        ledger.mark(-1, [A])


def test_ledger_epochs_close_in_order() -> None:
    ledger = marked({0: [A, B, C], 1: [A, B, C, D], 2: [A]})
    assert (ledger.closed_epochs, ledger.remaining(1), len(ledger.used(1))) == (0, 0, 4)
    with pytest.raises(LedgerError, match="5 problems would be marked"):
        ledger.mark(1, ["0" * 16])
    ledger.mark(0, [D])
    assert (ledger.closed_epochs, ledger.remaining(2)) == (2, 3)
    assert names(ledger.used(2)) == [A]


def test_ledger_without_contents_closes_no_epoch() -> None:
    ledger = marked({0: [A, B, C, D]}, fingerprint=None)
    assert (ledger.closed_epochs, len(ledger.used(0))) == (0, 4)
    with pytest.raises(LedgerError, match=r"the size of an epoch is not known yet; set Ledger\.fingerprint first"):
        ledger.remaining(0)
    ledger.fingerprint = ABCD
    assert (ledger.closed_epochs, ledger.remaining(0)) == (1, 0)


def test_ledger_arrays_are_read_only() -> None:
    ledger = marked({0: [A]})
    ledger.set_curriculum(1, [B], [C])
    for numbers in (ledger.used(0), ledger.skipped(1), ledger.preferred(1), ledger.used(7)):
        with pytest.raises(ValueError, match="read-only"):
            numbers[:] = 0


def test_ledger_mark_sorts_only_the_new_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    # A step marks tens of ids and an epoch may hold millions: a sort of the whole epoch per step would be quadratic.
    ids, sorted_sizes, sort = problems(10_000), [], np.sort

    def counting_sort(array: Any, *args: Any, **kwargs: Any) -> Any:
        sorted_sizes.append(len(array))
        return sort(array, *args, **kwargs)

    monkeypatch.setattr(np, "sort", counting_sort)
    ledger = Ledger(DatasetFingerprint(10_001, ""))
    for first in range(0, len(ids), 64):
        ledger.mark(0, ids[first : first + 64])
    assert max(sorted_sizes) == 64
    assert names(ledger.used(0)) == sorted(ids) and ledger.remaining(0) == 1


# The curriculum of an epoch


def test_ledger_passed_over_counts_but_is_not_used() -> None:
    ledger = Ledger(ABCD)
    ledger.set_curriculum(0, skipped=[D, B], preferred=[C])
    assert names(ledger.skipped(0)) == [B, D] and names(ledger.preferred(0)) == [C]
    assert ledger.remaining(0) == 2
    assert ledger.is_used(0, [B, C]).tolist() == [False, False]
    ledger.mark(0, [A])
    assert names(ledger.preferred(0)) == [C]
    ledger.mark(0, [C])
    assert ledger.closed_epochs == 1
    for numbers in (ledger.skipped(0), ledger.preferred(0), ledger.skipped(1)):
        assert names(numbers) == []


def test_ledger_preferred_does_not_count() -> None:
    ledger = Ledger(ABCD)
    ledger.set_curriculum(0, [], preferred=[A, B, C, D, D])
    assert (ledger.closed_epochs, ledger.remaining(0)) == (0, 4)
    assert names(ledger.preferred(0)) == [A, B, C, D]


def test_ledger_open_round_after_first_mark_raises() -> None:
    ledger = Ledger(ABCD)
    ledger.set_curriculum(0, [A], [B])
    ledger.set_curriculum(0, [C], [])
    assert names(ledger.skipped(0)) == [C] and names(ledger.preferred(0)) == []
    ledger.mark(0, [B])
    before = ledger.copy()
    with pytest.raises(LedgerError, match=r"^epoch 0 has begun: 1 problems are used, too late for its curriculum$"):
        ledger.set_curriculum(0, [A], [])
    assert ledger == before
    ledger.mark(0, [A, D])
    with pytest.raises(LedgerError, match="epoch 0 is closed"):
        ledger.set_curriculum(0, [], [])


def test_ledger_open_round_too_many_problems_raises() -> None:
    ledger = Ledger(ABCD)
    with pytest.raises(LedgerError, match="would be skipped twice"):
        ledger.set_curriculum(0, [A, B, A], [])
    with pytest.raises(LedgerError, match="5 problems would be marked"):
        ledger.set_curriculum(0, [A, B, C, D, "0" * 16], [])
    assert ledger == Ledger(ABCD)


# A dataset that changes


def test_ledger_grown_dataset_keeps_epoch_open() -> None:
    ledger = marked({0: [A, B, C, D], 1: [A, B, C]})
    new = "0" * 16
    ledger.fingerprint = DatasetFingerprint.of([new, A, B, C, D])
    assert (ledger.closed_epochs, ledger.remaining(0), ledger.remaining(1)) == (1, 0, 2)
    ledger.mark(1, [new, D])
    assert ledger.closed_epochs == 2


def dataset(*ids: str) -> tuple[np.ndarray, DatasetFingerprint]:
    """Return the arguments of `Ledger.set_dataset`."""
    return np.sort(ids_to_uint64(ids)), DatasetFingerprint.of(ids)


def test_ledger_set_dataset_removed_problems_do_not_count() -> None:
    ledger = Ledger(ABCD)
    ledger.set_curriculum(0, skipped=[A, C], preferred=[D])
    ledger.set_curriculum(1, skipped=[A], preferred=[])
    ledger.mark(0, [B])
    ledger.set_dataset(*dataset(B, C, D))
    assert names(ledger.used(0)) == [B] and names(ledger.skipped(0)) == [C] and names(ledger.preferred(0)) == [D]
    assert (ledger.remaining(0), ledger.remaining(1)) == (1, 3)
    ledger.mark(0, [D])
    assert ledger == Ledger(DatasetFingerprint.of([B, C, D]), closed_epochs=1)


def test_ledger_epoch_whole_without_removed_problems_closes() -> None:
    ledger = marked({0: [A, B, C]})
    ledger.set_dataset(*dataset(A, B))
    assert ledger.closed_epochs == 1


def test_ledger_removed_problem_that_comes_back_is_still_used(tmp_path: Path) -> None:
    ledger = marked({0: [A, B]})
    ledger.set_dataset(*dataset(B, C, D))
    ledger.mark(0, [C])
    ledger.save(tmp_path)
    again = Ledger.load(tmp_path)
    assert again == ledger and repr(again) == repr(ledger)
    again.set_dataset(*dataset(A, B, C, D))
    assert names(again.used(0)) == [A, B, C] and again.remaining(0) == 1
    again.mark(0, [D])
    assert again == Ledger(ABCD, closed_epochs=1)


def test_ledger_curriculum_keeps_removed_problems_used() -> None:
    ledger = marked({0: [A]})
    ledger.set_dataset(*dataset(B, C, D))  # no used problem is left: the epoch gets a curriculum anew
    ledger.set_curriculum(0, skipped=[B], preferred=[])
    ledger.set_dataset(*dataset(A, B, C, D))
    assert names(ledger.used(0)) == [A] and ledger.remaining(0) == 2


def test_ledger_problem_outside_of_dataset_raises() -> None:
    ledger = Ledger()
    ledger.set_dataset(*dataset(A, B, C))
    assert ledger.contains([A, D]).tolist() == [True, False]
    assert Ledger().contains([A, D]).tolist() == [True, True]
    message = f"epoch 0: 1 problems are not in the dataset: {D}"
    with pytest.raises(LedgerError, match=message):
        ledger.mark(0, [A, D])
    with pytest.raises(LedgerError, match=message):
        ledger.set_curriculum(0, skipped=[D], preferred=[])
    assert len(ledger.used(0)) == 0 and ledger.copy().contains([D]).tolist() == [False]


def test_ledger_dataset_smaller_than_used_raises() -> None:
    ledger = marked({0: [A, B, C]})
    with pytest.raises(LedgerError, match="epoch 0: 3 problems would be marked, but the dataset holds 2"):
        ledger.fingerprint = DatasetFingerprint.of([A, B])
    assert ledger.fingerprint == ABCD


# Equality, copies and files


def test_ledger_equal_records_are_equal() -> None:
    ledger = Ledger(ABCD)
    ledger.set_curriculum(1, [A], [B])
    ledger.mark(0, [A, B])
    other = Ledger(ABCD)
    other.mark(0, [B])
    other.mark(0, [A])
    other.set_curriculum(1, iter([A]), {B})
    other.set_curriculum(2, [], [])
    assert ledger == other and ledger == ledger.copy() and repr(ledger) == repr(other)
    assert ledger != "ledger"


def test_ledger_different_records_are_unequal() -> None:
    def ledger(
        fingerprint: DatasetFingerprint | None = ABCD,
        closed_epochs: int = 0,
        used: Sequence[str] = (A,),
        skipped: Sequence[str] = (B,),
        preferred: Sequence[str] = (C,),
        epoch: int = 5,
    ) -> Ledger:
        made = Ledger(fingerprint, closed_epochs)
        made.set_curriculum(epoch, skipped, preferred)
        made.mark(epoch, used)
        return made

    others = [
        ledger(fingerprint=None),
        ledger(fingerprint=DatasetFingerprint(4, "0" * 32)),
        ledger(closed_epochs=1),
        ledger(used=[D]),
        ledger(used=[]),
        ledger(skipped=[]),
        ledger(preferred=[D]),
        ledger(epoch=6),
        ledger(used=[B], skipped=[A]),
    ]
    assert ledger() == ledger()
    assert [other for other in others if other == ledger()] == []


def test_ledger_copy_is_independent() -> None:
    ledger = marked({0: [A, B]})
    other = ledger.copy()
    other.mark(0, [C, D])
    assert (ledger.closed_epochs, other.closed_epochs) == (0, 1)
    ledger.mark(0, [C])
    assert names(ledger.used(0)) == [A, B, C] and names(other.used(0)) == []


@pytest.fixture
def ledger() -> Ledger:
    """Ledger with closed and open epochs, marks, and a curriculum."""
    made = Ledger(ABCD)
    made.mark(0, [A, B, C, D])
    made.mark(1, [B, C])
    made.set_curriculum(2, [A], [B, C])
    return made


def test_ledger_saved_and_loaded_is_equal_and_continues(ledger: Ledger, tmp_path: Path) -> None:
    ledger.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.npz"]
    again = Ledger.load(tmp_path)
    assert again == ledger and again.fingerprint == ABCD
    again.mark(1, [D, A])
    again.mark(2, [B])
    assert (again.closed_epochs, again.remaining(2)) == (2, 2)
    with pytest.raises(LedgerError):
        again.mark(2, [B])


@pytest.mark.parametrize("empty", [Ledger(), Ledger(ABCD), Ledger(ABCD, closed_epochs=7)], ids=repr)
def test_ledger_without_open_epoch_loads_equal(empty: Ledger, tmp_path: Path) -> None:
    empty.save(tmp_path)
    again = Ledger.load(tmp_path)
    assert again == empty and again.closed_epochs == empty.closed_epochs and again.fingerprint == empty.fingerprint


@given(data=st.data())
@examples(10)
def test_ledger_files_of_any_mark_order_are_equal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    ids = problems(40)
    marks = [(epoch, ids[n : n + 10]) for epoch in (0, 1) for n in range(0, 40, 10)]
    files = []
    for order in (marks, data.draw(st.permutations(marks))):
        folder = tmp_path_factory.mktemp("ledger")
        marked_in_order = Ledger(DatasetFingerprint(100, "0" * 32))
        for epoch, some_ids in order:
            marked_in_order.mark(epoch, some_ids)
        marked_in_order.save(folder)
        files.append((folder / FILE_NAME).read_bytes())
        with zipfile.ZipFile(folder / FILE_NAME) as file:
            assert {info.date_time[0] for info in file.infolist()} == {1980}  # not the clock of this machine
    assert files[0] == files[1]


def test_ledger_file_takes_eight_bytes_per_open_mark(tmp_path: Path) -> None:
    ids = problems(10_000)
    ledger = Ledger(DatasetFingerprint.of(ids))
    sizes = []
    for some_ids in (ids[:0], ids[:1_000], ids[1_000:9_999], ids[9_999:]):
        ledger.mark(ledger.epoch, some_ids)
        ledger.save(tmp_path)
        sizes.append((tmp_path / FILE_NAME).stat().st_size)
    empty, of_1_000, of_9_999, whole = sizes
    assert of_9_999 - of_1_000 == 8 * 8_999
    assert of_1_000 - empty < 8 * 1_000 + 1_000  # and headers of the arrays
    assert whole == empty < 2_000 and ledger.epoch == 1  # a whole epoch takes nothing


def test_ledger_load_missing_file_raises_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=FILE_NAME):
        Ledger.load(tmp_path)


def test_ledger_load_damaged_file_raises_or_is_harmless(ledger: Ledger, tmp_path: Path) -> None:
    ledger.save(tmp_path)
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    refused, harmless = 0, 0

    @given(position=st.integers(0, len(whole) - 1), flipped=st.sampled_from([None, 0x01, 0xFF]) | st.integers(1, 255))
    @examples(250)
    def damage(position: int, flipped: int | None) -> None:
        """Cut the file short, or change one byte."""
        nonlocal refused, harmless
        changed = b"" if flipped is None else bytes([whole[position] ^ flipped]) + whole[position + 1 :]
        path.write_bytes(whole[:position] + changed)
        try:
            again = Ledger.load(tmp_path)
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith(f"{path}: cannot be read as a ledger: ")
        else:
            harmless += 1  # such as the time of day in the zip directory
            assert flipped is not None and again == ledger

    damage()
    assert refused > harmless  # most bytes are covered by a checksum


def test_ledger_load_huge_size_raises_without_allocating(ledger: Ledger, tmp_path: Path) -> None:
    ledger.save(tmp_path)
    path = tmp_path / FILE_NAME
    size, other = b"(2,), }" + b" " * 20, b"(%d,), }" % 10**15
    assert len(other) < len(size) and size in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(size, other.ljust(len(size))))
    with pytest.raises(CheckpointError, match=r"\.npy is damaged$"):
        Ledger.load(tmp_path)


class Trap:
    """Object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_ledger_load_other_file_raises_without_unpickling(tmp_path: Path) -> None:
    file, sprung = tmp_path / FILE_NAME, tmp_path / "sprung"
    trap = np.array([Trap(sprung)], dtype=object)
    for write in (
        lambda: file.write_text('{"problems_used": 3}'),
        lambda: file.write_bytes(pickle.dumps(trap)),
        lambda: np.savez(file, header=trap),
        lambda: np.savez(file, weights=np.zeros(3)),
        lambda: np.savez(file, header=np.frombuffer(b"[1]", dtype=np.uint8)),
    ):
        write()
        with pytest.raises(CheckpointError, match=r"ledger\.npz: cannot be read as a ledger: "):
            Ledger.load(tmp_path)
    assert not sprung.exists()
    os.unlink(file)
    file.mkdir()
    with pytest.raises(CheckpointError, match=r"ledger\.npz: cannot be read as a ledger: "):
        Ledger.load(tmp_path)


def test_ledger_load_other_format_raises(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("grpo_ray.data.ledger.FORMAT", 2)
        ledger.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read as a ledger: format 2, not 1$"):
        Ledger.load(tmp_path)


def test_ledger_error_is_grpo_ray_error_after_pickling() -> None:
    error = pickle.loads(pickle.dumps(LedgerError("epoch 0: ...")))
    assert isinstance(error, GrpoRayError) and isinstance(error, RuntimeError) and str(error) == "epoch 0: ..."


# Any sequence of operations


class AnyRun(RuleBasedStateMachine):
    """Operations on three epochs in any order, restarts included, compared with plain sets."""

    EPOCHS = range(3)

    @initialize(ids=unique_ids(least=1, most=12), shares=st.tuples(*[st.sampled_from([0.0, 0.0, 0.3, 0.9])] * 3))
    def begin(self, ids: list[str], shares: tuple[float, ...]) -> None:
        """Pass over a share of each epoch's problems."""
        self.ids = ids
        self.ledger = Ledger(DatasetFingerprint.of(ids))
        self.used: dict[int, set[str]] = {epoch: set() for epoch in self.EPOCHS}
        self.left_out: dict[int, set[str]] = {epoch: set() for epoch in self.EPOCHS}
        self.folder = tempfile.TemporaryDirectory()
        self.saved: bytes | None = None
        self.open: dict[int, set[str]] = {epoch: set() for epoch in self.EPOCHS}
        for epoch, share in enumerate(shares):
            self.left_out[epoch] = set(ids[: int(share * len(ids))])
            self.ledger.set_curriculum(epoch, self.left_out[epoch], ids[-2:])

    def left(self, epoch: int) -> list[str]:
        return [each for each in self.ids if each not in self.used[epoch] | self.left_out[epoch]]

    @property
    def closed_epochs(self) -> int:
        return next((epoch for epoch in self.EPOCHS if self.left(epoch)), len(self.EPOCHS))

    def refuses(self, epoch: int, ids: list[str]) -> None:
        before = self.ledger.copy()
        with pytest.raises(LedgerError):
            self.ledger.mark(epoch, ids)
        assert self.ledger == before

    @rule(data=st.data(), epoch=st.sampled_from(EPOCHS))
    def set_curriculum(self, data: st.DataObject, epoch: int) -> None:
        left_out = data.draw(st.lists(st.sampled_from(self.ids), unique=True, max_size=len(self.ids) - 1))
        preferred = data.draw(st.lists(st.sampled_from(self.ids), max_size=3))
        if epoch < self.closed_epochs or self.used[epoch]:
            before = self.ledger.copy()
            with pytest.raises(LedgerError):
                self.ledger.set_curriculum(epoch, left_out, preferred)
            assert self.ledger == before
        else:
            self.ledger.set_curriculum(epoch, left_out, preferred)
            self.left_out[epoch] = set(left_out)
            assert names(self.ledger.preferred(epoch)) == sorted(set(preferred))

    @rule(data=st.data(), epoch=st.sampled_from(EPOCHS))
    def mark(self, data: st.DataObject, epoch: int) -> None:
        if left := self.left(epoch):
            ids = data.draw(st.lists(st.sampled_from(left), min_size=1, max_size=5, unique=True))
            self.ledger.mark(epoch, ids)
            self.used[epoch] |= set(ids)
            self.open[epoch] -= set(ids)

    @rule(data=st.data())
    def set_open(self, data: st.DataObject) -> None:
        self.open = {
            epoch: data.draw(st.sets(st.sampled_from(left))) if (left := self.left(epoch)) else set()
            for epoch in self.EPOCHS
        }
        self.ledger.set_open({epoch: ids for epoch, ids in self.open.items() if ids})

    @rule(data=st.data(), epoch=st.sampled_from(EPOCHS))
    def set_used_open(self, data: st.DataObject, epoch: int) -> None:
        if self.used[epoch]:
            before = self.ledger.copy()
            with pytest.raises(LedgerError):
                self.ledger.set_open({epoch: [data.draw(st.sampled_from(sorted(self.used[epoch])))]})
            assert self.ledger == before

    @precondition(lambda self: self.closed_epochs < 3 and self.left_out[self.closed_epochs])
    @rule(data=st.data())
    def mark_skipped(self, data: st.DataObject) -> None:
        epoch = self.closed_epochs
        self.refuses(epoch, [data.draw(st.sampled_from(sorted(self.left_out[epoch])))])

    @rule(data=st.data(), epoch=st.sampled_from(EPOCHS))
    def mark_again(self, data: st.DataObject, epoch: int) -> None:
        if counted := sorted(self.used[epoch] | self.left_out[epoch]):
            self.refuses(epoch, [*self.left(epoch)[:2], data.draw(st.sampled_from(counted))])

    @rule(data=st.data(), epoch=st.sampled_from(EPOCHS))
    def mark_twice_at_once(self, data: st.DataObject, epoch: int) -> None:
        if left := self.left(epoch):
            self.refuses(epoch, [data.draw(st.sampled_from(left))] * 2)

    @rule()
    def save(self) -> None:
        self.ledger.save(Path(self.folder.name))
        self.saved = pickle.dumps((self.used, self.left_out, self.open))

    @precondition(lambda self: self.saved)
    @rule()
    def restart_from_checkpoint(self) -> None:
        assert self.saved is not None
        self.ledger = Ledger.load(Path(self.folder.name))
        self.used, self.left_out, self.open = pickle.loads(self.saved)

    @invariant()
    def counts_are_those_of_the_sets(self) -> None:
        assert self.ledger.closed_epochs == self.ledger.epoch == self.closed_epochs
        for epoch in self.EPOCHS:
            assert self.ledger.remaining(epoch) == len(self.left(epoch))
            if epoch >= self.closed_epochs:
                assert names(self.ledger.used(epoch)) == sorted(self.used[epoch])
                assert names(self.ledger.skipped(epoch)) == sorted(self.left_out[epoch])
                assert names(self.ledger.open(epoch)) == sorted(self.open[epoch])
                assert self.ledger.is_used(epoch, self.ids).tolist() == [each in self.used[epoch] for each in self.ids]

    def teardown(self) -> None:
        """Finish the run: whatever happened, exactly the rest is left."""
        for epoch in self.EPOCHS:
            if left := self.left(epoch):
                self.ledger.mark(epoch, left)
        assert self.ledger == Ledger(DatasetFingerprint.of(self.ids), closed_epochs=len(self.EPOCHS))
        self.folder.cleanup()


def test_ledger_set_dataset_removed_problems_are_not_open() -> None:
    ledger = Ledger(DatasetFingerprint.of([A, B, C]))
    ledger.set_open({0: [A, B], 1: [C]})
    ledger.set_dataset(np.sort(ids_to_uint64([A, C])), DatasetFingerprint.of([A, C]))
    assert names(ledger.open(0)) == [A] and names(ledger.open(1)) == [C]
    assert ledger.remaining(0) == 2  # open problems are not used


def test_ledger_any_run_counts_each_problem_once_per_epoch() -> None:
    run_state_machine_as_test(
        AnyRun, settings=settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)
    )


@given(ids=unique_ids(), data=st.data())
@examples(30)
def test_ledger_any_order_and_size_of_marks_is_equal(ids: list[str], data: st.DataObject) -> None:
    fingerprint = DatasetFingerprint.of([*ids, A]) if A not in ids else DatasetFingerprint(len(ids) + 1, "0" * 32)
    ledgers = []
    for _ in range(2):
        ledger = Ledger(fingerprint)
        left = data.draw(st.permutations(ids))
        while left:
            size = data.draw(st.integers(1, 9))
            ledger.mark(0, left[:size])
            left = left[size:]
        ledgers.append(ledger)
    assert ledgers[0] == ledgers[1] and ledgers[0].remaining(0) == 1
