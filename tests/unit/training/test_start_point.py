"""Start point of an attempt: the ledger of the checkpoint that it resumes from."""

from pathlib import Path

from grpo_ray.data.ledger import DatasetFingerprint, Ledger, ids_to_uint64, uint64_to_ids
from grpo_ray.training.start_point import load_ledger

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
