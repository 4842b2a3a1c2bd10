"""Start point of an attempt: the checkpoint that it resumes from, its ledger, and the next serial number."""

from pathlib import Path

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint, Ledger, ids_to_uint64, uint64_to_ids
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.training import start_point
from grpo_ray.training.start_point import choose_start, load_ledger

OLD, KEPT, NEW = "a" * 16, "b" * 16, "c" * 16


def test_load_ledger_changed_dataset_counts_only_its_problems(tmp_path: Path) -> None:
    began_with, today = DatasetFingerprint.of([OLD, KEPT, "d" * 16]), DatasetFingerprint.of([KEPT, NEW])
    before = Ledger(began_with)
    before.mark(0, [OLD, KEPT])
    before.save(tmp_path)

    ids = ids_to_uint64([KEPT, NEW])
    ledger = load_ledger(tmp_path, ids, today)
    assert uint64_to_ids(ledger.used(0)) == [KEPT] and ledger.remaining(0) == 1
    assert len(load_ledger(None, ids, today).used(0)) == 0


def test_choose_start_best_numbers_new_checkpoints_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the new ones count as older than those that the run went back behind."""
    monkeypatch.setattr(start_point, "_find_faults", lambda checkpoint: [])  # needs a Ray Train worker
    folder = RunFolder(str(tmp_path), "run")
    for serial, reward in enumerate((0.9, 0.5, 0.7), start=1):
        manifest = {"metrics": {"step": serial, "reward/mean": reward}, "serial": serial, "files": {}}
        folder.write_json(manifest, f"checkpoint-{serial:06d}", "manifest.json")
    config = load_config(None, ["run.resume=best", "run.best_metric=reward/mean"])
    start = choose_start(config, folder, 3, lambda text: None)
    assert start.step == 1 and start.last_serial == 3
