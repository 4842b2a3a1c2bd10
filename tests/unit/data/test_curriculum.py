"""Tests of the curriculum: which problems an epoch skips, and which come first."""

import math
import random
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from group_records import NAN, A, B, C, D, group
from hypothesis import given, settings

from grpo_ray.data.curriculum import plan_curriculum
from grpo_ray.storage.records.group_columns import groups_table
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.rollout_files import read_rollouts, write_rollouts
from grpo_ray.storage.run_folder import RunFolder


def examples(count: int) -> settings:
    """Return settings of a hypothesis test: this number of examples, the same ones in each run."""
    return settings(max_examples=count, deadline=None, derandomize=True)


def visits(*epochs: dict[str, tuple[float, ...] | None], seed: int = 0) -> pa.Table:
    """Make the table of a run with these problems and verdicts in each epoch, its rows shuffled."""
    groups = [
        group(step=10 * epoch + n, problem=problem, correct=correct, epoch=epoch)
        for epoch, verdicts in enumerate(epochs)
        for n, (problem, correct) in enumerate(verdicts.items(), start=1)
    ]
    return groups_table(random.Random(seed).sample(groups, len(groups)))


RIGHT, WRONG, MIXED = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


def test_curriculum_skips_problems_solved_in_a_row() -> None:
    table = visits({A: RIGHT, B: RIGHT, C: WRONG}, {A: RIGHT, B: MIXED, C: RIGHT, D: RIGHT})
    assert plan_curriculum(table, 2, skip_solved=1, prefer_mixed=False) == ([A, C, D], [])
    assert plan_curriculum(table, 2, skip_solved=2, prefer_mixed=False) == ([A], [])
    assert plan_curriculum(table, 2, skip_solved=3, prefer_mixed=False) == ([], [])
    assert plan_curriculum(table, 1, skip_solved=1, prefer_mixed=False) == ([A, B], [])


@pytest.mark.parametrize("off", [None, 0])
def test_curriculum_skip_solved_off_skips_nothing(off: int | None) -> None:
    assert plan_curriculum(visits({A: RIGHT}), 1, skip_solved=off, prefer_mixed=True) == ([], [])


def test_curriculum_solved_problem_returns_every_other_epoch() -> None:
    # Skipped in epoch 1: no group of epoch 1, so it is used in epoch 2; solved again there, so skipped in 3.
    visited: list[dict[str, tuple[float, ...] | None]] = [{A: RIGHT, B: WRONG}, {B: WRONG}, {A: RIGHT, B: WRONG}]
    chosen = [
        plan_curriculum(visits(*visited[:epoch]), epoch, skip_solved=1, prefer_mixed=False)[0] for epoch in (1, 2, 3)
    ]
    assert chosen == [[A], [], [A]]


def test_curriculum_forgotten_problem_stays() -> None:
    table = visits({A: RIGHT}, {}, {A: MIXED})
    assert plan_curriculum(table, 3, skip_solved=1, prefer_mixed=True) == ([], [A])


@pytest.mark.parametrize("correct", [None, (), (1.0, NAN), (NAN, NAN), (1.0, 0.0), (1.0, 0.99)])
def test_curriculum_group_not_wholly_correct_is_unsolved(correct: tuple[Any, ...] | None) -> None:
    assert plan_curriculum(visits({A: correct, B: RIGHT}), 1, skip_solved=1, prefer_mixed=False) == ([B], [])


def test_curriculum_prefers_problems_sometimes_correct() -> None:
    table = visits({A: MIXED, B: WRONG, C: RIGHT, D: WRONG}, {A: WRONG, B: WRONG, C: RIGHT, D: RIGHT})
    assert plan_curriculum(table, 2, skip_solved=None, prefer_mixed=True) == ([], [A, D])
    assert plan_curriculum(table, 2, skip_solved=None, prefer_mixed=False) == ([], [])


def test_curriculum_skipped_is_not_preferred() -> None:
    table = visits({A: WRONG, B: MIXED}, {A: RIGHT, B: WRONG})
    assert plan_curriculum(table, 2, skip_solved=1, prefer_mixed=True) == ([A], [B])


def test_curriculum_unknown_verdicts_do_not_count() -> None:
    table = visits({A: (1.0, NAN), B: (NAN, 0.0), C: (NAN, NAN), D: None}, {A: (NAN, 0.0), B: None, C: None})
    assert plan_curriculum(table, 2, skip_solved=None, prefer_mixed=True) == ([], [A])


def test_curriculum_ignores_the_epoch_itself_and_later_ones() -> None:
    # An epoch that is opened again after a restart gets the same curriculum, however many steps it had taken.
    table = visits({A: RIGHT, B: MIXED}, {A: WRONG, B: RIGHT}, {A: RIGHT, B: RIGHT})
    assert plan_curriculum(table, 1, skip_solved=1, prefer_mixed=True) == ([A], [B])
    assert plan_curriculum(table, 0, skip_solved=1, prefer_mixed=True) == ([], [])


def test_curriculum_without_groups_or_verdicts_is_empty() -> None:
    assert plan_curriculum(groups_table([]), 3, skip_solved=1, prefer_mixed=True) == ([], [])
    assert plan_curriculum(visits({A: None, B: None}), 1, skip_solved=1, prefer_mixed=True) == ([], [])


def test_curriculum_last_group_is_by_step_not_row() -> None:
    groups = [group(30, A, RIGHT, epoch=1), group(4, A, WRONG, epoch=0), group(29, B, WRONG, epoch=1)]
    groups += [group(5, B, RIGHT, epoch=0)]
    assert plan_curriculum(groups_table(groups), 2, skip_solved=1, prefer_mixed=False) == ([A], [])


def plain(groups: list[GroupRecord], epoch: int, skip_solved: int, prefer_mixed: bool) -> tuple[list[str], list[str]]:
    """Compute by a slow, direct implementation of the docstring of `plan_curriculum`."""
    groups = sorted((each for each in groups if each.epoch < epoch), key=lambda each: each.step)
    skipped, preferred = [], []
    for problem in sorted({each.problem for each in groups}):
        mine = [each for each in groups if each.problem == problem]
        last = mine[-skip_solved:] if skip_solved else []
        solved = [bool(each.correct) and all(verdict == 1.0 for verdict in each.correct or ()) for each in last]
        known = [verdict for each in mine for verdict in each.correct or () if not math.isnan(verdict)]
        if skip_solved and len(last) == skip_solved and all(solved) and mine[-1].epoch == epoch - 1:
            skipped.append(problem)
        elif prefer_mixed and known and 0 < Fraction(sum(verdict == 1.0 for verdict in known), len(known)) < 1:
            preferred.append(problem)
    return skipped, preferred


VERDICTS = st.none() | st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.0, NAN]), max_size=3).map(tuple)
VERDICTS_BY_PROBLEM = st.dictionaries(st.integers(0, 5).map("{:016x}".format), VERDICTS)
"""Problems of one epoch with the verdicts on their completions."""


@pytest.mark.long
@given(epochs=st.lists(VERDICTS_BY_PROBLEM, min_size=1, max_size=4), per_step=st.integers(1, 3), data=st.data())
@examples(40)
def test_curriculum_any_run_matches_plain_reading(epochs: list[Any], per_step: int, data: st.DataObject) -> None:
    visited = [
        (epoch, problem, correct) for epoch, verdicts in enumerate(epochs) for problem, correct in verdicts.items()
    ]
    groups = [group(1 + n // per_step, problem, correct, epoch) for n, (epoch, problem, correct) in enumerate(visited)]
    folder = RunFolder("mock://bucket/runs", "run")  # pyarrow keeps it in memory
    for first in range(1, len(groups) + 1, 5):  # a checkpoint every five steps
        write_rollouts(folder, [each for each in groups if first <= each.step < first + 5])
    written, shuffled = read_rollouts(folder), groups_table(data.draw(st.permutations(groups)))
    for epoch in range(len(epochs) + 2):
        for skip_solved in (0, 1, 2, 3):
            for prefer_mixed in (False, True):
                chosen = plan_curriculum(written, epoch, skip_solved, prefer_mixed)
                assert chosen == plain(groups, epoch, skip_solved, prefer_mixed)
                assert chosen == plan_curriculum(shuffled, epoch, skip_solved, prefer_mixed)
