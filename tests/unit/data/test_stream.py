"""Tests of the order of the training stream: epochs, windows, plans, limits and the held-out cut."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_shards import NO_IDS, ids, numbers, problem, shards_of, write_jsonl

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.config.sources import BUILT_IN_DATASETS
from grpo_ray.data.files import file_shards
from grpo_ray.data.problem import Problem
from grpo_ray.data.registry import DATASETS, EMBEDDED
from grpo_ray.data.stream import (
    SHARDS_PER_WINDOW,
    EpochPlan,
    Split,
    build_index,
    describe_heldout_part,
    describe_repeated_rows,
    from_row,
    make_epoch_reader,
    open_splits,
    to_row,
)
from grpo_ray.errors import DataError

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def yielded(split: Split, plan: EpochPlan, seed: int = 0) -> list[int]:
    """Return the numbers of the problems that a plan yields, in order."""
    reader = make_epoch_reader(split, seed)
    return [int(row["solution"]) for task in range(reader.num_read_tasks) for row in reader.run_read_task(task, plan)]


@pytest.mark.parametrize(
    "columns",
    [{}, {"topic": "sums", "difficulty": 3.5, "tags": ["a", {"b": None}], "ok": True}, {"id": "other", "epoch": 7}],
)
def test_row_problem_is_read_back_unchanged(columns: dict[str, Any]) -> None:
    prompt = [{"role": "system", "content": "ünïcode 🧮"}, {"role": "user", "content": "a\n\\boxed{}\u2028"}]
    before = Problem(id="0123456789abcdef", prompt=prompt, solution="$\\frac{1}{2}$", columns=columns)
    row = to_row(before, epoch=3)
    assert from_row(row) == before and row["epoch"] == 3


def test_row_types_do_not_depend_on_columns() -> None:
    rows = [to_row(Problem(id="1", prompt=[], solution="s", columns=c), 0) for c in ({}, {"x": 1}, {"x": "text"})]
    assert {tuple((name, type(value)) for name, value in row.items()) for row in rows} == {
        (("id", str), ("epoch", int), ("prompt", str), ("solution", str), ("columns", str), ("source", str))
    }


@QUICK
@given(
    count=st.one_of(st.integers(1, 30), st.sampled_from([SHARDS_PER_WINDOW, SHARDS_PER_WINDOW + 1])),
    rows=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
    limit=st.one_of(st.none(), st.integers(1, 250)),
)
def test_epoch_holds_every_problem_once(count: int, rows: int, seed: int, limit: int | None) -> None:
    split = Split("some", shards_of(count, rows), limit=limit)
    first = list(range(count * rows))[:limit]  # a limit takes the first problems of the dataset
    for epoch in numbers(split, seed, epochs=3):
        assert sorted(epoch) == first
    if limit is None:
        assert make_epoch_reader(split, seed).num_windows == -(-count // SHARDS_PER_WINDOW)


def test_order_depends_on_seed_and_epoch_only() -> None:
    split = Split("some", shards_of(20, 5))
    order = numbers(split, seed=7, epochs=3)
    assert numbers(split, seed=7, epochs=3) == order
    assert numbers(Split("other name", shards_of(20, 5)), seed=7, epochs=3) == order
    assert numbers(split, seed=7, epochs=1) == order[:1]  # the first epoch of a longer run is the same
    assert numbers(split, seed=8, epochs=3) != order
    assert len({tuple(epoch) for epoch in order}) == 3


def test_order_one_shard_differs_between_epochs() -> None:
    order = numbers(Split("some", shards_of(1, 20)), epochs=4)
    assert len({tuple(epoch) for epoch in order}) == 4


def test_order_mixes_problems_and_shards() -> None:
    (order,) = numbers(Split("some", shards_of(4 * SHARDS_PER_WINDOW, 10)))
    first = order[: 10 * SHARDS_PER_WINDOW]
    assert first != sorted(first)
    # The first window takes 8 of 32 shards at random: the first 8 would be one draw in 10 million.
    assert {n // 10 for n in first} != set(range(SHARDS_PER_WINDOW))
    assert len({n // 10 for n in first[:10]}) > 1


def test_window_read_twice_is_equal() -> None:
    reader = make_epoch_reader(Split("some", shards_of(2, 5)), seed=0)
    assert reader.read_window(0, 0) == reader.read_window(0, 0)


def test_epoch_plan_skips_used_problems_and_keeps_order() -> None:
    split = Split("some", shards_of(20, 5))
    whole = numbers(split, seed=3, epochs=2)
    for epoch in (0, 1):
        used = whole[epoch][:37]
        assert yielded(split, EpochPlan(epoch, ids(used), NO_IDS), seed=3) == whole[epoch][37:]
    assert yielded(split, EpochPlan(0, ids(whole[0]), NO_IDS), seed=3) == []


def test_epoch_plan_reordered_shards_skip_same_problems() -> None:
    split, reordered = Split("some", shards_of(20, 5)), Split("some", list(reversed(shards_of(10, 10))))
    used = numbers(split)[0][:33]
    assert sorted(used + yielded(reordered, EpochPlan(0, ids(used), NO_IDS))) == list(range(100))


def test_epoch_plan_yields_carried_then_preferred_then_rest() -> None:
    split = Split("some", shards_of(20, 5))
    (order,) = numbers(split)
    preferred, carried_over = [5, 17, 88], [to_row(problem(1000), epoch=6), to_row(problem(1001), epoch=6)]
    found = yielded(split, EpochPlan(0, NO_IDS, ids(preferred), tuple(carried_over)))
    assert found[:2] == [1000, 1001]
    assert found[2:5] == [n for n in order if n in preferred]
    assert found[5:] == [n for n in order if n not in preferred]


def test_limit_counts_after_heldout_cut() -> None:
    kept = Split("some", shards_of(10, 10), heldout_share=0.5)
    limited = Split("some", shards_of(10, 10), heldout_share=0.5, limit=20)
    assert sorted(numbers(limited)[0]) == sorted([int(p.solution) for p in kept.read()][:20])


@pytest.mark.parametrize("share", [0.005, 0.1, 0.5, 0.9])
def test_heldout_cut_is_disjoint_and_complete(share: float) -> None:
    training = Split("some", shards_of(20, 50), share)
    heldout = Split("some", shards_of(20, 50), share, keep_heldout=True)
    train, held = ({int(p.solution) for p in split.read()} for split in (training, heldout))
    assert not train & held and train | held == set(range(1000))
    # 1000 draws stay within five standard deviations of their mean.
    assert abs(len(held) - 1000 * share) < 5 * (1000 * share * (1 - share)) ** 0.5 + 1


def test_heldout_cut_does_not_depend_on_shards() -> None:
    held = [
        {p.id for p in Split("some", shards, 0.1, keep_heldout=True).read()}
        for shards in (shards_of(20, 50), shards_of(1, 1000), list(reversed(shards_of(50, 20))))
    ]
    assert held[0] == held[1] == held[2]


def test_heldout_problems_are_not_in_training_windows() -> None:
    training = Split("some", shards_of(20, 10), 0.3)
    heldout = {int(p.solution) for p in Split("some", shards_of(20, 10), 0.3, keep_heldout=True).read()}
    for epoch in numbers(training, epochs=2):
        assert sorted(epoch) == sorted(set(range(200)) - heldout)


def test_open_splits_without_heldout_file_cuts_training(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", 200)
    training, heldout = open_splits(
        load_config(None, [f"data.train={path}", "data.heldout=null", "data.heldout_share=0.2"])
    )
    train, held = ({p.id for p in split.read()} for split in (training[""], heldout["heldout"]))
    assert not train & held and len(train | held) == 200 and held


def held_out(config: Config) -> tuple[set[str], set[str]]:
    """Return the ids of the training and of the held-out problems."""
    training, heldout = open_splits(config)
    (part,) = heldout.values()
    return {problem.id for problem in training[""].read()}, {problem.id for problem in part.read()}


def test_open_splits_own_file_is_measured_on_a_part_of_itself(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", 2000)
    train, held = held_out(load_config(None, [f"data.train={path}"]))
    assert not train & held and len(train | held) == 2000
    assert 60 <= len(held) <= 140  # 5 %: four standard deviations of 9.7 around 100
    again = held_out(load_config(None, [f"data.train={path}", "run.seed=7", "cluster.num_workers=1"]))
    assert again == (train, held)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "1.jsonl").write_text("".join(lines[900:]))
    (tmp_path / "moved" / "2.jsonl").write_text("".join(lines[:900]))
    assert held_out(load_config(None, [f"data.train={tmp_path}/moved"])) == (train, held)


@pytest.mark.long
def test_open_splits_large_file_holds_out_some_500(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", 20_000)
    train, held = held_out(load_config(None, [f"data.train={path}"]))
    assert 410 <= len(held) <= 590  # four standard deviations of 22
    assert len(train) == 20_000 - len(held)
    _, fewer = held_out(load_config(None, [f"data.train={path}", "data.heldout_share=0.01", "data.heldout_limit=50"]))
    assert len(fewer) == 50 and fewer < held


def test_built_in_datasets_are_those_of_the_registry() -> None:
    assert set(BUILT_IN_DATASETS) == set(DATASETS)


def test_open_splits_built_in_train_has_its_own_heldout_split() -> None:
    for name, count in (("arithmetic", 600), ("multiplication", 500)):
        train, held = held_out(load_config(None, [f"data.train={name}"]))
        own = {problem.id for problem in EMBEDDED[name]("heldout")}
        assert held == own and len(held) == count and not train & held


def test_build_index_part_of_training_is_read_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", 1000)
    _, heldout = open_splits(load_config(None, [f"data.train={path}", "data.heldout_limit=20"]))
    expected = list(heldout["heldout"].read())
    index = build_index(heldout["heldout"])
    (tmp_path / "a.jsonl").unlink()
    assert list(index.split.read()) == expected and len(expected) == 20
    assert "Question" not in repr(index)


def test_build_index_too_few_problems_to_hold_out_raises(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", 3)
    _, heldout = open_splits(load_config(None, [f"data.train={path}"]))
    with pytest.raises(DataError, match=r"a\.jsonl: data\.heldout_share=0\.05 holds out none .* such as 0\.2$"):
        build_index(heldout["heldout"])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_build_index_rows_with_other_columns_are_problems_and_equal_rows_are_counted(tmp_path: Path) -> None:
    row = {"prompt": "q?", "solution": "1"}
    path = write_rows(tmp_path / "a.jsonl", [row, row | {"level": 1}, row | {"level": 2}, row | {"level": 1}, row])
    index = build_index(Split("a.jsonl", file_shards(path)))
    assert [each.columns["level"] for each in index.split.read()] == [None, 1, 2]
    assert (index.fingerprint.count, index.repeated_rows) == (3, 2)
    assert describe_repeated_rows(index) == "a.jsonl: 2 rows left out, equal to an earlier row in all columns"


def test_build_index_other_columns_are_another_dataset(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "solution": "1", "level": n} for n in range(3)]
    before = build_index(Split("a", file_shards(write_rows(tmp_path / "a.jsonl", rows))))
    rows[1]["level"] = 7
    after = build_index(Split("a", file_shards(write_rows(tmp_path / "a.jsonl", rows))))
    assert before.fingerprint.count == after.fingerprint.count
    assert before.fingerprint != after.fingerprint


def test_open_splits_rows_of_one_question_are_held_out_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "solution": "1", "level": level} for n in range(40) for level in range(5)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    training, heldout = open_splits(load_config(None, [f"data.train={path}", "data.heldout_share=0.3"]))
    parts = [{each.question_id for each in split.read()} for split in (training[""], heldout["heldout"])]
    assert all(parts) and not parts[0] & parts[1]


def test_describe_heldout_part_gives_sizes_and_advice_for_few() -> None:
    assert describe_heldout_part("a.jsonl", 50, 950) == (
        "50 problems of a.jsonl are held out of training, which has 950"
    )
    assert "so few can show only large differences" in describe_heldout_part("a.jsonl", 49, 951)


def test_open_splits_with_heldout_file_uses_both(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / "a.jsonl", 20), write_jsonl(tmp_path / "b.jsonl", 10)]
    settings = [f"data.train={paths[0]}", f"data.heldout={paths[1]}", "data.limit=15", "data.heldout_limit=5"]
    training, heldout = open_splits(load_config(None, settings))
    assert [int(p.solution) for p in training[""].read()] == list(range(15))
    assert [int(p.solution) for p in heldout["heldout"].read()] == list(range(5))


def test_open_splits_several_sets_each_has_the_limit(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", 9) for name in "abc"]
    settings = [f"data.train={paths[0]}", f"data.heldout={{b: {paths[1]}, c: {paths[2]}}}", "data.heldout_limit=5"]
    _, heldout = open_splits(load_config(None, settings))
    assert {key: (split.name, len(list(split.read()))) for key, split in heldout.items()} == {
        "heldout/b": (str(paths[1]), 5), "heldout/c": (str(paths[2]), 5),
    }  # fmt: skip


def test_index_rows_with_different_columns_get_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows: list[dict[str, Any]] = [{"topic": "t"}, {"level": 2}, {}]
    path.write_text(
        "".join(json.dumps({"prompt": f"{n}?", "solution": "1"} | row) + "\n" for n, row in enumerate(rows))
    )
    split = build_index(Split("some", file_shards(str(path)))).split
    assert split.columns == ("level", "topic")
    assert [p.columns for p in split.read()] == [
        {"level": None, "topic": "t"},
        {"level": 2, "topic": None},
        {"level": None, "topic": None},
    ]
