"""Whole runs on a GPU: through the commands (train, eval, export), with its memory; and one that generates ahead."""

import json
from pathlib import Path
from typing import Any

from small_runs import rows_of, weights_of


def test_train_eval_and_export_on_a_gpu(machine: Any, tmp_path: Path) -> None:
    folder = machine.whole
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["heldout_after"] is not None
    rows = [row for row in rows_of(folder) if "engine/logprob_gap_mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 0.05

    checkpoint = summary["latest_checkpoint"]
    machine.command("eval", checkpoint, "--json", str(tmp_path / "evaluation.json"))
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["problems"] == 24 and 0 <= evaluation["pass_at_1"]["value"] <= 1

    machine.command("export", checkpoint, str(tmp_path / "exported"))
    exported, trained = weights_of(tmp_path / "exported"), weights_of(checkpoint)
    assert exported.keys() == trained.keys()
    assert all((exported[name].float() == trained[name].float()).all() for name in trained)

    print(f"memory: {json.dumps(summary['memory'])}")
    measured, estimated = summary["memory"]["measured"], summary["memory"]["estimated"]
    if machine.dry:
        assert "resident_peak_gib" in measured
        return
    assert measured["used_gib"] <= estimated["used_gib"] <= 1.5 * measured["used_gib"]


def test_run_with_staleness_proves_each_sync(machine: Any) -> None:
    folder = machine.train("ahead", "rollout.max_staleness=1", "grpo.max_steps=4", "grpo.save_steps=4")
    rows = [row for row in rows_of(folder) if "engine/logprob_gap_mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]  # the last step samples nothing
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 0.05
