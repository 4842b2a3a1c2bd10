"""Tests of problem files: shards, row numbers in errors, formats, file search, dataset names, and the held-out cut."""

import csv
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import DataConfig
from grpo_ray.data import deepmath, registry
from grpo_ray.data import files as files_module
from grpo_ray.data.deepmath import HUB_ID
from grpo_ray.data.files import file_shards, find_files
from grpo_ray.data.problem import Problem
from grpo_ray.data.registry import EmbeddedShard, is_heldout, open_dataset
from grpo_ray.errors import DataError


def examples(count: int) -> settings:
    """Return settings of a hypothesis test: this number of examples, the same ones in each run."""
    return settings(max_examples=count, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder whose files each example of a hypothesis test writes anew."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module", autouse=True)
def three_lines_per_shard() -> Iterator[None]:
    """Make jsonl shards small, so that small files have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "LINES_PER_SHARD", 3)
        yield


def chat(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question {number}: où est π?"}]


def write_jsonl(path: Path, rows: list, end: str = "\n") -> str:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode())
    return str(path)


def write_parquet(path: Path, rows: list[dict], row_group_size: int = 1_000) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return str(path)


def read(paths: str, **settings: Any) -> list[Problem]:
    return [problem for shard in file_shards(paths, **settings) for problem in shard.read()]


def solutions(paths: str, **settings: Any) -> list[str]:
    return [problem.solution for problem in read(paths, **settings)]


def refusal(paths: str, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(paths, **settings)
    return str(caught.value)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    if filesystem.exists("/grpo-ray-test"):
        filesystem.rm("/grpo-ray-test", recursive=True)


# Parquet


def test_file_shards_parquet_row_group_is_a_shard(tmp_path: Path) -> None:
    rows = [{"prompt": chat(i), "solution": f"{i}", "topic": "t"} for i in range(7)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=3)
    shards = file_shards(path)
    # 7 rows in groups of 3: rows 1 to 3, 4 to 6, and 7.
    assert [(s.first_row, s.num_rows) for s in shards] == [(1, 3), (4, 3), (7, 1)]
    assert [[p.solution for p in s.read()] for s in shards] == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    assert read(path)[6] == Problem(id=read(path)[6].id, prompt=chat(6), solution="6", columns={"topic": "t"})


@given(rows=st.integers(1, 12), group=st.integers(1, 13), data=st.data())
@examples(30)
def test_file_shards_parquet_any_size_keeps_rows_and_numbers(
    scratch: Path, rows: int, group: int, data: st.DataObject
) -> None:
    bad = data.draw(st.none() | st.integers(1, rows))
    table = [{"prompt": f"q{i}", "solution": "" if i == bad else f"{i}"} for i in range(1, rows + 1)]
    path = write_parquet(scratch / "a.parquet", table, row_group_size=group)
    first_rows = [*range(1, rows + 1, group)]
    sizes = [min(group, rows + 1 - first) for first in first_rows]
    assert [(s.first_row, s.num_rows) for s in file_shards(path)] == list(zip(first_rows, sizes, strict=True))
    if bad is None:
        assert solutions(path) == [f"{i}" for i in range(1, rows + 1)]
    else:
        assert refusal(path) == f"{path}, row {bad}: 'solution' is empty"


def test_file_shard_parquet_row_group_over_batch_keeps_numbers(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "solution": "" if i == 2_344 else "s"} for i in range(2_500)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=2_500)
    assert refusal(path) == f"{path}, row 2345: 'solution' is empty"


def test_file_shard_parquet_numbers_and_lists_are_solutions(tmp_path: Path) -> None:
    for name, column, expected in (
        ("numbers", [5, 6], ["5", "6"]),
        ("floats", [5.0, 0.25], ["5", "0.25"]),
        ("lists", [["5", "6"], ["7"]], ["5, 6", "7"]),
    ):
        rows = [{"prompt": "q", "solution": each} for each in column]
        assert solutions(write_parquet(tmp_path / f"{name}.parquet", rows)) == expected


def test_file_shard_solution_of_another_type_raises(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": "q", "solution": {"x": 5}}])
    kinds = "text, a number or a list of these, not dict ({'x': 5})"
    assert refusal(path) == f"{path}, row 1: 'solution' must be {kinds}"


@pytest.mark.parametrize("content", [b"", b"hello", b"PAR1 and then nothing of the kind PAR1"])
def test_file_shards_not_parquet_raises_with_file_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    assert refusal(str(path)).startswith(f"{path}: is not a parquet file")


def test_file_shard_damaged_parquet_raises_with_file_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [{"prompt": f"question {i} " * 20, "solution": "s"} for i in range(200)])
    content = bytearray(path.read_bytes())
    content[60 : len(content) // 2] = bytes(len(content) // 2 - 60)  # the footer stays whole
    path.write_bytes(content)
    assert str(path) in refusal(str(path))


# Jsonl


LINES = st.lists(st.sampled_from(["problem", "problem", "problem", "blank"]), min_size=1, max_size=12)


@given(lines=LINES, end=st.sampled_from(["\n", "\r\n"]), closed=st.booleans(), data=st.data())
@example(lines=["problem"] * 9, end="\n", closed=True, data=None)  # three whole shards, and no empty fourth one
@examples(60)
def test_file_shards_jsonl_any_size_keeps_rows_and_numbers(
    scratch: Path, lines: list[str], end: str, closed: bool, data: st.DataObject
) -> None:
    bad = data and data.draw(st.none() | st.integers(1, len(lines)))
    written = [
        "" if kind == "blank" else json.dumps({"prompt": chat(number), "solution": f"{number}"}, ensure_ascii=False)
        for number, kind in enumerate(lines, start=1)
    ]
    if bad:
        written[bad - 1] = '{"prompt": "q", "solution"'
    if written[-1] == "" and not closed:
        written[-1] = "  "  # without a line end, an empty last line would be no line
    path = scratch / "a.jsonl"
    path.write_bytes((end.join(written) + (end if closed else "")).encode())
    first_rows = [*range(1, len(lines) + 1, 3)]
    sizes = [min(3, len(lines) + 1 - first) for first in first_rows]
    shards = file_shards(str(path))
    assert [(s.first_row, s.num_rows) for s in shards] == list(zip(first_rows, sizes, strict=True))
    if bad:
        assert refusal(str(path)).startswith(f"{path}, row {bad}: is not JSON: ")
    else:
        # Each shard is read on its own, as in a task of its own.
        by_shard = [[p.solution for p in s.read()] for s in shards]
        numbers = [number for number, kind in enumerate(lines, start=1) if kind == "problem"]
        assert by_shard == [[f"{n}" for n in numbers if first <= n < first + 3] for first in first_rows]


def test_file_shard_jsonl_blank_lines_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "a", "solution": "1"}\r\n  \n\n{"prompt": "b", "solution": "2"}')
    assert solutions(str(path)) == ["1", "2"]


def test_file_shard_jsonl_unicode_line_ends_do_not_split(tmp_path: Path) -> None:
    rows = [{"prompt": "a\u2028b\u0085c\x0bd\x0ce", "solution": "1"}, {"prompt": "b", "solution": "2"}]
    assert solutions(write_jsonl(tmp_path / "a.jsonl", rows)) == ["1", "2"]


def test_file_shard_jsonl_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "solution": "1"}\n')
    assert solutions(str(path)) == ["1"]


@pytest.mark.parametrize("line", [b"{", b"not json", b'{"prompt": "\xff"}', b"[" * 100_000, b"1" * 5_000, b"{'a': 1}"])
def test_file_shard_jsonl_invalid_line_raises_with_its_row(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "solution": "1"}\n' + line + b"\n")
    assert refusal(str(path)).startswith(f"{path}, row 2: is not JSON: ")


@pytest.mark.parametrize(("line", "kind"), [("[]", "list"), ("3", "int"), ('"text"', "str"), ("null", "NoneType")])
def test_file_shard_jsonl_not_an_object_raises_with_its_type(tmp_path: Path, line: str, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    assert refusal(str(path)) == f"{path}, row 1: must be a JSON object, not {kind}"


# Csv


def test_file_shard_csv_field_with_line_ends_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    prompt = 'Two lines,\nand a "quote":\r\nwhat is 1 + 1?'
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt", "solution", "topic"], [prompt, "2", "sums"], ["q", "é", ""]])
    first, second = read(str(path))
    assert (first.prompt[0]["content"], first.solution, first.columns) == (prompt, "2", {"topic": "sums"})
    assert second.solution == "é"
    assert [s.num_rows for s in file_shards(str(path))] == [2]


def test_file_shard_csv_byte_order_mark_keeps_first_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,solution\r\nq,1\r\n", encoding="utf-8-sig", newline="")
    assert read(str(path))[0].columns == {}


def test_file_shard_csv_field_of_a_megabyte_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"prompt,solution\n{'x' * 1_000_000},1\n")
    assert len(read(str(path))[0].prompt[0]["content"]) == 1_000_000


def test_file_shard_csv_wrong_field_count_raises_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,solution\n"two\nlines",1\nq,1,2\n')
    assert refusal(str(path)) == f"{path}, row 2: has more fields than the header"
    path.write_text("prompt,solution\nq\n")
    assert refusal(str(path)).startswith(f"{path}, row 1: 'solution' must be text")


def test_file_shards_csv_quote_without_end_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,solution\np,1\nq,"2\nr,3\n')  # as a field, the third row would be lost in it
    assert refusal(str(path)) == f"{path}, row 2: is not csv: unexpected end of data"
    path.write_text('prompt,"solution\np,1\n')
    assert refusal(str(path)) == f"{path}, header: is not csv: unexpected end of data"


def test_file_shards_csv_not_utf8_raises_with_file_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("prompt,solution\nœ,1\n".encode("cp1252"))
    assert refusal(str(path)).startswith(f"{path}: is not a csv file: ")


# Columns and the system prompt


def test_file_shard_columns_are_renamed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "5", "level": 3}])
    (problem,) = read(path, columns={"prompt": "question", "solution": "answer"})
    assert problem.prompt[0]["content"] == "q" and problem.solution == "5" and problem.columns == {"level": 3}


def test_file_shard_mapped_column_replaces_same_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "long working", "final": "5"}])
    assert solutions(path, columns={"solution": "final"}) == ["5"]


def test_file_shard_columns_can_be_swapped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "5", "solution": "q"}])
    (problem,) = read(path, columns={"prompt": "solution", "solution": "prompt"})
    assert problem.prompt[0]["content"] == "q" and problem.solution == "5"


def test_file_shard_missing_mapped_column_names_the_others(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "5"}])
    assert refusal(path, columns={"prompt": "problem"}) == (
        f"{path}, row 1: no column 'problem' (`columns` maps 'prompt' to it); the row has answer, question"
    )


def test_file_shard_refused_value_names_the_files_column(tmp_path: Path) -> None:
    columns = {"prompt": "question", "solution": "answer"}
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "5"}, {"question": None, "answer": "5"}])
    assert refusal(path, columns=columns) == (
        f"{path}, row 2: 'prompt' must be text or a list of chat messages, not NoneType ('prompt' is its column "
        "'question')"
    )
    path = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "q", "answer": " "}])
    assert refusal(path, columns={"solution": "answer"}).endswith(
        "row 1: 'solution' is empty ('solution' is its column 'answer')"
    )


def test_file_shard_system_prompt_is_added_to_every_problem(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "5"}] * 2)
    for problem in read(path, system_prompt="Be brief."):
        assert problem.prompt[0] == {"role": "system", "content": "Be brief."} and len(problem.prompt) == 2


# Finding files


def test_find_files_folder_is_sorted_by_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "q", "solution": "2"}])
    write_parquet(tmp_path / "c.parquet", [{"prompt": "q", "solution": "3"}])
    (tmp_path / "a.csv").write_text("prompt,solution\nq,1\n")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "deeper").mkdir()
    write_jsonl(tmp_path / "deeper" / "d.jsonl", [{"prompt": "q", "solution": "4"}])
    assert solutions(str(tmp_path)) == ["1", "2", "3", "4"]


def test_find_files_glob_takes_matches_sorted(tmp_path: Path) -> None:
    for name in ("train-10.jsonl", "train-02.jsonl", "test-01.jsonl", "train-01.txt"):
        write_jsonl(tmp_path / name, [{"prompt": "q", "solution": name}])
    assert solutions(str(tmp_path / "train-*")) == ["train-02.jsonl", "train-10.jsonl"]
    assert solutions(str(tmp_path / "te[rs]t-0?.jsonl")) == ["test-01.jsonl"]


def test_find_files_name_with_brackets_is_found(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train[1].jsonl", [{"prompt": "q", "solution": "5"}])
    assert solutions(path) == ["5"]


def test_file_shards_empty_file_among_others_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "q", "solution": "2"}])
    assert solutions(str(tmp_path)) == ["2"]


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", ""), ("a.csv", ""), ("a.csv", "prompt,solution\n")])
def test_file_shards_empty_file_raises(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert refusal(str(path)) == f"{path}: there are no rows"


def test_file_shards_parquet_without_rows_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "solution": pa.array([], pa.string())}), path)
    assert refusal(str(path)) == f"{path}: there are no rows"


def test_file_shard_parquet_date_beyond_python_raises_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    dates = pa.array([2**60], pa.timestamp("us"))  # in the year 38,504
    pq.write_table(pa.table({"prompt": ["q"], "solution": ["1"], "seen": dates}), path)
    assert refusal(str(path)) == f"{path}: cannot be read from row 1 on: date value out of range"


def test_find_files_missing_path_raises_with_its_name(tmp_path: Path) -> None:
    for paths in (tmp_path / "none.jsonl", tmp_path / "none-*.jsonl", tmp_path / "nowhere" / "x.csv", tmp_path):
        assert refusal(str(paths)).startswith(f"{paths}: no such file or folder, or no .parquet, .jsonl, .csv file")


def test_find_files_other_suffix_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("{}")
    assert refusal(str(path)) == f"{path}: not a .parquet, .jsonl, .csv file"


def test_find_files_unknown_scheme_raises() -> None:
    assert refusal("nosuch://bucket/a.jsonl").startswith("nosuch://bucket/a.jsonl: cannot be opened: ")


def test_file_shard_deleted_file_raises_with_its_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    shards = file_shards(path)
    Path(path).unlink()
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read"):
        list(shards[0].read())


def test_file_shards_relative_path_works_from_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    monkeypatch.chdir(tmp_path)
    shards = file_shards("a.jsonl")  # workers read them from another working directory
    monkeypatch.chdir("/")
    assert [p.solution for p in shards[0].read()] == ["5"]


def test_find_files_expands_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files("~/a.jsonl") == [str(tmp_path / "a.jsonl")]


def test_file_shards_other_filesystem_is_read(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/grpo-ray-test/b.csv", b"prompt,solution\nq,2\n")
    memory.pipe("/grpo-ray-test/a.jsonl", b'{"prompt": "q", "solution": "1"}\n')
    with memory.open("/grpo-ray-test/c.parquet", "wb") as file:
        pq.write_table(pa.table({"prompt": ["q"], "solution": ["3"]}), file)
    assert solutions("memory://grpo-ray-test") == ["1", "2", "3"]
    assert solutions("memory://grpo-ray-test/*.csv") == ["2"]
    assert solutions("memory://grpo-ray-test/c.parquet") == ["3"]
    assert all(path.startswith("memory://") for path in find_files("memory://grpo-ray-test"))


def test_file_shard_bad_row_on_other_filesystem_names_uri(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/grpo-ray-test/a.jsonl", b'{"prompt": "q", "solution": "1"}\n{"prompt": "q"}\n')
    message = refusal("memory://grpo-ray-test/a.jsonl")
    missing = "no column 'solution', which a reward or heldout.score reads; the row has prompt"
    assert message == f"memory:///grpo-ray-test/a.jsonl, row 2: {missing}"


# Shards


def test_file_shard_pickled_or_read_twice_gives_the_same(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "solution": f"{i}"} for i in range(5)]
    last = file_shards(write_jsonl(tmp_path / "a.jsonl", rows), columns={}, system_prompt="Be brief.")[-1]
    once = list(last.read())
    assert [p.solution for p in once] == ["3", "4"]
    assert list(last.read()) == once
    assert list(pickle.loads(pickle.dumps(last)).read()) == once


def test_file_shards_parses_no_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"nothing": "right"}])
    assert file_shards(path)[0].num_rows == 1


# The table of datasets


class HubRequested(Exception):
    """Error that is raised instead of a request to the hub."""


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def request(hub_id: str, split: str, columns: Any = None, system_prompt: str | None = None) -> None:
        raise HubRequested(hub_id)

    monkeypatch.setattr(registry, "hub_shards", request)


def test_open_dataset_built_in_name_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "arithmetic").mkdir()
    monkeypatch.chdir(tmp_path)
    (shard,) = open_dataset("arithmetic", "train", DataConfig())
    assert isinstance(shard, EmbeddedShard)


def test_open_dataset_one_slash_is_a_hub_dataset(no_hub: None) -> None:
    with pytest.raises(HubRequested, match="someone/problems"):
        open_dataset("someone/problems", "train", DataConfig())


@pytest.mark.parametrize("name", ["sub/a.jsonl", "./sub", "{}/sub"])
def test_open_dataset_path_is_not_a_hub_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None, name: str
) -> None:
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "sub" / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    monkeypatch.chdir(tmp_path)
    assert len(open_dataset(name.format(tmp_path), "train", DataConfig())) == 1


def test_open_dataset_existing_folder_is_not_a_hub_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None
) -> None:
    (tmp_path / "data" / "problems").mkdir(parents=True)
    write_jsonl(tmp_path / "data" / "problems" / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    monkeypatch.chdir(tmp_path)
    assert len(open_dataset("data/problems", "train", DataConfig())) == 1


@pytest.mark.parametrize(
    ("name", "meant"), [("arithmetc", "; did you mean arithmetic?"), ("math-500", "; did you mean math500?"), ("", "")]
)
def test_open_dataset_misspelled_name_suggests_a_built_in_one(name: str, meant: str) -> None:
    with pytest.raises(DataError) as caught:
        open_dataset(name, "train", DataConfig())
    assert str(caught.value) == (
        f"{name!r} is no dataset, and there is no such file or folder; built-in datasets are arithmetic, guessing, "
        f"multiplication, deepmath, gsm8k{meant}"
    )


def test_local_files_that_do_not_exist_are_refused_with_their_field(tmp_path: Path, no_hub: None) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"not": "read"}])
    missing = tmp_path / "b.jsonl"
    for field, override in {
        "data.train": f"data.train={missing}",
        "data.train.math": f"data.train={{sums: {{path: arithmetic}}, math: {{path: {missing}}}}}",
        "data.heldout": f"data.heldout={missing}",
        "data.heldout.own": f"data.heldout={{hub: someone/problems, own: {missing}}}",
        "data.heldout.math": f"data.heldout={{hub: gpqa, math: math500={missing}}}",
    }.items():
        with pytest.raises(DataError) as caught:
            registry.require_local_files(load_config(None, [f"data.train={path}", override]))
        assert str(caught.value).startswith(f"{field}: {missing}: no such file or folder")
    for found in ("arithmetic", path, "someone/problems", "s3://bucket/a.jsonl"):
        for heldout in ("math500", f"math500={path}", "math500=s3://bucket/a.jsonl"):
            registry.require_local_files(load_config(None, [f"data.train={found}", f"data.heldout={heldout}"]))


def test_open_dataset_passes_columns_and_system_prompt(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "solution": "5"}])
    config = DataConfig(columns={"prompt": "question"}, system_prompt="Be brief.")
    (problem,) = open_dataset(path, "train", config)[0].read()
    assert [m["content"] for m in problem.prompt] == ["Be brief.", "q"]


def test_open_dataset_deepmath_reads_the_hub_parquet_files(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def no_shards(paths: str, *settings: object) -> list[Any]:
        requests.append((paths, settings))
        return []

    monkeypatch.setattr(deepmath, "file_shards", no_shards)
    open_dataset("deepmath", "train", DataConfig(system_prompt="Be brief."))
    assert requests == [(f"hf://datasets/{HUB_ID}/data/train-*.parquet", ({}, "Be brief."))]


# The held-out cut


@given(
    id=st.integers(0, 2**64 - 1).map("{:016x}".format), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)
)
@examples(60)
def test_is_heldout_larger_share_includes_the_smaller_one(id: str, shares: list[float]) -> None:
    small, large = shares
    assert is_heldout(id, small) <= is_heldout(id, large)
    assert not is_heldout(id, 0.0) and is_heldout(id, 1.0)


def test_is_heldout_share_is_the_share_of_all_ids() -> None:
    ids = [f"{(2 * i + 1) * 2**63 // 1000:016x}" for i in range(1000)]  # evenly over all 64-bit ids
    assert [sum(is_heldout(i, share) for i in ids) for share in (0.005, 0.1, 0.5)] == [5, 100, 500]
    assert {i for i in ids if is_heldout(i, 0.01)} < {i for i in ids if is_heldout(i, 0.02)}


def test_csv_header_with_repeated_column_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,solution,note,note\nq,5,a,b\n")
    with pytest.raises(DataError, match="the header has the column 'note' twice"):
        file_shards(str(path))


def test_parquet_with_repeated_column_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    arrays = [pa.array([text]) for text in ("q", "5", "a", "b")]
    pq.write_table(pa.table(arrays, names=["prompt", "solution", "note", "note"]), path)
    with pytest.raises(DataError, match="has the column 'note' twice"):
        file_shards(str(path))


def test_columns_decide_the_question_of_a_row_with_a_solution_too(tmp_path: Path) -> None:
    """Boards of an environment have the same prompt and few different solutions; a part of them may be held out."""
    path = tmp_path / "boards.jsonl"
    path.write_text("".join(f'{{"prompt": "Play.", "solution": "yes", "level": {level}}}\n' for level in (1, 2)))

    def questions(columns_decide: bool) -> set[str]:
        shards = open_dataset(str(path), "train", DataConfig(), needs_solutions=True, columns_decide=columns_decide)
        return {problem.question_id for shard in shards for problem in shard.read()}

    assert (len(questions(True)), len(questions(False))) == (2, 1)
