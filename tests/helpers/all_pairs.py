"""Selection of a few combinations of parameter values in which every pair of values occurs."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest


def all_pairs(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations such that each pair of values of two parameters occurs in at least one. Greedy."""
    combinations = list(itertools.product(*(range(len(values)) for values in parameters)))
    missing = set().union(*map(_pairs, combinations))
    chosen = []
    while missing:
        best = max(combinations, key=lambda combination: len(_pairs(combination) & missing))
        missing -= _pairs(best)
        chosen.append(tuple(values[at] for values, at in zip(parameters, best, strict=True)))
    return chosen


def _pairs(combination: Sequence[int]) -> set[Any]:
    return set(itertools.combinations(enumerate(combination), 2))


def slow_case(*values: Any) -> Any:
    """Return a parametrised case that only the slow tests run."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pairs_then_all(*parameters: Sequence[Any]) -> Iterator[Any]:
    """Yield the whole grid of cases; those not needed to cover all pairs of values are marked slow."""
    soon = all_pairs(*parameters)
    for case in itertools.product(*parameters):
        yield case if case in soon else slow_case(*case)
