"""The summary of a run, computed from its files."""

import json
from pathlib import Path

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.driver.summary import summarize_run
from grpo_ray.storage.run_folder import RunFolder


def test_summarise_rewards_are_of_first_and_last_ten_rows(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    rows = [{"step": step, "reward/mean": step / 100, "step/seconds": 0.5} for step in range(1, 31)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = {"pass_at_1": {"value": 0.25}}
    summary = summarize_run(
        load_config(None, ["grpo.prompts_per_step=4", "grpo.num_generations=2"]), folder, before, 0.5, 9, 60
    )
    assert summary.reward_first == pytest.approx(0.055)  # mean of 0.01 to 0.10
    assert summary.reward_last == pytest.approx(0.255)  # mean of 0.21 to 0.30
    assert (summary.steps, summary.train_seconds, summary.wall_seconds) == (30, 15.0, 60)
    assert summary.completions_per_second == 16.0  # 8 completions in 0.5 s
    assert (summary.heldout_before, summary.heldout_after, summary.heldout_problems) == (0.25, 0.5, 9)


def test_summarise_unmeasured_run_has_no_accuracy(tmp_path: Path) -> None:
    summary = summarize_run(load_config(), RunFolder(str(tmp_path), "run"), None, float("nan"), 9, 60)
    assert summary.heldout_before is None and summary.heldout_after is None
    assert (summary.steps, summary.reward_first, summary.best_checkpoint) == (0, None, None)
