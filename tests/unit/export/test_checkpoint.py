"""Tests of an export beside a run that goes on, and beside another export; the policy's files are stand-ins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_ray.errors import CheckpointError, ConfigError
from grpo_ray.export import checkpoint as module
from grpo_ray.export.checkpoint import export
from grpo_ray.storage.checkpoint_integrity import file_checksum
from grpo_ray.storage.run_folder import RunFolder

NAME = "checkpoint-000002"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Run folder with a checkpoint."""
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text(yaml.safe_dump({"run": {"name": "run"}}), "config.yaml")
    for file in ("config.json", "model.safetensors"):
        folder.write_text("{}", NAME, file)
    files = {
        file: {"bytes": 2, "sha256": file_checksum(folder, NAME, file)} for file in ("config.json", "model.safetensors")
    }
    folder.write_json({"metrics": {"step": 2}, "serial": 1, "files": files}, NAME, "manifest.json")
    return folder


@pytest.fixture
def exporting(monkeypatch: pytest.MonkeyPatch, run: RunFolder, tmp_path: Path) -> Callable[..., None]:
    """Function that exports the checkpoint, and calls another one when the policy has been written."""

    def start(meanwhile: Callable[[], object]) -> None:
        def write_policy(checkpoint: str, policy: Any, target: Path, *arguments: Any) -> None:
            target.mkdir()
            meanwhile()

        monkeypatch.setattr(module, "write_policy", write_policy)
        monkeypatch.setattr(module, "require_plausible_policy", lambda folder: None)
        export(str(run.local), tmp_path / "target")

    return start


def test_export_of_a_checkpoint_that_its_run_keeps_is_written(exporting: Callable[..., None], tmp_path: Path) -> None:
    exporting(lambda: None)
    assert {path.name for path in (tmp_path / "target").iterdir()} == {"README.md", "export.json"}


@pytest.mark.parametrize("names", [(NAME,), (NAME, "config.json")])  # the deletion may have just begun
def test_export_of_a_checkpoint_that_its_run_deletes_is_refused(
    exporting: Callable[..., None], run: RunFolder, tmp_path: Path, names: tuple[str, ...]
) -> None:
    delete = run.delete_folder if len(names) == 1 else run.delete_file
    with pytest.raises(CheckpointError, match=rf"{NAME} was deleted while it was exported"):
        exporting(lambda: delete(*names))
    assert not (tmp_path / "target").exists()


def test_failure_of_an_export_names_the_deletion_that_caused_it(exporting: Callable[..., None], run: RunFolder) -> None:
    def fail() -> None:
        run.delete_folder(NAME)
        raise ConfigError("the policy cannot be read")

    with pytest.raises(CheckpointError, match=rf"{NAME} was deleted while it was exported"):
        exporting(fail)


def test_damaged_checkpoint_is_not_taken_for_a_deleted_one(exporting: Callable[..., None], run: RunFolder) -> None:
    run.delete_file(NAME, "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is damaged: model\.safetensors is missing"):
        exporting(lambda: None)


def test_export_replaces_no_other_export(exporting: Callable[..., None], tmp_path: Path) -> None:
    def write_other() -> None:
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / "model.safetensors").write_text("of another checkpoint")

    with pytest.raises(ConfigError, match="target exists; name a new folder"):
        exporting(write_other)
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["model.safetensors"]
