"""Marks of a loader in the ledger, and the background fetch of an epoch's first row."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import Ledger, uint64_to_ids
from grpo_ray.storage.rollouts import GroupRecord
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.training.problem_loader import ProblemLoader, prefetch_first


def group(problem: str, epoch: int) -> GroupRecord:
    return GroupRecord(
        step=3, epoch=epoch, problem=problem, rewards=(1.0,), correct=(1.0,), lengths=(5,), truncated=(False,)
    )


def test_problem_loader_settle_marks_problems_of_every_epoch(tmp_path: Path) -> None:
    """A step at the end of an epoch holds problems of two."""
    folder = RunFolder(str(tmp_path), "run")
    loader = ProblemLoader(load_config(None, []), Ledger(), folder, coordinator=None, rows=lambda: iter([]))
    ends, begins = "a" * 16, "b" * 16
    loader.record([group(ends, epoch=0), group(begins, epoch=1)])
    loader.settle(tmp_path)
    saved = Ledger.load(tmp_path)
    assert [uint64_to_ids(saved.used(epoch)) for epoch in range(3)] == [[ends], [begins], []]


def test_prefetch_first_starts_before_the_first_row_is_requested() -> None:
    begun = threading.Event()

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(3):
            begun.set()
            yield {"number": number}

    fetched = prefetch_first(rows())
    assert begun.wait(timeout=60)
    assert [row["number"] for row in fetched] == [0, 1, 2]


def test_prefetch_first_empty_iterator_ends_at_once() -> None:
    assert list(prefetch_first(iter([]))) == []


def test_prefetch_first_error_is_raised_to_the_consumer() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        raise OSError("the file is gone")
        yield {}

    with pytest.raises(OSError, match="the file is gone"):
        next(prefetch_first(rows()))
