"""Tests of solve rates and of the choice of sample groups."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from page_samples import NAN, make_group, write_run

from grpo_ray.pages.report.groups import first_and_last_groups, solve_rates
from grpo_ray.pages.report.read import RunData, read_run
from grpo_ray.storage.records.groups import GroupRecord, attach_texts

A, B, C, D = (letter * 16 for letter in "abcd")


def read_groups(tmp_path: Path, groups: Sequence[GroupRecord]) -> RunData:
    return read_run(str(write_run(tmp_path, groups=groups).local))


def test_solve_rates_count_transitions_between_epochs(tmp_path: Path) -> None:
    first = [
        *(make_group(1, A, (0.0, 0.0)), make_group(1, B, (0.0, 1.0))),
        *(make_group(2, C, (1.0, 1.0)), make_group(2, D, (0.0, 0.0))),
    ]
    last = [make_group(3, A, (1.0, 1.0), 1), make_group(3, B, (1.0, 1.0), 1), make_group(4, C, (0.0, 1.0), 1)]
    rates = solve_rates(read_groups(tmp_path, first + last))
    assert rates is not None and rates.by_epoch
    assert [(period.label, period.never, period.sometimes, period.always) for period in rates.periods] == [
        ("epoch 1", 2, 1, 1),
        ("epoch 2", 0, 1, 2),
    ]
    # Problem D has not been repeated yet.
    assert rates.transitions == [("never", [0, 0, 1]), ("sometimes", [0, 0, 1]), ("always", [0, 1, 0])]
    assert rates.periods[0].histogram == [0.5, 0, 0.25, 0, 0, 0.25]


def test_solve_rates_one_epoch_is_split_into_parts(tmp_path: Path) -> None:
    groups = [make_group(step, f"{step:016x}", (1.0, NAN) if step > 4 else (0.0, NAN)) for step in range(1, 9)]
    rates = solve_rates(read_groups(tmp_path, groups))
    assert rates is not None and not rates.by_epoch and rates.transitions == []
    assert [(period.label, period.never, period.always) for period in rates.periods] == [
        ("steps 1 to 2", 2, 0), ("steps 3 to 4", 2, 0), ("steps 5 to 6", 0, 2), ("steps 7 to 8", 0, 2),
    ]  # fmt: skip


def test_solve_rates_without_verdicts_is_none(tmp_path: Path) -> None:
    without_verdicts = [replace(make_group(1, A, (0.0, 1.0)), correct=None), make_group(2, B, (NAN,))]
    assert solve_rates(read_groups(tmp_path, without_verdicts)) is None
    assert solve_rates(read_groups(tmp_path / "empty", [])) is None


def test_groups_first_and_last_steps_are_shown(tmp_path: Path) -> None:
    groups = [make_group(step, A, (0.0, 1.0), texts=(f"no {step}", f"yes {step}")) for step in range(1, 10)]
    first, last = first_and_last_groups(read_groups(tmp_path, groups))
    assert [group.step for group in first] == [1, 2, 3] and [group.step for group in last] == [7, 8, 9]
    assert [(each.text, each.correct) for each in first[0].completions] == [("yes 1", True), ("no 1", False)]
    first, last = first_and_last_groups(read_groups(tmp_path / "short", groups[:3]))
    assert [group.step for group in first] == [1] and [group.step for group in last] == [2, 3]


def test_groups_large_group_shows_best_and_worst(tmp_path: Path) -> None:
    group = replace(make_group(1, A, (0.5, NAN, 1.0, 0.0, 0.75, 0.25)), correct=None)
    group = attach_texts(group, [{"role": "user", "content": "?"}], list("abcdef"))
    _, (sample,) = first_and_last_groups(read_groups(tmp_path, [group]))
    assert [(each.text, each.reward, each.correct) for each in sample.completions] == [
        ("c", "1", None), ("e", "0.75", None), ("d", "0", None), ("b", "?", None),
    ]  # fmt: skip
    assert sample.size == 6
