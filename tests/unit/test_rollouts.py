import inspect
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_ray import rollouts
from grpo_ray.errors import DataError
from grpo_ray.rollouts import (
    GROUP_BYTES,
    TEXT_BYTES,
    Group,
    curriculum,
    drop_after,
    read_rollouts,
    read_texts,
    shorten,
    table_of,
    with_texts,
    write_rollouts,
)
from grpo_ray.storage import RunFolder

NAN = math.nan
A, B, C, D = (letter * 16 for letter in "abcd")


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    # A folder of such a name becomes a column in readers that take it for a partition.
    return RunFolder(str(tmp_path / "step=7"), "run")


@pytest.fixture
def remote() -> RunFolder:
    """A run folder in an object store; pyarrow's `mock` keeps it in memory."""
    return RunFolder("mock://bucket/runs", "run")


def group(step: int, problem: str = A, correct: tuple[float, ...] | None = (1.0, 0.0), epoch: int = 0) -> Group:
    """A group of two completions."""
    return Group(
        step=step,
        epoch=epoch,
        problem=problem,
        rewards=(1.5, NAN),
        correct=correct,
        lengths=(3, 4096),
        truncated=(False, True),
    )


def files(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.local.joinpath("rollouts").iterdir())


def steps(folder: RunFolder, up_to_step: int | None = None) -> list[int]:
    return read_rollouts(folder, up_to_step)["step"].to_pylist()


# Writing and reading


def test_a_group_comes_back_as_it_was_written(folder, remote):
    for place in (folder, remote):
        assert write_rollouts(place, [group(11)]) == "rollouts/steps-00000011-00000011.parquet"
        (row,) = read_rollouts(place).to_pylist()
        assert math.isnan(row["rewards"].pop())
        assert row == {
            "step": 11,
            "epoch": 0,
            "problem": A,
            "rewards": [1.5],
            "correct": [1.0, 0.0],
            "lengths": [3, 4096],
            "truncated": [False, True],
            "trained": True,
        }


def test_unknown_is_none_or_nan_as_it_was_written(folder):
    write_rollouts(folder, [group(1, A, None), group(1, B, (NAN, 1.0)), group(1, C, ())])
    absent, unknown, empty = read_rollouts(folder)["correct"].to_pylist()
    assert absent is None and math.isnan(unknown[0]) and unknown[1] == 1.0 and empty == []


def test_one_file_holds_the_steps_between_two_checkpoints_in_order(folder):
    groups = [group(step, problem, epoch=epoch) for step in range(11, 21) for problem in (A, B) for epoch in (0, 1)]
    shuffled = random.Random(0).sample(groups, len(groups))
    assert write_rollouts(folder, shuffled) == "rollouts/steps-00000011-00000020.parquet"
    assert files(folder) == ["steps-00000011-00000020.parquet"]
    rows = pq.ParquetFile(folder.path("rollouts", "steps-00000011-00000020.parquet")).read().to_pylist()
    places = [(row["step"], row["epoch"], row["problem"]) for row in rows]
    assert places == sorted((each.step, each.epoch, each.problem) for each in groups)


def test_no_groups_make_no_file(folder):
    assert write_rollouts(folder, []) == ""
    assert not folder.exists("rollouts")


def test_a_run_without_rollouts_has_an_empty_table_of_the_same_columns(folder, remote):
    for place in (folder, remote):
        empty = read_rollouts(place)
        assert len(empty) == 0 and empty.schema == table_of([group(1)]).schema
        write_rollouts(place, [group(1)])
        assert read_rollouts(place).schema == read_rollouts(place, up_to_step=0).schema == empty.schema


def test_files_are_read_in_order_of_steps_and_not_of_names(folder):
    for step in (100_000_000, 99_999_999, 3):
        write_rollouts(folder, [group(step)])
    assert files(folder)[1] == "steps-100000000-100000000.parquet"  # sorted as text it stands before the one below
    assert steps(folder) == [3, 99_999_999, 100_000_000]


def test_rollouts_can_be_read_up_to_a_step(folder, remote):
    for place in (folder, remote):
        for first in (1, 4, 7):
            write_rollouts(place, [group(step) for step in range(first, first + 3)])
        assert steps(place) == [*range(1, 10)]
        assert steps(place, up_to_step=6) == [*range(1, 7)]
        assert steps(place, up_to_step=5) == [*range(1, 6)]
        assert steps(place, up_to_step=0) == []


def test_steps_taken_again_replace_the_file_of_the_same_steps(folder):
    write_rollouts(folder, [group(1, A), group(2, B)])
    write_rollouts(folder, [group(1, C), group(2, D)])
    assert read_rollouts(folder)["problem"].to_pylist() == [C, D]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(folder, monkeypatch):
    write_rollouts(folder, [group(1, A)])

    def full(aside, target):
        assert aside.read_bytes() and aside.name.startswith(".")  # hidden from who reads the folder as a whole
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_rollouts(folder, [group(1, B)])
    assert files(folder) == ["steps-00000001-00000001.parquet"]
    assert read_rollouts(folder)["problem"].to_pylist() == [A]


def test_what_a_crash_left_half_written_disturbs_no_reader(folder):
    write_rollouts(folder, [group(1)])
    folder.write_text("PAR1 half", "rollouts", ".steps-00000002-00000003.parquet.4711.tmp")
    assert steps(folder) == [1] and drop_after(folder, 1) == 0
    assert len(pandas.read_parquet(folder.path("rollouts"))) == 1


def test_other_files_in_the_folder_are_left_alone(folder):
    write_rollouts(folder, [group(9)])
    folder.write_text("mine", "rollouts", "notes.txt")
    folder.write_text("mine", "rollouts", "steps-9-9.parquet")
    assert steps(folder) == [9]
    assert drop_after(folder, 0) == 1
    assert files(folder) == ["notes.txt", "steps-9-9.parquet"]


@pytest.mark.parametrize("content", ["", "PAR1 cut short", "PAR1" + "\0" * 100 + "PAR1"])
def test_a_spoilt_file_is_refused_by_name(folder, content):
    write_rollouts(folder, [group(1)])
    folder.write_text(content, "rollouts", "steps-00000002-00000003.parquet")
    with pytest.raises(DataError, match=r"run/rollouts/steps-00000002-00000003\.parquet: cannot be read: "):
        read_rollouts(folder)
    assert steps(folder, up_to_step=1) == [1]
    assert drop_after(folder, 1) == 1
    assert steps(folder) == [1]


def test_a_file_of_other_columns_is_refused_by_name(folder):
    write_rollouts(folder, [group(1)])
    name = "steps-00000002-00000002.parquet"
    for table in (
        pa.table({"step": [2]}),
        table_of([group(2)]).drop_columns(["lengths"]),
        table_of([group(2)]).set_column(0, "step", pa.array(["two"])),
    ):
        pq.write_table(table, folder.path("rollouts", name))
        with pytest.raises(DataError, match="steps-00000002-00000002"):
            read_rollouts(folder)


def test_a_file_from_before_groups_were_put_aside_says_that_all_were_trained_on(folder):
    old = table_of([group(1), group(1, B)], texts=True).drop_columns(["trained", "prompt", "completions"])
    os.makedirs(folder.path("rollouts"))
    pq.write_table(old, folder.path("rollouts", "steps-00000001-00000001.parquet"))
    write_rollouts(folder, [replace(group(2), trained=False)])
    assert read_rollouts(folder)["trained"].to_pylist() == [True, True, False]
    assert read_texts(folder).num_rows == 0


def test_groups_that_are_not_written_yet_go_below_those_that_are(folder):
    write_rollouts(folder, [group(1, A), group(2, B)])
    table = table_of([group(4, C), group(3, D)], before=read_rollouts(folder))
    assert table["problem"].to_pylist() == [A, B, C, D]
    assert table_of([], before=table)["step"].to_pylist() == [1, 2, 4, 3]


# Texts


ASKED = [{"role": "user", "content": "2 + 2?"}]


def test_texts_come_back_as_they_were_kept(folder, remote):
    for place in (folder, remote):
        told = [{"role": "system", "content": "Be brief."}, *ASKED]
        write_rollouts(place, [with_texts(group(1, A), told, ["4\n\0", "\\boxed{5} ∎"]), group(1, B)])
        (row,) = read_texts(place).to_pylist()
        assert (row["problem"], row["prompt"]) == (A, "system: Be brief.\n\nuser: 2 + 2?")
        assert row["completions"] == ["4\n\0", "\\boxed{5} ∎"] and row["rewards"][0] == 1.5
        assert with_texts(group(1), ASKED, []).prompt == "2 + 2?"


def test_groups_without_texts_have_null_there(folder):
    write_rollouts(folder, [with_texts(group(1, A), ASKED, ["4", "5"]), group(1, B)])
    rows = pandas.read_parquet(folder.path("rollouts")).set_index("problem")
    assert rows["completions"][A].tolist() == ["4", "5"] and rows["completions"][B] is None
    assert rows["prompt"].isna().tolist() == [False, True]


def test_who_asks_for_groups_gets_no_texts(folder):
    # The curriculum reads all groups of a run, and has no use for the texts.
    write_rollouts(folder, [with_texts(group(1), ASKED, ["x" * 4000] * 2)])
    assert read_rollouts(folder).column_names == table_of([]).column_names
    assert "completions" not in read_rollouts(folder).column_names


def test_texts_are_those_of_the_first_and_of_the_last_file(folder):
    assert len(read_texts(folder)) == 0
    for first in (1, 4, 7):
        write_rollouts(folder, [with_texts(group(step), ASKED, [f"of {step}", ""]) for step in range(first, first + 3)])
    assert [row["completions"][0] for row in read_texts(folder).to_pylist()] == [f"of {s}" for s in (1, 2, 3, 7, 8, 9)]


def test_a_run_that_goes_back_keeps_the_texts_up_to_there(folder):
    write_rollouts(folder, [with_texts(group(step), ASKED, [f"of {step}", ""]) for step in (1, 2, 3)])
    drop_after(folder, 2)
    assert [row["completions"][0] for row in read_texts(folder).to_pylist()] == ["of 1", "of 2"]


def test_a_file_from_before_texts_were_kept_can_be_read(folder):
    folder.filesystem.create_dir(folder.path("rollouts"), recursive=True)
    pq.write_table(table_of([group(1), group(2)]), folder.path("rollouts", "steps-00000001-00000002.parquet"))
    write_rollouts(folder, [with_texts(group(3), ASKED, ["4", "5"])])
    assert steps(folder) == [1, 2, 3]
    assert read_texts(folder)["step"].to_pylist() == [3]


@pytest.mark.parametrize(
    "text", ["x" * 10_000_000, "é" * 5000, "∎" * 5000, "👩‍🔬" * 1000, "\ud800" * 5000, "a" + "é" * 4999]
)
@pytest.mark.parametrize("limit", [0, 1, 20, 100, 4096])
def test_a_long_text_is_cut_in_its_middle(text, limit):
    short = shorten(text, limit)
    assert limit - 6 <= len(short.encode()) <= limit  # up to two characters are cut through
    if limit >= 100:
        assert short[0] == text[0].replace("\ud800", "?") and short[-1] == text[-1].replace("\ud800", "?")
        assert "\n[... of " in short


@pytest.mark.parametrize("text", ["", "short", "x" * 4096, "é" * 2048])
def test_a_short_text_stays_as_it_is(text):
    assert shorten(text, 4096) == text


@pytest.mark.parametrize("count", [1, 8, 64, 1024])
def test_the_texts_of_a_group_have_a_bound_however_many_there_are(count):
    kept = with_texts(group(1), [{"role": "user", "content": "q" * 99_999}], ["é" * 50_000] * count)
    assert len(kept.prompt.encode()) <= TEXT_BYTES and len(kept.completions) == count
    assert all(len(text.encode()) <= TEXT_BYTES for text in kept.completions)
    assert sum(len(text.encode()) for text in kept.completions) <= GROUP_BYTES


# Going back


def test_a_run_that_goes_back_loses_the_files_of_the_steps_it_takes_again(folder, remote):
    for place in (folder, remote):
        for first in (1, 4, 7):
            write_rollouts(place, [group(step) for step in range(first, first + 3)])
        assert drop_after(place, 9) == 0
        assert drop_after(place, 3) == 2
        assert steps(place) == [1, 2, 3]
        write_rollouts(place, [group(4), group(5)])
        assert steps(place) == [1, 2, 3, 4, 5]
        assert drop_after(place, 0) == 2
        assert steps(place) == []


def test_there_is_nothing_to_drop_in_a_run_that_begins(folder, remote):
    assert drop_after(folder, 0) == drop_after(remote, 0) == 0


def test_a_file_that_spans_the_step_is_cut(folder, remote):
    for place in (folder, remote):
        write_rollouts(place, [group(step, problem) for step in (1, 2, 4, 5) for problem in (B, A)])
        write_rollouts(place, [group(6)])
        assert drop_after(place, 3) == 1
        assert steps(place) == [1, 1, 2, 2]
        assert read_rollouts(place)["problem"].to_pylist() == [A, B, A, B]
        assert place.exists("rollouts", "steps-00000001-00000002.parquet")
        assert not place.exists("rollouts", "steps-00000001-00000005.parquet")


def test_a_drop_that_was_killed_halfway_is_finished_by_the_next(folder):
    # Killed between writing what is left of a spanning file and deleting it: steps 1 and 2 stand in both.
    write_rollouts(folder, [group(step) for step in (1, 2)])
    write_rollouts(folder, [group(step) for step in (1, 2, 3)])
    drop_after(folder, 2)
    assert steps(folder) == [1, 2]


# The curriculum


def visits(*epochs: dict[str, tuple[float, ...] | None], seed: int = 0) -> pa.Table:
    """The table of a run that met in each epoch the problems named there, its rows in no order."""
    groups = [
        group(step=10 * epoch + n, problem=problem, correct=correct, epoch=epoch)
        for epoch, met in enumerate(epochs)
        for n, (problem, correct) in enumerate(met.items(), start=1)
    ]
    return table_of(random.Random(seed).sample(groups, len(groups)))


RIGHT, WRONG, MIXED = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


def test_a_problem_that_was_solved_often_enough_in_a_row_is_passed_over():
    table = visits({A: RIGHT, B: RIGHT, C: WRONG}, {A: RIGHT, B: MIXED, C: RIGHT, D: RIGHT})
    assert curriculum(table, 2, skip_solved=1, prefer_mixed=False) == ([A, C, D], [])
    assert curriculum(table, 2, skip_solved=2, prefer_mixed=False) == ([A], [])
    assert curriculum(table, 2, skip_solved=3, prefer_mixed=False) == ([], [])
    assert curriculum(table, 1, skip_solved=1, prefer_mixed=False) == ([A, B], [])


@pytest.mark.parametrize("off", [None, 0])
def test_nothing_is_passed_over_when_it_is_off(off):
    assert curriculum(visits({A: RIGHT}), 1, skip_solved=off, prefer_mixed=True) == ([], [])


def test_a_solved_problem_comes_back_every_other_epoch():
    # Passed over in epoch 1, so there is no group of epoch 1, so it is back in epoch 2; solved again there, not in 3.
    met = [{A: RIGHT, B: WRONG}, {B: WRONG}, {A: RIGHT, B: WRONG}]
    told = [curriculum(visits(*met[:epoch]), epoch, skip_solved=1, prefer_mixed=False)[0] for epoch in (1, 2, 3)]
    assert told == [[A], [], [A]]


def test_a_forgotten_problem_stays():
    table = visits({A: RIGHT}, {}, {A: MIXED})
    assert curriculum(table, 3, skip_solved=1, prefer_mixed=True) == ([], [A])


@pytest.mark.parametrize("correct", [None, (), (1.0, NAN), (NAN, NAN), (1.0, 0.0), (1.0, 0.99)])
def test_a_group_that_is_not_known_to_be_wholly_correct_solves_nothing(correct):
    assert curriculum(visits({A: correct, B: RIGHT}), 1, skip_solved=1, prefer_mixed=False) == ([B], [])


def test_problems_that_are_sometimes_correct_come_first():
    table = visits({A: MIXED, B: WRONG, C: RIGHT, D: WRONG}, {A: WRONG, B: WRONG, C: RIGHT, D: RIGHT})
    assert curriculum(table, 2, skip_solved=None, prefer_mixed=True) == ([], [A, D])
    assert curriculum(table, 2, skip_solved=None, prefer_mixed=False) == ([], [])


def test_what_is_passed_over_is_not_preferred():
    table = visits({A: WRONG, B: MIXED}, {A: RIGHT, B: WRONG})
    assert curriculum(table, 2, skip_solved=1, prefer_mixed=True) == ([A], [B])


def test_unknown_verdicts_are_left_out_of_the_share():
    table = visits({A: (1.0, NAN), B: (NAN, 0.0), C: (NAN, NAN), D: None}, {A: (NAN, 0.0), B: None, C: None})
    assert curriculum(table, 2, skip_solved=None, prefer_mixed=True) == ([], [A])


def test_groups_of_the_epoch_itself_and_later_ones_do_not_count():
    # An epoch that is opened again after a restart is given the same curriculum, however far it had come.
    table = visits({A: RIGHT, B: MIXED}, {A: WRONG, B: RIGHT}, {A: RIGHT, B: RIGHT})
    assert curriculum(table, 1, skip_solved=1, prefer_mixed=True) == ([A], [B])
    assert curriculum(table, 0, skip_solved=1, prefer_mixed=True) == ([], [])


def test_a_run_without_groups_or_without_the_reward_has_no_curriculum():
    assert curriculum(table_of([]), 3, skip_solved=1, prefer_mixed=True) == ([], [])
    assert curriculum(visits({A: None, B: None}), 1, skip_solved=1, prefer_mixed=True) == ([], [])


def test_the_last_group_is_the_one_of_the_last_step():
    groups = [group(30, A, RIGHT, epoch=1), group(4, A, WRONG, epoch=0), group(29, B, WRONG, epoch=1)]
    groups += [group(5, B, RIGHT, epoch=0)]
    assert curriculum(table_of(groups), 2, skip_solved=1, prefer_mixed=False) == ([A], [])


def plain(groups: list[Group], epoch: int, skip_solved: int, prefer_mixed: bool) -> tuple[list[str], list[str]]:
    """The curriculum in the words of its docstring, slowly."""
    groups = sorted((each for each in groups if each.epoch < epoch), key=lambda each: each.step)
    passed_over, preferred = [], []
    for problem in sorted({each.problem for each in groups}):
        mine = [each for each in groups if each.problem == problem]
        last = mine[-skip_solved:] if skip_solved else []
        solved = [bool(each.correct) and all(verdict == 1.0 for verdict in each.correct) for each in last]
        known = [verdict for each in mine for verdict in each.correct or () if not math.isnan(verdict)]
        if skip_solved and len(last) == skip_solved and all(solved) and mine[-1].epoch == epoch - 1:
            passed_over.append(problem)
        elif prefer_mixed and known and 0 < Fraction(sum(verdict == 1.0 for verdict in known), len(known)) < 1:
            preferred.append(problem)
    return passed_over, preferred


@pytest.mark.parametrize("seed", range(20))
def test_any_run_has_the_curriculum_that_a_plain_reading_gives(seed, tmp_path):
    choice = random.Random(seed)
    groups, step = [], 0
    ids = [f"{choice.getrandbits(64):016x}" for _ in range(12)]
    for epoch in range(4):
        for problem in choice.sample(ids, choice.randint(0, len(ids))):
            step += choice.randint(0, 1) or not step
            verdicts = tuple(choice.choices([1.0, 0.0, NAN], [6, 1, 0.3], k=choice.choice([0, 1, 2, 3])))
            groups.append(group(step, problem, choice.choice([verdicts, verdicts, verdicts, None]), epoch))
    folder = RunFolder(str(tmp_path), "run")
    for first in range(1, step + 1, 5):  # a checkpoint every five steps
        write_rollouts(folder, [each for each in groups if first <= each.step < first + 5])
    shuffled = table_of(choice.sample(groups, len(groups)))
    for epoch in range(6):
        for skip_solved in (0, 1, 2, 3):
            for prefer_mixed in (False, True):
                told = curriculum(read_rollouts(folder), epoch, skip_solved, prefer_mixed)
                assert told == plain(groups, epoch, skip_solved, prefer_mixed)
                assert told == curriculum(shuffled, epoch, skip_solved, prefer_mixed)


# For other tools


def test_the_line_of_pandas_in_the_docstring_gives_solve_rates(folder, monkeypatch):
    write_rollouts(folder, [group(1, A, (1.0, NAN)), group(1, B, (0.0, NAN)), group(1, C, None)])
    write_rollouts(folder, [group(2, A, (0.0, 0.0)), group(2, B, (0.0, 0.0))])
    (line,) = [line for line in inspect.getdoc(rollouts).splitlines() if line.strip().startswith("pandas.")]
    monkeypatch.chdir(folder.local)
    rates = eval(line.strip(), {"pandas": pandas, "float": float})
    assert rates[A] == pytest.approx(1 / 3) and rates[B] == 0.0 and math.isnan(rates[C])


def test_the_module_can_be_imported_without_pyarrow():
    code = "import sys, grpo_ray.rollouts; print({'pyarrow', 'ray', 'torch', 'pandas'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
