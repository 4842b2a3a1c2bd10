"""Tests of the key numbers of the report page."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_ray.pages.report.facts import gpu_memory, recent_speed
from grpo_ray.pages.report.rows import MetricsLines

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


def speed_of(rows: list[dict[str, Any]], config: dict[str, Any]) -> tuple[float | None, float | None]:
    lines = MetricsLines()
    for step, row in enumerate(rows, 1):
        lines.add({"step": step, **row})
    run: Any = SimpleNamespace(rows=lines.rows, config=config)
    return recent_speed(run)


def test_recent_speed_is_a_median_of_whole_batches() -> None:
    """Batches of three steps take 9 + 1 + 2 s, and the last one 60 s; each step counts 8 completions."""
    seconds = [9.0, 1.0, 2.0, 9.0, 1.0, 2.0, 58.0, 1.0, 1.0]
    rows = [{"step/seconds": each, "step/completions_per_second": 8 / each} for each in seconds]
    three: dict[str, Any] = {"grpo": {"steps_per_generation": 3}}
    assert speed_of(rows, three) == pytest.approx((4.0, 2.0))
    assert speed_of(rows, {}) == pytest.approx((2.0, 4.0))
    assert speed_of(rows[:2], three) == pytest.approx((5.0, 1.6))


def test_recent_speed_without_measurements_is_unknown() -> None:
    assert speed_of([], {}) == (None, None) == speed_of([{"reward/mean": 1.0}], {})
    assert speed_of([{"step/seconds": 2.0}, {"step/seconds": math.nan}], {}) == (2.0, None)
