"""Tests of the key numbers of the report page."""

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_ray.pages.report.facts import gpu_memory

MEASURED = {"used_gib": 19.25, "total_gib": 22.0}


@pytest.mark.parametrize(
    ("memory", "tile"),
    [
        (
            {"measured": MEASURED, "estimated": {"used_gib": 20.9}},
            ("GPU memory", "19.2 of 22 GiB", "per GPU; 20.9 GiB estimated"),
        ),
        ({"measured": MEASURED, "estimated": None}, ("GPU memory", "19.2 of 22 GiB", "per GPU")),
        ({"measured": {"resident_peak_gib": 1.2}, "estimated": None}, None),  # without GPUs
        ({"measured": {"used_gib": "<b>", "total_gib": [1]}, "estimated": 3}, None),
        ("text", None),
        (None, None),
    ],
)
def test_gpu_memory_tile_needs_a_measurement(memory: object, tile: object) -> None:
    run: Any = SimpleNamespace(summary={"memory": memory})
    assert gpu_memory(run) == tile
