"""The summary of a run, computed from its files."""

import json
from pathlib import Path

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.driver.summary import HeldoutSummary, summarize_run
from grpo_ray.storage.run_folder import RunFolder


def test_summarise_rewards_are_of_first_and_last_ten_rows(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    timing = {"step/seconds": 0.5, "step/completions_per_second": 16.0}
    rows = [{"step": step, "reward/mean": step / 100} | timing for step in range(1, 31)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    heldout = {"heldout": HeldoutSummary(problems=9, before={"accuracy": 0.25}, after={"accuracy": 0.5})}
    summary = summarize_run(
        load_config(None, ["grpo.prompts_per_step=4", "grpo.num_generations=2"]), folder, heldout, 60
    )
    assert summary.reward_first == pytest.approx(0.055)  # mean of 0.01 to 0.10
    assert summary.reward_last == pytest.approx(0.255)  # mean of 0.21 to 0.30
    assert (summary.steps, summary.train_seconds, summary.wall_seconds) == (30, 15.0, 60)
    assert summary.completions_per_second == 16.0  # 8 completions in 0.5 s
    assert (summary.heldout_before, summary.heldout_after, summary.heldout_problems) == (0.25, 0.5, 9)


def test_summarise_unmeasured_run_has_no_accuracy(tmp_path: Path) -> None:
    heldout = {"heldout": HeldoutSummary(problems=9, before={}, after={})}
    summary = summarize_run(load_config(), RunFolder(str(tmp_path), "run"), heldout, 60)
    assert summary.heldout_before is None and summary.heldout_after is None
    assert (summary.steps, summary.reward_first, summary.best_checkpoint) == (0, None, None)


def test_summarise_several_sets_reports_primary_as_the_accuracy(tmp_path: Path) -> None:
    config = load_config(None, ["data.heldout={a: x.jsonl, b: y.jsonl}", "run.best_metric=heldout/b/accuracy"])
    heldout = {
        "heldout/a": HeldoutSummary(problems=5, before={"accuracy": 0.2}, after={"accuracy": 0.4}),
        "heldout/b": HeldoutSummary(problems=4, before={"accuracy": 0.25}, after={"accuracy": 0.5}),
    }
    summary = summarize_run(config, RunFolder(str(tmp_path), "run"), heldout, 60)
    assert (summary.heldout_before, summary.heldout_after, summary.heldout_problems) == (0.25, 0.5, 4)
    assert summary.heldout == heldout


def test_summarise_memory_is_the_last_measured(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    (tmp_path / "run").mkdir()
    events = [
        {"event": "memory", "at": 1.0, "estimated": None, "measured": {"resident_peak_gib": 1.0}},
        {"event": "memory", "at": 2.0, "estimated": None, "measured": {"resident_peak_gib": 1.5}},
        {"event": "ended", "at": 3.0},
    ]
    heldout = {"heldout": HeldoutSummary(problems=9, before={}, after={})}
    assert summarize_run(load_config(), folder, heldout, 60).memory is None
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    memory = {"estimated": None, "measured": {"resident_peak_gib": 1.5}}
    assert summarize_run(load_config(), folder, heldout, 60).memory == memory
