"""Tests of the progress line, on a terminal and in a file or pipe."""

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from grpo_ray.observers.feed import RunFeed
from grpo_ray.observers.follower import RunFiles, RunFollower
from grpo_ray.observers.terminal.progress import ProgressLine, format_step
from grpo_ray.storage.jsonl import read_metrics
from grpo_ray.storage.run_folder import RunFolder

ROW = {
    "step": 5,
    "reward/mean": 0.625,
    "completion/length_mean": 12.34,
    "step/completions_per_second": 64.04,
    "learner/loss": 0.1,
}


class Screen:
    """Console that records its output, as a terminal or as a file."""

    def __init__(self, terminal: bool = False, width: int | None = None) -> None:
        self.file = io.StringIO()
        environment = {"TERM": "xterm-256color"} if terminal else None
        self.console = Console(file=self.file, force_terminal=terminal, width=width, _environ=environment)

    @property
    def text(self) -> str:
        return self.file.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def wait_for(self, part: str) -> None:
        """Wait until the thread of the display has drawn a text."""
        until = time.monotonic() + 60
        while part not in self.text:
            assert time.monotonic() < until, f"{part!r} is not shown"
            time.sleep(0.01)


def test_plain_line_shows_step_reward_length_speed() -> None:
    assert format_step(ROW, 100) == "step 5/100  reward 0.625  length 12.3  completions/s 64.0"


def test_plain_line_evaluated_step_shows_accuracy() -> None:
    line = format_step(ROW | {"heldout/accuracy": 0.5}, 100)
    assert line == "step 5/100  reward 0.625  held-out 0.500  length 12.3  completions/s 64.0"


def test_plain_line_several_sets_shows_each_accuracy_once() -> None:
    sets = {"heldout/accuracy": 0.5, "heldout/low": 0.4, "heldout/math/accuracy": 0.5, "heldout/math/low": 0.4}
    line = format_step(ROW | sets | {"heldout/gsm8k/accuracy": 0.75}, 100)
    assert "  held-out math 0.500, gsm8k 0.750  " in line


def test_plain_line_missing_metrics_are_left_out() -> None:
    assert format_step({"step": 1}, 10) == "step 1/10"


def test_plain_line_zero_reward_is_shown() -> None:
    assert format_step({"step": 1, "reward/mean": 0.0}, 10) == "step 1/10  reward 0.000"


def test_progress_file_prints_each_phase_once() -> None:
    screen = Screen()
    with ProgressLine(100, screen.console) as line:
        line.phase("warming up", 0, 1000)
        line.phase("warming up", 500, 1000)
        line.phase("warming up")
        line.phase("training")
    assert screen.lines == ["warming up", "training"]


def test_progress_file_returning_phase_is_printed_again() -> None:
    screen = Screen()
    with ProgressLine(100, screen.console) as line:
        for text in ("training", "a worker failed; starting again", "training"):
            line.phase(text)
    assert screen.lines == ["training", "a worker failed; starting again", "training"]


def test_progress_file_prints_one_line_per_step() -> None:
    screen = Screen(width=20)  # narrower than a line
    with ProgressLine(100, screen.console) as line:
        line.step(ROW, 0.0)
        line.step(ROW | {"step": 6, "heldout/accuracy": 0.5}, 0.0)
    assert screen.lines == [format_step(ROW, 100), format_step(ROW | {"step": 6, "heldout/accuracy": 0.5}, 100)]


def test_progress_file_long_phase_is_not_wrapped() -> None:
    screen = Screen(width=80)
    phase = "the old run is now /mnt/shared/a/rather/deep/folder/of/runs/with/long/names/qwen2.5-72b-deepmath.1"
    with ProgressLine(100, screen.console) as line:
        line.phase(phase)
    assert screen.lines == [phase]


@pytest.mark.parametrize("path", ["/runs/[old]/a.1", "/runs/[/old]/a.1", "/runs/[red]a.1"])
def test_progress_file_brackets_are_not_markup(path: str) -> None:
    screen = Screen(width=80)
    with ProgressLine(100, screen.console) as line:
        line.phase(f"the old run is now {path}")
    assert screen.lines == [f"the old run is now {path}"]


def test_progress_file_has_no_control_characters() -> None:
    screen = Screen()
    with ProgressLine(100, screen.console) as line:
        line.phase("training")
        line.step(ROW, 0.0)
    assert screen.text.isprintable() or not set(screen.text) & {"\x1b", "\r"}


def test_progress_file_warning_and_failure_are_lines() -> None:
    screen = Screen()
    with ProgressLine(100, screen.console) as line:
        line.event({"event": "warning", "at": 0.0, "step": 7, "name": "no_signal", "what": "no group has signal"})
        line.event({"event": "failed", "at": 0.0, "rank": 1, "what": "killed"})
        line.event({"event": "baseline", "at": 0.0, "metrics": {"heldout/accuracy": 0.5}})  # a notice has its numbers
        line.measured(8, {"heldout/accuracy": 0.75})
    assert screen.lines == [
        "warning at step 7: no group has signal (no_signal)",
        "worker 1 failed: killed",
        "checkpoint of step 8  held-out 0.750",
    ]


def test_progress_file_control_characters_of_messages_are_written_out() -> None:
    screen = Screen(width=80)
    with ProgressLine(100, screen.console) as line:
        line.notice("worker 1: \x1b[2Jhidden\u202e")
        line.phase("fetching \x1b]0;title\x07")
    assert screen.lines == ["worker 1: ⟨U+001B⟩[2Jhidden⟨U+202E⟩", "fetching ⟨U+001B⟩]0;title⟨U+0007⟩"]


def test_progress_terminal_shows_reward_and_last_accuracy() -> None:
    screen = Screen(terminal=True, width=100)
    with ProgressLine(100, screen.console) as line:
        line.step(ROW | {"heldout/accuracy": 0.5}, 0.0)
        line.step(ROW | {"step": 6, "reward/mean": 0.75}, 0.0)
        screen.wait_for("6/100")
    assert "0.750" in screen.text and "0.500" in screen.text


def test_progress_terminal_view_is_erased_at_end() -> None:
    screen = Screen(terminal=True, width=100)
    with ProgressLine(100, screen.console) as line:
        line.phase("warming up", 3, 10)
        screen.wait_for("warming up")
    assert screen.text.endswith("\x1b[1A\x1b[2K")  # cursor up, erase line


@pytest.mark.parametrize("path", ["/runs/[old]/a.1", "/runs/[/old]/a.1"])
def test_progress_terminal_brackets_are_not_markup(path: str) -> None:
    screen = Screen(terminal=True, width=100)
    with ProgressLine(100, screen.console) as line:
        line.phase(path)
        screen.wait_for(path)
        line.notice(f"the old run is now {path}")
    assert f"the old run is now {path}" in screen.text


def test_progress_terminal_error_restores_cursor() -> None:
    screen = Screen(terminal=True)
    with pytest.raises(KeyError), ProgressLine(100, screen.console):
        raise KeyError("the run")
    # The cursor is hidden once and shown once.
    assert screen.text.count("\x1b[?25l") == screen.text.count("\x1b[?25h") == 1


def test_progress_terminal_notice_and_warnings_stay() -> None:
    screen = Screen(terminal=True, width=100)
    with ProgressLine(100, screen.console) as line:
        line.notice("checkpoint-000050 is not whole [model.safetensors]")
        line.event({"event": "warning", "at": 0.0, "step": 7, "name": "no_signal", "what": "no group has signal"})
        line.phase("training")
    text = screen.text.replace("\r", "")
    assert "checkpoint-000050 is not whole [model.safetensors]\n" in text
    assert "warning at step 7: no group has signal (no_signal)\n" in text


def test_progress_terminal_output_of_other_code_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a-secret-of-a-test")
    screen = Screen(terminal=True, width=100)
    with ProgressLine(100, screen.console):
        print("printed with a-secret-of-a-test")
    assert "printed with" in screen.text and "a-secret-of-a-test" not in screen.text


def test_progress_terminal_is_drawn_at_most_four_times_a_second() -> None:
    screen = Screen(terminal=True, width=100)
    begun = time.monotonic()
    with ProgressLine(10_000, screen.console) as line:
        for step in range(1, 3000):
            line.step(ROW | {"step": step}, 0.0)
        screen.wait_for("2999/10000")
        seconds = time.monotonic() - begun
    assert screen.text.count("/10000") <= 4 * seconds + 2


def test_progress_terminal_start_is_summed_up_when_training_begins() -> None:
    screen, now = Screen(terminal=True, width=100), [0.0]
    with ProgressLine(100, screen.console, clock=lambda: now[0]) as line:
        for seconds, phase in ((0.0, "starting Ray"), (4.0, "checking the settings"), (4.1, "starting the workers")):
            now[0] = seconds
            line.phase(phase)
        now[0] = 9.0
        line.event({"event": "training", "at": 0.0, "step": 0})
    expected = "started in 9.0 s: starting the workers 4.9 s, starting Ray 4.0 s, checking the settings 0.1 s"
    assert expected in screen.text


@pytest.mark.parametrize(("max_steps", "steps_on_disk"), [(3, [1, 2, 3]), (4, [1, 2])])
def test_follower_attempt_without_steps_left_writes_rows_at_once(
    tmp_path: Path, max_steps: int, steps_on_disk: list[int]
) -> None:
    folder = RunFolder(str(tmp_path), "run")
    files = RunFiles(folder, print)
    for step in (1, 2):  # the driver never got the row of step 3, whose checkpoint is complete
        files.step({"step": step}, 0.0)
    follower = RunFollower(None, RunFeed([files]), max_steps)
    rows = [{"step": step} for step in (1, 2, 3)]
    follower._handle({"event": "began", "at": 0.0, "workers": 2, "step": 3, "checkpoint": None, "rows": rows})
    assert [row["step"] for row in read_metrics(folder)] == steps_on_disk


def test_warning_event_is_printed_with_its_step_and_name() -> None:
    screen = Screen()
    progress = ProgressLine(100, screen.console)
    progress.event({"event": "warning", "at": 0.0, "step": 12, "name": "no_signal", "what": "[b]no[/b] gradient; try"})
    assert screen.lines == ["warning at step 12: [b]no[/b] gradient; try (no_signal)"]
