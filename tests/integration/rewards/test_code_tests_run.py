"""A run with the reward `code_tests` beside another one: programs are graded while others are generated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_runs import events_of, rows_of, same_weights, weights_of

from grpo_ray.resilience.chaos import Fault


def test_run_grades_programs_and_is_exact_when_killed(tmp_path: Path, small_run: Callable[..., Any]) -> None:
    rows = [
        {"prompt": f"{n} + {n + 1}", "test_list": [f"assert add({n}, 1) == {n + 1}", "assert True"]} for n in range(12)
    ]
    path = tmp_path / "programs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        f"data.train={path}", "data.columns={tests: test_list}", "data.heldout_share=0.3",
        "rewards.functions=[code_tests, 'reward_spies:vary']", "rewards.settings={code_tests: {partial: true}}",
        "run.trace=true", "run.max_failures=1", "grpo.save_steps=2", "grpo.max_steps=3", "grpo.prompts_per_step=2",
    ]  # fmt: skip
    whole, folder = small_run("whole", *options)
    steps = [row for row in rows_of(folder) if "reward/mean" in row]
    assert [row["reward/code_tests_timeout_share"] for row in steps] == [0.0] * 3
    # No completion of this policy is a program, so each passes no test, not even the one that is always true.
    assert {row["reward/code_tests_mean"] for row in steps} == {row["reward/code_tests_passed_share"] for row in steps}
    trace = json.loads(next(iter((folder / "trace").glob("*.json"))).read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert any(event.get("name") == "verdicts" for event in events)
    killed, folder = small_run("killed", *options, faults=[Fault("kill-backward", step=3)])
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert same_weights(weights_of(killed.latest_checkpoint), weights_of(whole.latest_checkpoint))
