"""Start point of an attempt: the checkpoint that it resumes from, its ledger, and the next serial number."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint, Ledger, ids_to_uint64, uint64_to_ids
from grpo_ray.errors import CheckpointError
from grpo_ray.storage.checkpoints import list_checkpoints
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.training import start_point
from grpo_ray.training.start_point import TRAINER_STATE, at_step_zero, choose_start, load_ledger

OLD, KEPT, NEW = "a" * 16, "b" * 16, "c" * 16


def test_load_ledger_changed_dataset_counts_only_its_problems(tmp_path: Path) -> None:
    began_with, today = DatasetFingerprint.of([OLD, KEPT, "d" * 16]), DatasetFingerprint.of([KEPT, NEW])
    before = Ledger(began_with)
    before.mark(0, [OLD, KEPT])
    before.save(tmp_path)

    single = {"": Fraction(1)}, {"": ids_to_uint64([KEPT, NEW])}, {"": today}
    ledger = load_ledger(tmp_path, *single).ledgers[""]
    assert uint64_to_ids(ledger.used(0)) == [KEPT] and ledger.remaining(0) == 1
    assert len(load_ledger(None, *single).ledgers[""].used(0)) == 0


def test_load_ledger_of_other_run_has_no_open_problems(tmp_path: Path) -> None:
    ids = [f"{number:016x}" for number in (1, 2)]
    ledger, fingerprint = Ledger(), DatasetFingerprint.of(ids)
    ledger.set_open({0: ids})
    ledger.save(tmp_path)
    data = {"": Fraction(1)}, {"": np.sort(ids_to_uint64(ids))}, {"": fingerprint}
    assert len(load_ledger(tmp_path, *data).ledgers[""].open(0)) == 2
    assert len(load_ledger(tmp_path, *data, is_of_other_run=True).ledgers[""].open(0)) == 0


def write_manifests(folder: RunFolder, *rewards: float) -> None:
    """Write checkpoints without files, of the steps 1, 2, ..."""
    for serial, reward in enumerate(rewards, start=1):
        manifest = {"metrics": {"step": serial, "reward/mean": reward}, "serial": serial, "files": {}}
        folder.write_json(manifest, f"checkpoint-{serial:06d}", "manifest.json")


def test_choose_start_best_numbers_new_checkpoints_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ones with lower numbers would count as older than those discarded by `run.resume=best`."""
    monkeypatch.setattr(start_point, "_find_faults", lambda checkpoint: [])  # needs a Ray Train worker
    folder = RunFolder(str(tmp_path), "run")
    write_manifests(folder, 0.9, 0.5, 0.7)
    config = load_config(None, ["run.resume=best", "run.best_metric=reward/mean"])
    start = choose_start(config, folder, 3, lambda text: None)
    assert start.step == 1 and start.last_serial == 3


@pytest.mark.parametrize(("faulty", "step"), [({1}, 3), ({1, 3}, 2)])
def test_choose_start_best_is_damaged_takes_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty: set[int], step: int
) -> None:
    monkeypatch.setattr(start_point, "_find_faults", lambda checkpoint: ["x"] * (checkpoint.serial in faulty))
    monkeypatch.setattr(start_point, "is_rank_zero", lambda: True)
    folder = RunFolder(str(tmp_path), "run")
    write_manifests(folder, 0.9, 0.5, 0.7)
    config = load_config(None, ["run.resume=best", "run.best_metric=reward/mean"])
    assert choose_start(config, folder, 3, lambda text: None).step == step


def test_choose_start_all_are_damaged_is_refused_in_each_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 0 the run would delete the records of the steps that it has taken."""
    monkeypatch.setattr(start_point, "_find_faults", lambda checkpoint: ["x"])
    folder = RunFolder(str(tmp_path), "run")
    write_manifests(folder, 0.9)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"all checkpoints are damaged; set run\.resume=never"):
            choose_start(load_config(), folder, 1, lambda text: None)
        assert list_checkpoints(folder) == []  # from the first launch on


def test_choose_start_unreadable_manifests_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text("{", "checkpoint-000002", "manifest.json")
    with pytest.raises(CheckpointError, match="all checkpoints are damaged"):
        choose_start(load_config(), folder, 0, lambda text: None)


def test_at_step_zero_takes_over_the_policy_and_not_the_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-000008"
    for name in ("model.safetensors", "optimizer.pt", "ledger.npz", "metrics.jsonl", "rewards_0.json", "shards/a"):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(name)
    callbacks = {"NonFiniteMonitor": {"attributes": {"skipped": 3}}, "TrainerControl": {}}
    state = {"global_step": 8, "epoch": 0.5, "log_history": [{"step": 8}], "stateful_callbacks": callbacks}
    (checkpoint / TRAINER_STATE).write_text(json.dumps(state))
    view = at_step_zero(checkpoint, tmp_path / "view")
    names = {path.name for path in view.iterdir()}
    assert names == {"model.safetensors", "optimizer.pt", "ledger.npz", "shards", TRAINER_STATE}
    assert (view / "shards" / "a").read_text() == "shards/a"
    begun = json.loads((view / TRAINER_STATE).read_text())
    assert (begun["global_step"], begun["log_history"], begun["stateful_callbacks"]) == (0, [], {"TrainerControl": {}})
    assert json.loads((checkpoint / TRAINER_STATE).read_text()) == state  # another run's checkpoint is never changed


def test_choose_start_of_another_run_counts_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_point, "_find_faults", lambda checkpoint: [])  # needs a Ray Train worker
    other, folder = RunFolder(str(tmp_path), "other"), RunFolder(str(tmp_path), "run")
    manifest = {"metrics": {"step": 8, "reward/mean": 0.5}, "serial": 4, "files": {}}
    other.write_json(manifest, "checkpoint-000008", "manifest.json")
    (initial,) = list_checkpoints(other)
    start = choose_start(load_config(), folder, 0, lambda text: None, initial)
    assert (start.checkpoint, start.step, start.last_serial) == (initial, 0, 0)
    folder.write_json(manifest | {"metrics": {"step": 2}, "serial": 1}, "checkpoint-000002", "manifest.json")
    own = choose_start(load_config(), folder, 0, lambda text: None, initial)  # a later attempt of the same launch
    assert own.step == 2 and not own.is_of_other_run


def test_choose_start_another_run_is_damaged_names_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_point, "_find_faults", lambda checkpoint: ["x"])
    other, folder = RunFolder(str(tmp_path), "other"), RunFolder(str(tmp_path), "run")
    write_manifests(other, 0.5)
    with pytest.raises(CheckpointError, match=r"run\.from_checkpoint: .*/checkpoint-000001 is damaged; name another"):
        choose_start(load_config(), folder, 0, lambda text: None, list_checkpoints(other)[0])
