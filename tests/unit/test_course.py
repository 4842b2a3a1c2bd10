"""Tests of the background fetch of a round's first row."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_ray.course import fetching


def test_fetching_starts_before_the_first_row_is_requested() -> None:
    begun = threading.Event()

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(3):
            begun.set()
            yield {"number": number}

    fetched = fetching(rows())
    assert begun.wait(timeout=60)
    assert [row["number"] for row in fetched] == [0, 1, 2]


def test_fetching_empty_iterator_ends_at_once() -> None:
    assert list(fetching(iter([]))) == []


def test_fetching_error_is_raised_to_the_consumer() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        raise OSError("the file is gone")
        yield {}

    with pytest.raises(OSError, match="the file is gone"):
        next(fetching(rows()))
