import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from grpo_ray.data import files
from grpo_ray.data.files import file_shards
from grpo_ray.data.stream import (
    SHARDS_PER_WINDOW,
    Round,
    Split,
    epochs_of,
    from_row,
    heldout_dataset,
    open_splits,
    survey,
    to_row,
    training_stream,
)
from grpo_ray.errors import DataError
from grpo_ray.ledger import Contents, to_numbers
from grpo_ray.problem import Problem, parse_problem
from grpo_ray.settings import load


def problem(number: int) -> Problem:
    return parse_problem({"prompt": f"Question {number}?", "solution": f"{number}"}, where="here")


@dataclass(frozen=True)
class Shelf:
    """A shard that is held in memory."""

    first: int
    rows: int

    def read(self) -> Iterator[Problem]:
        return map(problem, range(self.first, self.first + self.rows))


def shelves(count: int, rows: int) -> list[Shelf]:
    return [Shelf(rows * i, rows) for i in range(count)]


def numbers(split: Split, seed: int = 0, epochs: int = 1) -> list[list[int]]:
    """The numbers of the problems of each epoch, in the order of the stream."""
    order = epochs_of(split, seed)
    return [
        [int(p.solution) for window in range(order.windows) for p in order.window(epoch, window)]
        for epoch in range(epochs)
    ]


NONE = np.empty(0, dtype=np.uint64)


def ids(some: Sequence[int]) -> np.ndarray:
    """Sorted numbers of problems, as a round names them."""
    return np.sort(to_numbers(problem(number).id for number in some))


def dealt(split: Split, round: Round, seed: int = 0) -> list[int]:
    """The numbers of the problems that a round deals, in order."""
    order = epochs_of(split, seed)
    return [int(row["solution"]) for piece in range(order.pieces) for row in order.read(piece, round)]


# Rows


@pytest.mark.parametrize(
    "columns",
    [{}, {"topic": "sums", "difficulty": 3.5, "tags": ["a", {"b": None}], "ok": True}, {"id": "other", "epoch": 7}],
)
def test_a_problem_comes_back_the_same_from_its_row(columns):
    prompt = [{"role": "system", "content": "ünïcode 🧮"}, {"role": "user", "content": "a\n\\boxed{}\u2028"}]
    before = Problem(id="0123456789abcdef", prompt=prompt, solution="$\\frac{1}{2}$", columns=columns)
    row = to_row(before, epoch=3)
    assert from_row(row) == before and row["epoch"] == 3


def test_rows_have_the_same_types_whatever_their_columns_are():
    rows = [to_row(Problem(id="1", prompt=[], solution="s", columns=c), 0) for c in ({}, {"x": 1}, {"x": "text"})]
    assert {tuple((name, type(value)) for name, value in row.items()) for row in rows} == {
        (("id", str), ("epoch", int), ("prompt", str), ("solution", str), ("columns", str))
    }


# Order


def test_each_epoch_holds_every_problem_exactly_once():
    split = Split("some", shelves(3, 7))
    for epoch in numbers(split, epochs=4):
        assert sorted(epoch) == list(range(21))


@pytest.mark.parametrize("count", [1, SHARDS_PER_WINDOW, SHARDS_PER_WINDOW + 1, 3 * SHARDS_PER_WINDOW + 2])
def test_no_problem_is_lost_between_windows_of_many_shards(count):
    split = Split("some", shelves(count, 5))
    for epoch in numbers(split, epochs=2):
        assert sorted(epoch) == list(range(5 * count))
    windows_of_an_epoch = -(-count // SHARDS_PER_WINDOW)
    assert epochs_of(split, seed=0).windows == windows_of_an_epoch


def test_the_order_depends_on_seed_and_epoch_alone():
    split = Split("some", shelves(20, 5))
    order = numbers(split, seed=7, epochs=3)
    assert numbers(split, seed=7, epochs=3) == order
    assert numbers(Split("other name", shelves(20, 5)), seed=7, epochs=3) == order
    assert numbers(split, seed=7, epochs=1) == order[:1]  # a longer run begins like a shorter one
    assert numbers(split, seed=8, epochs=3) != order
    assert len({tuple(epoch) for epoch in order}) == 3


def test_a_dataset_of_one_shard_has_another_order_in_each_epoch_too():
    order = numbers(Split("some", shelves(1, 20)), epochs=4)
    assert len({tuple(epoch) for epoch in order}) == 4


def test_problems_of_one_window_are_mixed_and_so_are_the_windows():
    (order,) = numbers(Split("some", shelves(4 * SHARDS_PER_WINDOW, 10)))
    first = order[: 10 * SHARDS_PER_WINDOW]
    assert first != sorted(first)
    # Of 32 shards the first window holds 8 by chance: 8 neighbours from the start would be one draw in 10 million.
    assert {n // 10 for n in first} != set(range(SHARDS_PER_WINDOW))
    assert len({n // 10 for n in first[:10]}) > 1


def test_a_window_can_be_read_twice_alike():
    order = epochs_of(Split("some", shelves(2, 5)), seed=0)
    assert order.window(0, 0) == order.window(0, 0)


# Rounds


def test_a_round_deals_what_is_not_left_out_in_the_order_of_the_epoch():
    split = Split("some", shelves(20, 5))
    whole = numbers(split, seed=3, epochs=2)
    for epoch in (0, 1):
        used = whole[epoch][:37]
        assert dealt(split, Round(epoch, ids(used), NONE), seed=3) == whole[epoch][37:]
    assert dealt(split, Round(0, ids(whole[0]), NONE), seed=3) == []


def test_the_left_out_problems_are_known_by_content_when_files_come_in_another_order():
    split, reordered = Split("some", shelves(20, 5)), Split("some", list(reversed(shelves(10, 10))))
    used = numbers(split)[0][:33]
    assert sorted(used + dealt(reordered, Round(0, ids(used), NONE))) == list(range(100))


def test_what_is_carried_comes_first_then_the_preferred_then_the_rest():
    split = Split("some", shelves(20, 5))
    (order,) = numbers(split)
    preferred, carried = [5, 17, 88], [to_row(problem(1000), epoch=6), to_row(problem(1001), epoch=6)]
    found = dealt(split, Round(0, NONE, ids(preferred), tuple(carried)))
    assert found[:2] == [1000, 1001]
    assert found[2:5] == [n for n in order if n in preferred]
    assert found[5:] == [n for n in order if n not in preferred]


def test_a_problem_that_stands_in_several_rows_is_dealt_once(small_cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINES_PER_SHARD", 5)
    rows = [*range(10), *range(5, 15), 12, 12, 16, *range(15, 18), 0, 1, 2]  # many stand twice or more, some in a shard
    lines = (json.dumps({"prompt": f"Question {n}?", "solution": f"{n}"}) + "\n" for n in rows)
    (tmp_path / "a.jsonl").write_text("".join(lines))
    shards = file_shards(str(tmp_path / "a.jsonl"))
    found = survey(Split("some", shards))
    assert found.contents == Contents.of(problem(n).id for n in range(18))
    assert found.numbers.tolist() == ids(range(18)).tolist()
    for epoch in numbers(found.split, epochs=3):
        assert sorted(epoch) == list(range(18))
    limited = survey(Split("some", shards, limit=12))
    assert limited.contents.count == 12 and sorted(numbers(limited.split)[0]) == list(range(12))


@pytest.mark.parametrize("limit", [1, 7, 10, 12])
def test_a_limit_means_the_first_problems_of_the_dataset_in_every_epoch(limit):
    split = Split("some", shelves(3, 4), limit=limit)
    for epoch in numbers(split, epochs=3):
        assert sorted(epoch) == list(range(limit))


def test_a_limit_larger_than_the_dataset_takes_all():
    assert sorted(numbers(Split("some", shelves(3, 4), limit=100))[0]) == list(range(12))


def test_a_limit_counts_what_is_left_after_the_cut():
    kept = Split("some", shelves(10, 10), heldout_share=0.5)
    limited = Split("some", shelves(10, 10), heldout_share=0.5, limit=20)
    assert sorted(numbers(limited)[0]) == sorted([int(p.solution) for p in kept.read()][:20])


# The held-out cut


@pytest.mark.parametrize("share", [0.005, 0.1, 0.5, 0.9])
def test_heldout_and_training_problems_are_apart_and_together_all(share):
    training = Split("some", shelves(20, 50), share)
    heldout = Split("some", shelves(20, 50), share, keep_heldout=True)
    train, held = ({int(p.solution) for p in split.read()} for split in (training, heldout))
    assert not train & held and train | held == set(range(1000))
    # A thousand draws: within five standard deviations of their mean.
    assert abs(len(held) - 1000 * share) < 5 * (1000 * share * (1 - share)) ** 0.5 + 1


def test_the_cut_does_not_move_when_the_dataset_is_cut_into_other_shards():
    held = [
        {p.id for p in Split("some", shards, 0.1, keep_heldout=True).read()}
        for shards in (shelves(20, 50), shelves(1, 1000), list(reversed(shelves(50, 20))))
    ]
    assert held[0] == held[1] == held[2]


def test_windows_of_the_training_split_hold_nothing_that_is_held_out():
    training = Split("some", shelves(20, 10), 0.3)
    heldout = {int(p.solution) for p in Split("some", shelves(20, 10), 0.3, keep_heldout=True).read()}
    for epoch in numbers(training, epochs=2):
        assert sorted(epoch) == sorted(set(range(200)) - heldout)


def write_jsonl(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"Question {i}?", "solution": f"{i}"}) + "\n" for i in range(count)))
    return str(path)


def test_a_config_without_heldout_problems_cuts_them_off_the_training_file(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", 200)
    training, heldout = open_splits(load(None, [f"data.train={path}", "data.heldout=null", "data.heldout_share=0.2"]))
    train, held = ({p.id for p in split.read()} for split in (training, heldout))
    assert not train & held and len(train | held) == 200 and held


def test_a_config_with_heldout_problems_uses_both_files_whole(tmp_path):
    paths = [write_jsonl(tmp_path / "a.jsonl", 20), write_jsonl(tmp_path / "b.jsonl", 10)]
    settings = [f"data.train={paths[0]}", f"data.heldout={paths[1]}", "data.limit=15", "data.heldout_limit=5"]
    training, heldout = open_splits(load(None, settings))
    assert [int(p.solution) for p in training.read()] == list(range(15))
    assert [int(p.solution) for p in heldout.read()] == list(range(5))


# On Ray


@pytest.fixture(scope="module")
def small_cluster() -> Iterator[None]:
    import ray

    if ray.is_initialized():  # by other tests of this session, which want to keep it
        yield
        return
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


PROMPTS_PER_STEP = 8
EPOCHS = 3
PROBLEMS = 109  # 3 epochs are 327 problems: 40 steps and 7 left over, and epochs end inside steps


@pytest.fixture
def split(tmp_path, monkeypatch) -> Split:
    """109 problems in a file of 13 shards, so that an epoch has two windows."""
    monkeypatch.setattr(files, "LINES_PER_SHARD", 9)
    return Split("a", file_shards(write_jsonl(tmp_path / "a.jsonl", PROBLEMS)))


def deal(dataset, world_size: int, **others) -> list[dict]:
    """What each of so many workers is given."""
    from grpo_ray.launch import WholeSteps

    return WholeSteps(PROMPTS_PER_STEP).configure(
        {"train": dataset, **others}, world_size, worker_handles=None, worker_node_ids=None
    )


def read_all(iterators: Sequence, slow: bool = False) -> list[list[dict]]:
    """Read every worker's part to its end, all at the same time, as workers do; the first slowly, if so asked."""
    rows: list[list[dict]] = [[] for _ in iterators]
    errors: list[BaseException] = []

    def read(rank: int) -> None:
        try:
            for number, row in enumerate(iterators[rank].iter_rows()):
                rows[rank].append(row)
                if slow and rank == 0 and number % 40 == 0:
                    time.sleep(0.2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(len(iterators))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
    return rows


def steps_of(parts: list[list[dict]]) -> list[list[tuple[int, int]]]:
    """The (epoch, number) of each step's problems: first worker 0's, then worker 1's ..."""
    share = PROMPTS_PER_STEP // len(parts)
    count = -(-max(map(len, parts)) // share)
    return [
        [(row["epoch"], int(row["solution"])) for part in parts for row in part[share * s : share * (s + 1)]]
        for s in range(count)
    ]


@pytest.fixture
def board(small_cluster):
    import ray

    from grpo_ray.board import Board

    return ray.remote(num_cpus=0)(Board).remote()


def follow(iterators: Sequence, board, epochs: int, slow: bool = False) -> list[list[tuple[int, int]]]:
    """The (epoch, number) of each step's problems over some epochs, what one leaves over carried into the next."""
    import ray

    steps, carried = [], []
    share = PROMPTS_PER_STEP // len(iterators)
    for epoch in range(epochs):
        ray.get(board.begin_round.remote([ray.put(Round(epoch, NONE, NONE, tuple(carried)))]))
        parts = read_all(iterators, slow)
        whole = (PROBLEMS + len(carried)) // PROMPTS_PER_STEP
        steps += steps_of([part[: whole * share] for part in parts])
        carried = [row for part in parts for row in part[whole * share :]]
        assert len(carried) < PROMPTS_PER_STEP
    return [*steps, *steps_of([carried])]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_has_the_same_problems_in_the_same_order_with_any_number_of_workers(split, board, world_size):
    parts = [part["train"] for part in deal(training_stream(split, 5, board), world_size)]
    steps = follow(parts, board, EPOCHS)
    order = [(epoch, n) for epoch, some in enumerate(numbers(split, 5, EPOCHS)) for n in some]
    assert steps == [order[i : i + PROMPTS_PER_STEP] for i in range(0, len(order), PROMPTS_PER_STEP)]
    assert len(order) == PROBLEMS * EPOCHS and len(steps) == 41


def test_a_slow_worker_does_not_change_who_gets_what(split, board):
    expected = follow([part["train"] for part in deal(training_stream(split, 5, board), 2)], board, 2)
    parts = [part["train"] for part in deal(training_stream(split, 5, board), 2)]
    assert follow(parts, board, 2, slow=True) == expected


def test_every_worker_gets_all_heldout_problems_in_the_datasets_order(split, board):
    heldout = heldout_dataset(Split("a", split.shards, limit=30))
    dealt = deal(training_stream(split, 0, board), 2, heldout=heldout)
    for part in dealt:
        assert [int(row["solution"]) for row in part["heldout"].iter_rows()] == list(range(30))


def test_problems_survive_the_way_through_ray(board, tmp_path):
    import ray

    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": "où est π? 🧮", "solution": "é\u2028", "level": 3},
        {"prompt": [{"role": "user", "content": "q"}], "solution": "Yes", "level": "hard", "tags": [1, "a"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    split = Split("a", file_shards(str(path)))
    ray.get(board.begin_round.remote([ray.put(Round(0, NONE, NONE))]))
    streamed = {p.id: p for p in map(from_row, training_stream(split, 0, board).take_all())}
    assert streamed == {p.id: p for p in split.read()}


def test_all_shards_are_surveyed(small_cluster, split):
    assert survey(split).contents.count == PROBLEMS
    assert survey(Split("a", split.shards, limit=50)).contents.count == 50
    training = survey(Split("a", split.shards, 0.2)).contents
    heldout = survey(Split("a", split.shards, 0.2, keep_heldout=True)).contents
    assert 0 < heldout.count < training.count
    assert training + heldout == survey(split).contents == survey(Split("a", list(reversed(split.shards)))).contents


def test_a_split_without_problems_is_refused_with_the_share(small_cluster):
    with pytest.raises(DataError, match=r"^some: .*data\.heldout_share=0\.5"):
        survey(Split("some", [Shelf(0, 0)], 0.5))


@pytest.mark.parametrize("lines_per_shard", [3, 100], ids=["many shards", "one shard"])
def test_a_bad_row_is_named_by_file_and_row_before_training(small_cluster, tmp_path, monkeypatch, lines_per_shard):
    monkeypatch.setattr(files, "LINES_PER_SHARD", lines_per_shard)
    lines = Path(write_jsonl(tmp_path / "a.jsonl", 20)).read_text().splitlines()
    lines[16] = json.dumps({"prompt": "q", "solution": 5})
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        survey(Split("a", file_shards(str(tmp_path / "a.jsonl"))))
    assert str(caught.value) == f"{tmp_path}/a.jsonl, row 17: 'solution' must be text, not int (5)"


def test_of_several_bad_rows_the_first_of_the_dataset_is_named(small_cluster):
    @dataclass(frozen=True)
    class BadShelf:  # here, because a task of Ray cannot import a file of tests
        """A shard with a bad row, which takes a while to read."""

        name: str
        seconds: float
        rows: int = 1

        def read(self) -> Iterator[Problem]:
            time.sleep(self.seconds)
            raise DataError(self.name)

    # The first shard is the last to be read to its end.
    shards = [BadShelf("first", 2.0), *(BadShelf(f"later {i}", 0.0) for i in range(8))]
    with pytest.raises(DataError, match=r"^first$"):
        survey(Split("some", shards))
