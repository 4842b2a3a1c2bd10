"""Tests of the folders of attempts: old ones are deleted, and what others have made there is left alone."""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from grpo_ray.storage.scratch_folder import LOCK, create_scratch_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_behind(folder: Path, name: str) -> Path:
    scratch = folder / f"grpo_ray-{name}"
    scratch.mkdir()
    (scratch / LOCK).touch()
    return scratch


def test_folders_of_ended_attempts_are_deleted(temporary: Path) -> None:
    ended = left_behind(temporary, "ended")
    living = left_behind(temporary, "living")
    with open(living / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        own = create_scratch_folder("mine")
    assert not ended.exists() and living.exists() and Path(own, LOCK).exists()


def test_pipe_in_place_of_a_lock_is_left_alone(temporary: Path) -> None:
    strange = temporary / "grpo_ray-strange"
    strange.mkdir()
    os.mkfifo(strange / LOCK)
    create_scratch_folder("mine")  # opening the pipe would wait for ever
    assert strange.exists()


def test_link_in_place_of_a_lock_is_left_alone(temporary: Path) -> None:
    (temporary / "file").touch()
    strange = temporary / "grpo_ray-strange"
    strange.mkdir()
    (strange / LOCK).symlink_to(temporary / "file")
    create_scratch_folder("mine")
    assert strange.exists()


def test_lock_of_another_user_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = left_behind(temporary, "strange")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    create_scratch_folder("mine")
    assert strange.exists()
