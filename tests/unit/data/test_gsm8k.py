"""Tests of GSM8K's loading code on files of the same form, in a local folder instead of the hub's."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_ray.config.schema import DataConfig
from grpo_ray.data import gsm8k
from grpo_ray.data.gsm8k import final_number
from grpo_ray.data.problem import problem_id
from grpo_ray.data.registry import open_dataset
from grpo_ray.errors import DataError


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folder instead of the hub's."""
    monkeypatch.setattr(gsm8k, "FOLDER", str(tmp_path))
    return tmp_path


def write(path: Path, *answers: str) -> None:
    rows = [{"question": f"Question {i}", "answer": answer} for i, answer in enumerate(answers)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)


def problems(split: str, config: DataConfig) -> list:
    return list(itertools.chain.from_iterable(shard.read() for shard in open_dataset("gsm8k", split, config)))


def test_gsm8k_question_and_number_become_problem(hub: Path) -> None:
    write(hub / "train-00000-of-00001.parquet", "16 - 3 = <<16-3=13>>13\n#### 13", "So\n#### 1,200", "#### -4")
    write(hub / "test-00000-of-00001.parquet", "#### 2.5")
    train = problems("train", DataConfig())
    assert [problem.solution for problem in train] == ["$13$", "$1200$", "$-4$"]
    assert train[0].prompt == [{"role": "user", "content": "Question 0"}]
    assert train[0].columns == {}  # the worked answer is left out
    assert [shard.num_rows for shard in open_dataset("gsm8k", "train", DataConfig())] == [2, 1]
    assert [problem.solution for problem in problems("heldout", DataConfig())] == ["$2.5$"]


def test_gsm8k_id_is_independent_of_system_prompt(hub: Path) -> None:
    write(hub / "train-00000-of-00001.parquet", "#### 13")
    (plain,), (instructed,) = problems("train", DataConfig()), problems("train", DataConfig(system_prompt="Be brief."))
    assert plain.id == instructed.id == problem_id([{"role": "user", "content": "Question 0"}], "$13$")
    assert [message["role"] for message in instructed.prompt] == ["system", "user"]


def test_gsm8k_row_without_number_raises_with_its_row(hub: Path) -> None:
    write(hub / "train-00000-of-00001.parquet", "#### 1", "#### 2", "#### 3", "no number")
    with pytest.raises(DataError, match=r"train-00000-of-00001\.parquet, row 4: 'answer' must end with ####"):
        problems("train", DataConfig())


def test_final_number_last_mark_counts() -> None:
    assert final_number("#### 1 no, that was wrong\n#### 2", where="here") == "$2$"
    with pytest.raises(DataError, match="must end with ####"):
        final_number("####  ", where="here")


def test_gsm8k_requests_the_hub_files(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def no_shards(paths: str, columns: Any) -> list[Any]:
        requests.append((paths, columns))
        return []

    monkeypatch.setattr(gsm8k, "file_shards", no_shards)
    open_dataset("gsm8k", "heldout", DataConfig())
    assert requests == [
        ("hf://datasets/openai/gsm8k/main/test-*.parquet", {"prompt": "question", "solution": "answer"})
    ]
