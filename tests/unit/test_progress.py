import io

import pytest
from rich.console import Console

from grpo_ray.progress import ProgressLine, plain_line

ROW = {
    "step": 5,
    "reward/mean": 0.625,
    "completion/length_mean": 12.34,
    "step/completions_per_second": 64.04,
    "learner/loss": 0.1,
}


class Screen:
    """A console that keeps what was printed: a file or pipe, or a terminal."""

    def __init__(self, terminal: bool = False, width: int | None = None):
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=terminal, width=width)

    @property
    def text(self) -> str:
        return self.file.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def test_a_step_is_one_line_of_what_matters():
    assert plain_line(ROW, 100) == "step 5/100  reward 0.625  length 12.3  completions/s 64.0"


def test_a_measured_step_says_so_behind_its_reward():
    line = plain_line(ROW | {"heldout/accuracy": 0.5}, 100)
    assert line == "step 5/100  reward 0.625  held-out 0.500  length 12.3  completions/s 64.0"


def test_what_was_not_measured_is_left_out():
    assert plain_line({"step": 1}, 10) == "step 1/10"


def test_a_reward_of_zero_is_shown():
    assert plain_line({"step": 1, "reward/mean": 0.0}, 10) == "step 1/10  reward 0.000"


# Off a terminal


def test_off_a_terminal_each_phase_is_said_once():
    screen = Screen()
    with ProgressLine(100, screen.console) as line:
        line.phase("warming up", 0, 1000)
        line.phase("warming up", 500, 1000)
        line.phase("warming up")
        line.phase("training")
    assert screen.lines == ["warming up", "training"]


def test_a_phase_that_comes_again_is_said_again():
    screen = Screen()
    with ProgressLine(100, screen.console) as line:
        for text in ("training", "a worker failed; starting again", "training"):
            line.phase(text)
    assert screen.lines == ["training", "a worker failed; starting again", "training"]


def test_off_a_terminal_each_step_is_one_line():
    screen = Screen(width=20)  # whatever the width
    with ProgressLine(100, screen.console) as line:
        line.row(ROW)
        line.row(ROW | {"step": 6, "heldout/accuracy": 0.5})
    assert screen.lines == [plain_line(ROW, 100), plain_line(ROW | {"step": 6, "heldout/accuracy": 0.5}, 100)]


def test_a_long_phase_is_not_broken_in_two():
    screen = Screen(width=80)
    said = "the old run is now /mnt/shared/a/rather/deep/folder/of/runs/with/long/names/qwen2.5-72b-deepmath.1"
    with ProgressLine(100, screen.console) as line:
        line.phase(said)
    assert screen.lines == [said]


@pytest.mark.parametrize("path", ["/runs/[old]/a.1", "/runs/[/old]/a.1", "/runs/[red]a.1"])
def test_brackets_in_a_path_are_no_markup(path):
    screen = Screen(width=80)
    with ProgressLine(100, screen.console) as line:
        line.phase(f"the old run is now {path}")
    assert screen.lines == [f"the old run is now {path}"]


def test_off_a_terminal_there_are_no_control_characters():
    screen = Screen()
    with ProgressLine(100, screen.console) as line:
        line.phase("training")
        line.row(ROW)
    assert screen.text.isprintable() or not set(screen.text) & {"\x1b", "\r"}


# On a terminal


def test_on_a_terminal_the_bar_shows_reward_and_the_last_heldout_accuracy():
    screen = Screen(terminal=True, width=200)
    with ProgressLine(100, screen.console) as line:
        line.row(ROW | {"heldout/accuracy": 0.5})
        line.row(ROW | {"step": 6, "reward/mean": 0.75})
    assert "reward 0.750  held-out 0.500  64 completions/s" in screen.text
    assert "6/100" in screen.text


def test_on_a_terminal_nothing_stays_behind_the_bar():
    screen = Screen(terminal=True, width=200)
    with ProgressLine(100, screen.console) as line:
        line.phase("warming up", 3, 10)
        line.row(ROW)
    # The last thing written takes the bar away: the cursor goes up and the line is erased.
    assert screen.text.endswith("\x1b[1A\x1b[2K")


@pytest.mark.parametrize("path", ["/runs/[old]/a.1", "/runs/[/old]/a.1"])
def test_brackets_are_no_markup_in_the_bar_either(path):
    screen = Screen(terminal=True, width=200)
    with ProgressLine(100, screen.console) as line:
        line.phase(path)
    assert path in screen.text


def test_the_bar_comes_down_when_the_run_fails():
    screen = Screen(terminal=True)
    with pytest.raises(KeyError), ProgressLine(100, screen.console):
        raise KeyError("the run")
    assert screen.text.count("\x1b[?25l") == screen.text.count("\x1b[?25h") == 1  # the cursor is back


def test_a_notice_stays_on_a_terminal():
    screen = Screen(terminal=True, width=200)
    with ProgressLine(100, screen.console) as line:
        line.notice("checkpoint-000050 is not whole [model.safetensors]")
        line.phase("training")
    assert "checkpoint-000050 is not whole [model.safetensors]\n" in screen.text.replace("\r", "")
