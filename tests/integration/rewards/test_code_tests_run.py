"""A run with the reward `code_tests` beside another one: programs are graded while others are generated."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from small_runs import FinishedRun, events_of, rows_of, same_weights, weights_of

from grpo_ray.resilience.chaos import Fault


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run on twelve programs."""
    rows = [
        {"prompt": f"{n} + {n + 1}", "test_list": [f"assert add({n}, 1) == {n + 1}", "assert True"]} for n in range(12)
    ]
    path = tmp_path_factory.mktemp("programs") / "programs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"data.train={path}", "data.columns={tests: test_list}", "data.heldout_share=0.3",
        "rewards.functions=[code_tests, 'reward_spies:vary']", "rewards.settings={code_tests: {partial: true}}",
        "run.trace=true", "run.max_failures=1", "grpo.save_steps=2", "grpo.max_steps=3", "grpo.prompts_per_step=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(options: list[str], module_run: Callable[..., Any]) -> FinishedRun:
    """An undisturbed run."""
    return FinishedRun(*module_run("whole", *options))


def test_run_grades_programs(whole: FinishedRun) -> None:
    steps = [row for row in rows_of(whole.folder) if "reward/mean" in row]
    assert [row["reward/code_tests_timeout_share"] for row in steps] == [0.0] * 3
    # No completion of this policy is a program, so each passes no test, not even the one that is always true.
    assert {row["reward/code_tests_mean"] for row in steps} == {row["reward/code_tests_passed_share"] for row in steps}
    trace = json.loads(next(iter((whole.folder / "trace").glob("*.json"))).read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert any(event.get("name") == "verdicts" for event in events)


@pytest.mark.slow
def test_run_grades_programs_and_is_exact_when_killed(
    options: list[str], whole: FinishedRun, small_run: Callable[..., Any]
) -> None:
    killed, folder = small_run("killed", *options, faults=[Fault("kill-backward", step=3)])
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert same_weights(weights_of(killed.latest_checkpoint), weights_of(whole.summary.latest_checkpoint))
