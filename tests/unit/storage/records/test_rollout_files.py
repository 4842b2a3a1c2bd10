"""Tests of the rollout files: writing, reading, dropping steps that are taken again, texts, tokens."""

import errno
import inspect
import io
import itertools
import math
import os
import random
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from group_records import NAN, A, B, C, D, group
from hypothesis import given, settings

from grpo_ray.errors import DataError
from grpo_ray.storage import run_folder
from grpo_ray.storage.records import rollout_files
from grpo_ray.storage.records.group_columns import groups_table
from grpo_ray.storage.records.groups import (
    GROUP_BYTES,
    TEXT_BYTES,
    GroupRecord,
    add_loss_tokens,
    attach_texts,
    without_texts,
)
from grpo_ray.storage.records.rollout_files import (
    ROW_GROUP,
    drop_rollouts_after,
    list_rollout_files,
    read_rollouts,
    read_steps,
    read_texts,
    write_rollouts,
)
from grpo_ray.storage.records.tokens import (
    COMPLETION_TOKENS,
    GROUP_TOKENS,
    LossTokens,
    TokenRecord,
    bound_text,
    cut_middle,
    importance_ratios,
    keep_ends,
)
from grpo_ray.storage.run_folder import RunFolder


def examples(count: int) -> settings:
    """Return settings of a hypothesis test: this number of examples, the same ones in each run."""
    return settings(max_examples=count, deadline=None, derandomize=True)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    # Readers that support partitions turn a folder of this name into a column.
    return RunFolder(str(tmp_path / "step=7"), "run")


def in_memory() -> RunFolder:
    """Create an empty run folder in an object store; pyarrow's `mock` keeps it in memory."""
    return RunFolder("mock://bucket/runs", "run")


@pytest.fixture
def remote() -> RunFolder:
    return in_memory()


def files(folder: RunFolder) -> list[str]:
    assert folder.local is not None
    return sorted(path.name for path in folder.local.joinpath("rollouts").iterdir())


def steps(folder: RunFolder, up_to_step: int | None = None) -> list[int]:
    return read_rollouts(folder, up_to_step)["step"].to_pylist()


# Writing and reading


def test_write_rollouts_group_reads_back_equal(folder: RunFolder, remote: RunFolder) -> None:
    for place in (folder, remote):
        assert write_rollouts(place, [group(11)]) == "rollouts/steps-00000011-00000011.parquet"
        (row,) = read_rollouts(place).to_pylist()
        assert math.isnan(row["rewards"].pop())
        assert row == {
            "step": 11,
            "epoch": 0,
            "problem": A,
            "source": "",
            "rewards": [1.5],
            "correct": [1.0, 0.0],
            "lengths": [3, 4096],
            "truncated": [False, True],
            "trained": True,
        }


def test_write_rollouts_unknown_verdicts_read_back_equal(folder: RunFolder) -> None:
    write_rollouts(folder, [group(1, A, None), group(1, B, (NAN, 1.0)), group(1, C, ())])
    absent, unknown, empty = read_rollouts(folder)["correct"].to_pylist()
    assert absent is None and math.isnan(unknown[0]) and unknown[1] == 1.0 and empty == []


def test_write_rollouts_makes_one_file_in_order_of_steps(folder: RunFolder) -> None:
    groups = [group(step, problem, epoch=epoch) for step in range(11, 21) for problem in (A, B) for epoch in (0, 1)]
    shuffled = random.Random(0).sample(groups, len(groups))
    assert write_rollouts(folder, shuffled) == "rollouts/steps-00000011-00000020.parquet"
    assert files(folder) == ["steps-00000011-00000020.parquet"]
    rows = pq.ParquetFile(folder.path("rollouts", "steps-00000011-00000020.parquet")).read().to_pylist()
    places = [(row["step"], row["epoch"], row["problem"]) for row in rows]
    assert places == sorted((each.step, each.epoch, each.problem) for each in groups)


def test_write_rollouts_without_groups_makes_no_file(folder: RunFolder) -> None:
    assert write_rollouts(folder, []) == ""
    assert not folder.exists("rollouts")


def test_read_rollouts_without_files_is_empty_with_columns(folder: RunFolder, remote: RunFolder) -> None:
    for place in (folder, remote):
        empty = read_rollouts(place)
        assert len(empty) == 0 and empty.schema == groups_table([group(1)]).schema
        write_rollouts(place, [group(1)])
        assert read_rollouts(place).schema == read_rollouts(place, up_to_step=0).schema == empty.schema


def test_read_rollouts_orders_files_by_step_not_name(folder: RunFolder) -> None:
    for step in (100_000_000, 99_999_999, 3):
        write_rollouts(folder, [group(step)])
    assert files(folder)[1] == "steps-100000000-100000000.parquet"  # first in alphabetical order
    assert steps(folder) == [3, 99_999_999, 100_000_000]


def test_read_rollouts_up_to_step_leaves_out_later_ones(folder: RunFolder, remote: RunFolder) -> None:
    for place in (folder, remote):
        for first in (1, 4, 7):
            write_rollouts(place, [group(step) for step in range(first, first + 3)])
        assert steps(place) == [*range(1, 10)]
        assert steps(place, up_to_step=6) == [*range(1, 7)]
        assert steps(place, up_to_step=5) == [*range(1, 6)]
        assert steps(place, up_to_step=0) == []


def test_write_rollouts_same_steps_replaces_the_file(folder: RunFolder) -> None:
    write_rollouts(folder, [group(1, A), group(2, B)])
    write_rollouts(folder, [group(1, C), group(2, D)])
    assert read_rollouts(folder)["problem"].to_pylist() == [C, D]


def test_write_rollouts_failed_write_keeps_the_old_file(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rollouts(folder, [group(1, A)])

    def full(temporary: Any, target: Any) -> None:
        assert temporary.read_bytes()
        assert temporary.name.startswith(".")  # readers of the whole folder skip hidden files
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_rollouts(folder, [group(1, B)])
    assert files(folder) == ["steps-00000001-00000001.parquet"]
    assert read_rollouts(folder)["problem"].to_pylist() == [A]


def test_read_rollouts_ignores_a_half_written_file(folder: RunFolder) -> None:
    write_rollouts(folder, [group(1)])
    folder.write_text("PAR1 half", "rollouts", ".steps-00000002-00000003.parquet.4711.tmp")
    assert steps(folder) == [1] and drop_rollouts_after(folder, 1) == []
    assert len(pandas.read_parquet(folder.path("rollouts"))) == 1


def test_drop_rollouts_after_leaves_other_files_alone(folder: RunFolder) -> None:
    write_rollouts(folder, [group(9)])
    folder.write_text("mine", "rollouts", "notes.txt")
    folder.write_text("mine", "rollouts", "steps-9-9.parquet")
    assert steps(folder) == [9]
    assert len(drop_rollouts_after(folder, 0)) == 1
    assert files(folder) == ["notes.txt", "steps-9-9.parquet"]


@pytest.mark.parametrize("content", ["", "PAR1 cut short", "PAR1" + "\0" * 100 + "PAR1"])
def test_read_rollouts_damaged_file_raises_with_its_name(folder: RunFolder, content: str) -> None:
    write_rollouts(folder, [group(1)])
    folder.write_text(content, "rollouts", "steps-00000002-00000003.parquet")
    with pytest.raises(DataError, match=r"run/rollouts/steps-00000002-00000003\.parquet: cannot be read: "):
        read_rollouts(folder)
    assert steps(folder, up_to_step=1) == [1]
    assert len(drop_rollouts_after(folder, 1)) == 1
    assert steps(folder) == [1]


def test_read_rollouts_other_columns_raises_with_file_name(folder: RunFolder) -> None:
    write_rollouts(folder, [group(1)])
    name = "steps-00000002-00000002.parquet"
    for table in (
        pa.table({"step": [2]}),
        groups_table([group(2)]).drop_columns(["lengths"]),
        groups_table([group(2)]).set_column(0, "step", pa.array(["two"])),
    ):
        pq.write_table(table, folder.path("rollouts", name))
        with pytest.raises(DataError, match="steps-00000002-00000002"):
            read_rollouts(folder)


def test_groups_table_appends_groups_below_a_table(folder: RunFolder) -> None:
    write_rollouts(folder, [group(1, A), group(2, B)])
    table = groups_table([group(4, C), group(3, D)], previous=read_rollouts(folder))
    assert table["problem"].to_pylist() == [A, B, C, D]
    assert groups_table([], previous=table)["step"].to_pylist() == [1, 2, 4, 3]


# Texts


PROMPT = [{"role": "user", "content": "2 + 2?"}]


def test_read_texts_returns_texts_as_written(folder: RunFolder, remote: RunFolder) -> None:
    for place in (folder, remote):
        prompt = [{"role": "system", "content": "Be brief."}, *PROMPT]
        write_rollouts(place, [attach_texts(group(1, A), prompt, ["4\n\0", "\\boxed{5} ∎"]), group(1, B)])
        (row,) = read_texts(place).to_pylist()
        assert (row["problem"], row["prompt"]) == (A, "system: Be brief.\n\nuser: 2 + 2?")
        assert row["completions"] == ["4\n\0", "\\boxed{5} ∎"] and row["rewards"][0] == 1.5
        assert attach_texts(group(1), PROMPT, []).prompt == "2 + 2?"


def test_write_rollouts_groups_without_texts_have_null(folder: RunFolder) -> None:
    write_rollouts(folder, [attach_texts(group(1, A), PROMPT, ["4", "5"]), group(1, B)])
    rows = pandas.read_parquet(folder.path("rollouts")).set_index("problem")
    assert rows["completions"][A].tolist() == ["4", "5"] and rows["completions"][B] is None
    assert rows["prompt"].isna().tolist() == [False, True]


def test_read_rollouts_leaves_out_texts(folder: RunFolder) -> None:
    # The curriculum reads all groups of a run and does not use the texts.
    write_rollouts(folder, [attach_texts(group(1), PROMPT, ["x" * 4000] * 2)])
    assert read_rollouts(folder).column_names == groups_table([]).column_names
    assert "completions" not in read_rollouts(folder).column_names


def test_read_texts_are_of_first_and_last_file(folder: RunFolder) -> None:
    assert len(read_texts(folder)) == 0
    for first in (1, 4, 7):
        write_rollouts(
            folder, [attach_texts(group(step), PROMPT, [f"of {step}", ""]) for step in range(first, first + 3)]
        )
    assert [row["completions"][0] for row in read_texts(folder).to_pylist()] == [f"of {s}" for s in (1, 2, 3, 7, 8, 9)]


def test_drop_rollouts_after_keeps_texts_up_to_the_step(folder: RunFolder) -> None:
    write_rollouts(folder, [attach_texts(group(step), PROMPT, [f"of {step}", ""]) for step in (1, 2, 3)])
    drop_rollouts_after(folder, 2)
    assert [row["completions"][0] for row in read_texts(folder).to_pylist()] == ["of 1", "of 2"]


@pytest.mark.parametrize("count", [1, 8, 64, pytest.param(1024, marks=pytest.mark.long)])
def test_attach_texts_any_group_size_stays_within_limits(count: int) -> None:
    kept = attach_texts(group(1), [{"role": "user", "content": "q" * 99_999}], ["é" * 50_000] * count)
    assert kept.prompt is not None and kept.completions is not None
    assert len(kept.prompt.encode()) <= TEXT_BYTES and len(kept.completions) == count
    assert all(len(text.encode()) <= TEXT_BYTES for text in kept.completions)
    assert sum(len(text.encode()) for text in kept.completions) <= GROUP_BYTES


# Tokens


def tokens_of(*texts: str, learner: tuple[float, ...] | None = None, head: int | None = None) -> TokenRecord:
    """Make the tokens of a completion; the engine's log-probabilities are -1, -2, ..."""
    ends = itertools.accumulate(len(text.encode()) for text in texts)
    return TokenRecord(
        text="".join(texts).encode(),
        ends=array("i", ends),
        head=len(texts) if head is None else head,
        engine_logps=array("f", [-1.0 - n for n in range(len(texts))]),
        learner_logps=None if learner is None else array("f", learner),
        masked=bytes(len(texts)),
    )


def sampled(step: int, *tokens: TokenRecord, sample: Literal["first", "signal"] = "first") -> GroupRecord:
    """Make a group of two completions with tokens and the advantages 1 and 0."""
    whole = attach_texts(group(step), PROMPT, ["ab", "c"])
    return replace(whole, sample=sample, advantages=(1.0, 0.0), tokens=tokens)


def test_write_rollouts_tokens_read_back_equal(folder: RunFolder, remote: RunFolder) -> None:
    read = tokens_of("4", "", "é", learner=(-1.0, -2.5, NAN), head=1)
    for place in (folder, remote):
        write_rollouts(place, [group(1), sampled(1, read, tokens_of()), group(2), sampled(3, tokens_of("x"), read)])
        table = read_steps(place, with_tokens=True)
        assert table["tokens"].is_null().to_pylist() == [True, False, True, False]
        assert table["sample"].to_pylist() == [None, "first", None, "first"]
        first, empty = table["tokens"][1].as_py()
        assert math.isnan(first["learner_logps"].pop())
        assert first == {
            "texts": ["4", "", "é"], "engine_logps": [-1.0, -2.0, -3.0], "learner_logps": [-1.0, -2.5],
            "masked": [False] * 3, "head": 1,
        }  # fmt: skip
        assert (empty["texts"], empty["learner_logps"]) == ([], None)
        assert table["tokens"][3].as_py()[0]["learner_logps"] is None
        assert table["advantages"][1].as_py() == [1.0, 0.0]
    assert read.texts == ["4", "", "é"]


def test_groups_table_of_groups_without_tokens_has_null_tokens() -> None:
    for groups in ([], [group(1)]):
        assert groups_table(groups, with_tokens=True)["tokens"].to_pylist() == [None] * len(groups)


def test_read_texts_leaves_out_tokens(folder: RunFolder) -> None:
    write_rollouts(folder, [sampled(1, tokens_of("a"), tokens_of("b"))])
    assert "tokens" not in read_texts(folder).column_names
    assert read_texts(folder)["completions"].to_pylist() == [["ab", "c"]]


def test_without_texts_leaves_only_numbers() -> None:
    assert without_texts(sampled(1, tokens_of("a"), tokens_of("b"))) == replace(group(1), rewards=sampled(1).rewards)


@pytest.mark.parametrize(
    ("count", "completions", "ends"),
    [(0, 8, (0, 0)), (256, 8, (256, 0)), (257, 8, (171, 85)), (9, 512, (3, 1)), (9, 4096, (2, 0)), (4, 512, (4, 0))],
)
def test_keep_ends_long_completion_keeps_both_ends(count: int, completions: int, ends: tuple[int, ...]) -> None:
    assert keep_ends(count, completions) == ends
    assert sum(ends) <= COMPLETION_TOKENS and (completions > 1024 or sum(ends) * completions <= GROUP_TOKENS)


def test_cut_middle_keeps_the_type() -> None:
    assert cut_middle(b"abcdef", 2, 1) == b"abf" and cut_middle(array("f", [1, 2, 3]), 1, 0) == array("f", [1])
    assert cut_middle(b"ab", 1, 1) == b"ab"


def test_bound_text_leaves_out_tokens_next_to_the_gap() -> None:
    whole = tokens_of("aaaa", "bb", "cc", "dd", "e", learner=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert bound_text(whole, 11) == whole
    cut = bound_text(whole, 9)  # 6 bytes of the beginning, 3 of the end
    assert (cut.texts, cut.head) == (["aaaa", "bb", "dd", "e"], 2)
    assert cut.engine_logps == array("f", [-1.0, -2.0, -4.0, -5.0]) and cut.learner_logps == array("f", [1, 2, 4, 5])
    again = bound_text(cut, 6)  # 4 and 2: the gap is where it was
    assert (again.texts, again.head, again.masked) == (["aaaa", "e"], 1, b"\0\0")
    assert bound_text(tokens_of("é" * 9), 4).texts == []


def test_add_loss_tokens_joins_rows_of_any_worker() -> None:
    groups = [group(7), sampled(7, tokens_of("a", "b"), tokens_of("c"))]
    groups += [sampled(7, tokens_of("d"), tokens_of("e"), sample="signal")]
    rows = [
        LossTokens(7, "signal", 0, array("f", [-9.0]), b"\0"),
        LossTokens(7, "first", 0, array("f", [-1.5, -2.5]), b"\0\1"),
        LossTokens(7, "first", 1, array("f", [-4.0]), b"\1"),  # without advantage: no gradient, but no mask either
        LossTokens(6, "first", 0, array("f", [0.0, 0.0]), b"\0\0"),
    ]
    plain, first, signal = add_loss_tokens(groups, rows)
    assert plain == groups[0] or math.isnan(plain.rewards[1])
    assert first.tokens is not None and signal.tokens is not None
    assert first.tokens[0].learner_logps == array("f", [-1.5, -2.5]) and first.tokens[0].masked == b"\0\1"
    assert first.tokens[1].learner_logps == array("f", [-4.0]) and first.tokens[1].masked == b"\0"
    assert signal.tokens[0].learner_logps == array("f", [-9.0]) and signal.tokens[1].learner_logps is None


def test_add_loss_tokens_several_passes_first_logps_last_mask() -> None:
    rows = [LossTokens(1, "first", 0, array("f", [-float(n)]), mask) for n, mask in ((1, None), (2, b"\0"), (3, b"\1"))]
    (joined,) = add_loss_tokens([sampled(1, tokens_of("a"), tokens_of("b"))], rows)
    assert joined.tokens is not None
    assert joined.tokens[0].learner_logps == array("f", [-1.0]) and joined.tokens[0].masked == b"\1"


def test_add_loss_tokens_shortened_tokens_keep_their_places() -> None:
    short = bound_text(tokens_of("aaaa", "bb", "cc", "dd", "e"), 9)
    rows = [LossTokens(1, "first", 0, array("f", [1, 2, 3, 4, 5]), b"\0\0\0\0\1")]
    (joined,) = add_loss_tokens([sampled(1, short, tokens_of("b"))], rows)
    assert joined.tokens is not None
    assert joined.tokens[0].learner_logps == array("f", [1, 2, 4, 5]) and joined.tokens[0].masked == b"\0\0\0\1"


def test_importance_ratios_unknown_logps_are_none() -> None:
    assert importance_ratios({"engine_logps": [-1.0, NAN, -800.0], "learner_logps": [-1.0, -1.0, 0.0]}) == [
        1.0, None, math.exp(700),
    ]  # fmt: skip
    assert importance_ratios({"engine_logps": [-1.0], "learner_logps": None}) == [None]


# Ranges of steps


def test_read_steps_reads_a_range_across_files(folder: RunFolder, remote: RunFolder) -> None:
    for place in (folder, remote):
        for first in (1, 4, 7):
            write_rollouts(place, [group(step) for step in range(first, first + 3)])
        assert read_steps(place, 3, 5)["step"].to_pylist() == [3, 4, 5]
        assert read_steps(place, 8)["step"].to_pylist() == [8, 9]
        assert read_steps(place, 20, 30).num_rows == read_steps(place, 5, 4).num_rows == 0
        assert [(file.first_step, file.last_step) for file in list_rollout_files(place)] == [(1, 3), (4, 6), (7, 9)]
        assert all(file.size > 0 for file in list_rollout_files(place))


def test_read_steps_skips_other_steps_of_a_long_file(folder: RunFolder) -> None:
    write_rollouts(folder, [group(1 + n // 100) for n in range(3 * ROW_GROUP)])
    (file,) = list_rollout_files(folder)
    path = folder.path("rollouts", file.name)
    assert pq.ParquetFile(path).num_row_groups == 3
    # The data of the first and the last row group are damaged; only the middle one is read.
    layout = pq.ParquetFile(path).metadata
    content = bytearray(Path(path).read_bytes())
    for part in (0, 2):
        start = (
            layout.row_group(part).column(0).dictionary_page_offset or layout.row_group(part).column(0).data_page_offset
        )
        content[start : start + 40] = bytes(40)
    Path(path).write_bytes(content)
    assert read_steps(folder, 12, 13)["step"].to_pylist() == [12] * 100 + [13] * 100
    with pytest.raises(DataError):
        read_steps(folder, 1, 13)


def test_list_rollout_files_replaced_file_differs(folder: RunFolder) -> None:
    write_rollouts(folder, [group(1)])
    (before,) = list_rollout_files(folder)
    write_rollouts(folder, [group(1), group(1, B)])
    (after,) = list_rollout_files(folder)
    assert (before.name, before) != (after.name, after) and before.name == after.name


# Going back


def test_drop_rollouts_after_removes_files_of_later_steps(folder: RunFolder, remote: RunFolder) -> None:
    for place in (folder, remote):
        for first in (1, 4, 7):
            write_rollouts(place, [group(step) for step in range(first, first + 3)])
        assert drop_rollouts_after(place, 9) == []
        assert len(drop_rollouts_after(place, 3)) == 2
        assert steps(place) == [1, 2, 3]
        write_rollouts(place, [group(4), group(5)])
        assert steps(place) == [1, 2, 3, 4, 5]
        assert len(drop_rollouts_after(place, 0)) == 2
        assert steps(place) == []


@pytest.mark.long
@given(cuts=st.lists(st.integers(1, 11), unique=True).map(sorted), step=st.integers(0, 13))
@examples(30)
def test_drop_rollouts_after_any_step_keeps_the_steps_up_to_it(cuts: list[int], step: int) -> None:
    """Write twelve steps, one file between two cuts; go back to a step and take the rest again."""
    folder, edges = in_memory(), [0, *cuts, 12]
    for before, last in itertools.pairwise(edges):
        write_rollouts(folder, [group(each) for each in range(before + 1, last + 1)])
    kept = [*range(1, min(step, 12) + 1)]
    assert steps(folder, up_to_step=step) == kept
    assert len(drop_rollouts_after(folder, step)) == sum(before >= step for before in edges[:-1])
    assert steps(folder) == kept
    assert drop_rollouts_after(folder, step) == []
    if again := [group(each, B) for each in range(len(kept) + 1, 13)]:
        write_rollouts(folder, again)
    assert steps(folder) == [*range(1, 13)]
    assert read_rollouts(folder)["problem"].to_pylist() == [A] * len(kept) + [B] * len(again)


def test_drop_rollouts_after_new_run_removes_nothing(folder: RunFolder, remote: RunFolder) -> None:
    assert drop_rollouts_after(folder, 0) == drop_rollouts_after(remote, 0) == []


def test_drop_rollouts_after_cuts_a_file_that_spans_the_step(folder: RunFolder, remote: RunFolder) -> None:
    for place in (folder, remote):
        write_rollouts(place, [group(step, problem) for step in (1, 2, 4, 5) for problem in (B, A)])
        write_rollouts(place, [group(6)])
        assert len(drop_rollouts_after(place, 3)) == 1
        assert steps(place) == [1, 1, 2, 2]
        assert read_rollouts(place)["problem"].to_pylist() == [A, B, A, B]
        assert place.exists("rollouts", "steps-00000001-00000002.parquet")
        assert not place.exists("rollouts", "steps-00000001-00000005.parquet")


def test_drop_rollouts_after_killed_halfway_is_finished_by_the_next(folder: RunFolder) -> None:
    # Killed after writing the shortened copy and before deleting the original: both files hold steps 1 and 2.
    write_rollouts(folder, [group(step) for step in (1, 2)])
    write_rollouts(folder, [group(step) for step in (1, 2, 3)])
    drop_rollouts_after(folder, 2)
    assert steps(folder) == [1, 2]


# For other tools


def test_rollouts_docstring_pandas_line_gives_solve_rates(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rollouts(folder, [group(1, A, (1.0, NAN)), group(1, B, (0.0, NAN)), group(1, C, None)])
    write_rollouts(folder, [group(2, A, (0.0, 0.0)), group(2, B, (0.0, 0.0))])
    (line,) = [
        line for line in (inspect.getdoc(rollout_files) or "").splitlines() if line.strip().startswith("pandas.")
    ]
    assert folder.local is not None
    monkeypatch.chdir(folder.local)
    rates = eval(line.strip(), {"pandas": pandas, "float": float})
    assert rates[A] == pytest.approx(1 / 3) and rates[B] == 0.0 and math.isnan(rates[C])


class CountedFile(io.BytesIO):
    """File of an object store; each read of it is a request."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        CountedFile.reads += 1
        return super().read(size)


class CountedFilesystem:
    """Filesystem whose files are counted ones."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open_input_file(self, path: str) -> pa.NativeFile:
        with self.inner.open_input_file(path) as file:
            return pa.PythonFile(CountedFile(file.read()), mode="r")


def test_small_file_of_an_object_store_is_one_request(remote: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rollouts(remote, [group(1), group(2, B)])
    counted: Any = CountedFilesystem(remote._arrow_filesystem)
    remote._arrow_filesystem = remote.filesystem.handler.filesystem = counted
    monkeypatch.setattr(CountedFile, "reads", 0)
    assert read_rollouts(remote)["problem"].to_pylist() == [A, B]
    assert CountedFile.reads == 1
    monkeypatch.setattr(run_folder, "WHOLE_BYTES", 100)  # only parts of a larger one are read
    assert read_rollouts(remote)["problem"].to_pylist() == [A, B]
    assert CountedFile.reads > 5


def test_rollouts_of_a_mixture_have_their_source(folder: RunFolder) -> None:
    groups = [replace(group(step), source=name) for step, name in ((1, "math"), (2, "games"), (3, "math"))]
    write_rollouts(folder, groups)
    assert read_rollouts(folder)["source"].to_pylist() == ["math", "games", "math"]
    drop_rollouts_after(folder, 2)
    assert read_rollouts(folder)["source"].to_pylist() == ["math", "games"]


def test_rollouts_that_the_disk_does_not_take_are_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems report a full disk only when a file is synced."""

    def is_full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", is_full)
    folder = RunFolder(str(tmp_path), "run")
    with pytest.raises(OSError, match="No space left on device"):
        write_rollouts(folder, [group(step=1)])
    assert list_rollout_files(folder) == [] and list(tmp_path.glob("run/rollouts/.*")) == []
