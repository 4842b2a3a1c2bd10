"""Tests of the files that an upload to the hub replaces, and of pushes that are refused before a request."""

from pathlib import Path

import pytest
from page_samples import write_run

from grpo_ray.cli import main
from grpo_ray.export.hub import WEIGHTS, Hub


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("consolidated.safetensors", True),  # Mistral's name
        ("adapter_model.safetensors", True),
        ("pytorch_model.bin", True),
        ("pytorch_model-00001-of-00002.bin", True),
        ("pytorch_model.fp16.bin", True),
        ("pytorch_model.bin.index.json", True),
        ("adapter_model.bin", True),
        ("training_args.bin", False),
        ("optimizer.bin", False),
        ("config.json", False),
        ("sub/model.safetensors", False),
        ("sub/pytorch_model.bin", False),
    ],
)
def test_weights_are_files_with_weights_at_the_top(name: str, expected: bool) -> None:
    assert (WEIGHTS.fullmatch(name) is not None) == expected


def test_push_of_another_folder_creates_no_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(Hub, "open_repo", lambda hub, name, public: opened.append(name))
    monkeypatch.setenv("HF_TOKEN", "a-token-of-alice")
    run, target = write_run(tmp_path), tmp_path / "other"
    target.mkdir()
    assert main(["export", str(run.local), str(target), "--push", "alice/model"]) == 2
    assert f"{target} exists, and is no export of" in capsys.readouterr().err
    assert opened == []
