"""Pairwise test cases: a few combinations of parameter values in which every pair of values occurs."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest


def all_pairs(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Select combinations so that each pair of values of two parameters occurs in at least one (greedy algorithm)."""
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
    """Return a parametrized case that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pairs_then_all(*parameters: Sequence[Any]) -> Iterator[Any]:
    """Yield all combinations; those not needed to cover all pairs of values are marked slow."""
    pairwise = all_pairs(*parameters)
    for case in itertools.product(*parameters):
        yield case if case in pairwise else slow_case(*case)
