"""Tests of the screen: what it lets through of the output of other code."""

import io
from pathlib import Path

import ray

from grpo_ray.observers.terminal.screen import DEATH_NOTICE, drop_death_notices


def test_drop_death_notices_drops_the_notice_with_its_line_end_only() -> None:
    stream = io.StringIO()
    drop_death_notices(stream)
    print("before", file=stream)
    print(f"\x1b[33m(raylet)\x1b[0m {DEATH_NOTICE} by an unexpected system error.", file=stream)
    print("", file=stream)
    print("after", file=stream)
    assert stream.getvalue() == "before\n\nafter\n"


def test_death_notice_is_in_the_raylet_of_the_installed_ray() -> None:
    raylet = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    assert DEATH_NOTICE.encode() in raylet.read_bytes()
