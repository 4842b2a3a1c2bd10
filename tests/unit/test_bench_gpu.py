"""Tests of the benchmark on a GPU that need no model: patterns, measurements of a stopped run, tables."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def bench() -> ModuleType:
    import bench_gpu

    return bench_gpu


def row_of(bench: ModuleType, part: str, patterns: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "cell": {"shape": "0.5B", "lengths": "1k"}, "part": part, "completions": 224, "patterns": patterns,
        "machine": "H100, torch 2.13; grpo_ray 123.", **more,
    }  # fmt: skip


def measured(seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds, "completions_per_second": 224 / seconds, "tokens_per_second": 80_000 / seconds,
        "phases": {"generate": seconds / 2, "loss": seconds / 4},
    }  # fmt: skip


@pytest.mark.parametrize(("pattern", "divisor"), [("every", 1), ("half", 2), ("6 of 7 none", 7)])
def test_pattern_has_the_same_signal_in_each_step(bench: ModuleType, pattern: str, divisor: int) -> None:
    assert pattern in bench.SIGNAL
    for cell in bench.CELLS:
        groups = bench.Replay("clock", [(pattern, 9)], cell.groups).groups
        steps = [groups[first : first + cell.groups] for first in range(0, len(groups), cell.groups)]
        assert {sum(len(set(group)) > 1 for group in step) for step in steps} == {cell.groups // divisor}


def test_task_of_a_cell_divides_its_step(bench: ModuleType) -> None:
    for cell in bench.CELLS:
        task = bench.task_of(cell, "trl", Path("folder"))
        assert task.completions % task.micro_batches == 0
        assert task.plan[0] == ("every", 1) and task.steps == len(cell.peer_patterns) + 2


def test_part_without_the_run_whose_lengths_it_reads_is_refused(bench: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text("earlier\n")
    command = ["--dry", "--folder", str(tmp_path), "--parts", "learner"]
    with pytest.raises(SystemExit, match=rf"--parts learner takes the lengths .* tiny-tiny, and {tmp_path} has none"):
        bench.main(command)
    assert results.read_text() == "earlier\n"  # nothing has begun
    (cell,) = bench.DRY_CELLS
    (ours := tmp_path / "tiny-tiny-ours").mkdir()
    (ours / "clock.0").write_text("")
    bench.require_lengths([cell], ["learner"], tmp_path)  # measured before
    bench.require_lengths(bench.CELLS, ["ours", "engine"], tmp_path)
    bench.require_lengths(bench.CELLS, ["trl"], tmp_path)


def test_record_of_a_stopped_run_has_the_steps_that_it_took(bench: ModuleType, tmp_path: Path) -> None:
    # The plan: a warm-up, two steps with signal, one without, and one to end it. The run was stopped in the fourth.
    task = bench.Task("", "", str(tmp_path), plan=[("every", 1), ("every", 2), ("half", 1), ("half", 1)], prompts=2)
    times, lengths = [100.0, 105.0, 107.0, 110.0], [[9, 9], [4, 6], [5, 6], [7, 6]]
    calls = [
        {"step": step, "at": at, "phases": {"loss": at / 10}, "lengths": each, "memory": {"resident": step}}
        for step, (at, each) in enumerate(zip(times, lengths, strict=True))
    ]
    (tmp_path / "clock.0").write_text("".join(json.dumps(call) + "\n" for call in calls))
    record = bench.read_record(task, partly=True)
    assert record.periods == [5.0, 2.0, 3.0] and record.steps("every") == [1, 2] and record.steps("half") == []
    assert record.median("every") == 2.5  # of 2 and 3 seconds
    assert record.token_rate("every") == 24 / 5  # 11 and 13 tokens were generated in these steps
    assert record.phase_means("every") == {"loss": pytest.approx(0.25)}
    assert record.memory == {"resident": 3}
    with pytest.raises(RuntimeError, match="took steps"):
        bench.read_record(task)


def test_table_compares_with_the_only_measured_pattern_of_trl(bench: ModuleType) -> None:
    ours = row_of(bench, "ours", {"every": measured(10.0), "6 of 7 none": measured(5.0)}, memory={"device": 2**33})
    trl = row_of(bench, "trl", {"every": measured(20.0)}, memory={"device": 2**34})
    lines = bench.tables([ours, trl]).splitlines()
    all_signal, half, few = (
        next(line for line in lines if f"| {share} |" in line).split(" | ") for share in ("all", "half", "14 %")
    )
    assert all_signal[2:8] == ["10.00", "22.4", "8000", "20.00", "11.2", "2.00x"]
    assert half[2:8] == ["-", "-", "-", "20.00", "11.2", "-"]
    assert few[7] == "4.00x"
    assert any("generate 5.00, loss 2.50 | 8.0 |" in line for line in lines)


def test_read_rows_takes_the_latest_of_a_measurement(bench: ModuleType, tmp_path: Path) -> None:
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    for file, seconds in zip(files, (1.0, 2.0), strict=True):
        file.write_text(json.dumps(row_of(bench, "ours", {"every": measured(seconds)})) + "\n")
    (row,) = bench.read_rows(files)
    assert row["patterns"]["every"]["seconds"] == 2.0


def test_write_page_replaces_the_text_between_its_markers(bench: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench.MARKERS[0]}\nold\n{bench.MARKERS[1]}\nafter\n")
    bench.write_page("new\n", page)
    assert page.read_text() == f"before\n{bench.MARKERS[0]}\nnew\n{bench.MARKERS[1]}\nafter\n"
    assert all(marker in bench.PAGE.read_text() for marker in bench.MARKERS)


def test_main_writes_no_page_without_a_gpu(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.jsonl"
    row = row_of(bench, "engine", {"every": measured(1.0)}) | {"machine": "2 cores, no GPU, torch 2.13; grpo_ray 1."}
    file.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("sys.argv", ["bench_gpu.py", "--table", str(file), "--write"])
    with pytest.raises(SystemExit, match="only written with figures of a GPU"):
        bench.main()
