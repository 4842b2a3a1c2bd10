"""Tests of the tables of a sweep: on a narrow terminal, and with long names."""

import io

import pytest
from rich.console import Console

from grpo_ray.evaluation.paired import compare_paired
from grpo_ray.sweep.results import TrialResult
from grpo_ray.sweep.runner import SweepSummary
from grpo_ray.sweep.state import TrialRecord
from grpo_ray.sweep.table import TableRow, build_table, order_rows, print_results, shorten_names, shorten_settings
from grpo_ray.sweep.trials import SweepTrial
from grpo_ray.telemetry.measures import Measure


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


STANDINGS = {"active": "", "dropped": "at step 25", "failed": "worker 0: RuntimeError: CUDA out of memory"}
RATES = [0.0003, 0.0006, 0.0012]


def ranking(width: int) -> list[str]:
    """Return the lines about three trials on a terminal of this width; each standing and rate has one trial."""
    verdicts = [{f"{number}": [float(number % each == 0)] for number in range(60)} for each in (2, 3)]
    records: dict[str, TrialRecord] = {}
    results: list[TrialResult] = []
    for number, (standing, rate) in enumerate(zip(STANDINGS, RATES, strict=True), 1):
        name = f"trial-0{number}-clone-1"
        overrides = {"grpo.learning_rate": rate, "grpo.loss_type": "dapo", "grpo.beta": 0.04 * number}
        trial = SweepTrial(name=name, overrides=overrides)
        records[name] = TrialRecord(trial=trial, standing=standing, reason=STANDINGS[standing])  # type: ignore[arg-type]
        results.append(
            TrialResult(
                name=name,
                steps=100 * number,
                checkpoint=None,
                value=0.8,
                measure=Measure(0.8, 0.75, 0.84, 600),
                paired=compare_paired(*verdicts) if number > 1 else None,
                p_value=0.012 if number > 1 else None,
            )
        )
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_results(SweepSummary(results=results, records=records, page=None, stopped=None), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "is_beside"), [(80, False), (100, False), (120, True), (160, True)])
def test_ranking_on_a_terminal_shows_settings_standing_and_interval(width: int, is_beside: bool) -> None:
    printed = ranking(width)
    table = printed[1:4]
    assert max(map(len, printed[:4])) <= width
    for number, (line, standing, rate) in enumerate(zip(table, STANDINGS, RATES, strict=True), 1):
        words = line.split()
        assert words[:2] == [f"{number}", f"trial-0{number}-clone-1"]
        assert words[2].endswith(f"={rate}") and "learning_rate".startswith(words[2].partition("=")[0])
        assert words[3].endswith(f"={0.04 * number:.4g}") and "beta".startswith(words[3].partition("=")[0])
        assert ("…" in line, "dapo" in line) == (False, False)  # all trials have the same type of loss
        assert standing == "active" or words[4] == standing
        assert f" {100 * number}  0.800 [0.750, 0.840]" in line
    # The paired tests are in the table, or in a second one.
    assert ("best minus this" in printed[0]) == is_beside
    of_pairs = table if is_beside else printed[5:8]
    assert [line.split()[-1] for line in of_pairs] == ["-", "0.012", "0.012"]
    reasons = [f"trial-0{number}-clone-1: {standing} {STANDINGS[standing]}" for number, standing in
               ((2, "dropped"), (3, "failed"))]  # fmt: skip
    if width == 160:
        assert all(STANDINGS[standing] in line for line, standing in zip(table, STANDINGS, strict=True))
    else:
        assert [line for line in printed if line.startswith("trial-") and ": " in line] == reasons


def test_ranking_on_a_very_narrow_terminal_leaves_out_intervals() -> None:
    printed = ranking(60)
    assert printed[0].split() == ["trial", "settings", "standing", "steps", "metric"]
    for line, standing in zip(printed[1:4], STANDINGS, strict=True):
        assert len(line) <= 60 and line.split()[-1] == "0.800" and (standing == "active" or standing in line)


def test_shortened_names_stay_different() -> None:
    names = {"a": "epsilon", "b": "epsilon_high", "c": "beta", "d": "learning_rate"}
    assert list(shorten_names(names, 4).values()) == ["epsilon", "epsilon_", "beta", "lear"]
    assert list(shorten_names(names, None).values()) == list(names.values())


def test_settings_are_shortened_no_more_than_the_width_requires() -> None:
    trials = [{"grpo.learning_rate": rate, "run.seed": 7} for rate in RATES]
    for width, first in (
        (27, "learning_rate=0.0003 seed=7"),
        (26, "learning_rate=0.0003"),
        (19, "learning=0.0003"),
        (11, "lear=0.0003"),
        (5, "le=0.0003"),
    ):
        assert shorten_settings(trials, width)[0] == first
    assert shorten_settings([{"run.seed": 7}], 5) == ["see=7"]  # nothing varies
    assert shorten_settings([{}, {"run.seed": 7}], 9) == ["", "seed=7"]
