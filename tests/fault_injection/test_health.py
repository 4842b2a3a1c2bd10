"""Tests of runs that go wrong: each gets the warning that names the cause, and can end by it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import events_of, rows_of, small_settings
from webhook import webhook
from wrong_runs import SETTINGS, WRONG_RUNS

from grpo_ray.cli import STOPPED_BY_WARNING, main
from grpo_ray.pages.report.health import health_findings
from grpo_ray.pages.report.read import read_run


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_RUNS)
def test_wrong_run_gets_the_warning_of_its_cause(small_run: Callable[..., Any], name: str) -> None:
    wrong = WRONG_RUNS[name]
    overrides = [*SETTINGS, "model.path=tiny-arithmetic", f"grpo.max_steps={wrong.steps}", *wrong.overrides]
    _, folder = small_run("wrong", *overrides)
    warnings = {event["name"]: event for event in events_of(folder, "warning")}
    assert wrong.warning in warnings, rows_of(folder)[-1]
    shown = [finding.text for finding in health_findings(read_run(str(folder)))]
    assert any(warnings[wrong.warning]["what"] in text for text in shown)


@pytest.mark.slow
def test_stop_on_ends_the_run_in_order_and_a_resumed_one_after_a_window(
    cluster: None, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with webhook() as server:
        overrides = [
            *small_settings("stop", tmp_path, policy),
            "rewards.functions=['wrong_runs:constant']",
            "grpo.max_steps=150",
            "grpo.save_steps=1000",
            # The policy truncates many completions, and the machine may be busy with other tests.
            "health.truncation=null",
            "health.memory=null",
            "health.data_wait=null",
            "run.stop_on=[no_signal]",
            f"run.notify={server.address}",
        ]
        folder = tmp_path / "stop"
        assert main(["train", *overrides]) == STOPPED_BY_WARNING
        first = len(rows_of(folder))
        assert 10 <= first < 150
        assert json.loads((folder / "summary.json").read_text())["stopped"] == "no_signal"
        assert (folder / f"checkpoint-{first:06d}" / "manifest.json").exists()
        output = capsys.readouterr().out
        assert "run.stop_on=no_signal: the run stops once the current step is finished and saved" in output
        assert f"stopped after step {first} by the warning no_signal (run.stop_on)" in output
        assert [body["event"] for body in server.bodies] == ["warning", "stopped"]
        assert server.bodies[1]["summary"]["stopped"] == "no_signal" and server.bodies[1]["step"] == first
        assert "s3cr3t" not in (folder / "config.yaml").read_text() + output

        assert main(["train", *overrides]) == STOPPED_BY_WARNING
        assert first + 10 <= len(rows_of(folder)) < 150
        assert [event["step"] for event in events_of(folder, "warning")] == [10, first + 10]
        last = len(rows_of(folder)) + 5  # too few for a window
        assert main(["train", *overrides, "run.stop_on=[]", f"grpo.max_steps={last}"]) == 0
        assert [body["event"] for body in server.bodies[4:]] == ["finished"]
    assert [row["step"] for row in rows_of(folder)] == list(range(1, last + 1))
