"""Tests of checkpoints on a real S3 server that is killed in the middle, or whose replies are lost."""

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import ray.train
from failing_storage import LossyProxy, S3Server

from grpo_ray.storage.checkpoint_integrity import find_faults
from grpo_ray.storage.checkpoint_upload import CheckpointUploader, clear_unfinished, finish_commits
from grpo_ray.storage.checkpoints import list_checkpoints
from grpo_ray.storage.run_folder import RunFolder

NAME = "checkpoint-000006"
run_number = count(1)


def upload(folder: RunFolder, local: Path, before_commit: Callable[[], None] = lambda: None) -> list[str]:
    """Upload a checkpoint of two workers at the same time; return what was shown to the user."""
    shown: list[str] = []
    threads = []
    for rank in range(2):
        part = local / str(rank)
        part.mkdir(parents=True)
        (part / f"weights-{rank}").write_bytes(bytes([rank]) * 10_000)
        uploader = CheckpointUploader(
            folder, rank, 2, {"step": 6}, 1, 60.0, on_progress=shown.append, before_commit=before_commit
        )
        checkpoint = ray.train.Checkpoint.from_directory(str(part))
        threads.append(threading.Thread(target=uploader, args=(checkpoint, NAME)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return shown


@pytest.mark.parametrize("lost_file", ["files-1.json", "manifest.json", "weights-0"])
def test_s3_reply_lost_checkpoint_survives_next_start(s3_server: S3Server, tmp_path: Path, lost_file: str) -> None:
    # The client itself repeats a request twice, so three replies in a row must be lost before our retry begins.
    remaining = [1] * 3
    name = f"lossy-{next(run_number)}"

    def loses(method: str, path: str) -> bool:
        return (
            method == "PUT"
            and path.partition("?")[0].endswith(f"/{NAME}/{lost_file}")
            and bool(remaining and remaining.pop())
        )

    with LossyProxy(s3_server.port, loses) as proxy:
        shown = upload(RunFolder(proxy.storage_path, name), tmp_path)
    assert proxy.lost == [f"PUT /bucket/runs/{name}/{NAME}/{lost_file}"] * 3
    assert any("storage cannot be reached" in line for line in shown) and any(
        "storage is back" in line for line in shown
    )
    folder = RunFolder(s3_server.storage_path, name)
    finish_commits(folder)
    assert clear_unfinished(folder) == []
    (checkpoint,) = list_checkpoints(folder)
    assert checkpoint.name == NAME and set(checkpoint.files) == {"weights-0", "weights-1"}
    assert find_faults(checkpoint) == []


def test_s3_upload_cut_off_is_cleared(s3_server: S3Server) -> None:
    folder = RunFolder(s3_server.storage_path, f"cut-{next(run_number)}")
    folder.write_text("half", NAME, "weights-0")
    assert clear_unfinished(folder) == [NAME] and folder.list_folders() == []
