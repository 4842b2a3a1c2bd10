"""Tests of runs that are paused at a step (`run.pause_at`) and continued: a pause changes no bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import SETTINGS
from small_runs import (
    REFERENCE,
    FinishedRun,
    events_of,
    groups_of,
    rows_of,
    same_weights,
    weights_of,
    without_timings,
)


def assert_same_run(paused: FinishedRun, whole: FinishedRun, pauses: list[int]) -> None:
    """Assert that a paused run equals the one without pauses, but for the additional measurements at its pauses."""
    assert same_weights(*(weights_of(run.summary.latest_checkpoint) for run in (paused, whole)))
    assert groups_of(paused.folder) == groups_of(whole.folder)
    rows, expected = (without_timings(rows_of(run.folder)) for run in (paused, whole))
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        if row["step"] in pauses:
            assert row["heldout/accuracy"] is not None
            row = {name: value for name, value in row.items() if name in other or not name.startswith("heldout")}
        assert row == other


def test_paused_run_equals_the_run_without_pauses(
    reference_run: FinishedRun, small_run: Callable[..., Any], tmp_path: Path
) -> None:
    paused, folder = small_run("reference", *REFERENCE, "run.pause_at=3")
    assert (paused.steps, paused.stopped) == (3, "run.pause_at")
    assert paused.heldout_after is not None
    assert rows_of(folder)[-1]["checkpoint"] == "checkpoint-000003"
    summary, _ = small_run("reference", *REFERENCE)
    assert (summary.steps, summary.stopped) == (5, None)
    assert [event["step"] for event in events_of(folder, "began")] == [0, 3]
    assert_same_run(FinishedRun(summary, folder), reference_run, [3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "pauses"),
    [
        # Each pause has completions of the next two steps open, in mid-epoch and at the end of one.
        (["rollout.max_staleness=2"], [2, 5, 9]),
        # A generation batch serves four steps, so a pause is between two of them.
        (["grpo.steps_per_generation=2", "grpo.epochs=2", "grpo.max_steps=12", "grpo.save_steps=4"], [4, 8]),
        (["cluster.num_workers=1", "run.measure=background"], [4, 7]),
    ],
    ids=["staleness", "several-steps-on-a-batch", "measured-in-the-background"],
)
def test_paused_run_of_other_schedules_equals_the_run_without_pauses(
    small_run: Callable[..., Any], overrides: list[str], pauses: list[int]
) -> None:
    settings = [*SETTINGS, *overrides, "rewards.functions=['reward_spies:vary']", "heldout.score=correctness"]
    whole = FinishedRun(*small_run("whole", *settings))
    for step in pauses:
        summary, folder = small_run("paused", *settings, f"run.pause_at={step}")
        assert (summary.steps, summary.stopped) == (step, "run.pause_at")
        if step == pauses[0]:  # the same command has no step left
            again, _ = small_run("paused", *settings, f"run.pause_at={step}")
            assert (again.steps, again.stopped) == (step, "run.pause_at")
    assert_same_run(FinishedRun(*small_run("paused", *settings)), whole, pauses)
    assert [event["step"] for event in events_of(folder, "began")] == [0, *pauses]
