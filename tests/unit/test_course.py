"""A worker's way through the problems: what is fetched before it is asked for."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_ray.course import fetching


def test_the_first_row_is_fetched_before_it_is_asked_for_and_all_come_in_order() -> None:
    begun = threading.Event()

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(3):
            begun.set()
            yield {"number": number}

    all_of_them = fetching(rows())
    assert begun.wait(timeout=60)
    assert [row["number"] for row in all_of_them] == [0, 1, 2]


def test_a_stream_of_nothing_ends_at_once() -> None:
    assert list(fetching(iter([]))) == []


def test_an_error_of_the_first_row_is_raised_where_the_row_is_asked_for() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        raise OSError("the file is gone")
        yield {}

    with pytest.raises(OSError, match="the file is gone"):
        next(fetching(rows()))
