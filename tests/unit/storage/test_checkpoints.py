"""Tests of checkpoints on a local disk: upload, verification, ranking, pruning, resume, and Ray Train's snapshot."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import ray.train
from hypothesis import given, settings

from grpo_ray.errors import CheckpointError, DamagedFileError, RewardError, SupersededError
from grpo_ray.storage import checkpoint_upload, checkpoints, retry
from grpo_ray.storage.checkpoint_integrity import find_faults, mark_damaged
from grpo_ray.storage.checkpoint_upload import CheckpointUploader, clear_unfinished, finish_commits
from grpo_ray.storage.checkpoints import (
    CheckpointInfo,
    best_checkpoint,
    checkpoint_name,
    checkpoint_score,
    damaged_measurements,
    list_checkpoints,
    load_reward_states,
    manifest_serial,
    prune_checkpoints,
    rank_checkpoints,
    read_returns,
    record_return,
    resolve_checkpoint,
    resume_candidates,
    save_reward_states,
    unreadable_manifests,
)
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.jsonl import load_metrics_history, save_metrics_history
from grpo_ray.storage.ray_snapshot import SNAPSHOT, repair_ray_snapshot
from grpo_ray.storage.run_folder import RunFolder

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


def parts(tmp_path: Path, workers: int) -> list[Path]:
    """Create a folder per worker with the files that it uploads."""
    local = [tmp_path / "local" / str(rank) for rank in range(workers)]
    for rank, path in enumerate(local):
        (path / "deep").mkdir(parents=True, exist_ok=True)
        (path / f"rng_state_{rank}.pth").write_bytes(bytes([rank]) * 100)
    (local[0] / "model.safetensors").write_bytes(WEIGHTS)
    (local[0] / "deep" / "config.json").write_text("{}")
    return local


def upload(folder: RunFolder, step: int, serial: int, workers: int = 2, **metrics: float) -> str:
    """Upload a checkpoint from all workers at the same time; return its name."""
    local = parts(Path(folder.storage_path), workers)
    name = checkpoint_name(folder, step)
    row = {"step": step, **metrics}
    uploads = [
        CheckpointUploader(folder, rank, workers, row, serial, 5.0, on_progress=print) for rank in range(workers)
    ]
    threads = [
        threading.Thread(target=each, args=(ray.train.Checkpoint.from_directory(str(path)), name))
        for each, path in zip(uploads, local, strict=True)
    ]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return name


class HeldPoll:
    """Replacement for the module `time` whose sleep lasts until the test ends it."""

    def __init__(self) -> None:
        self.reached, self.end = threading.Event(), threading.Event()

    def sleep(self, seconds: float) -> None:
        self.reached.set()
        assert self.end.wait(60)


class FakeClock:
    """Replacement for the module `time` that advances only while sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_upload_two_workers_with_one_file_name_raise(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    local = parts(tmp_path, 2)
    (local[1] / "model.safetensors").write_bytes(b"other weights")
    second, first = (CheckpointUploader(folder, rank, 2, {"step": 1}, 1, 5.0, on_progress=print) for rank in (1, 0))
    second(ray.train.Checkpoint.from_directory(str(local[1])), "checkpoint-000001")
    with pytest.raises(CheckpointError, match=r"worker 1 and one before it both wrote model\.safetensors") as caught:
        first(ray.train.Checkpoint.from_directory(str(local[0])), "checkpoint-000001")
    assert "once the storage works" not in str(caught.value)  # the same command would fail again
    assert list_checkpoints(folder) == []


def test_upload_checkpoint_exists_when_all_workers_wrote(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = HeldPoll()
    monkeypatch.setattr(checkpoint_upload, "time", poll)
    local = parts(tmp_path, 2)
    first, second = (CheckpointUploader(folder, rank, 2, {"step": 5}, 1, 5.0, on_progress=print) for rank in (0, 1))
    begun = ray.train.Checkpoint.from_directory(str(local[0]))
    waiting = threading.Thread(target=first, args=(begun, "checkpoint-5"), daemon=True)
    waiting.start()
    assert poll.reached.wait(60)  # rank 0 wrote its files and waits for those of rank 1
    assert waiting.is_alive() and list_checkpoints(folder) == []
    assert not folder.exists("checkpoint-5")
    second(ray.train.Checkpoint.from_directory(str(local[1])), "checkpoint-5")
    poll.end.set()
    waiting.join(60)
    (checkpoint,) = list_checkpoints(folder)
    assert (checkpoint.name, checkpoint.step, checkpoint.serial) == ("checkpoint-5", 5, 1)
    assert set(checkpoint.files) == {"model.safetensors", "deep/config.json", "rng_state_0.pth", "rng_state_1.pth"}
    assert Path(checkpoint.path, "model.safetensors").read_bytes() == WEIGHTS
    assert find_faults(checkpoint) == []


def test_clear_unfinished_deletes_only_unfinished_checkpoints(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    folder.write_text("half", "checkpoint-000002.part", "model.safetensors")
    clear_unfinished(folder)
    assert folder.list_folders("checkpoint-") == ["checkpoint-000001"]


def staged(folder: RunFolder, name: str, serial: int) -> None:
    """Write a checkpoint whose writer died just before it renamed the staging folder."""
    folder.write_json({"metrics": {"step": serial}, "serial": serial, "files": {}}, f"{name}.part", "manifest.json")


def test_finish_commits_renames_what_was_complete_and_names_it(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    staged(folder, "checkpoint-000002", 2)
    folder.write_text("half", "checkpoint-000003.part", "model.safetensors")
    assert manifest_serial(folder, "checkpoint-000002.part") == 2
    assert manifest_serial(folder, "checkpoint-000003.part") is None
    assert finish_commits(folder) == ["checkpoint-000002"]
    names = ["checkpoint-000001", "checkpoint-000002", "checkpoint-000003.part"]
    assert sorted(folder.list_folders("checkpoint-")) == names
    assert finish_commits(folder) == []


@pytest.mark.parametrize("serial", [1, 2])
def test_finish_commits_leaves_a_replaced_attempt_staged(folder: RunFolder, serial: int) -> None:
    upload(folder, 2, 2)
    staged(folder, "checkpoint-000003", serial)  # by an attempt before the one that wrote number 2
    assert finish_commits(folder) == []
    assert sorted(folder.list_folders("checkpoint-")) == ["checkpoint-000002", "checkpoint-000003.part"]


class ObjectStore(RunFolder):
    """Folder on a disk that counts as one in an object store."""

    @property
    def local(self) -> None:
        return None


def test_finish_commits_in_an_object_store_renames_nothing(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path), "run")
    staged(store, "checkpoint-000002", 2)  # copied from a disk
    assert finish_commits(store) == []
    assert store.list_folders("checkpoint-") == ["checkpoint-000002.part"]


def test_upload_repeated_after_the_commit_writes_nothing(folder: RunFolder, tmp_path: Path) -> None:
    local = ray.train.Checkpoint.from_directory(str(parts(tmp_path, 1)[0]))
    uploader = CheckpointUploader(folder, 0, 1, {"step": 1}, 1, 5.0, on_progress=print)
    for _ in range(2):  # the second time as if the reply to the first was lost
        assert Path(uploader(local, "checkpoint-000001").path).name == "checkpoint-000001"
        assert folder.list_folders("checkpoint-") == ["checkpoint-000001"]


def test_upload_superseded_attempt_stops_at_the_next_file(folder: RunFolder, tmp_path: Path) -> None:
    class Overtaken(CheckpointUploader):
        def _copy_file(self, path: Path, *names: str) -> str:
            FencingToken.take(folder)  # by another attempt, while this one copies
            copied.append(path.name)
            return super()._copy_file(path, *names)

    copied: list[str] = []
    fence = FencingToken.take(folder)
    uploader = Overtaken(folder, 0, 1, {"step": 1}, 1, 5.0, on_progress=print, fence=fence)
    with pytest.raises(SupersededError):
        uploader._upload(parts(tmp_path, 1)[0], "checkpoint-000001")
    assert len(copied) == 1


def test_upload_superseded_while_it_copies_its_last_file_lists_none(folder: RunFolder, tmp_path: Path) -> None:
    """On an object store another attempt may write other files under the same name."""

    class Overtaken(CheckpointUploader):
        def _copy_file(self, path: Path, *names: str) -> str:
            checksum = super()._copy_file(path, *names)
            FencingToken.take(folder)  # by another attempt
            return checksum

    local = tmp_path / "local"
    local.mkdir()
    (local / "model.safetensors").write_bytes(WEIGHTS)
    fence = FencingToken.take(folder)
    uploader = Overtaken(folder, 0, 1, {"step": 1}, 1, 5.0, on_progress=print, fence=fence)
    with pytest.raises(SupersededError):
        uploader._upload(local, "checkpoint-000001")
    assert not folder.exists(uploader.staging_name("checkpoint-000001"), "files-0.json")


def test_attempt_superseded_directly_before_its_commit_publishes_nothing(folder: RunFolder, tmp_path: Path) -> None:
    fence = FencingToken.take(folder)

    def before_commit() -> None:
        FencingToken.take(folder)  # by another attempt

    uploader = CheckpointUploader(folder, 0, 1, {"step": 1}, 1, 5.0, print, before_commit, fence)
    with pytest.raises(SupersededError):
        uploader(ray.train.Checkpoint.from_directory(str(parts(tmp_path, 1)[0])), "checkpoint-000001")
    assert list_checkpoints(folder) == []


def test_commit_repeated_by_a_superseded_attempt_raises(folder: RunFolder, tmp_path: Path) -> None:
    fence = FencingToken.take(folder)
    uploader = CheckpointUploader(folder, 0, 1, {"step": 1}, 1, 5.0, on_progress=print, fence=fence)
    uploader(ray.train.Checkpoint.from_directory(str(parts(tmp_path, 1)[0])), "checkpoint-000001")
    FencingToken.take(folder)
    with pytest.raises(SupersededError):  # although its checkpoint is complete
        uploader._commit("checkpoint-000001")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: path.write_bytes(WEIGHTS[:1000]), "model.safetensors has 1000 of 10240 bytes"),
    "emptied": (lambda path: path.write_bytes(b""), "model.safetensors has 0 of 10240 bytes"),
    "one bit flipped": (
        lambda path: path.write_bytes(WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])),
        "model.safetensors was altered",
    ),
    "deleted": (lambda path: path.unlink(), "model.safetensors is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_find_faults_damaged_file_is_named(folder: RunFolder, damage: str) -> None:
    upload(folder, 1, 1)
    (checkpoint,) = list_checkpoints(folder)
    change, fault = DAMAGE[damage]
    change(Path(checkpoint.path, "model.safetensors"))
    assert find_faults(checkpoint) == [fault]


def test_find_faults_shared_by_workers_finds_each_fault_once(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    (checkpoint,) = list_checkpoints(folder)
    Path(checkpoint.path, "deep", "config.json").write_text("[]")
    seen = [find_faults(checkpoint, part, 3) for part in range(3)]
    assert sorted(map(len, seen)) == [0, 0, 1] and ["deep/config.json was altered"] in seen


def test_find_faults_reads_all_files_the_largest_first(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    (checkpoint,) = list_checkpoints(folder)
    Path(checkpoint.path, "deep", "config.json").write_text("[]")  # 2 bytes as before
    Path(checkpoint.path, "model.safetensors").write_bytes(WEIGHTS[::-1])
    assert find_faults(checkpoint) == ["model.safetensors was altered", "deep/config.json was altered"]


@pytest.mark.parametrize(
    ("changed", "is_complete"),
    [
        ({}, True),
        ({"metrics": {"step": 0}}, True),
        ({"metrics": {"step": -1}}, False),
        ({"metrics": {"step": 10**15}}, False),
        ({"serial": "1"}, False),
        ({"files": {"model.safetensors": 3}}, False),
    ],
)
def test_list_checkpoints_manifest_with_impossible_values_is_unreadable(
    folder: RunFolder, changed: dict[str, Any], is_complete: bool
) -> None:
    manifest = {"metrics": {"step": 1}, "serial": 1, "files": {"model.safetensors": {"bytes": 3, "sha256": ""}}}
    folder.write_json(manifest | changed, "checkpoint-000001", "manifest.json")
    assert len(list_checkpoints(folder)) == is_complete
    assert unreadable_manifests(folder) == ([] if is_complete else ["checkpoint-000001"])


def test_list_checkpoints_damaged_manifest_is_unreadable(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    for text in ("", "{", "[]", '{"metrics": {}}'):
        folder.write_text(text, "checkpoint-000001", "manifest.json")
        assert list_checkpoints(folder) == []
        assert unreadable_manifests(folder) == ["checkpoint-000001"]


def test_mark_damaged_removes_checkpoint_but_keeps_its_name(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    (checkpoint,) = list_checkpoints(folder)
    mark_damaged(checkpoint, ["model.safetensors was altered"])
    assert list_checkpoints(folder) == []
    assert json.loads(folder.read_text("checkpoint-000001", "damaged.json")) == ["model.safetensors was altered"]
    assert checkpoint_name(folder, 1) == "checkpoint-000001.2"


def checkpoint_info(step: int, serial: int, folder: RunFolder, **metrics: float | None) -> CheckpointInfo:
    return CheckpointInfo(folder, f"checkpoint-{step:06d}", {"step": step, **metrics}, serial, {})


def test_checkpoint_digest_does_not_depend_on_the_order_of_files(folder: RunFolder) -> None:
    files = {name: {"bytes": 1, "sha256": name * 64} for name in "ab"}
    one, other = (
        CheckpointInfo(folder, "checkpoint-000001", {"step": 1}, 1, dict(each))
        for each in (files.items(), reversed(files.items()))
    )
    assert one.digest == other.digest


def test_checkpoint_repr_leaves_out_its_files(folder: RunFolder) -> None:
    info = CheckpointInfo(folder, "checkpoint-000001", {"step": 1}, 1, {"model.safetensors": {}})
    assert "safetensors" not in repr(info)


def test_best_of_equal_metrics_is_the_earliest(folder: RunFolder) -> None:
    some = [checkpoint_info(n, n, folder, m=value) for n, value in ((1, 0.5), (2, 0.75), (3, 0.75), (4, 0.25))]
    assert best_checkpoint(some, "m") is some[1]
    assert best_checkpoint([*some, checkpoint_info(5, 5, folder, m=None)], "m") is some[1]
    assert best_checkpoint(some, "other") is None
    # Ray Train ranks by one number, which must give the same order.
    ranked = sorted(some, key=lambda each: checkpoint_score(each.metrics, "m")["checkpoint/score"])
    assert ranked[-1] is some[1] and ranked[-2] is some[2]


def test_checkpoint_score_is_less_by_a_trifle_per_step() -> None:
    assert checkpoint_score({"step": 4, "m": 0.5}, "m") == {"checkpoint/score": 0.5 - 4e-12}
    assert checkpoint_score({"step": 4, "m": 0}, "m") == {"checkpoint/score": -4e-12}


NOT_A_SCORE = (None, math.nan, math.inf, -math.inf, "0.9", True, 10**400)


@pytest.mark.parametrize("value", NOT_A_SCORE, ids=repr)
def test_best_checkpoint_value_without_order_ranks_last(folder: RunFolder, value: object) -> None:
    odd = CheckpointInfo(folder, "checkpoint-000001", {"step": 1, "m": value}, 1, {})
    some = [odd, checkpoint_info(2, 2, folder, m=0.5), checkpoint_info(3, 3, folder, m=0.75)]
    assert best_checkpoint(some, "m") is some[2]
    assert rank_checkpoints(some, "m") == [some[2], some[1], odd]
    assert best_checkpoint([odd], "m") is None
    assert checkpoint_score(odd.metrics, "m") == {}


def test_rank_checkpoints_negative_value_comes_before_none(folder: RunFolder) -> None:
    some = [checkpoint_info(1, 1, folder, m=None), checkpoint_info(2, 2, folder, m=-0.5)]
    assert [each.step for each in rank_checkpoints(some, "m")] == [2, 1]


def test_rank_checkpoints_latest_of_unmeasured_comes_first(folder: RunFolder) -> None:
    some = [checkpoint_info(n, n, folder, **({"m": 0.5} if n == 2 else {})) for n in (1, 2, 3)]
    assert [each.step for each in rank_checkpoints(some, "m")] == [2, 3, 1]


def test_prune_unmeasured_checkpoints_fill_free_places(folder: RunFolder) -> None:
    # As in Ray Train: 2 is the best one, 4 the latest; without other measurements 4 is the second of two to keep.
    measured: list[dict[str, Any]] = [{}, {"m": 0.5}, {}, {}]
    for serial, metrics in enumerate(measured, start=1):
        upload(folder, serial, serial, **metrics)
    prune_checkpoints(folder, "m", keep=3)
    assert [each.step for each in list_checkpoints(folder)] == [2, 3, 4]


def test_repair_snapshot_nan_ranks_last_in_ray(folder: RunFolder) -> None:
    for step, value in ((1, 0.5), (2, math.nan), (3, 0.4)):
        upload(folder, step, step, m=value)
    folder.delete_folder("checkpoint-000003")
    repair_ray_snapshot(folder, "m")
    results = json.loads(folder.read_text(SNAPSHOT))["checkpoint_results"]  # worst first
    assert [each["checkpoint_dir_name"] for each in results] == ["checkpoint-000002", "checkpoint-000001"]


@given(measured=st.dictionaries(st.integers(1, 100_000), st.integers(0, 600), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_best_of_any_checkpoints_agrees_with_ray_score(
    tmp_path_factory: pytest.TempPathFactory, measured: dict[int, int]
) -> None:
    """Accuracies on 600 problems; `measured` maps a step to its number of solved problems."""
    folder = RunFolder(str(tmp_path_factory.getbasetemp()), "run")
    some = [
        checkpoint_info(step, serial, folder, m=solved / 600) for serial, (step, solved) in enumerate(measured.items())
    ]
    best = max(some, key=lambda each: checkpoint_score(each.metrics, "m")["checkpoint/score"])
    assert best_checkpoint(some, "m") is best
    assert best.step == min(step for step, solved in measured.items() if solved == max(measured.values()))


def test_resume_candidates_order_by_resume_and_launch(folder: RunFolder) -> None:
    for serial, (step, value) in enumerate(((2, 0.9), (4, 0.5), (6, 0.7)), start=1):
        upload(folder, step, serial, m=value)

    def steps(resume: str, after: int | None = None) -> list[int]:
        return [each.step for each in resume_candidates(folder, resume, "m", after)]

    assert steps("latest") == [6, 4, 2]
    assert steps("best") == [2, 6, 4]  # nothing is older than the best
    assert steps("best", after=0) == [6, 4, 2]  # all were written by this launch
    assert steps("best", after=3) == [2, 6, 4]
    upload(folder, 4, 4, m=0.1)  # this launch resumed from the best and reached step 4 again
    assert steps("best", after=3) == [4, 2, 6, 4]
    assert [each.name for each in resume_candidates(folder, "best", "m", 3)][:2] == [
        "checkpoint-000004.2",
        "checkpoint-000002",
    ]


def test_resume_candidates_leave_out_what_the_run_went_back_behind(folder: RunFolder) -> None:
    """The rollouts of the later steps are gone, although no newer checkpoint has been written."""
    for serial, (step, value) in enumerate(((2, 0.9), (4, 0.5), (6, 0.7)), start=1):
        upload(folder, step, serial, m=value)
    for _ in range(2):
        record_return(folder, to=1, newest=3)
        assert read_returns(folder) == [(1, 3)]
        assert [each.step for each in resume_candidates(folder, "latest", "m")] == [2]
    upload(folder, 4, 4, m=0.1)
    assert [each.serial for each in resume_candidates(folder, "latest", "m")] == [4, 1]
    record_return(folder, to=4, newest=4)  # the newest one: no return
    assert read_returns(folder) == [(1, 3)]


@pytest.mark.parametrize("text", ["", "[[1", "[1]", "{}x", '[["a", 2]]'])
def test_read_returns_damaged_file_is_named(folder: RunFolder, text: str) -> None:
    folder.write_text(text, "returns.json")
    with pytest.raises(DamagedFileError, match=r"returns\.json is damaged: .*; delete it"):
        read_returns(folder)


def test_prune_keeps_best_and_latest(folder: RunFolder) -> None:
    for serial, (step, value) in enumerate(((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.8), (5, 0.2)), start=1):
        upload(folder, step, serial, m=value)
    prune_checkpoints(folder, "m", keep=2)
    assert [each.step for each in list_checkpoints(folder)] == [2, 4, 5]


@pytest.mark.parametrize("snapshot", ["missing", "cut short", "names a deleted one", "lacks one"])
def test_repair_snapshot_names_the_checkpoints_that_exist(folder: RunFolder, snapshot: str) -> None:
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.4)):
        upload(folder, step, step, m=value)
    repair_ray_snapshot(folder, "m")
    if snapshot == "missing":
        folder.delete_file(SNAPSHOT)
    elif snapshot == "cut short":
        folder.write_text(folder.read_text(SNAPSHOT)[:100], SNAPSHOT)
    elif snapshot == "names a deleted one":
        folder.delete_folder("checkpoint-000001")
    else:
        upload(folder, 4, 4, m=0.1)
    there = [each.name for each in list_checkpoints(folder)]
    repair_ray_snapshot(folder, "m")
    # Ray's own reader must accept it.
    result = ray.train.Result.from_path(folder.path(), storage_filesystem=folder.filesystem)
    assert Path(result.checkpoint.path).name == there[-1]
    assert {Path(each.path).name for each, _ in result.best_checkpoints} == set(there)
    best = result.get_best_checkpoint("checkpoint/score", mode="max")
    assert Path(best.path).name == "checkpoint-000002"


def test_resolve_checkpoint_by_folder_or_run(folder: RunFolder) -> None:
    upload(folder, 1, 1, m=0.9)
    upload(folder, 2, 2, m=0.1)
    assert resolve_checkpoint(folder.uri, "m").step == 1
    assert resolve_checkpoint(f"{folder.uri}/", "m").step == 1
    assert resolve_checkpoint(folder.uri_of("checkpoint-000002"), "m").step == 2
    assert resolve_checkpoint(folder.uri, "other").step == 2  # no checkpoint has the metric: the latest
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        resolve_checkpoint(folder.uri_of("checkpoint-000009"), "m")
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        resolve_checkpoint(folder.storage_path + "/nothing", "m")


def test_upload_storage_full_retries_then_raises(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(CheckpointUploader):
        def _copy_file(self, path: Path, *names: str) -> str:
            tries.append(clock.now)
            raise OSError(28, "No space left on device")

    clock = FakeClock()
    monkeypatch.setattr(retry, "time", clock)
    messages: list[str] = []
    tries: list[float] = []
    local = parts(tmp_path, 1)
    full = Full(folder, 0, 1, {"step": 1}, 1, 5.0, on_progress=messages.append)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 could not be written .*No space left.* goes on"):
        full(ray.train.Checkpoint.from_directory(str(local[0])), "checkpoint-1")
    assert len(messages) == 1 and list_checkpoints(folder) == []
    assert len(tries) > 1 and tries[-1] == 5.0  # the last attempt is at the end of `retry_seconds`


def test_metrics_history_loads_equal(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "checkpoint": "é"}]
    save_metrics_history(tmp_path, rows)
    assert list(load_metrics_history(tmp_path)) == rows


def test_upload_superseded_attempt_cannot_commit(folder: RunFolder, tmp_path: Path) -> None:
    name, committing = "checkpoint-000006", threading.Event()
    local = parts(tmp_path, 2)

    def write(fence: FencingToken, rank: int, serial: int, weights: bytes = WEIGHTS) -> CheckpointUploader:
        (local[0] / "model.safetensors").write_bytes(weights)
        written = CheckpointUploader(
            folder, rank, 2, {"step": 6}, serial, 5.0, on_progress=print, before_commit=committing.set, fence=fence
        )
        written._upload(local[rank], name)
        return written

    old = FencingToken.take(folder)
    # All files are written, only the commit is missing.
    cut_off = [write(old, rank, 1, b"other weights") for rank in (0, 1)]
    new = FencingToken.take(folder)
    clear_unfinished(folder)
    first, _ = [write(new, rank, 2) for rank in (0, 1)]
    # Uploading is tried first: an attempt that is not stopped would wait in the commit for files that are gone.
    with pytest.raises(SupersededError):
        cut_off[1]._upload(local[1], name)
    # It commits neither its own files nor those of the new attempt.
    with pytest.raises(SupersededError, match="another attempt"):
        cut_off[0]._commit(name)
    assert not folder.exists(name) and not committing.is_set()
    first._commit(name)
    (checkpoint,) = list_checkpoints(folder)
    assert (checkpoint.name, checkpoint.serial, find_faults(checkpoint)) == (name, 2, [])


class OvertakenFolder(RunFolder):
    """Run folder that another attempt takes while a commit looks for the first worker's file list."""

    def exists(self, *names: str) -> bool:
        if names[-1:] == ("files-0.json",):
            FencingToken.take(self)
        return super().exists(*names)


def commit_overtaken(tmp_path: Path, workers: int, uploaded: int) -> list[Exception]:
    """Commit a checkpoint of which some workers have uploaded their parts, overtaken meanwhile; return the error."""
    folder = OvertakenFolder(str(tmp_path), "run")
    fence, local = FencingToken.take(folder), parts(tmp_path, workers)
    uploads = [
        CheckpointUploader(folder, rank, workers, {"step": 1}, 1, 5.0, on_progress=print, fence=fence)
        for rank in range(workers)
    ]
    for each, path in list(zip(uploads, local, strict=True))[:uploaded]:
        each._upload(path, "checkpoint-000001")
    errors: list[Exception] = []

    def commit() -> None:
        try:
            uploads[0]._commit("checkpoint-000001")
        except SupersededError as error:
            errors.append(error)

    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    thread.join(60)  # without a check of the fence, it would wait for ever
    assert list_checkpoints(folder) == []
    return errors


def test_commit_overtaken_while_it_waits_for_a_worker_ends(tmp_path: Path) -> None:
    assert len(commit_overtaken(tmp_path, workers=2, uploaded=1)) == 1


def test_commit_overtaken_after_the_last_part_writes_no_manifest(tmp_path: Path) -> None:
    assert len(commit_overtaken(tmp_path, workers=1, uploaded=1)) == 1


def test_load_reward_states_own_rank_goes_before_rank_0(tmp_path: Path) -> None:
    for rank in (0, 1):
        save_reward_states(tmp_path, rank, {"length": {"step": rank}})
    assert load_reward_states(tmp_path, 1) == {"length": {"step": 1}}
    assert load_reward_states(tmp_path, 2) == {"length": {"step": 0}}  # a worker that the run did not have before


def test_reward_states_that_cannot_be_loaded_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SMALL_FILE_BYTES", 49)  # the first two have 49 bytes with the end of the line
    states = {"length": {"step": 1}, "novelty": {"seen": [12]}}
    save_reward_states(tmp_path, 0, {"length": {"step": 1}, "novelty": {"seen": []}})
    assert load_reward_states(tmp_path, 0)["novelty"] == {"seen": []}
    with pytest.raises(RewardError, match=r"have 51 bytes in JSON, and that of novelty has 14; the limit is 49"):
        save_reward_states(tmp_path, 1, states)
    assert not (tmp_path / "rewards_1.json").exists()


def test_reward_states_that_are_empty_take_no_file(tmp_path: Path) -> None:
    save_reward_states(tmp_path, 0, {})
    assert list(tmp_path.iterdir()) == [] and load_reward_states(tmp_path, 0) == {}


def test_upload_altered_by_the_storage_raises(tmp_path: Path) -> None:
    class Storage:
        """Storage that keeps one byte less than was written."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def open_output_stream(self, path: str) -> Any:
            class Short:
                def __enter__(self) -> Any:
                    return self

                def __exit__(self, *exc: Any) -> None:
                    pass

                def write(self, block: Any) -> None:
                    Path(path).write_bytes(block[:-1])

            return Short()

    local = tmp_path / "local"
    local.mkdir()
    (local / "model.safetensors").write_bytes(b"weights")
    folder = RunFolder(str(tmp_path), "run")
    folder.filesystem = Storage(folder.filesystem)
    upload = CheckpointUploader(folder, 0, 1, {"step": 1}, 1, 0.0, on_progress=print)
    with pytest.raises(OSError, match="the storage returned other bytes than were written"):
        upload._copy_file(local / "model.safetensors", "x", "model.safetensors")


def test_list_checkpoints_reads_later_measurement(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    contents = {"count": 24, "checksum": "ab"}
    for step, measured_on in ((1, contents), (2, None)):
        name = f"checkpoint-{step:06d}"
        (tmp_path / "run" / name).mkdir(parents=True)
        manifest = {"metrics": {"step": step}, "serial": step, "files": {}, "measured_on": measured_on}
        folder.write_json(manifest, name, "manifest.json")
    later = {"metrics": {"heldout/accuracy": 0.5}, "measured_on": {"count": 9, "checksum": "cd"}}
    folder.write_json(later, "checkpoint-000002", "measured.json")  # by a task beside the training
    first, second = list_checkpoints(folder)
    assert first.measured_on == contents and first.metrics == {"step": 1}
    assert second.measured_on == later["measured_on"]
    assert second.metrics == {"step": 2, "heldout/accuracy": 0.5}


@pytest.mark.parametrize(
    "measured",
    [
        "{",
        {"metrics": {}, "measured_on": {"set": 1}},
        {"metrics": {"heldout/accuracy": 0.5}, "measured_on": None},
        {"metrics": {"heldout/accuracy": "high"}, "measured_on": {"set": 1}},
        {"metrics": {"heldout/accuracy": 0.5}},
        [],
    ],
    ids=repr,
)
def test_list_checkpoints_damaged_measurement_counts_as_none(folder: RunFolder, measured: Any) -> None:
    for step in (1, 2, 3):
        upload(folder, step, step, m=0.25)
    text = measured if isinstance(measured, str) else json.dumps(measured)
    folder.write_text(text, "checkpoint-000002", "measured.json")
    sound = {"metrics": {"m": 0.5}, "measured_on": {"set": 1}}
    folder.write_json(sound, "checkpoint-000003", "measured.json")
    assert damaged_measurements(folder) == ["checkpoint-000002"]
    assert [each.metrics["m"] for each in list_checkpoints(folder)] == [0.25, 0.25, 0.5]
    assert [each.measured_on for each in list_checkpoints(folder)] == [None, None, {"set": 1}]


def test_checkpoint_name_counts_repeated_steps(folder: RunFolder) -> None:
    names = []
    for _ in range(3):
        names.append(checkpoint_name(folder, 7))
        folder.write_text("", names[-1], "file")
    assert names == ["checkpoint-000007", "checkpoint-000007.2", "checkpoint-000007.3"]
