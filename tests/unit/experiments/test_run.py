"""Tests of a run in Python: data frames of a run folder, and the bounds of a stranger's."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_parquet import BOMBS
from page_samples import make_group, several_sets_run, write_run

from grpo_ray import ConfigError, DamagedFileError, DataError, Run
from grpo_ray.experiments import run as run_module
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.heldout_files import HeldoutRecord, write_heldout


def test_metrics_have_one_row_per_step_with_the_latest_values(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": 0.5, "checkpoint": "checkpoint-000002"},
        {"step": 2, "reward/mean": 0.75, "learner/loss": 1},  # taken again after a failure
        {"step": 3, "learner/loss": 2.5},
    ]
    run = Run(str(write_run(tmp_path, metrics=rows).local))
    assert run.metrics.index.tolist() == [1, 2, 3] and run.metrics.index.name == "step"
    assert run.metrics.columns.tolist() == ["learner/loss", "reward/mean"]
    assert run.metrics["reward/mean"].tolist()[:2] == [0.25, 0.75] and math.isnan(run.metrics["reward/mean"][3])
    assert run.metrics["learner/loss"].tolist()[1:] == [1.0, 2.5]
    assert run.steps == 3 and repr(run) == f"Run('{tmp_path / 'run'}', steps=3)"


def test_groups_and_completions_of_some_steps(tmp_path: Path) -> None:
    groups = [
        make_group(1, "a" * 16, (0.0, 1.0), texts=("wrong", "right")),
        make_group(2, "b" * 16, (1.0, 1.0, 0.0)),
        make_group(3, "c" * 16, (0.0,)),
    ]
    run = Run(write_run(tmp_path, groups=groups).local or "")
    assert run.groups(2).step.tolist() == [2, 3]
    assert [values.tolist() for values in run.groups(2, 2).rewards] == [[1.0, 1.0, 0.0]]
    assert "source" not in run.groups() and "prompt" not in run.groups()
    frame = run.completions(1, 2, texts=True)
    assert frame.problem.tolist() == ["a" * 16] * 2 + ["b" * 16] * 3
    assert frame["index"].tolist() == [0, 1, 0, 1, 2]
    assert frame.reward.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert frame.completion.tolist()[:2] == ["wrong", "right"] and frame.completion[2:].isna().all()
    assert frame.length.tolist() == [7] * 5 and frame.truncated.tolist() == [False] * 5
    assert np.isnan(frame.advantage[4]) and set(run.completions()) & {"completion", "prompt"} == set()


def test_unknown_verdicts_are_nan(tmp_path: Path) -> None:
    group = GroupRecord(
        step=1, epoch=0, problem="a" * 16, source="math", rewards=(0.5, math.nan), correct=None, lengths=(1, 2),
        truncated=(True, False),
    )  # fmt: skip
    frame = Run(str(write_run(tmp_path, groups=[group]).local)).completions()
    assert frame.source.tolist() == ["math", "math"] and frame.truncated.tolist() == [True, False]
    assert frame.reward.isna().tolist() == [False, True] and frame.correct.isna().all()


def test_heldout_has_the_rows_of_each_measured_step(tmp_path: Path) -> None:
    folder = several_sets_run(tmp_path)
    for step, verdict in ((0, 0.0), (10, 1.0)):
        records = [HeldoutRecord(problem="a" * 16, correct=(verdict,), lengths=(3,), truncated=(False,), prompt="p")]
        write_heldout(folder, "heldout/gsm8k", step, records, policy="", conditions={})
    run = Run(str(folder.local))
    assert run.heldout_keys == ("heldout/gsm8k", "heldout/math")
    frame = run.heldout()
    assert frame.step.tolist() == [0, 10] and [each.tolist() for each in frame.correct] == [[0.0], [1.0]]
    assert "turns" not in frame and frame.prompt.tolist() == ["p", "p"]
    assert run.heldout(first=1).step.tolist() == [10] and len(run.heldout("heldout/math")) == 0
    with pytest.raises(ConfigError, match="has no held-out set math; it has heldout/gsm8k, heldout/math"):
        run.heldout("math")


def test_checkpoints_config_summary_and_events(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    folder.write_json({"steps": 40}, "summary.json")
    run = Run(str(folder.local))
    assert [each.step for each in run.checkpoints] == [30, 40]
    best = run.best_checkpoint
    assert best is not None and best.path == str(tmp_path / "run/checkpoint-000040")
    assert best.metrics["heldout/accuracy"] == pytest.approx(0.9)  # 0.5 + 40 / 100
    assert run.config["grpo"]["learning_rate"] == 3e-4 and run.summary == {"steps": 40} and run.notes == ()
    assert run.events.event.iloc[1] == "began" and run.events.about.iloc[1]["workers"] == 2
    assert run.events.step.iloc[3:5].tolist() == [1.0, 2.0] and np.isnan(run.events.step.iloc[0])


def test_run_without_measured_checkpoints_has_no_best_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=[{"step": 30, "checkpoint": "checkpoint-000030"}])
    assert Run(str(folder.local)).best_checkpoint is None and len(Run(str(folder.local)).checkpoints) == 1


def test_damaged_files_are_noted_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    folder.write_text("a: [", "config.yaml")
    run = Run(str(folder.local))
    assert len(run.metrics) == 40 and run.config == {} and run.best_checkpoint is not None
    assert [note for note in run.notes if note.startswith("config.yaml cannot be read")]


def test_folder_with_links_out_of_it_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    Path(folder.path("summary.json")).symlink_to("/etc/hostname")
    with pytest.raises(DamagedFileError, match="is a link that leads out of the run"):
        Run(str(folder.local))
    with pytest.raises(ConfigError, match="is not a run folder"):
        Run(str(tmp_path))


@pytest.mark.parametrize("name", BOMBS)
def test_rollouts_that_expand_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path)
    file = Path(folder.path("rollouts"), "steps-00000001-00000001.parquet")
    plant, message = BOMBS[name]
    plant(file)
    with pytest.raises(DataError, match=re.escape(message)):
        Run(str(folder.local)).completions(texts=True)


def test_metrics_with_other_names_in_each_row_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, metrics=[{"step": step, f"m{step}": 1.0} for step in range(20)])
    monkeypatch.setattr(run_module, "MAX_CELLS", 399)
    with pytest.raises(DamagedFileError, match="20 steps with 20 metrics; the limit is 399 values"):
        _ = Run(str(folder.local)).metrics


def test_lists_of_unequal_lengths_are_refused(tmp_path: Path) -> None:
    group = GroupRecord(
        step=1, epoch=0, problem="a" * 16, rewards=(1.0,), correct=None, lengths=(1, 2), truncated=(False, False)
    )
    folder = write_run(tmp_path, groups=[group])
    with pytest.raises(DataError, match="another number of values than completions"):
        Run(str(folder.local)).completions()


def test_reading_leaves_the_folder_unchanged(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run = Run(str(folder.local))
    _ = run.metrics, run.events, run.groups(), run.completions(), run.heldout(), run.checkpoints
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert json.loads(json.dumps(dict(run.summary))) == {}
