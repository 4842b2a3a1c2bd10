"""Checkpoints on a local disk: whole or not there, verified, ranked, pruned, and known to Ray Train."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import ray.train

from grpo_ray import checkpoint
from grpo_ray.checkpoint import Stored, Upload, best_of, candidates, faults, foreign, score, stored_checkpoints
from grpo_ray.errors import CheckpointError, SupersededError
from grpo_ray.fence import Fence
from grpo_ray.storage import RunFolder

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


def parts(tmp_path: Path, workers: int) -> list[Path]:
    """What each worker has to upload."""
    local = [tmp_path / "local" / str(rank) for rank in range(workers)]
    for rank, path in enumerate(local):
        (path / "deep").mkdir(parents=True, exist_ok=True)
        (path / f"rng_state_{rank}.pth").write_bytes(bytes([rank]) * 100)
    (local[0] / "model.safetensors").write_bytes(WEIGHTS)
    (local[0] / "deep" / "config.json").write_text("{}")
    return local


def upload(folder: RunFolder, step: int, serial: int, workers: int = 2, **metrics: float) -> str:
    """Write a checkpoint, all workers at the same time; gives its name."""
    local = parts(Path(folder.storage_path), workers)
    name = checkpoint.checkpoint_name(folder, step)
    row = {"step": step, **metrics}
    uploads = [Upload(folder, rank, workers, row, serial, 5.0, say=print) for rank in range(workers)]
    threads = [
        threading.Thread(target=each, args=(ray.train.Checkpoint.from_directory(str(path)), name))
        for each, path in zip(uploads, local, strict=True)
    ]
    for thread in reversed(threads):  # rank 0 last or first: it waits for the others
        thread.start()
    for thread in threads:
        thread.join(30)
    return name


def test_a_checkpoint_of_several_workers_is_there_when_all_have_written(folder: RunFolder, tmp_path: Path) -> None:
    local = parts(tmp_path, 2)
    first, second = (Upload(folder, rank, 2, {"step": 5}, 1, 5.0, say=print) for rank in (0, 1))
    waiting = threading.Thread(target=first, args=(ray.train.Checkpoint.from_directory(str(local[0])), "checkpoint-5"))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive() and stored_checkpoints(folder) == []  # rank 1 has not written
    assert not folder.exists("checkpoint-5")
    second(ray.train.Checkpoint.from_directory(str(local[1])), "checkpoint-5")
    waiting.join(30)
    (stored,) = stored_checkpoints(folder)
    assert (stored.name, stored.step, stored.serial) == ("checkpoint-5", 5, 1)
    assert set(stored.files) == {"model.safetensors", "deep/config.json", "rng_state_0.pth", "rng_state_1.pth"}
    assert Path(stored.path, "model.safetensors").read_bytes() == WEIGHTS
    assert faults(stored) == []


def test_what_was_written_aside_by_the_dead_is_cleared_and_the_whole_is_left(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    folder.write_text("half", "checkpoint-000002.part", "model.safetensors")
    checkpoint.clear_unfinished(folder)
    assert folder.list_folders("checkpoint-") == ["checkpoint-000001"]


SPOIL: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: path.write_bytes(WEIGHTS[:1000]), "model.safetensors has 1000 of 10240 bytes"),
    "emptied": (lambda path: path.write_bytes(b""), "model.safetensors has 0 of 10240 bytes"),
    "one bit flipped": (
        lambda path: path.write_bytes(WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])),
        "model.safetensors was altered",
    ),
    "gone": (lambda path: path.unlink(), "model.safetensors is missing"),
}


@pytest.mark.parametrize("how", SPOIL)
def test_a_spoilt_file_is_named(folder: RunFolder, how: str) -> None:
    upload(folder, 1, 1)
    (stored,) = stored_checkpoints(folder)
    spoil, said = SPOIL[how]
    spoil(Path(stored.path, "model.safetensors"))
    assert faults(stored) == [said]


def test_workers_share_the_reading_and_together_see_everything(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    (stored,) = stored_checkpoints(folder)
    Path(stored.path, "deep", "config.json").write_text("[]")
    seen = [faults(stored, part, 3) for part in range(3)]
    assert sorted(map(len, seen)) == [0, 0, 1] and ["deep/config.json was altered"] in seen


def test_a_spoilt_manifest_makes_no_checkpoint(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    for text in ("", "{", "[]", '{"metrics": {}}'):
        folder.write_text(text, "checkpoint-000001", "manifest.json")
        assert stored_checkpoints(folder) == []
        assert checkpoint.unreadable(folder) == ["checkpoint-000001"]


def test_a_damaged_checkpoint_leaves_the_run_and_keeps_its_name(folder: RunFolder) -> None:
    upload(folder, 1, 1)
    (stored,) = stored_checkpoints(folder)
    checkpoint.mark_damaged(stored, ["model.safetensors was altered"])
    assert stored_checkpoints(folder) == []
    assert json.loads(folder.read_text("checkpoint-000001", "damaged.json")) == ["model.safetensors was altered"]
    assert checkpoint.checkpoint_name(folder, 1) == "checkpoint-000001.2"


def stored(step: int, serial: int, folder: RunFolder, **metrics: float | None) -> Stored:
    return Stored(folder, f"checkpoint-{step:06d}", {"step": step, **metrics}, serial, {})


def test_of_equals_the_earliest_is_the_best(folder: RunFolder) -> None:
    some = [stored(n, n, folder, m=value) for n, value in ((1, 0.5), (2, 0.75), (3, 0.75), (4, 0.25))]
    assert best_of(some, "m") is some[1]
    assert best_of([*some, stored(5, 5, folder, m=None)], "m") is some[1]
    assert best_of(some, "other") is None
    # Ray ranks by one number: it must come to the same.
    ranked = sorted(some, key=lambda each: score(each.metrics, "m")["checkpoint/score"])
    assert ranked[-1] is some[1] and ranked[-2] is some[2]


def test_where_a_run_goes_on_and_what_it_falls_back_on(folder: RunFolder) -> None:
    for serial, (step, value) in enumerate(((2, 0.9), (4, 0.5), (6, 0.7)), start=1):
        upload(folder, step, serial, m=value)

    def steps(resume: str, after: int = 0) -> list[int]:
        return [each.step for each in candidates(folder, resume, "m", after)]

    assert steps("latest") == [6, 4, 2]
    assert steps("best") == [6, 4, 2]  # all of this launch
    assert steps("best", after=3) == [2]  # before the best there is nothing
    upload(folder, 4, 4, m=0.1)  # this launch went back to the best and has come to step 4 again
    assert steps("best", after=3) == [4, 2]
    assert [each.name for each in candidates(folder, "best", "m", 3)] == ["checkpoint-000004.2", "checkpoint-000002"]


def test_what_is_neither_best_nor_latest_is_pruned(folder: RunFolder) -> None:
    for serial, (step, value) in enumerate(((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.8), (5, 0.2)), start=1):
        upload(folder, step, serial, m=value)
    checkpoint.prune(folder, "m", keep=2)
    assert [each.step for each in stored_checkpoints(folder)] == [2, 4, 5]


@pytest.mark.parametrize("spoilt", ["missing", "cut short", "names one that is gone", "lacks one"])
def test_ray_trains_record_is_made_to_agree_with_what_is_there(folder: RunFolder, spoilt: str) -> None:
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.4)):
        upload(folder, step, step, m=value)
    checkpoint.mend_snapshot(folder, "m")
    if spoilt == "missing":
        folder.delete_file(checkpoint.SNAPSHOT)
    elif spoilt == "cut short":
        folder.write_text(folder.read_text(checkpoint.SNAPSHOT)[:100], checkpoint.SNAPSHOT)
    elif spoilt == "names one that is gone":
        folder.delete_folder("checkpoint-000001")
    else:
        upload(folder, 4, 4, m=0.1)
    there = [each.name for each in stored_checkpoints(folder)]
    checkpoint.mend_snapshot(folder, "m")
    # Ray's own reader must take it.
    result = ray.train.Result.from_path(folder.path(), storage_filesystem=folder.filesystem)
    assert Path(result.checkpoint.path).name == there[-1]
    assert {Path(each.path).name for each, _ in result.best_checkpoints} == set(there)
    best = result.get_best_checkpoint("checkpoint/score", mode="max")
    assert Path(best.path).name == "checkpoint-000002"


def test_another_runs_checkpoint_is_found_by_folder_or_by_run(folder: RunFolder) -> None:
    upload(folder, 1, 1, m=0.9)
    upload(folder, 2, 2, m=0.1)
    assert foreign(folder.uri, "m").step == 1
    assert foreign(f"{folder.uri}/", "m").step == 1
    assert foreign(folder.uri_of("checkpoint-000002"), "m").step == 2
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        foreign(folder.uri_of("checkpoint-000009"), "m")
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        foreign(folder.storage_path + "/nothing", "m")


def test_storage_that_stays_full_is_told_with_what_to_do(folder: RunFolder, tmp_path: Path) -> None:
    class Full(Upload):
        def _copy(self, path: Path, *names: str) -> str:
            raise OSError(28, "No space left on device")

    said: list[str] = []
    local = parts(tmp_path, 1)
    full = Full(folder, 0, 1, {"step": 1}, 1, 0.2, say=said.append)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 could not be written .*No space left.* goes on"):
        full(ray.train.Checkpoint.from_directory(str(local[0])), "checkpoint-1")
    assert len(said) == 1 and stored_checkpoints(folder) == []


def test_the_metrics_so_far_come_back(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "checkpoint": "é"}]
    checkpoint.save_rows(tmp_path, rows)
    assert checkpoint.load_rows(tmp_path) == rows


def test_an_attempt_that_another_one_has_followed_can_name_no_checkpoint(folder: RunFolder, tmp_path: Path) -> None:
    name, trouble = "checkpoint-000006", threading.Event()
    local = parts(tmp_path, 2)

    def write(fence: Fence, rank: int, serial: int, weights: bytes = WEIGHTS) -> Upload:
        (local[0] / "model.safetensors").write_bytes(weights)
        written = Upload(folder, rank, 2, {"step": 6}, serial, 5.0, say=print, before_naming=trouble.set, fence=fence)
        written._write(local[rank], name)
        return written

    old = Fence.take(folder)
    cut_off = [write(old, rank, 1, b"other weights") for rank in (0, 1)]  # all is there but the name
    new = Fence.take(folder)
    checkpoint.clear_unfinished(folder)
    first, _ = [write(new, rank, 2) for rank in (0, 1)]
    with pytest.raises(SupersededError, match="another attempt"):  # neither its own nor the other's files get the name
        cut_off[0]._name(name)
    with pytest.raises(SupersededError):
        cut_off[1]._write(local[1], name)
    assert not folder.exists(name) and not trouble.is_set()
    first._name(name)
    (stored,) = stored_checkpoints(folder)
    assert (stored.name, stored.serial, faults(stored)) == (name, 2, [])
