"""Tests of where a worker begins: the ledger of the checkpoint that the run goes on from."""

from pathlib import Path

import ray

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint, Ledger, ids_to_uint64, uint64_to_ids
from grpo_ray.training.worker import WorkerSpec, ledger_of

OLD, KEPT, NEW = "a" * 16, "b" * 16, "c" * 16


def test_ledger_of_changed_dataset_forgets_problems_it_no_longer_holds(cluster: None, tmp_path: Path) -> None:
    began_with, today = DatasetFingerprint.of([OLD, KEPT, "d" * 16]), DatasetFingerprint.of([KEPT, NEW])
    before = Ledger(began_with)
    before.mark(0, [OLD, KEPT])
    before.save(tmp_path)

    def assignment(contents: DatasetFingerprint, numbers: ray.ObjectRef | None) -> WorkerSpec:
        return WorkerSpec(load_config(None, []), "policy", contents, contents, numbers=numbers, serial=0, board=None)

    ledger = ledger_of(tmp_path, assignment(today, ray.put(ids_to_uint64([KEPT, NEW]))))
    assert uint64_to_ids(ledger.used(0)) == [KEPT] and ledger.remaining(0) == 1
    # The dataset that the run began with is not looked through: all of it is still there.
    assert uint64_to_ids(ledger_of(tmp_path, assignment(began_with, None)).used(0)) == [OLD, KEPT]
    assert len(ledger_of(None, assignment(began_with, None)).used(0)) == 0
