"""Tests of the files that an upload to the hub replaces."""

import pytest

from grpo_ray.export.hub import WEIGHTS


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
