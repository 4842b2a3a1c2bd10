"""Tests of the training stream and the dataset index on a Ray cluster."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from memory_shards import NO_IDS, MemoryShard, ids, numbers, problem, write_jsonl

from grpo_ray.data.files import file_shards
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.problem import Problem
from grpo_ray.data.stream import (
    EpochPlan,
    Split,
    build_index,
    from_row,
    heldout_dataset,
    make_epoch_reader,
    training_stream,
)
from grpo_ray.errors import DataError


def write_files(folder: Path, lines: Sequence[str], lines_per_file: int) -> str:
    """Write lines to the files of a folder, each of which is a shard."""
    for first in range(0, len(lines), lines_per_file):
        (folder / f"{first:04}.jsonl").write_text("\n".join(lines[first : first + lines_per_file]) + "\n")
    return str(folder)


def test_index_duplicate_rows_are_read_once(cluster: None, tmp_path: Path) -> None:
    rows = [
        *range(10),
        *range(5, 15),
        12,
        12,
        16,
        *range(15, 18),
        0,
        1,
        2,
    ]  # many occur twice or more, some within a shard
    lines = [json.dumps({"prompt": f"Question {n}?", "solution": f"{n}"}) for n in rows]
    shards = file_shards(write_files(tmp_path, lines, 5))
    assert len(shards) == 6
    index = build_index(Split("some", shards))
    assert index.fingerprint == DatasetFingerprint.of(problem(n).id for n in range(18))
    assert index.ids.tolist() == ids(range(18)).tolist()
    assert index.repeated_rows == len(rows) - 18
    for epoch in numbers(index.split, epochs=3):
        assert sorted(epoch) == list(range(18))
    limited = build_index(Split("some", shards, limit=12))
    assert limited.fingerprint.count == 12 and sorted(numbers(limited.split)[0]) == list(range(12))


PROMPTS_PER_STEP = 8


EPOCHS = 3


PROBLEMS = 109  # 3 epochs are 327 problems: 40 steps and 7 left over, and epochs end inside steps


@pytest.fixture
def split(tmp_path: Path) -> Split:
    """Split of 109 problems in 13 files, so that an epoch has two windows."""
    (tmp_path / "a").mkdir()
    lines = Path(write_jsonl(tmp_path / "a.jsonl", PROBLEMS)).read_text().splitlines()
    return Split("a", file_shards(write_files(tmp_path / "a", lines, 9)))


def split_datasets(dataset: Any, world_size: int, **others: Any) -> list[dict]:
    """Return the iterators of each worker, by dataset name."""
    from grpo_ray.data.split import StepDataConfig

    return StepDataConfig(PROMPTS_PER_STEP).configure(
        {"train": dataset, **others}, world_size, worker_handles=None, worker_node_ids=None
    )


def read_all(iterators: Sequence, slow: bool = False) -> list[list[dict]]:
    """Read every worker's part to its end, all at the same time, as workers do.

    slow: the first worker stops after its first row until the second has read its whole part.
    """
    rows: list[list[dict]] = [[] for _ in iterators]
    errors: list[BaseException] = []
    second_done = threading.Event()

    def read(rank: int) -> None:
        try:
            for row in iterators[rank].iter_rows():
                rows[rank].append(row)
                if slow and rank == 0 and len(rows[0]) == 1:
                    assert second_done.wait(120), "the second worker did not get its rows"
            if rank == 1:
                second_done.set()
        except BaseException as error:  # a thread's own error would be lost
            errors.append(error)

    threads = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(len(iterators))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
    return rows


def steps_of(parts: list[list[dict]]) -> list[list[tuple[int, int]]]:
    """Return the (epoch, number) of each step's problems, those of worker 0 first."""
    share = PROMPTS_PER_STEP // len(parts)
    count = -(-max(map(len, parts)) // share)
    return [
        [(row["epoch"], int(row["solution"])) for part in parts for row in part[share * s : share * (s + 1)]]
        for s in range(count)
    ]


@pytest.fixture
def coordinator(cluster: None) -> Any:
    import ray

    from grpo_ray.telemetry.coordinator import RunCoordinator

    return ray.remote(num_cpus=0)(RunCoordinator).remote()


def follow(iterators: Sequence, coordinator: Any, epochs: int, slow: bool = False) -> list[list[tuple[int, int]]]:
    """Return the (epoch, number) of each step's problems; the rest of an epoch is carried over to the next."""
    import ray

    steps: list[list[tuple[int, int]]] = []
    carried_over: list[dict[str, Any]] = []
    share = PROMPTS_PER_STEP // len(iterators)
    for epoch in range(epochs):
        ray.get(coordinator.set_epoch_plan.remote([ray.put(EpochPlan(epoch, NO_IDS, NO_IDS, tuple(carried_over)))]))
        parts = read_all(iterators, slow)
        whole = (PROBLEMS + len(carried_over)) // PROMPTS_PER_STEP
        steps += steps_of([part[: whole * share] for part in parts])
        carried_over = [row for part in parts for row in part[whole * share :]]
        assert len(carried_over) < PROMPTS_PER_STEP
    return [*steps, *steps_of([carried_over])]


def test_heldout_dataset_is_whole_on_every_worker(split: Split, coordinator: Any) -> None:
    heldout = heldout_dataset(Split("a", split.shards, limit=30))
    per_worker = split_datasets(training_stream(split, 0, coordinator), 2, heldout=heldout)
    for part in per_worker:
        assert [int(row["solution"]) for row in part["heldout"].iter_rows()] == list(range(30))


def test_stream_problems_are_unchanged_by_ray(coordinator: Any, tmp_path: Path) -> None:
    import ray

    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": "où est π? 🧮", "solution": "é\u2028", "level": 3},
        {"prompt": [{"role": "user", "content": "q"}], "solution": "Yes", "level": "hard", "tags": [1, "a"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    split = Split("a", file_shards(str(path)))
    ray.get(coordinator.set_epoch_plan.remote([ray.put(EpochPlan(0, NO_IDS, NO_IDS))]))
    streamed = {p.id: p for p in map(from_row, training_stream(split, 0, coordinator).take_all())}
    assert streamed == {p.id: p for p in split.read()}


def test_index_counts_all_shards(cluster: None, split: Split) -> None:
    assert build_index(split).fingerprint.count == PROBLEMS
    assert build_index(Split("a", split.shards, limit=50)).fingerprint.count == 50
    training = build_index(Split("a", split.shards, 0.2)).fingerprint
    heldout = build_index(Split("a", split.shards, 0.2, keep_heldout=True)).fingerprint
    assert 0 < heldout.count < training.count
    assert (
        training + heldout
        == build_index(split).fingerprint
        == build_index(Split("a", list(reversed(split.shards)))).fingerprint
    )


@pytest.mark.parametrize("limit", [None, 4])
def test_index_part_of_many_shards_keeps_their_order(cluster: None, split: Split, limit: int | None) -> None:
    part = Split("a", [*split.shards, split.shards[0]], 0.2, keep_heldout=True, limit=limit)  # the last one repeats
    index = build_index(part)
    assert len(index.split.shards) == 1 < len(part.shards)
    problems = list(index.split.read())
    assert problems == list(part.read()) and len(problems) == (limit or index.fingerprint.count)


def test_index_empty_split_raises(cluster: None) -> None:
    with pytest.raises(DataError, match=r"^some: .*data\.heldout_share=0\.5"):
        build_index(Split("some", [MemoryShard(0, 0)], 0.5))


@pytest.mark.parametrize(
    ("lines_per_file", "place"),
    [(3, "0015.jsonl, row 2"), (100, "0000.jsonl, row 17")],
    ids=["many shards", "one shard"],
)
def test_index_bad_row_is_named(cluster: None, tmp_path: Path, lines_per_file: int, place: str) -> None:
    lines = [json.dumps({"prompt": f"Question {n}?", "solution": f"{n}"}) for n in range(20)]
    lines[16] = json.dumps({"prompt": "q", "solution": " "})
    with pytest.raises(DataError) as caught:
        build_index(Split("a", file_shards(write_files(tmp_path, lines, lines_per_file))))
    assert str(caught.value) == f"{tmp_path}/{place}: 'solution' is empty"


@pytest.mark.parametrize(("world_size", "slow"), [(1, False), (2, False), (4, True)])
def test_stream_order_does_not_depend_on_workers(split: Split, coordinator: Any, world_size: int, slow: bool) -> None:
    parts = [part["train"] for part in split_datasets(training_stream(split, 5, coordinator), world_size)]
    steps = follow(parts, coordinator, EPOCHS, slow)
    order = [(epoch, n) for epoch, some in enumerate(numbers(split, 5, EPOCHS)) for n in some]
    assert steps == [order[i : i + PROMPTS_PER_STEP] for i in range(0, len(order), PROMPTS_PER_STEP)]
    assert len(order) == PROBLEMS * EPOCHS and len(steps) == 41


@pytest.mark.parametrize(("world_size", "most"), [(1, 16), (2, 64), (4, 104)])
def test_stream_with_a_bound_begins_like_the_whole_one(
    split: Split, coordinator: Any, world_size: int, most: int
) -> None:
    import ray

    ray.get(coordinator.set_epoch_plan.remote([ray.put(EpochPlan(0, NO_IDS, NO_IDS))]))
    stream = training_stream(split, 5, coordinator, most_problems=most)
    parts = read_all([part["train"] for part in split_datasets(stream, world_size)])
    order = [(0, n) for n in numbers(split, 5)[0]]
    steps = [order[i : i + PROMPTS_PER_STEP] for i in range(0, most, PROMPTS_PER_STEP)]
    assert steps_of(parts)[: len(steps)] == steps
    reader = make_epoch_reader(split, 5)
    windows = [len(reader.read_window(0, window)) for window in range(reader.num_windows)]
    assert len(windows) == 2 and sum(map(len, parts)) == sum(min(most, window) for window in windows)


def test_index_several_bad_rows_names_first_of_dataset(cluster: None, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class BadShard:  # defined here so that Ray pickles it by value: a task cannot import a test module
        """Shard with a bad row; the one called "first" is read to its end after another one."""

        name: str
        folder: str
        num_rows: int = 1

        def read(self) -> Iterator[Problem]:
            if self.name == "first":
                wait_for(lambda: any(Path(self.folder).iterdir()), "another shard to be read")
            else:
                Path(self.folder, self.name).touch()
            raise DataError(self.name)

    shards = [BadShard(name, str(tmp_path)) for name in ("first", *(f"later {i}" for i in range(8)))]
    with pytest.raises(DataError, match=r"^first$"):
        build_index(Split("some", shards))
