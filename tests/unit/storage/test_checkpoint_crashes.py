"""Every crash and every lost reply around a checkpoint: a complete one is never lost, and no half of one is left over.

The storage is a model (`store_model.py`); upload, recovery and deletion are the real ones.
"""

import json
import types
from functools import partial
from pathlib import Path

import pytest
import ray.train
from store_model import Crash, Decisions, Scheduler, State, StoreModel, explore

from grpo_ray.storage import checkpoint_upload, retry
from grpo_ray.storage.checkpoint_upload import CheckpointUploader, clear_unfinished, finish_commits
from grpo_ray.storage.checkpoints import MANIFEST, list_checkpoints, prune_checkpoints

NAME = "checkpoint-000006"
BEFORE = "checkpoint-000003"


def checkpoint_files(name: str, serial: int, **metrics: float) -> dict[str, str]:
    """Return the files of a complete checkpoint."""
    manifest = {"metrics": {"step": serial, **metrics}, "serial": serial, "files": {"weights": {}}}
    return {f"{name}/weights": "of this checkpoint", f"{name}/{MANIFEST}": json.dumps(manifest)}


class ModelUploader(CheckpointUploader):
    """Uploader whose files are copied into the model in one change each."""

    def _copy_file(self, path: Path, *names: str) -> str:
        self.folder.write_text(path.read_text(), *names)
        return "checksum"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(retry, "LONGEST_PAUSE", 0.0)


def complete_folders(state: State) -> dict[str, dict[str, str]]:
    """Return the files of each folder that has a manifest, without those that no manifest names."""
    folders: dict[str, dict[str, str]] = {}
    for path, text in state.items():
        name, _, file = path.partition("/")
        if file == MANIFEST:
            named = json.loads(text)["files"]
            folders[name] = {file: state[f"{name}/{file}"] for file in named}
    return folders


def recover(store: StoreModel) -> None:
    """Do what the next launch does before and after its first step."""
    finish_commits(store)
    clear_unfinished(store)


def check_recovery(state: State, is_remote: bool) -> None:
    """Assert that a launch after a crash in this state keeps every complete checkpoint, and nothing incomplete.

    The launch may itself be killed after any number of changes, and be started again.
    """
    complete = {name.split(".")[0]: files for name, files in complete_folders(state).items()}

    def recover_twice(decisions: Decisions) -> None:
        store = StoreModel(state, is_remote, decisions)
        store.crash_after = decisions.choose(6)
        try:
            recover(store)
        except Crash:
            store.crash_after = None
            assert {name.split(".")[0] for name in complete_folders(store.state)} == set(complete)
            recover(store)
        assert complete_folders(store.state) == complete
        assert {each.name for each in list_checkpoints(store)} == set(complete) == set(store.list_folders())

    explore(recover_twice)


@pytest.mark.long
@pytest.mark.parametrize("is_remote", [True, False], ids=["object store", "file system"])
def test_upload_any_order_lost_reply_or_crash_keeps_complete_checkpoints(
    is_remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = [tmp_path / str(rank) for rank in range(2)]
    for rank, path in enumerate(local):
        path.mkdir()
        (path / f"weights-{rank}").write_text(f"of worker {rank}")
    crash_states: set[frozenset[tuple[str, str]]] = set()

    def upload(decisions: Decisions) -> None:
        store = StoreModel(checkpoint_files(BEFORE, 1), is_remote, decisions, faults=1)

        def worker(rank: int) -> None:
            uploader = ModelUploader(store, rank, 2, {"step": 6}, 2, 1e9, on_progress=lambda text: None)
            uploader(ray.train.Checkpoint(str(local[rank]), filesystem=None), NAME)

        scheduler = Scheduler(store, [partial(worker, rank) for rank in range(2)])
        clock = types.SimpleNamespace(sleep=lambda seconds: scheduler.pause(blocked=True))
        monkeypatch.setattr(checkpoint_upload, "time", clock)
        monkeypatch.setattr(ModelUploader, "__call__", call_without_result)
        scheduler.run(decisions)
        assert complete_folders(store.state)[NAME] == {"weights-0": "of worker 0", "weights-1": "of worker 1"}
        crash_states.update(frozenset(state.items()) for state in store.passed_through)

    runs = explore(upload)
    assert runs > 100 and len(crash_states) >= 9
    for state in crash_states:
        check_recovery(dict(state), is_remote)


def call_without_result(uploader: CheckpointUploader, checkpoint: ray.train.Checkpoint, name: str) -> None:
    """Upload as `CheckpointUploader.__call__` does, without the result, which needs a real filesystem."""
    uploader._retry(lambda: uploader._upload(Path(checkpoint.path), name))
    if uploader.rank == 0:
        uploader._retry(lambda: uploader._commit(name))


@pytest.mark.parametrize("is_remote", [True, False], ids=["object store", "file system"])
def test_prune_crash_or_lost_reply_keeps_best_and_latest(is_remote: bool) -> None:
    accuracies = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3}
    stored = {
        path: text
        for step, value in accuracies.items()
        for path, text in checkpoint_files(f"checkpoint-{step:06d}", step, m=value).items()
    }
    crash_states: set[frozenset[tuple[str, str]]] = set()

    def prune(decisions: Decisions) -> None:
        store = StoreModel(stored, is_remote, decisions)
        prune_checkpoints(store, "m", keep=1)
        assert set(store.list_folders()) == {"checkpoint-000002", "checkpoint-000004"}
        crash_states.update(frozenset(state.items()) for state in store.passed_through)

    explore(prune)
    assert len(crash_states) == 4  # manifest and weights of two checkpoints
    for state in crash_states:
        assert {"checkpoint-000002", "checkpoint-000004"} <= set(complete_folders(dict(state)))
        check_recovery(dict(state), is_remote)


def test_clear_unfinished_spares_damaged_and_foreign_folders() -> None:
    kept = {
        "checkpoint-000001/weights": "", "checkpoint-000001/damaged.json": "[]", "checkpoint-best/weights": "",
        "checkpoint-000002/manifest.json": "cut sho", "policy/weights": "",
    }  # fmt: skip
    garbage = {
        "checkpoint-000003/weights": "",
        "checkpoint-000004.2/a": "",
        f"checkpoint-000005.{'0a' * 16}.part/a": "",
    }
    store = StoreModel(kept | garbage, True, Decisions([], set()))
    assert clear_unfinished(store) == [path.partition("/")[0] for path in garbage]
    assert store.state == kept


def test_finish_commits_leaves_older_checkpoint_of_replaced_attempt() -> None:
    staging = f"checkpoint-000006.{'0a' * 16}.part"
    state = checkpoint_files(staging, 2) | checkpoint_files("checkpoint-000006", 2)
    store = StoreModel(state, False, Decisions([], set()))
    recover(store)
    assert store.state == state
