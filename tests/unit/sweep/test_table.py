"""Tests of the tables of a sweep: on a narrow terminal, and with long names."""

import io

import pytest
from rich.console import Console

from grpo_ray.sweep.results import TrialResult
from grpo_ray.sweep.runner import SweepSummary
from grpo_ray.sweep.state import TrialRecord
from grpo_ray.sweep.table import TableRow, build_table, order_rows, print_results
from grpo_ray.sweep.trials import SweepTrial


def row(name: str, standing: str = "running") -> TableRow:
    return TableRow(
        name=name,
        settings="learning_rate=0.0003 beta=0.04 loss_type=dapo",
        standing=standing,
        step=12,
        max_steps=100,
        value=0.8125,
        reward=0.6,
        line="step 12/100  reward 0.600  held-out 0.812  12 completions/s  30 s left",
    )


def lines(*names: str, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(build_table([row(name) for name in names], width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120, 250])
def test_narrow_terminal_shortens_only_settings_and_latest_line(width: int) -> None:
    first, second = lines("trial-01", "trial-01-clone-1", width=width)[1:]
    assert first.startswith("trial-01  ") and second.startswith("trial-01-clone-1  ")
    for line in (first, second):
        assert len(line) <= width
        assert "  running  12/100   0.812   0.600  step" in line


def test_long_names_that_differ_in_the_middle_stay_different() -> None:
    begin, end = "b" * 40, "e" * 40
    shown = lines(*(f"{begin}{number}{end}" for number in (1, 2)), width=80)[1:]
    names = "".join(line.split(" ")[0] for line in shown)
    assert names == f"{begin}1{end}{begin}2{end}"


def test_running_trials_come_first_on_a_terminal_that_is_too_low() -> None:
    rows = [row("a", "dropped"), row("b"), row("c", "waiting"), row("d", "stopping")]
    assert [each.name for each in order_rows(rows, height=5)] == ["a", "b", "c", "d"]
    assert [each.name for each in order_rows(rows, height=4)] == ["b", "d", "a", "c"]


def test_ranking_in_a_log_has_every_column_beside_long_reasons() -> None:
    records = {
        name: TrialRecord(
            trial=SweepTrial(name=name, overrides={"data.system_prompt": "s" * 90}),
            standing="failed",
            reason="r" * 90,
        )
        for name in ("x" * 60 + "-1", "x" * 60 + "-2")
    }
    results = [TrialResult(name=name, steps=25, checkpoint=None, value=0.5, measure=None) for name in records]
    output = io.StringIO()
    print_results(SweepSummary(results=results, records=records, page=None, stopped=None), Console(file=output))
    header, *rows = output.getvalue().splitlines()[:3]
    assert header.split() == ["trial", "settings", "standing", "steps", "metric", "best", "minus", "this", "p"]
    for number, (name, line) in enumerate(zip(records, rows, strict=True), 1):
        assert line.split()[:2] == [str(number), name]
        assert "failed rrr" in line and line.split()[-4:] == ["25", "0.500", "-", "-"]
