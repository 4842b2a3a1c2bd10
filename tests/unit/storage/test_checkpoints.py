"""Tests of checkpoints on a local disk: writing, verification, ranking, pruning, resume, and Ray Train's record."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import ray.train
from hypothesis import given, settings

from grpo_ray.errors import CheckpointError, SupersededError
from grpo_ray.storage import checkpoints, retry
from grpo_ray.storage.checkpoints import (
    CheckpointInfo,
    CheckpointUploader,
    best_checkpoint,
    checkpoint_score,
    find_faults,
    load_reward_states,
    open_foreign_checkpoint,
    resume_candidates,
    save_reward_states,
    stored_checkpoints,
)
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.run_folder import RunFolder

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


def parts(tmp_path: Path, workers: int) -> list[Path]:
    """Folders with the files that each worker uploads."""
    local = [tmp_path / "local" / str(rank) for rank in range(workers)]
    for rank, path in enumerate(local):
        (path / "deep").mkdir(parents=True, exist_ok=True)
        (path / f"rng_state_{rank}.pth").write_bytes(bytes([rank]) * 100)
    (local[0] / "model.safetensors").write_bytes(WEIGHTS)
    (local[0] / "deep" / "config.json").write_text("{}")
    return local


def upload(folder: RunFolder, step: int, serial: int, workers: int = 2, **metrics: float) -> str:
    """Write a checkpoint, all workers at the same time, and return its name."""
    local = parts(Path(folder.storage_path), workers)
    name = checkpoints.checkpoint_name(folder, step)
    row = {"step": step, **metrics}
    uploads = [CheckpointUploader(folder, rank, workers, row, serial, 5.0, say=print) for rank in range(workers)]
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
    """A `time` module whose sleep lasts until the test lets it end."""

    def __init__(self) -> None:
        self.reached, self.end = threading.Event(), threading.Event()

    def sleep(self, seconds: float) -> None:
        self.reached.set()
        assert self.end.wait(60)


class FakeClock:
    """A `time` module that only advances when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_upload_checkpoint_exists_when_all_workers_wrote(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = HeldPoll()
    monkeypatch.setattr(checkpoints, "time", poll)
    local = parts(tmp_path, 2)
    first, second = (CheckpointUploader(folder, rank, 2, {"step": 5}, 1, 5.0, say=print) for rank in (0, 1))
    begun = ray.train.Checkpoint.from_directory(str(local[0]))
    waiting = threading.Thread(target=first, args=(begun, "checkpoint-5"), daemon=True)
    waiting.start()
    assert poll.reached.wait(60)  # rank 0 wrote its files and waits for those of rank 1
    assert waiting.is_alive() and stored_checkpoints(folder) == []
    assert not folder.exists("checkpoint-5")
    second(ray.train.Checkpoint.from_directory(str(local[1])), "checkpoint-5")
    poll.end.set()
    waiting.join(60)
    (stored,) = stored_checkpoints(folder)
    assert (stored.name, stored.step, stored.serial) == ("checkpoint-5", 5, 1)
    assert set(stored.files) == {"model.safetensors", "deep/config.json", "rng_state_0.pth", "rng_state_1.pth"}
    assert Path(stored.path, "model.safetensors").read_bytes() == WEIGHTS
    assert find_faults(stored) == []


def test_clear_unfinished_deletes_only_unfinished_checkpoints(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    folder.write_text("half", "checkpoint-000002.part", "model.safetensors")
    checkpoints.clear_unfinished(folder)
    assert folder.list_folders("checkpoint-") == ["checkpoint-000001"]


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
def test_faults_damaged_file_is_named(folder: RunFolder, damage: str) -> None:
    upload(folder, 1, 1)
    (stored,) = stored_checkpoints(folder)
    change, fault = DAMAGE[damage]
    change(Path(stored.path, "model.safetensors"))
    assert find_faults(stored) == [fault]


def test_faults_shared_by_workers_finds_each_fault_once(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    (stored,) = stored_checkpoints(folder)
    Path(stored.path, "deep", "config.json").write_text("[]")
    seen = [find_faults(stored, part, 3) for part in range(3)]
    assert sorted(map(len, seen)) == [0, 0, 1] and ["deep/config.json was altered"] in seen


def test_stored_checkpoints_damaged_manifest_is_unreadable(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    for text in ("", "{", "[]", '{"metrics": {}}'):
        folder.write_text(text, "checkpoint-000001", "manifest.json")
        assert stored_checkpoints(folder) == []
        assert checkpoints.unreadable_manifests(folder) == ["checkpoint-000001"]


def test_mark_damaged_removes_checkpoint_but_keeps_its_name(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    (stored,) = stored_checkpoints(folder)
    checkpoints.mark_damaged(stored, ["model.safetensors was altered"])
    assert stored_checkpoints(folder) == []
    assert json.loads(folder.read_text("checkpoint-000001", "damaged.json")) == ["model.safetensors was altered"]
    assert checkpoints.checkpoint_name(folder, 1) == "checkpoint-000001.2"


def stored(step: int, serial: int, folder: RunFolder, **metrics: float | None) -> CheckpointInfo:
    return CheckpointInfo(folder, f"checkpoint-{step:06d}", {"step": step, **metrics}, serial, {})


def test_best_of_equal_metrics_is_the_earliest(folder: RunFolder) -> None:
    some = [stored(n, n, folder, m=value) for n, value in ((1, 0.5), (2, 0.75), (3, 0.75), (4, 0.25))]
    assert best_checkpoint(some, "m") is some[1]
    assert best_checkpoint([*some, stored(5, 5, folder, m=None)], "m") is some[1]
    assert best_checkpoint(some, "other") is None
    # Ray Train ranks by one number, which must give the same order.
    ranked = sorted(some, key=lambda each: checkpoint_score(each.metrics, "m")["checkpoint/score"])
    assert ranked[-1] is some[1] and ranked[-2] is some[2]


@given(measured=st.dictionaries(st.integers(1, 100_000), st.integers(0, 600), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_best_of_any_checkpoints_agrees_with_ray_score(tmp_path_factory: pytest.TempPathFactory, measured) -> None:
    """Accuracies on 600 problems, step -> problems solved."""
    folder = RunFolder(str(tmp_path_factory.getbasetemp()), "run")
    some = [stored(step, serial, folder, m=solved / 600) for serial, (step, solved) in enumerate(measured.items())]
    best = max(some, key=lambda each: checkpoint_score(each.metrics, "m")["checkpoint/score"])
    assert best_checkpoint(some, "m") is best
    assert best.step == min(step for step, solved in measured.items() if solved == max(measured.values()))


def test_candidates_order_by_resume_and_launch(folder: RunFolder) -> None:
    for serial, (step, value) in enumerate(((2, 0.9), (4, 0.5), (6, 0.7)), start=1):
        upload(folder, step, serial, m=value)

    def steps(resume: str, after: int = 0) -> list[int]:
        return [each.step for each in resume_candidates(folder, resume, "m", after)]

    assert steps("latest") == [6, 4, 2]
    assert steps("best") == [6, 4, 2]  # all were written by this launch
    assert steps("best", after=3) == [2]  # nothing is older than the best
    upload(folder, 4, 4, m=0.1)  # this launch resumed from the best and reached step 4 again
    assert steps("best", after=3) == [4, 2]
    assert [each.name for each in resume_candidates(folder, "best", "m", 3)] == [
        "checkpoint-000004.2",
        "checkpoint-000002",
    ]


def test_prune_keeps_best_and_latest(folder: RunFolder) -> None:
    for serial, (step, value) in enumerate(((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.8), (5, 0.2)), start=1):
        upload(folder, step, serial, m=value)
    checkpoints.prune_checkpoints(folder, "m", keep=2)
    assert [each.step for each in stored_checkpoints(folder)] == [2, 4, 5]


@pytest.mark.parametrize("snapshot", ["missing", "cut short", "names a deleted one", "lacks one"])
def test_mend_snapshot_agrees_with_stored_checkpoints(folder: RunFolder, snapshot: str) -> None:
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.4)):
        upload(folder, step, step, m=value)
    checkpoints.repair_ray_snapshot(folder, "m")
    if snapshot == "missing":
        folder.delete_file(checkpoints.SNAPSHOT)
    elif snapshot == "cut short":
        folder.write_text(folder.read_text(checkpoints.SNAPSHOT)[:100], checkpoints.SNAPSHOT)
    elif snapshot == "names a deleted one":
        folder.delete_folder("checkpoint-000001")
    else:
        upload(folder, 4, 4, m=0.1)
    there = [each.name for each in stored_checkpoints(folder)]
    checkpoints.repair_ray_snapshot(folder, "m")
    # Ray's own reader must accept it.
    result = ray.train.Result.from_path(folder.path(), storage_filesystem=folder.filesystem)
    assert Path(result.checkpoint.path).name == there[-1]
    assert {Path(each.path).name for each, _ in result.best_checkpoints} == set(there)
    best = result.get_best_checkpoint("checkpoint/score", mode="max")
    assert Path(best.path).name == "checkpoint-000002"


def test_foreign_finds_checkpoint_by_folder_or_run(folder: RunFolder) -> None:
    upload(folder, 1, 1, m=0.9)
    upload(folder, 2, 2, m=0.1)
    assert open_foreign_checkpoint(folder.uri, "m").step == 1
    assert open_foreign_checkpoint(f"{folder.uri}/", "m").step == 1
    assert open_foreign_checkpoint(folder.uri_of("checkpoint-000002"), "m").step == 2
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        open_foreign_checkpoint(folder.uri_of("checkpoint-000009"), "m")
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        open_foreign_checkpoint(folder.storage_path + "/nothing", "m")


def test_upload_storage_full_retries_then_raises(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(CheckpointUploader):
        def _copy(self, path: Path, *names: str) -> str:
            tries.append(clock.now)
            raise OSError(28, "No space left on device")

    clock = FakeClock()
    monkeypatch.setattr(retry, "time", clock)
    messages: list[str] = []
    tries: list[float] = []
    local = parts(tmp_path, 1)
    full = Full(folder, 0, 1, {"step": 1}, 1, 5.0, say=messages.append)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 could not be written .*No space left.* goes on"):
        full(ray.train.Checkpoint.from_directory(str(local[0])), "checkpoint-1")
    assert len(messages) == 1 and stored_checkpoints(folder) == []
    assert len(tries) > 1 and tries[-1] == 5.0  # the last try is at the end of the patience


def test_save_rows_load_equal(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "checkpoint": "é"}]
    checkpoints.save_rows(tmp_path, rows)
    assert checkpoints.load_rows(tmp_path) == rows


def test_upload_superseded_attempt_cannot_name_checkpoint(folder: RunFolder, tmp_path: Path) -> None:
    name, naming = "checkpoint-000006", threading.Event()
    local = parts(tmp_path, 2)

    def write(fence: FencingToken, rank: int, serial: int, weights: bytes = WEIGHTS) -> CheckpointUploader:
        (local[0] / "model.safetensors").write_bytes(weights)
        written = CheckpointUploader(
            folder, rank, 2, {"step": 6}, serial, 5.0, say=print, before_naming=naming.set, fence=fence
        )
        written._write(local[rank], name)
        return written

    old = FencingToken.take(folder)
    cut_off = [
        write(old, rank, 1, b"other weights") for rank in (0, 1)
    ]  # all files are written, only the name is missing
    new = FencingToken.take(folder)
    checkpoints.clear_unfinished(folder)
    first, _ = [write(new, rank, 2) for rank in (0, 1)]
    # Writing goes first: an attempt that is let through would wait for files that are gone in naming.
    with pytest.raises(SupersededError):
        cut_off[1]._write(local[1], name)
    # Neither its own files nor the new attempt's get the name.
    with pytest.raises(SupersededError, match="another attempt"):
        cut_off[0]._name(name)
    assert not folder.exists(name) and not naming.is_set()
    first._name(name)
    (stored,) = stored_checkpoints(folder)
    assert (stored.name, stored.serial, find_faults(stored)) == (name, 2, [])


def test_load_reward_states_own_rank_goes_before_rank_0(tmp_path):
    for rank in (0, 1):
        save_reward_states(tmp_path, rank, {"length": {"step": rank}})
    assert load_reward_states(tmp_path, 1) == {"length": {"step": 1}}
    assert load_reward_states(tmp_path, 2) == {"length": {"step": 0}}  # a worker that the run did not have before


def test_upload_altered_by_the_storage_raises(tmp_path):
    class Storage:
        """Keeps one byte less than was written."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def open_output_stream(self, path):
            class Short:
                def __enter__(self):
                    return self

                def __exit__(self, *exc):
                    pass

                def write(self, block):
                    Path(path).write_bytes(block[:-1])

            return Short()

    local = tmp_path / "local"
    local.mkdir()
    (local / "model.safetensors").write_bytes(b"weights")
    folder = RunFolder(str(tmp_path), "run")
    folder.filesystem = Storage(folder.filesystem)
    upload = CheckpointUploader(folder, 0, 1, {"step": 1}, 1, 0.0, say=print)
    with pytest.raises(OSError, match="the storage does not hold what was written"):
        upload._copy(local / "model.safetensors", "x", "model.safetensors")


def test_stored_checkpoint_knows_what_it_was_measured_on(tmp_path):
    folder = RunFolder(str(tmp_path), "run")
    contents = {"count": 24, "checksum": "ab"}
    for step, measured_on in ((1, contents), (2, None)):
        name = f"checkpoint-{step:06d}"
        (tmp_path / "run" / name).mkdir(parents=True)
        manifest = {"metrics": {"step": step}, "serial": step, "files": {}, "measured_on": measured_on}
        folder.write_json(manifest, name, "manifest.json")
    later = {"metrics": {"heldout/accuracy": 0.5}, "measured_on": {"count": 9, "checksum": "cd"}}
    folder.write_json(later, "checkpoint-000002", "measured.json")  # by a task beside the training
    first, second = stored_checkpoints(folder)
    assert first.measured_on == contents and first.metrics == {"step": 1}
    assert second.measured_on == later["measured_on"]
    assert second.metrics == {"step": 2, "heldout/accuracy": 0.5}
