"""Tests that Parquet files of strangers are read in bounded memory, or refused with the reason."""

import random
import resource
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_parquet import BOMBS, SLOW_BOMBS, rows, write

from grpo_ray.errors import DataError
from grpo_ray.storage.parquet import FOOTER_BYTES, MAX_ROW_GROUPS, MemoryBudget, read_columns, row_group_rows
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.rollout_files import read_rollouts, read_texts, write_rollouts
from grpo_ray.storage.run_folder import RunFolder

NAME = "steps-00000001-00000002.parquet"


def rollouts_file(folder: Path) -> Path:
    path = folder / "run" / "rollouts" / NAME
    path.parent.mkdir(parents=True)
    return path


def require_refused(folder: Path, bomb: Callable[[Path], None], message: str) -> None:
    bomb(rollouts_file(folder))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError) as caught:
        read_texts(RunFolder(str(folder), "run"))
    assert NAME in str(caught.value) and message in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_read_columns_of_a_table_without_rows_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    schema = pa.schema([("problem", pa.string()), ("step", pa.int64())])
    pq.write_table(schema.empty_table(), path)
    with pa.OSFile(str(path)) as file:
        assert read_columns(file, schema, {}).num_rows == 0


@pytest.mark.parametrize("name", BOMBS)
def test_read_bomb_is_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    require_refused(tmp_path, *BOMBS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_BOMBS)
def test_read_huge_bomb_is_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    require_refused(tmp_path, *SLOW_BOMBS[name])


def test_read_damaged_bytes_are_refused_or_read(tmp_path: Path) -> None:
    path = rollouts_file(tmp_path)
    write(path, rows(50, prompt=pa.array([f"problem {place}" for place in range(50)])))
    whole, generator, outcomes = path.read_bytes(), random.Random(0), set()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            read_texts(RunFolder(str(tmp_path), "run")).to_pylist()
            outcomes.add("read")
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_read_columns_equals_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    texts = [None if place % 7 == 0 else f"text {place % 5}" * place for place in range(300)]
    table = pa.table(
        {
            "step": pa.array(range(300), pa.int64()),
            "prompt": texts,
            "lists": pa.array([[text, "é", None] if text else None for text in texts], pa.list_(pa.string())),
        }
    )
    pq.write_table(table, path, row_group_size=100)
    with pa.OSFile(str(path)) as stream:
        assert read_columns(stream, table.schema, {}).equals(table)
    missing = table.schema.append(pa.field("later", pa.bool_()))
    with pa.OSFile(str(path)) as stream:
        chosen = read_columns(
            stream, missing, {"later": True}, ordered_by="step", has_rows=lambda least, most: least <= 150 <= most
        )
    assert chosen["step"].to_pylist() == list(range(100, 200)) and set(chosen["later"].to_pylist()) == {True}


def test_row_groups_of_a_large_file_are_few() -> None:
    assert row_group_rows(10, 1000) == 1000
    assert -(-10_000_000 // row_group_rows(10_000_000, 1000)) <= MAX_ROW_GROUPS


def test_budget_ends_at_the_file_that_does_not_fit() -> None:
    budget = MemoryBudget(1000)
    table = pa.table({"a": pa.array([1] * 60, pa.int64())})  # 480 bytes
    assert budget.take(table, "first") is table
    budget.take(table, "second")
    with pytest.raises(DataError, match="third: the files up to this one take more than 1000 bytes"):
        budget.take(table, "third")


def test_footer_of_a_file_with_long_texts_is_small(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    records = [
        GroupRecord(
            step=step, epoch=0, problem=f"{step:016}", rewards=(1.0,), correct=(1.0,), lengths=(3,), truncated=(False,),
            prompt="x" * 4000, completions=("y" * 4000,), advantages=(0.0,), sample="first",
        )
        for step in range(2500)
    ]  # fmt: skip
    name = write_rollouts(folder, records)
    data = Path(folder.path(*name.split("/"))).read_bytes()
    footer = int.from_bytes(data[-8:-4], "little")
    assert footer / 3 * MAX_ROW_GROUPS < FOOTER_BYTES  # with statistics of texts: 20,000 bytes more per row group
    assert len(read_rollouts(folder)) == 2500
