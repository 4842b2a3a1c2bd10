"""Tests of the index of groups: filters, order, search, details with tokens, problems, and reading only new files."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from page_samples import make_group

from grpo_ray.errors import DataError
from grpo_ray.pages.watch import rollouts
from grpo_ray.pages.watch.rollouts import GroupQuery, RolloutIndex, RolloutReader
from grpo_ray.storage.records.conversation_columns import ConversationRecord, MessageRecord
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.rollout_files import drop_rollouts_after, write_rollouts
from grpo_ray.storage.records.tokens import TokenRecord
from grpo_ray.storage.run_folder import RunFolder

NAN = math.nan
A, B, C = "a" * 16, "b" * 16, "c" * 16


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


def index_of(folder: RunFolder, *files: Sequence[GroupRecord]) -> RolloutIndex:
    """Write files of groups, and return their index."""
    for groups in files:
        write_rollouts(folder, groups)
    reader = RolloutReader(folder)
    assert reader.refresh()
    return reader.index


def chosen(index: RolloutIndex, query: GroupQuery) -> list[tuple[int, str]]:
    """Return step and first letter of the problem of the chosen groups."""
    return [(group["step"], group["problem"][0]) for group in index.describe(index.select(query))]


def tokens_of(*texts: str, learner: bool = True) -> TokenRecord:
    """Make tokens with the engine's log-probabilities -1, -2, ... and the learner's half a nat higher."""
    engine = [-1.0 - number for number in range(len(texts))]
    return TokenRecord(
        text="".join(texts).encode(),
        ends=array("i", np.cumsum([len(text.encode()) for text in texts]).tolist()),
        head=len(texts),
        engine_logps=array("f", engine),
        learner_logps=array("f", [value + 0.5 for value in engine]) if learner else None,
        masked=bytes([1] + [0] * (len(texts) - 1)),
    )


@pytest.fixture
def index(folder: RunFolder) -> RolloutIndex:
    return index_of(
        folder,
        [
            make_group(1, A, (0.0, 0.0), texts=("three apples", "four")),
            make_group(1, B, (1.0, 1.0)),
            make_group(2, B, (NAN, NAN), texts=("Apples and pears", "x")),
        ],
        [make_group(3, A, (1.0, 0.0), epoch=1, texts=("none", "none")), make_group(4, C, (1.0, 1.0), epoch=1)],
    )


def test_select_problem_among_groups_without_problems_finds_none(folder: RunFolder) -> None:
    """The file of another program may lack the ids of problems."""
    index = index_of(folder, [make_group(1, A, (1.0, 0.0))])
    groups = index.groups.set_column(
        index.groups.column_names.index("problem"), "problem", pa.chunked_array([pa.nulls(1, pa.string())])
    )
    prompts = pa.chunked_array([pa.nulls(1, pa.string())])
    without = RolloutIndex(folder, [rollouts._FileRows(index.files[0], groups, prompts)], [])
    assert len(without.select(GroupQuery())) == 1 and not len(without.select(GroupQuery(problem="a")))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (GroupQuery(), [(4, "c"), (3, "a"), (2, "b"), (1, "b"), (1, "a")]),
        (GroupQuery(order="oldest"), [(1, "a"), (1, "b"), (2, "b"), (3, "a"), (4, "c")]),
        (GroupQuery(order="highest"), [(4, "c"), (1, "b"), (3, "a"), (1, "a"), (2, "b")]),
        (GroupQuery(order="lowest"), [(1, "a"), (3, "a"), (4, "c"), (1, "b"), (2, "b")]),
        (GroupQuery(first_step=2, last_step=3), [(3, "a"), (2, "b")]),
        (GroupQuery(problem="AAA"), [(3, "a"), (1, "a")]),
        (GroupQuery(problem="no such"), []),
        (GroupQuery(outcome="mixed"), [(3, "a")]),
        (GroupQuery(outcome="all"), [(4, "c"), (1, "b")]),
        (GroupQuery(outcome="none"), [(1, "a")]),
        (GroupQuery(min_reward=0.5), [(4, "c"), (3, "a"), (1, "b")]),
        (GroupQuery(max_reward=0.0), [(1, "a")]),
        (GroupQuery(with_texts=True), [(3, "a"), (2, "b"), (1, "a")]),
    ],
)
def test_select_query_chooses_and_orders_groups(
    index: RolloutIndex, query: GroupQuery, expected: list[tuple[int, str]]
) -> None:
    assert chosen(index, query) == expected


def test_describe_group_of_unknown_reward_has_null(index: RolloutIndex) -> None:
    (group,) = index.describe(index.select(GroupQuery(first_step=2, last_step=2)))
    assert group["reward"] is None and group["rewards"] == [None, None] and group["prompt"] == f"prompt of {B}"


def test_search_text_is_found_in_any_case_over_files(index: RolloutIndex) -> None:
    rows = index.select(GroupQuery(with_texts=True))
    found, rest = index.search("APPLES", rows, 0, 10)
    assert rest is None
    assert [(each["step"], each["excerpt"]) for each in found] == [(2, "Apples and pears"), (1, "three apples")]
    assert [each["step"] for each in index.search("prompt of a", rows, 0, 10)[0]] == [3, 1]
    assert index.search("bananas", rows, 0, 10) == ([], None)


def test_search_goes_on_where_it_stopped(index: RolloutIndex) -> None:
    rows = index.select(GroupQuery(with_texts=True))
    found, searched = index.search("e", rows, 0, 1)
    assert ([each["step"] for each in found], searched) == ([3], 1)
    found, searched = index.search("e", rows, 1, 1)
    assert ([each["step"] for each in found], searched) == ([2], 2)
    # Without time left, one file is searched.
    found, searched = index.search("apples", rows, 0, 10, seconds=-1)
    assert (found, searched) == ([], 1)


def test_search_excerpt_is_cut_around_the_match(folder: RunFolder) -> None:
    text = "x" * 500 + "needle" + "y" * 500
    index = index_of(folder, [make_group(1, A, (1.0,), texts=(text,))])
    ((found,), _) = index.search("Needle", index.select(GroupQuery()), 0, 10)
    assert found["excerpt"] == f"…{'x' * 80}needle{'y' * 80}…"


def test_detail_group_has_texts_and_tokens(folder: RunFolder) -> None:
    whole = make_group(2, A, (1.0, 0.0), texts=("ab", "c"))
    sampled = replace(
        whole, sample="signal", advantages=(0.5, -0.5), tokens=(tokens_of("a", "b"), tokens_of("c", learner=False))
    )
    index = index_of(folder, [make_group(2, B, (0.0, 0.0)), sampled, make_group(1, A, (1.0, 1.0), texts=("x", "y"))])
    row = index.find(2, 0, A)
    assert row is not None
    group = index.detail(row)
    assert (group["prompt"], group["sample"]) == (f"prompt of {A}", "signal")
    first, second = group["completions"]
    assert (first["text"], first["advantage"], first["correct"], first["reward"]) == ("ab", 0.5, 1.0, 1.0)
    assert first["tokens"] == {
        "texts": ["a", "b"], "engine": [-1.0, -2.0], "learner": [-0.5, -1.5], "ratio": [1.6487, 1.6487],
        "masked": [True, False], "head": 2, "omitted": 0,
    }  # fmt: skip
    assert second["tokens"]["learner"] is None and second["tokens"]["ratio"] is None


def test_detail_group_without_texts_has_none(index: RolloutIndex) -> None:
    row = index.find(4, 1, C)
    assert row is not None and index.detail(row)["completions"] == []
    assert index.find(4, 0, C) is None and index.find(9, 0, A) is None


def test_detail_hostile_text_is_made_visible(folder: RunFolder) -> None:
    hostile = "a\u202e<script>alert(1)</script>\x1b[31m"
    group = make_group(1, A, (1.0,), texts=(hostile,))
    index = index_of(folder, [replace(group, tokens=(tokens_of(*hostile),), advantages=(0.0,))])
    (completion,) = index.detail(0)["completions"]
    visible = "a⟨U+202E⟩<script>alert(1)</script>⟨U+001B⟩[31m"
    assert completion["text"] == visible
    assert "".join(completion["tokens"]["texts"]) == visible


def test_detail_tokens_that_spell_a_secret_are_left_out(folder: RunFolder) -> None:
    secret = "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
    group = make_group(1, A, (1.0,), texts=(secret,))
    index = index_of(folder, [replace(group, tokens=(tokens_of(*secret),), advantages=(0.0,))])
    (completion,) = index.detail(0)["completions"]
    assert completion["tokens"] is None and "wJalr" not in completion["text"]


def test_describe_tokens_gap_counts_what_is_missing() -> None:
    tokens = {"texts": ["a", "b"], "engine_logps": [-1.0, None], "learner_logps": None, "masked": [False], "head": 1}
    described = rollouts.describe_tokens(tokens, 10)
    assert described is not None
    assert (described["omitted"], described["engine"], described["masked"]) == (8, [-1.0, None], [False])


def test_problems_are_ordered_by_the_change_of_their_solve_rate(index: RolloutIndex) -> None:
    # a: 0 at step 1, 1/2 at step 3; b: 1 at step 1, unknown at step 2; c: 1 at step 4.
    problems, total = index.problems("gained", "", 0, 10)
    assert [(each["problem"][0], each["first_rate"], each["last_rate"], each["groups"]) for each in problems] == [
        ("a", 0.0, 0.5, 2), ("c", 1.0, 1.0, 1), ("b", 1.0, 1.0, 1),
    ]  # fmt: skip
    assert total == 3 and problems[0]["rate"] == 0.25 and problems[0]["prompt"] == f"prompt of {A}"
    assert [each["problem"][0] for each in index.problems("easiest", "", 1, 1)[0]] == ["b"]
    assert index.problems("lost", "z", 0, 10) == ([], 0)


def test_reader_reads_new_and_changed_files_only(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = rollouts.read_rollout_file

    def counting(folder: RunFolder, file: rollouts.RolloutFile, *rest: object) -> object:
        read.append(file.name)
        return original(folder, file, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(rollouts, "read_rollout_file", counting)
    reader = RolloutReader(folder)
    assert not reader.refresh() and len(reader.index) == 0
    write_rollouts(folder, [make_group(1, A, (1.0,)), make_group(2, A, (1.0,))])
    assert reader.refresh() and not reader.refresh() and len(read) == 1
    write_rollouts(folder, [make_group(3, A, (1.0,)), make_group(4, B, (0.0,))])
    assert reader.refresh() and len(read) == 2 and reader.index.step.tolist() == [1, 2, 3, 4]
    # The run goes back to step 2, and takes steps 3 and 4 again.
    drop_rollouts_after(folder, 2)
    assert reader.refresh() and len(read) == 2 and reader.index.step.tolist() == [1, 2]
    write_rollouts(folder, [make_group(3, C, (1.0,)), make_group(4, C, (0.0,))])
    assert reader.refresh() and reader.index.ids[-1] == C and len(read) == 3


def test_reader_damaged_file_is_noted_and_not_read_again(folder: RunFolder) -> None:
    write_rollouts(folder, [make_group(1, A, (1.0,))])
    folder.write_text("no parquet", "rollouts", "steps-00000002-00000003.parquet")
    reader = RolloutReader(folder)
    assert reader.refresh() and len(reader.index) == 1
    assert "steps-00000002-00000003.parquet" in reader.index.notes[0]
    assert not reader.refresh()


def test_reader_file_is_read_again_after_the_storage_failed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    original, is_down = rollouts.read_rollout_file, True

    def read(*given: object) -> object:
        if is_down:
            raise DataError("no connection") from OSError("no connection")
        return original(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(rollouts, "read_rollout_file", read)
    write_rollouts(folder, [make_group(1, A, (1.0,))])
    reader = RolloutReader(folder)
    assert reader.refresh() and len(reader.index) == 0 and len(reader.index.notes) == 1
    assert not reader.refresh()
    is_down = False
    assert reader.refresh() and len(reader.index) == 1 and reader.index.notes == []
    assert not reader.refresh()


def conversations(*results: str) -> tuple[ConversationRecord, ...]:
    """Make a conversation for each result of a tool."""
    return tuple(
        ConversationRecord(
            turns=2, calls=1, call_errors=0, tool_seconds=0.5, ended="stop",
            messages=(MessageRecord("tool", "lookup", result), MessageRecord("assistant", "", "It is so.")),
        )
        for result in results
    )  # fmt: skip


def test_search_text_is_found_in_messages_alone(folder: RunFolder) -> None:
    plain = make_group(1, A, (0.0, 1.0), texts=("one", "needle"))
    talk = replace(make_group(2, B, (0.0, 1.0), texts=("one", "two")), conversations=conversations("x", "A Needle."))
    index = index_of(folder, [plain], [talk, make_group(2, C, (1.0, 1.0)), replace(talk, step=3, conversations=None)])
    rows = index.select(GroupQuery(with_texts=True))
    found, _ = index.search("needle", rows, 0, 10)
    assert [(each["step"], each["excerpt"]) for each in found] == [(2, "A Needle."), (1, "needle")]
    assert [each["excerpt"] for each in index.search("LOOKUP", rows, 0, 10)[0]] == ["lookup"]


def test_detail_group_has_messages_and_marks_result_tokens(folder: RunFolder) -> None:
    tokens = (replace(tokens_of("a", "b"), results=b"\0\1"), replace(tokens_of("c"), results=b"\0"))
    group = replace(
        make_group(1, A, (0.0, 1.0), texts=("one", "two")),
        sample="first", advantages=(-1.0, 1.0), tokens=tokens, conversations=conversations("b", "c"),
    )  # fmt: skip
    index = index_of(folder, [group])
    first, second = index.detail(0)["completions"]
    assert first["tokens"]["result"] == [False, True] and second["tokens"]["result"] == [False]
    assert first["conversation"]["facts"] == "2 turns, 1 call, 0.5 s in tools"
    assert [(each["kind"], each["name"], each["text"]) for each in second["conversation"]["messages"]] == [
        ("tool", "lookup", "c"), ("assistant", "", "It is so."),
    ]  # fmt: skip


def test_detail_group_without_tools_has_no_conversation(folder: RunFolder) -> None:
    group = make_group(1, A, (1.0,), texts=("ab",))
    index = index_of(folder, [replace(group, sample="first", advantages=(0.0,), tokens=(tokens_of("a", "b"),))])
    (completion,) = index.detail(0)["completions"]
    assert "conversation" not in completion and "result" not in completion["tokens"]


def test_groups_of_a_source_are_chosen(folder: RunFolder) -> None:
    groups = [
        replace(make_group(1, A, [1.0, 0.0]), source="math"),
        replace(make_group(2, B, [1.0, 0.0]), source="games"),
    ]
    index = index_of(folder, groups)
    assert index.sources() == ["games", "math"]
    assert chosen(index, GroupQuery(source="math")) == [(1, "a")] and chosen(index, GroupQuery(source="mat")) == []
    assert [group["source"] for group in index.describe([0, 1])] == ["math", "games"]


def test_groups_of_a_single_dataset_have_no_source(folder: RunFolder) -> None:
    index = index_of(folder, [make_group(1, A, [1.0, 0.0])])
    assert index.sources() == [] and index.describe([0])[0]["source"] == ""
    (file,) = (folder.local / "rollouts").iterdir()  # type: ignore[operator]
    assert "source" not in pq.read_schema(file).names
