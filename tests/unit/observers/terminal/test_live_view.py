"""Tests of the drawing of the live view."""

import pytest
from rich.cells import cell_len

from grpo_ray.observers.terminal.live_view import ASCII, UNICODE, Glyphs, amount, draw, duration
from grpo_ray.observers.terminal.run_view import RunView

SIZES = [(120, 40), (80, 24), (40, 12), (40, 6), (21, 5), (20, 3), (5, 2), (1, 1), (300, 100)]


def full_view() -> RunView:
    """A run with everything that the view shows."""
    view = RunView(100, started=0.0, name="run", uses_gpus=True)
    view.add_event({"event": "began", "at": 0.0, "workers": 2, "step": 0, "checkpoint": None}, 0.0)
    for step in range(1, 65):
        phases = {"phase/generate": 6.0, "phase/forward_backward": 3.0, "phase/wait": 0.5, "phase/other": 0.5}
        row = {"step": step, "reward/mean": step / 100, "group/equal_share": 0.25, "completion/length_mean": 512.0}
        view.add_step(row | phases | {"step/seconds": 10.0, "step/completions_per_second": 25.6}, now=0.0)
    view.add_measures(50, {"heldout/accuracy": 0.75, "heldout/low": 0.7, "heldout/high": 0.8})
    view.add_event({"event": "baseline", "at": 0.0, "metrics": {"heldout/accuracy": 0.5, "heldout/low": 0.4}}, 0.0)
    view.add_event({"event": "failed", "at": 0.0, "rank": 1, "what": "killed"}, 0.0)
    view.add_event({"event": "training", "at": 0.0, "step": 50}, 0.0)
    for step in (10, 20, 30, 40):
        view.add_event({"event": "warning", "at": 0.0, "step": step, "name": "clipping", "what": f"share {step}"}, 0.0)
    return view


def text_of(view: RunView, width: int, height: int, now: float = 640.0, glyphs: Glyphs = UNICODE) -> list[str]:
    return ["".join(segment.text for segment in line) for line in draw(view, now, width, height, glyphs)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_draw_any_size_fits_the_terminal(width: int, height: int, glyphs: Glyphs) -> None:
    start = RunView(100, started=0.0, name="x" * 200)
    for number in range(40):
        start.begin_stage(f"stage {number} 界" * 20, number, 40, now=float(number))
    for view in (full_view(), start, RunView(100, started=0.0), RunView(0, started=0.0)):
        lines = text_of(view, width, height, glyphs=glyphs)
        assert 1 <= len(lines) <= max(1, height - 1)
        assert all(cell_len(line) <= max(1, width - 2) for line in lines)
        if glyphs is ASCII and view is not start:
            assert all(line.isascii() for line in lines)


def test_draw_wide_terminal_shows_everything() -> None:
    lines = [line for line in text_of(full_view(), 120, 40) if line]
    labels = [line[:12].rstrip() for line in lines[1:]]
    assert lines[0].startswith("── run ─") and lines[0].endswith("─ 2 GPUs  10:40 ──")
    assert lines[1].startswith("step        64/100  ━") and lines[1].endswith("64 %  10.0 s/step  6:00 left")
    assert labels[1:] == [
        "reward",
        "held-out",
        "signal",
        "per GPU",
        "time",
        "",
        "failures",
        "warnings",
        "",
        "",
        "last event",
    ]
    assert "0.640" in lines[2] and "0.015 to 0.635" in lines[2]  # means of two steps each
    assert lines[3].endswith("0.750 [0.700, 0.800]  step 50  before 0.500")
    assert "75 %" in lines[4]
    assert lines[5].endswith("12.8 completions/s  6,554 tokens/s")  # 25.6 / 2, x 512
    assert lines[7].strip() == "■ generating 60 %  ■ learning 30 %  ■ waiting 5 %  ■ all else 5 %"
    assert "1  last: worker 1: killed" in lines[8]
    assert [line[12:] for line in lines[9:12]] == [f"step {step}  clipping: share {step}" for step in (40, 30, 20)]


def test_draw_run_with_tools_has_a_line_of_calls() -> None:
    view = full_view()
    assert not any(line.startswith("tools") for line in text_of(view, 120, 40))
    shares = {"rollout/call_error_share": 0.02, "rollout/call_timeout_share": 0.01}
    rollout = {"rollout/turns_mean": 2.25, "rollout/calls_mean": 1.3, "rollout/call_seconds_mean": 0.041}
    view.add_step({"step": 65} | rollout | shares, now=0.0)
    (line,) = (line for line in text_of(view, 120, 40) if line.startswith("tools"))
    assert line.split(None, 1)[1] == "2.25 turns  1.30 calls  3 % failed  0.04 s a call"


def test_draw_low_terminal_keeps_the_most_important() -> None:
    lines = text_of(full_view(), 40, 9)
    assert [line[:11].rstrip() for line in lines[1:]] == [
        "step",
        "reward",
        "held-out",
        "signal",
        "per GPU",
        "failures",
        "warnings",
    ]


def test_draw_named_sets_have_a_line_each() -> None:
    view = full_view()
    view.heldout.clear()
    view.add_measures(60, {"heldout/accuracy": 0.5, "heldout/math/accuracy": 0.5, "heldout/gsm8k/accuracy": 0.75})
    lines = text_of(view, 120, 40)
    assert any(line.startswith("held-out    math  0.500  step 60") for line in lines)
    assert any(line.startswith("            gsm8k  0.750  step 60") for line in lines)


def test_draw_start_ticks_off_stages() -> None:
    view = RunView(100, started=0.0, name="run")
    view.begin_stage("starting Ray", None, None, now=0.0)
    view.begin_stage("measuring the policy before training", 30, 120, now=4.0)
    lines = text_of(view, 80, 24, now=75.0)
    assert lines[2].startswith("✓ starting Ray ") and lines[2].endswith("4.0 s")
    assert lines[3][1:].startswith(" measuring the policy before training") and lines[3].endswith("30/120  1:11")
    assert "━━━━━───────────────" in lines[3]  # a quarter of 20


def test_draw_restart_shows_stage_below_steps() -> None:
    view = full_view()
    view.begin_stage("starting the workers again", None, None, now=640.0)
    lines = text_of(view, 80, 24, now=641.5)
    assert lines[3][1:].startswith(" starting the workers again") and lines[3].endswith("1.5 s")
    assert lines[5].startswith("reward")


def test_draw_nothing_measured_shows_dashes() -> None:
    view = RunView(100, started=0.0, name="run")
    view.add_step({"step": 1}, now=0.0)
    lines = [line for line in text_of(view, 80, 24) if line]
    assert [line.split() for line in lines[2:]] == [
        ["reward", "-"],
        ["held-out", "-"],
        ["signal", "-"],
        ["per", "worker", "-"],
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (252.9, "4:12"), (3852, "1:04:12"), (2 * 86400 + 3 * 3600 + 600, "2 d 03:10")]
)
def test_duration_has_the_units_it_needs(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_duration_decimals_below_a_minute() -> None:
    assert [duration(each, decimals=True) for each in (4.25, 59.94, 61.0)] == ["4.2 s", "59.9 s", "1:01"]


def test_amount_has_three_digits() -> None:
    assert [amount(each) for each in (0.4242, 7.3149, 78.06, 1234.5)] == ["0.42", "7.31", "78.1", "1,234"]
