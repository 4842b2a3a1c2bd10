import csv
import importlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import grpo_ray.data
from grpo_ray.data import ArithmeticShard, is_heldout, open_dataset
from grpo_ray.data.deepmath import HUB_ID
from grpo_ray.data.files import LINES_PER_SHARD, file_shards, find_files
from grpo_ray.errors import DataError
from grpo_ray.problem import Problem
from grpo_ray.sections import DataConfig


def chat(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question {number}: où est π?"}]


def write_jsonl(path: Path, rows: list, end: str = "\n") -> str:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode())
    return str(path)


def write_parquet(path: Path, rows: list[dict], row_group_size: int = 1_000) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return str(path)


def read(paths: str, **settings) -> list[Problem]:
    return [problem for shard in file_shards(paths, **settings) for problem in shard.read()]


def solutions(paths: str, **settings) -> list[str]:
    return [problem.solution for problem in read(paths, **settings)]


def refusal(paths: str, **settings) -> str:
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


def test_each_row_group_of_a_parquet_file_is_a_shard(tmp_path):
    rows = [{"prompt": chat(i), "solution": f"{i}", "topic": "t"} for i in range(7)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=3)
    shards = file_shards(path)
    # 7 rows in groups of 3: rows 1 to 3, 4 to 6, and 7.
    assert [(s.first_row, s.rows) for s in shards] == [(1, 3), (4, 3), (7, 1)]
    assert [[p.solution for p in s.read()] for s in shards] == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    assert read(path)[6] == Problem(id=read(path)[6].id, prompt=chat(6), solution="6", columns={"topic": "t"})


def test_a_bad_row_of_a_later_row_group_is_named_by_its_number_in_the_file(tmp_path):
    rows = [{"prompt": f"q{i}", "solution": "" if i == 5 else "s"} for i in range(8)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=2)
    assert refusal(path) == f"{path}, row 6: 'solution' is empty"


def test_a_row_group_longer_than_a_batch_keeps_its_numbers(tmp_path):
    rows = [{"prompt": "q", "solution": "" if i == 2_344 else "s"} for i in range(2_500)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=2_500)
    assert refusal(path) == f"{path}, row 2345: 'solution' is empty"


def test_a_solution_that_is_a_number_in_parquet_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": "q", "solution": 5}])
    assert refusal(path) == f"{path}, row 1: 'solution' must be text, not int (5)"


@pytest.mark.parametrize("content", [b"", b"hello", b"PAR1 and then nothing of the kind PAR1"])
def test_a_file_that_is_not_parquet_is_refused_by_name(tmp_path, content):
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    assert refusal(str(path)).startswith(f"{path}: is not a parquet file")


def test_a_parquet_file_with_damaged_pages_is_refused_by_name(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [{"prompt": f"question {i} " * 20, "solution": "s"} for i in range(200)])
    content = bytearray(path.read_bytes())
    content[60 : len(content) // 2] = bytes(len(content) // 2 - 60)  # the footer stays whole
    path.write_bytes(content)
    assert str(path) in refusal(str(path))


# Jsonl


def test_every_line_of_a_long_jsonl_file_comes_exactly_once_and_in_order(tmp_path):
    count = 2 * LINES_PER_SHARD + 3
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat(i), "solution": f"{i}"} for i in range(count)])
    shards = file_shards(path)
    assert [(s.first_row, s.rows) for s in shards] == [
        (1, LINES_PER_SHARD),
        (LINES_PER_SHARD + 1, LINES_PER_SHARD),
        (2 * LINES_PER_SHARD + 1, 3),
    ]
    assert solutions(path) == [f"{i}" for i in range(count)]


def test_a_file_of_exactly_one_shard_has_no_empty_second_one(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "s"}] * LINES_PER_SHARD)
    assert [s.rows for s in file_shards(path)] == [LINES_PER_SHARD]


def test_a_bad_line_deep_in_a_jsonl_file_is_named_by_its_line(tmp_path):
    lines = [json.dumps({"prompt": chat(i), "solution": "s"}, ensure_ascii=False) for i in range(LINES_PER_SHARD + 900)]
    lines[3] = ""  # a blank line holds no problem but is a line of the file
    lines[LINES_PER_SHARD + 776] = '{"prompt": "q", "solution"'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert refusal(str(path)).startswith(f"{path}, row {LINES_PER_SHARD + 777}: is not JSON: ")


def test_blank_lines_and_a_missing_last_line_end_lose_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "a", "solution": "1"}\r\n  \n\n{"prompt": "b", "solution": "2"}')
    assert solutions(str(path)) == ["1", "2"]


def test_line_ends_of_unicode_do_not_cut_a_line(tmp_path):
    rows = [{"prompt": "a\u2028b\u0085c\x0bd\x0ce", "solution": "1"}, {"prompt": "b", "solution": "2"}]
    assert solutions(write_jsonl(tmp_path / "a.jsonl", rows)) == ["1", "2"]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "solution": "1"}\n')
    assert solutions(str(path)) == ["1"]


@pytest.mark.parametrize("line", [b"{", b"not json", b'{"prompt": "\xff"}', b"[" * 100_000, b"1" * 5_000, b"{'a': 1}"])
def test_a_line_that_is_not_a_json_object_is_refused_with_its_place(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "solution": "1"}\n' + line + b"\n")
    assert refusal(str(path)).startswith(f"{path}, row 2: is not JSON: ")


@pytest.mark.parametrize(("line", "kind"), [("[]", "list"), ("3", "int"), ('"text"', "str"), ("null", "NoneType")])
def test_json_that_is_no_object_is_refused_with_its_kind(tmp_path, line, kind):
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    assert refusal(str(path)) == f"{path}, row 1: must be a JSON object, not {kind}"


# Csv


def test_a_csv_field_may_hold_line_ends_commas_and_quotes(tmp_path):
    path = tmp_path / "a.csv"
    prompt = 'Two lines,\nand a "quote":\r\nwhat is 1 + 1?'
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt", "solution", "topic"], [prompt, "2", "sums"], ["q", "é", ""]])
    first, second = read(str(path))
    assert (first.prompt[0]["content"], first.solution, first.columns) == (prompt, "2", {"topic": "sums"})
    assert second.solution == "é"
    assert [s.rows for s in file_shards(str(path))] == [2]


def test_a_csv_file_of_a_spreadsheet_with_a_byte_order_mark_has_its_first_column(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,solution\r\nq,1\r\n", encoding="utf-8-sig", newline="")
    assert read(str(path))[0].columns == {}


def test_a_csv_field_of_a_megabyte_is_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"prompt,solution\n{'x' * 1_000_000},1\n")
    assert len(read(str(path))[0].prompt[0]["content"]) == 1_000_000


def test_a_csv_row_with_too_many_or_too_few_fields_is_refused_by_its_number(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,solution\n"two\nlines",1\nq,1,2\n')
    assert refusal(str(path)) == f"{path}, row 2: has more fields than the header"
    path.write_text("prompt,solution\nq\n")
    assert refusal(str(path)).startswith(f"{path}, row 1: 'solution' must be text")


def test_a_csv_file_that_is_not_utf8_is_refused_by_name(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("prompt,solution\nœ,1\n".encode("cp1252"))
    assert refusal(str(path)).startswith(f"{path}: is not a csv file: ")


# Columns and the system prompt


def test_columns_of_another_name_are_mapped_to_ours(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "5", "level": 3}])
    (problem,) = read(path, columns={"prompt": "question", "solution": "answer"})
    assert problem.prompt[0]["content"] == "q" and problem.solution == "5" and problem.columns == {"level": 3}


def test_a_mapped_column_goes_before_one_that_has_our_name_already(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "long working", "final": "5"}])
    assert solutions(path, columns={"solution": "final"}) == ["5"]


def test_two_columns_can_be_swapped(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "5", "solution": "q"}])
    (problem,) = read(path, columns={"prompt": "solution", "solution": "prompt"})
    assert problem.prompt[0]["content"] == "q" and problem.solution == "5"


def test_a_mapped_column_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "5"}])
    assert refusal(path, columns={"prompt": "problem"}) == (
        f"{path}, row 1: no column 'problem' (data.columns maps 'prompt' to it); the row has answer, question"
    )


def test_the_system_prompt_is_put_before_every_problem(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "5"}] * 2)
    for problem in read(path, system_prompt="Be brief."):
        assert problem.prompt[0] == {"role": "system", "content": "Be brief."} and len(problem.prompt) == 2


# Finding files


def test_the_files_of_a_folder_come_in_the_order_of_their_names(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "q", "solution": "2"}])
    write_parquet(tmp_path / "c.parquet", [{"prompt": "q", "solution": "3"}])
    (tmp_path / "a.csv").write_text("prompt,solution\nq,1\n")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "deeper").mkdir()
    write_jsonl(tmp_path / "deeper" / "d.jsonl", [{"prompt": "q", "solution": "4"}])
    assert solutions(str(tmp_path)) == ["1", "2", "3", "4"]


def test_a_glob_takes_what_it_matches_and_is_sorted(tmp_path):
    for name in ("train-10.jsonl", "train-02.jsonl", "test-01.jsonl", "train-01.txt"):
        write_jsonl(tmp_path / name, [{"prompt": "q", "solution": name}])
    assert solutions(str(tmp_path / "train-*")) == ["train-02.jsonl", "train-10.jsonl"]
    assert solutions(str(tmp_path / "te[rs]t-0?.jsonl")) == ["test-01.jsonl"]


def test_a_file_whose_name_has_brackets_is_found_by_its_name(tmp_path):
    path = write_jsonl(tmp_path / "train[1].jsonl", [{"prompt": "q", "solution": "5"}])
    assert solutions(path) == ["5"]


def test_an_empty_file_among_others_is_no_hindrance(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "q", "solution": "2"}])
    assert solutions(str(tmp_path)) == ["2"]


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", ""), ("a.csv", ""), ("a.csv", "prompt,solution\n")])
def test_an_empty_file_is_refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    assert refusal(str(path)) == f"{path}: the file has no rows"


def test_a_parquet_file_without_rows_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "solution": pa.array([], pa.string())}), path)
    assert refusal(str(path)) == f"{path}: the file has no rows"


def test_what_is_not_there_is_refused_by_name(tmp_path):
    for paths in (tmp_path / "none.jsonl", tmp_path / "none-*.jsonl", tmp_path / "nowhere" / "x.csv", tmp_path):
        assert refusal(str(paths)).startswith(f"{paths}: no such file or folder, or no .parquet, .jsonl, .csv file")


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("{}")
    assert refusal(str(path)) == f"{path}: not a .parquet, .jsonl, .csv file"


def test_an_unknown_scheme_is_refused_by_name():
    assert refusal("nosuch://bucket/a.jsonl").startswith("nosuch://bucket/a.jsonl: cannot be opened: ")


def test_a_file_that_vanishes_between_cutting_and_reading_is_refused_by_name(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    shards = file_shards(path)
    Path(path).unlink()
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read"):
        list(shards[0].read())


def test_a_relative_path_is_found_from_another_folder_too(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    monkeypatch.chdir(tmp_path)
    shards = file_shards("a.jsonl")  # read by workers whose folder is another one
    monkeypatch.chdir("/")
    assert [p.solution for p in shards[0].read()] == ["5"]


def test_a_path_of_the_home_folder_is_found(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files("~/a.jsonl") == [str(tmp_path / "a.jsonl")]


def test_files_on_another_filesystem_are_found_and_read(memory):
    memory.pipe("/grpo-ray-test/b.csv", b"prompt,solution\nq,2\n")
    memory.pipe("/grpo-ray-test/a.jsonl", b'{"prompt": "q", "solution": "1"}\n')
    with memory.open("/grpo-ray-test/c.parquet", "wb") as file:
        pq.write_table(pa.table({"prompt": ["q"], "solution": ["3"]}), file)
    assert solutions("memory://grpo-ray-test") == ["1", "2", "3"]
    assert solutions("memory://grpo-ray-test/*.csv") == ["2"]
    assert solutions("memory://grpo-ray-test/c.parquet") == ["3"]
    assert all(path.startswith("memory://") for path in find_files("memory://grpo-ray-test"))


def test_a_bad_row_on_another_filesystem_is_named_by_its_uri(memory):
    memory.pipe("/grpo-ray-test/a.jsonl", b'{"prompt": "q", "solution": "1"}\n{"prompt": "q"}\n')
    said = refusal("memory://grpo-ray-test/a.jsonl")
    assert said == "memory:///grpo-ray-test/a.jsonl, row 2: no column 'solution'; the row has prompt"


# Shards


def test_a_shard_is_read_alone_twice_alike_and_after_pickling(tmp_path):
    rows = [{"prompt": f"q{i}", "solution": f"{i}"} for i in range(LINES_PER_SHARD + 2)]
    last = file_shards(write_jsonl(tmp_path / "a.jsonl", rows), columns={}, system_prompt="Be brief.")[-1]
    once = list(last.read())
    assert [p.solution for p in once] == [f"{LINES_PER_SHARD}", f"{LINES_PER_SHARD + 1}"]
    assert list(last.read()) == once
    assert list(pickle.loads(pickle.dumps(last)).read()) == once


def test_cutting_into_shards_reads_no_rows(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"nothing": "right"}])
    assert file_shards(path)[0].rows == 1


# The table of datasets


class HubAsked(Exception):
    """Someone asked the hub."""


@pytest.fixture
def no_hub(monkeypatch):
    def ask(hub_id, split, columns=None, system_prompt=None):
        raise HubAsked(hub_id)

    monkeypatch.setattr(grpo_ray.data, "hub_shards", ask)


def test_a_built_in_name_goes_before_a_file_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "arithmetic").mkdir()
    monkeypatch.chdir(tmp_path)
    (shard,) = open_dataset("arithmetic", "train", DataConfig())
    assert isinstance(shard, ArithmeticShard)


def test_one_slash_means_a_hub_dataset(no_hub):
    with pytest.raises(HubAsked, match="someone/problems"):
        open_dataset("someone/problems", "train", DataConfig())


@pytest.mark.parametrize("name", ["sub/a.jsonl", "./sub", "{}/sub"])
def test_a_path_is_not_taken_for_a_hub_dataset(tmp_path, monkeypatch, no_hub, name):
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "sub" / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    monkeypatch.chdir(tmp_path)
    assert len(open_dataset(name.format(tmp_path), "train", DataConfig())) == 1


def test_a_relative_folder_that_exists_is_not_taken_for_a_hub_dataset(tmp_path, monkeypatch, no_hub):
    (tmp_path / "data" / "problems").mkdir(parents=True)
    write_jsonl(tmp_path / "data" / "problems" / "a.jsonl", [{"prompt": "q", "solution": "5"}])
    monkeypatch.chdir(tmp_path)
    assert len(open_dataset("data/problems", "train", DataConfig())) == 1


def test_columns_and_system_prompt_of_the_config_reach_the_files(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "solution": "5"}])
    config = DataConfig(columns={"prompt": "question"}, system_prompt="Be brief.")
    (problem,) = open_dataset(path, "train", config)[0].read()
    assert [m["content"] for m in problem.prompt] == ["Be brief.", "q"]


def test_deepmath_is_read_from_the_hubs_parquet_files(monkeypatch):
    asked = []
    module = importlib.import_module("grpo_ray.data.deepmath")  # the attribute of that name is the function
    monkeypatch.setattr(module, "file_shards", lambda paths, *settings: asked.append((paths, settings)))
    open_dataset("deepmath", "train", DataConfig(system_prompt="Be brief."))
    assert asked == [(f"hf://datasets/{HUB_ID}/data/train-*.parquet", ({}, "Be brief."))]


# The held-out cut


def test_the_share_held_out_is_the_share_asked_for():
    ids = [f"{(2 * i + 1) * 2**63 // 1000:016x}" for i in range(1000)]  # evenly over all 64-bit ids
    assert [sum(is_heldout(i, share) for i in ids) for share in (0.005, 0.1, 0.5)] == [5, 100, 500]


def test_a_larger_share_holds_out_what_a_smaller_one_did():
    ids = [f"{i * 2**64 // 1000:016x}" for i in range(1000)]
    assert {i for i in ids if is_heldout(i, 0.01)} < {i for i in ids if is_heldout(i, 0.02)}
