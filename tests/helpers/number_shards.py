"""Invented problems that are identified by numbers, and shards of them."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_ray.data.problem import Problem, parse_problem


@functools.cache
def problem(number: int) -> Problem:
    """Return the problem with this number; the solution of every fifth one is Yes."""
    solution = "Yes" if number % 5 == 0 else f"{number}"
    return parse_problem({"prompt": f"Question {number}?", "solution": solution}, where="here")


@functools.cache
def number_of(problem_id: str) -> int:
    """Return the number of the problem with this id."""
    return next(number for number in range(10_000) if problem(number).id == problem_id)


@dataclass(frozen=True)
class NumberShard:
    """Shard of the problems with these numbers."""

    numbers: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.numbers)

    def read(self) -> Iterator[Problem]:
        return map(problem, self.numbers)
