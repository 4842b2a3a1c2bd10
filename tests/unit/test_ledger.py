import itertools
import os
import pickle
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from grpo_ray.errors import CheckpointError, GrpoRayError, LedgerError
from grpo_ray.ledger import FILE_NAME, Contents, Ledger, to_ids, to_numbers


def problems(count: int, seed: int = 0) -> list[str]:
    """Ids of so many problems, in no order."""
    choice = random.Random(seed)
    return [f"{choice.getrandbits(64):016x}" for _ in range(count)]


A, B, C, D = (letter * 16 for letter in "abcd")
ABCD = Contents.of([A, B, C, D])


def names(numbers: np.ndarray) -> list[str]:
    """The ids of what a ledger gave, which must be sorted numbers."""
    assert numbers.dtype == np.uint64 and numbers.tolist() == sorted(set(numbers.tolist()))
    return to_ids(numbers)


def marked(epochs: dict[int, Iterable[str]], contents: Contents | None = ABCD) -> Ledger:
    ledger = Ledger(contents)
    for epoch, ids in epochs.items():
        ledger.mark(epoch, ids)
    return ledger


# Ids and numbers


def test_ids_become_numbers_and_come_back_in_the_order_given():
    ids = ["ffffffffffffffff", "0000000000000000", "00000000000000ff", *problems(100)]
    assert to_numbers(ids[:3]).tolist() == [2**64 - 1, 0, 255]
    assert to_ids(to_numbers(ids)) == ids
    assert to_numbers(iter(ids)).dtype == to_numbers([]).dtype == np.uint64
    assert to_ids(to_numbers([])) == []


@pytest.mark.parametrize(
    "wrong",
    ["", "abc", "a" * 17, "a" * 32, "A" * 16, "x" * 16, " " + "a" * 15, "0x" + "a" * 14, "a" * 16 + "\n", "é" * 16],
)
def test_what_is_no_id_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match="a problem id is 16 hex digits, not ") as caught:
        to_numbers([A, wrong, B])
    assert repr(wrong) in str(caught.value)


# What a dataset holds


def test_contents_do_not_depend_on_the_order_of_problems():
    ids = problems(500)
    assert Contents.of(ids) == Contents.of(sorted(ids)) == Contents.of(iter(ids[::-1]))


def test_contents_of_shards_add_up_to_those_of_the_whole_however_it_is_cut():
    ids = problems(300)
    for cuts in ([0, 300], [7], [100, 200], [1, 2, 3, 299]):
        edges = [0, *cuts, 300]
        parts = [Contents.of(ids[begin:end]) for begin, end in itertools.pairwise(edges)]
        assert sum(parts[1:], parts[0]) == Contents.of(ids)


def test_contents_differ_as_soon_as_one_problem_is_another():
    ids = problems(50)
    others = [Contents.of([*ids[:n], other, *ids[n + 1 :]]) for n, other in enumerate(problems(50, seed=1))]
    assert len({Contents.of(ids), *others, Contents.of(ids[1:]), Contents.of([*ids, A])}) == 53


def test_problems_that_sum_up_alike_are_other_contents():
    # As numbers 1 + 4 = 2 + 3: a checksum that added the ids themselves could not tell them apart.
    one, two, three, four = (f"{n:016x}" for n in (1, 2, 3, 4))
    assert Contents.of([one, four]) != Contents.of([two, three])


def test_the_checksum_is_the_same_in_every_version():
    # It is kept in checkpoints: a changed hash would take every old run's dataset for another one.
    assert Contents.of([]) == Contents(0, "0" * 32)
    assert Contents(4, "0622b2768768be5527bc58492fa54f29") == ABCD


# Marking


def test_marked_problems_are_used_in_their_epoch_and_no_other():
    ledger = marked({0: [C, A]})
    assert names(ledger.used(0)) == [A, C] and names(ledger.used(1)) == []
    assert ledger.is_used(0, [D, C, B, A]).tolist() == [False, True, False, True]
    assert ledger.is_used(1, [A, C]).tolist() == [False, False]
    assert (ledger.epoch, ledger.remaining(0), ledger.remaining(1)) == (0, 2, 4)


def test_an_empty_ledger_answers_for_every_epoch():
    ledger = Ledger(ABCD)
    for numbers in (ledger.used(5), ledger.passed_over(5), ledger.preferred(5)):
        assert names(numbers) == []
    answer = ledger.is_used(5, [A])
    assert answer.tolist() == [False] and answer.dtype == bool
    assert ledger.is_used(0, []).shape == (0,)
    assert ledger.remaining(5) == 4


@pytest.mark.parametrize(
    "ids, said",
    [
        ([B, A], f"epoch 0: 1 problems would be used twice: {A}"),
        ([C, D, C], f"epoch 0: 1 problems would be marked twice at once: {C}"),
        ([C, B], f"epoch 0: 1 problems would be used, though passed over: {B}"),
        ([C, D, "0" * 16], "epoch 0: 5 problems would be marked, but the dataset holds 4"),
    ],
)
def test_a_problem_is_never_counted_twice_and_a_refused_mark_leaves_no_trace(ids, said):
    ledger = Ledger(ABCD)
    ledger.open_round(0, passed_over=[B], preferred=[])
    ledger.mark(0, [A])
    before = ledger.copy()
    with pytest.raises(LedgerError) as caught:
        ledger.mark(0, ids)
    assert str(caught.value) == said
    assert ledger == before
    ledger.mark(0, [C])


def test_the_same_problem_is_used_again_in_the_next_epoch():
    assert marked({0: [A], 1: [A]}).remaining(1) == 3


def test_many_problems_are_counted_but_not_all_of_them_named():
    ids = sorted(problems(10))
    with pytest.raises(LedgerError, match=f"10 problems would be used twice: {ids[0]}, {ids[1]}, {ids[2]} ...$"):
        marked({0: ids}, None).mark(0, ids)


def test_an_epoch_closes_with_its_last_problem_and_takes_no_other():
    ledger = marked({0: [A, B, C]})
    assert (ledger.closed, ledger.epoch) == (0, 0)
    ledger.mark(0, [D])
    assert (ledger.closed, ledger.epoch, ledger.remaining(0)) == (1, 1, 0)
    assert names(ledger.used(0)) == []
    assert ledger.is_used(0, [A, D]).tolist() == [True, True]
    with pytest.raises(LedgerError, match=r"^epoch 0 is closed: every problem of it is used$"):
        ledger.mark(0, [A])
    with pytest.raises(LedgerError, match=r"^epoch -1 is closed"):
        ledger.mark(-1, [A])


def test_epochs_close_in_order():
    ledger = marked({0: [A, B, C], 1: [A, B, C, D], 2: [A]})
    assert (ledger.closed, ledger.remaining(1), len(ledger.used(1))) == (0, 0, 4)
    with pytest.raises(LedgerError, match="5 problems would be marked"):
        ledger.mark(1, ["0" * 16])
    ledger.mark(0, [D])
    assert (ledger.closed, ledger.remaining(2)) == (2, 3)
    assert names(ledger.used(2)) == [A]


def test_without_contents_marks_are_taken_and_no_epoch_closes():
    ledger = marked({0: [A, B, C, D]}, contents=None)
    assert (ledger.closed, len(ledger.used(0))) == (0, 4)
    with pytest.raises(LedgerError, match="what the dataset holds is not known"):
        ledger.remaining(0)
    ledger.contents = ABCD
    assert (ledger.closed, ledger.remaining(0)) == (1, 0)


def test_what_a_ledger_gives_cannot_be_written_into():
    ledger = marked({0: [A]})
    ledger.open_round(1, [B], [C])
    for numbers in (ledger.used(0), ledger.passed_over(1), ledger.preferred(1), ledger.used(7)):
        with pytest.raises(ValueError, match="read-only"):
            numbers[:] = 0


def test_marks_in_tens_of_thousands_take_no_time():
    ids = problems(100_000)
    ledger = Ledger(Contents(100_001, ""))
    begun = time.process_time()
    for first in range(0, len(ids), 64):
        ledger.mark(0, ids[first : first + 64])
    assert time.process_time() - begun < 5  # 0.2 s on one core
    assert (len(ledger.used(0)), ledger.remaining(0)) == (100_000, 1)


# The curriculum of an epoch


def test_problems_passed_over_count_toward_the_epoch_and_are_not_used():
    ledger = Ledger(ABCD)
    ledger.open_round(0, passed_over=[D, B], preferred=[C])
    assert names(ledger.passed_over(0)) == [B, D] and names(ledger.preferred(0)) == [C]
    assert ledger.remaining(0) == 2
    assert ledger.is_used(0, [B, C]).tolist() == [False, False]
    ledger.mark(0, [A])
    assert names(ledger.preferred(0)) == [C]
    ledger.mark(0, [C])
    assert ledger.closed == 1
    for numbers in (ledger.passed_over(0), ledger.preferred(0), ledger.passed_over(1)):
        assert names(numbers) == []


def test_preferred_problems_do_not_count():
    ledger = Ledger(ABCD)
    ledger.open_round(0, [], preferred=[A, B, C, D, D])
    assert (ledger.closed, ledger.remaining(0)) == (0, 4)
    assert names(ledger.preferred(0)) == [A, B, C, D]


def test_a_curriculum_can_be_replaced_until_its_epoch_has_begun():
    ledger = Ledger(ABCD)
    ledger.open_round(0, [A], [B])
    ledger.open_round(0, [C], [])
    assert names(ledger.passed_over(0)) == [C] and names(ledger.preferred(0)) == []
    ledger.mark(0, [B])
    before = ledger.copy()
    with pytest.raises(LedgerError, match=r"^epoch 0 has begun: 1 problems are used, too late for its curriculum$"):
        ledger.open_round(0, [A], [])
    assert ledger == before
    ledger.mark(0, [A, D])
    with pytest.raises(LedgerError, match="epoch 0 is closed"):
        ledger.open_round(0, [], [])


def test_a_curriculum_of_more_problems_than_there_are_is_refused():
    ledger = Ledger(ABCD)
    with pytest.raises(LedgerError, match="would be passed over twice"):
        ledger.open_round(0, [A, B, A], [])
    with pytest.raises(LedgerError, match="5 problems would be marked"):
        ledger.open_round(0, [A, B, C, D, "0" * 16], [])
    assert ledger == Ledger(ABCD)


# A dataset that changes


def test_a_dataset_that_grew_keeps_the_epoch_open_for_what_is_new():
    ledger = marked({0: [A, B, C, D], 1: [A, B, C]})
    new = "0" * 16
    ledger.contents = Contents.of([new, A, B, C, D])
    assert (ledger.closed, ledger.remaining(0), ledger.remaining(1)) == (1, 0, 2)
    ledger.mark(1, [new, D])
    assert ledger.closed == 2


def test_problems_that_a_dataset_lost_are_forgotten():
    ledger = Ledger(ABCD)
    ledger.open_round(0, passed_over=[A, C], preferred=[D])
    ledger.open_round(1, passed_over=[A], preferred=[])
    ledger.mark(0, [B])
    ledger.keep_only(to_numbers([D, C, B]))
    ledger.contents = Contents.of([B, C, D])
    assert names(ledger.used(0)) == [B] and names(ledger.passed_over(0)) == [C] and names(ledger.preferred(0)) == [D]
    assert (ledger.remaining(0), ledger.remaining(1)) == (1, 3)
    ledger.mark(0, [D])
    assert ledger == Ledger(Contents.of([B, C, D]), closed=1)


def test_an_epoch_that_is_whole_without_the_lost_problems_closes():
    ledger = marked({0: [A, B, C]})
    ledger.keep_only(to_numbers([A, B]))
    assert ledger.closed == 0
    ledger.contents = Contents.of([A, B])
    assert ledger.closed == 1


def test_a_dataset_smaller_than_what_is_used_of_it_is_refused():
    ledger = marked({0: [A, B, C]})
    with pytest.raises(LedgerError, match="epoch 0: 3 problems would be marked, but the dataset holds 2"):
        ledger.contents = Contents.of([A, B])
    assert ledger.contents == ABCD


# Equality, copies and files


def test_ledgers_are_equal_by_what_they_record():
    ledger = Ledger(ABCD)
    ledger.open_round(1, [A], [B])
    ledger.mark(0, [A, B])
    other = Ledger(ABCD)
    other.mark(0, [B])
    other.mark(0, [A])
    other.open_round(1, iter([A]), {B})
    other.open_round(2, [], [])
    assert ledger == other and ledger == ledger.copy() and repr(ledger) == repr(other)
    assert ledger != "ledger"


def test_ledgers_differ_in_each_thing_that_they_record():
    def ledger(contents=ABCD, closed=0, used=(A,), passed_over=(B,), preferred=(C,), epoch=5) -> Ledger:
        made = Ledger(contents, closed)
        made.open_round(epoch, passed_over, preferred)
        made.mark(epoch, used)
        return made

    others = [
        ledger(contents=None),
        ledger(contents=Contents(4, "0" * 32)),
        ledger(closed=1),
        ledger(used=[D]),
        ledger(used=[]),
        ledger(passed_over=[]),
        ledger(preferred=[D]),
        ledger(epoch=6),
        ledger(used=[B], passed_over=[A]),
    ]
    assert ledger() == ledger()
    assert [other for other in others if other == ledger()] == []


def test_a_copy_goes_its_own_way():
    ledger = marked({0: [A, B]})
    other = ledger.copy()
    other.mark(0, [C, D])
    assert (ledger.closed, other.closed) == (0, 1)
    ledger.mark(0, [C])
    assert names(ledger.used(0)) == [A, B, C] and names(other.used(0)) == []


@pytest.fixture
def ledger() -> Ledger:
    """A ledger with something of everything."""
    made = Ledger(ABCD)
    made.mark(0, [A, B, C, D])
    made.mark(1, [B, C])
    made.open_round(2, [A], [B, C])
    return made


def test_a_saved_ledger_comes_back_equal_and_goes_on(ledger, tmp_path):
    ledger.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.npz"]
    again = Ledger.load(tmp_path)
    assert again == ledger and again.contents == ABCD
    again.mark(1, [D, A])
    again.mark(2, [B])
    assert (again.closed, again.remaining(2)) == (2, 2)
    with pytest.raises(LedgerError):
        again.mark(2, [B])


@pytest.mark.parametrize("empty", [Ledger(), Ledger(ABCD), Ledger(ABCD, closed=7)], ids=repr)
def test_a_ledger_of_no_open_epoch_comes_back(empty, tmp_path):
    empty.save(tmp_path)
    again = Ledger.load(tmp_path)
    assert again == empty and again.closed == empty.closed and again.contents == empty.contents


def test_equal_ledgers_are_equal_files_whenever_and_in_whatever_order_they_were_made(tmp_path):
    ids = problems(200)
    files = []
    for seed in range(3):
        made = Ledger(Contents(1000, "0" * 32))
        calls = [(epoch, ids[n : n + 10]) for epoch in (0, 1) for n in range(0, 200, 10)]
        random.Random(seed).shuffle(calls)
        for epoch, some in calls:
            made.mark(epoch, some)
        folder = tmp_path / str(seed)
        folder.mkdir()
        made.save(folder)
        files.append((folder / FILE_NAME).read_bytes())
        time.sleep(0.01)
    assert files[0] == files[1] == files[2]
    with zipfile.ZipFile(tmp_path / "0" / FILE_NAME) as file:
        assert {info.date_time[0] for info in file.infolist()} == {1980}  # no clock of this machine in it


def test_a_whole_epoch_costs_nothing_and_an_open_one_eight_bytes_a_problem(tmp_path):
    ids = problems(10_000)
    made = Ledger(Contents.of(ids))
    sizes = []
    for some in (ids[:0], ids[:9_999], ids[9_999:]):
        made.mark(made.epoch, some)
        made.save(tmp_path)
        sizes.append((tmp_path / FILE_NAME).stat().st_size)
    assert sizes[1] - sizes[0] == pytest.approx(8 * 9_999, abs=1_000)
    assert sizes[2] == sizes[0]


def test_a_checkpoint_without_a_ledger_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=FILE_NAME):
        Ledger.load(tmp_path)


def spoilt(whole: bytes) -> Iterator[bytes]:
    """The file cut short anywhere, or with any one byte changed."""
    for n in range(0, len(whole), 7):
        yield whole[:n]
        yield whole[:n] + bytes([whole[n] ^ 0xFF]) + whole[n + 1 :]
        yield whole[:n] + bytes([whole[n] ^ 0x01]) + whole[n + 1 :]


def test_a_spoilt_file_is_refused_by_name_or_says_what_it_said_before(ledger, tmp_path):
    ledger.save(tmp_path)
    path = tmp_path / FILE_NAME
    refused, harmless = 0, 0
    for content in spoilt(path.read_bytes()):
        path.write_bytes(content)
        try:
            again = Ledger.load(tmp_path)
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith(f"{path}: cannot be read as a ledger: ")
        else:
            harmless += 1  # such as the time of day that zip keeps
            assert again == ledger
    assert refused > 4 * harmless


def test_a_spoilt_size_is_refused_before_memory_is_asked_for_it(ledger, tmp_path):
    ledger.save(tmp_path)
    path = tmp_path / FILE_NAME
    size, other = b"(2,), }" + b" " * 20, b"(%d,), }" % 10**15
    assert len(other) < len(size) and size in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(size, other.ljust(len(size))))
    with pytest.raises(CheckpointError, match=r"\.npy is spoilt$"):
        Ledger.load(tmp_path)


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_what_is_no_ledger_is_refused_and_never_unpickled(tmp_path):
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


def test_a_ledger_of_another_format_is_refused(ledger, tmp_path, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr("grpo_ray.ledger.FORMAT", 2)
        ledger.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read as a ledger: format 2, not 1$"):
        Ledger.load(tmp_path)


def test_a_ledger_error_is_one_of_ours_and_survives_pickling():
    error = pickle.loads(pickle.dumps(LedgerError("epoch 0: ...")))
    assert isinstance(error, GrpoRayError) and isinstance(error, RuntimeError) and str(error) == "epoch 0: ..."


def test_the_ledger_can_be_read_without_a_heavy_library():
    code = "import sys, grpo_ray.ledger; print({'pyarrow', 'ray', 'torch', 'pandas'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


# Whatever happens, in whatever order


@pytest.mark.parametrize("seed", range(20))
def test_however_a_run_goes_each_problem_is_counted_once_in_each_epoch(seed, tmp_path):
    """Random marks over three epochs beside plain sets; killed, restored and cheated on along the way."""
    choice = random.Random(seed)
    count = choice.choice([1, 2, 7, 40])
    ids = problems(count, seed)
    ledger = Ledger(Contents.of(ids))
    left = {epoch: list(ids) for epoch in range(3)}
    used: dict[int, set[str]] = {epoch: set() for epoch in range(3)}
    over: dict[int, set[str]] = {epoch: set() for epoch in range(3)}
    for epoch in left:
        choice.shuffle(left[epoch])
        if choice.random() < 0.5:
            over[epoch] = {left[epoch].pop() for _ in range(choice.randint(0, count - 1))}
            ledger.open_round(epoch, choice.sample(sorted(over[epoch]), len(over[epoch])), choice.choices(ids, k=3))
    saved = None
    while any(left.values()):
        epoch = choice.choice([each for each in left if left[each]])
        some = [left[epoch].pop() for _ in range(choice.randint(1, min(5, len(left[epoch]))))]
        ledger.mark(epoch, choice.sample(some, len(some)))
        used[epoch] |= set(some)
        whole = [len(used[n]) + len(over[n]) == count for n in range(3)]
        assert ledger.closed == [*whole, False].index(False)
        for n in range(3):
            assert ledger.remaining(n) == count - len(used[n]) - len(over[n])
            if n >= ledger.closed:
                assert names(ledger.used(n)) == sorted(used[n]) and names(ledger.passed_over(n)) == sorted(over[n])
                assert ledger.is_used(n, ids).tolist() == [each in used[n] for each in ids]
        before = ledger.copy()
        with pytest.raises(LedgerError):
            ledger.mark(epoch, [*left[epoch][:2], choice.choice(sorted(used[epoch] | over[epoch]))])
        assert ledger == before
        if choice.random() < 0.3:
            ledger.save(tmp_path)
            saved = pickle.dumps((left, used, over))
        elif saved and choice.random() < 0.1:  # the machine died: back to the last checkpoint
            ledger, (left, used, over) = Ledger.load(tmp_path), pickle.loads(saved)
            saved = None
    assert ledger == Ledger(Contents.of(ids), closed=3)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_and_the_size_of_marks_change_nothing(seed):
    choice = random.Random(seed)
    ids = problems(60)
    ledgers = []
    for _ in range(2):
        ledger = Ledger(Contents.of([*ids, A]))
        left = choice.sample(ids, len(ids))
        while left:
            size = choice.randint(1, 9)
            ledger.mark(0, left[:size])
            left = left[size:]
        ledgers.append(ledger)
    assert ledgers[0] == ledgers[1] and ledgers[0].remaining(0) == 1
