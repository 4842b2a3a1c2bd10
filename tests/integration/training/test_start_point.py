"""Start point of an attempt: the ledger of the checkpoint that it resumes from."""

from pathlib import Path

import ray

from grpo_ray.data.ledger import DatasetFingerprint, Ledger, ids_to_uint64, uint64_to_ids
from grpo_ray.training.start_point import load_ledger

OLD, KEPT, NEW = "a" * 16, "b" * 16, "c" * 16


def test_load_ledger_changed_dataset_forgets_problems_it_no_longer_holds(cluster: None, tmp_path: Path) -> None:
    began_with, today = DatasetFingerprint.of([OLD, KEPT, "d" * 16]), DatasetFingerprint.of([KEPT, NEW])
    before = Ledger(began_with)
    before.mark(0, [OLD, KEPT])
    before.save(tmp_path)

    ledger = load_ledger(tmp_path, ray.put(ids_to_uint64([KEPT, NEW])), today)
    assert uint64_to_ids(ledger.used(0)) == [KEPT] and ledger.remaining(0) == 1
    # If the dataset is the one that the run began with, the ledger is not filtered: all problems are still there.
    assert uint64_to_ids(load_ledger(tmp_path, None, began_with).used(0)) == [OLD, KEPT]
    assert len(load_ledger(None, None, began_with).used(0)) == 0
