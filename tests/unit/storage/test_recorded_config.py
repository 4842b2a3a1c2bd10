"""Tests of reading the config that a run was launched with."""

from pathlib import Path

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.config.yaml_documents import dump_yaml
from grpo_ray.errors import DamagedFileError
from grpo_ray.storage.recorded_config import read_recorded
from grpo_ray.storage.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


def test_read_recorded_gives_the_settings_of_every_section(folder: RunFolder) -> None:
    settings = load_config(None, ["grpo.learning_rate=1e-6", "run.name=1e5"]).to_dict()
    folder.write_text(dump_yaml(settings), "config.yaml")
    assert read_recorded(folder) == settings


def test_read_recorded_without_a_file_raises(folder: RunFolder) -> None:
    with pytest.raises(FileNotFoundError):
        read_recorded(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run: [", "while parsing a flow node"),
        ("just text", "it has no sections"),
        ("run: 3", "it has no sections"),
        ("run: {name: a}\nrun: {name: b}", "repeats the key 'run' of line 1; merge them, or remove one"),
        ("run: {name: !!bool maybe}", "a value does not have the type of its tag"),
    ],
)
def test_read_recorded_damaged_file_is_named_with_the_reason(folder: RunFolder, text: str, reason: str) -> None:
    folder.write_text(text, "config.yaml")
    with pytest.raises(DamagedFileError) as caught:
        read_recorded(folder)
    assert str(caught.value).startswith(f"{folder.uri_of('config.yaml')} is damaged: {reason}")
