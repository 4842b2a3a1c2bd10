"""Tests of the live view in a process on a terminal: sizes, changes of size, Ctrl-C, and lost connections."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

pytest.importorskip("pyte", reason="pyte, the terminal emulator, is in the extra `test`")

from terminal import Terminal, wait_for

HELPERS = Path(__file__).parents[3] / "helpers"
STEPS = 60


def write_run(folder: Path) -> None:
    """Write what a run of 60 steps leaves behind; the reward rises from 0.01 to 0.60."""
    folder.mkdir()
    config = {"run": {"name": "run"}, "grpo": {"max_steps": STEPS}, "cluster": {"num_workers": 2, "use_gpu": False}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {
            "step": step,
            "reward/mean": step / 100,
            "group/equal_share": 0.25,
            "completion/length_mean": 20.0,
            "step/seconds": 2.0,
            "step/completions_per_second": 64.0,
            "phase/generate": 1.5,
            "phase/forward_backward": 0.5,
            "phase/other": 0.0,
        }
        for step in range(1, STEPS + 1)
    ]
    rows[9] |= {"heldout/accuracy": 0.5, "heldout/low": 0.4, "heldout/high": 0.6}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [
        {"event": "launched", "at": 100.0},
        {"event": "began", "at": 101.0, "workers": 2, "step": 0, "checkpoint": None},
        {"event": "baseline", "at": 102.0, "metrics": {"heldout/accuracy": 0.25, "heldout/low": 0.2}},
        {"event": "training", "at": 103.0, "step": 0},
        *({"event": "step", "at": 103.0 + step, "step": step} for step in range(1, STEPS + 1)),
    ]
    events.insert(14, {"event": "warning", "at": 113.5, "step": 10, "name": "no_signal", "what": "few groups \x1b[2J"})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


class Program:
    """The display of a recorded run as a process, and the files that control it."""

    def __init__(self, folder: Path):
        self.run, self.folder = folder / "run", folder / "control"
        write_run(self.run)
        self.folder.mkdir()
        self.take_steps(20)

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(HELPERS / "terminal_run.py"), str(self.run), str(self.folder)]

    @property
    def environment(self) -> dict[str, str]:
        """The environment without settings of this process's own terminal."""
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        return own | {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join([str(HELPERS.parents[1]), str(HELPERS)])}

    def on_terminal(self, columns: int, rows: int, *arguments: str) -> Terminal:
        return Terminal([*self.command, *arguments], columns, rows, env=self.environment)

    def take_steps(self, until: int) -> None:
        (self.folder / "new").write_text(str(until))
        (self.folder / "new").rename(self.folder / "until")

    def end(self) -> None:
        (self.folder / "end").touch()

    @property
    def steps(self) -> int:
        return int((self.folder / "steps").read_text() or 0)

    def wait_for_end(self) -> str:
        """Wait for the program's last act, and return what it wrote."""
        ended = self.folder / "ended"
        wait_for(lambda: ended.exists() and ended.read_text(), lambda: "the program did not end")
        return ended.read_text()


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.fixture(params=[(120, 40), (80, 24), (40, 12)], ids=["120x40", "80x24", "40x12"])
def terminal(program: Program, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    with program.on_terminal(*request.param) as terminal:
        yield terminal


def test_view_on_terminal_shows_run_and_leaves_lines(program: Program, terminal: Terminal) -> None:
    # A view reaches the terminal in pieces.
    for part in ("20/60", "run", "reward", "0.200", "held-out", "0.500", "1:20 left", "75 %", "no_signal"):
        terminal.wait_for(partial(terminal.shows, part), f"{part} is not shown")
    assert sum("20/60" in line for line in terminal.lines) == 1
    assert not terminal.shows_cursor
    program.end()
    assert program.wait_for_end() == "finished" and terminal.process.wait(60) == 0
    terminal.wait_for(lambda: "the program has ended" in terminal.text, "the output after the view is missing")
    assert terminal.shows_cursor and "reward" not in terminal.text  # the view is gone
    assert "warning at step 10: few groups" in terminal.text  # and its warning stays


@pytest.mark.parametrize("sizes", [[(60, 20), (120, 40)], [(40, 12), (30, 5), (80, 24)]], ids=["larger", "tiny"])
def test_view_resized_terminal_shows_one_view_of_the_new_size(program: Program, sizes: list[tuple[int, int]]) -> None:
    with program.on_terminal(100, 30) as terminal:
        terminal.wait_for(lambda: "20/60" in terminal.text, "step 20 is not shown")
        for number, (columns, rows) in enumerate(sizes):
            step = 30 + 10 * number
            terminal.resize(columns, rows)
            program.take_steps(step)
            terminal.wait_for(partial(terminal.shows, f"{step}/60"), f"step {step} is not shown")
        # Neither remains of the former view nor lines that the terminal has wrapped.
        assert "20/60" not in terminal.text and "30/60" not in terminal.text
        assert sum(line.startswith("── run ─") for line in terminal.lines) == 1
        assert sum(line.startswith("reward") for line in terminal.lines) == 1


def test_view_ctrl_c_shows_message_and_restores_terminal(program: Program) -> None:
    with program.on_terminal(80, 24, "--signals") as terminal:
        settings = terminal.settings()
        terminal.wait_for(lambda: "20/60" in terminal.text, "step 20 is not shown")
        terminal.type(b"\x03")
        terminal.wait_for(lambda: "SIGINT: the run stops" in terminal.text, "the message is not shown")
        program.take_steps(21)
        assert program.wait_for_end() == "stopped" and terminal.process.wait(60) == 0
        terminal.wait_for(lambda: "the program has ended" in terminal.text, "the output after the view is missing")
        assert "SIGINT: the run stops" in terminal.text
        assert terminal.shows_cursor and terminal.settings() == settings


def test_view_lost_terminal_run_goes_on_silently(program: Program) -> None:
    with program.on_terminal(80, 24) as terminal:
        terminal.wait_for(lambda: "20/60" in terminal.text, "step 20 is not shown")
        terminal.hang_up()
        program.take_steps(STEPS)
        wait_for(lambda: program.steps == STEPS, lambda: f"the program took {program.steps} steps only")
        program.end()
        assert program.wait_for_end() == "finished" and terminal.process.wait(60) == 0


def test_view_paused_terminal_delays_no_step(program: Program) -> None:
    with program.on_terminal(80, 24) as terminal:
        terminal.wait_for(lambda: "20/60" in terminal.text, "step 20 is not shown")
        terminal.type(b"\x13")  # Ctrl-S: writing to the terminal blocks from now on
        program.take_steps(STEPS)
        wait_for(lambda: program.steps == STEPS, lambda: f"the program took {program.steps} steps only")
        terminal.type(b"\x11")  # Ctrl-Q
        terminal.wait_for(lambda: "60/60" in terminal.text, "step 60 is not shown")
        program.end()
        assert terminal.process.wait(60) == 0


def test_plain_lines_pipe_closed_run_goes_on_silently(program: Program) -> None:
    with subprocess.Popen(program.command, env=program.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "step 1/60  reward 0.010" in next(line for line in process.stdout if line.startswith("step"))
        process.stdout.close()
        program.take_steps(STEPS)
        wait_for(lambda: program.steps == STEPS, lambda: f"the program took {program.steps} steps only")
        program.end()
        assert program.wait_for_end() == "finished" and process.wait(60) == 0


def test_plain_lines_hangup_is_ignored_and_output_goes_on(program: Program) -> None:
    with subprocess.Popen(program.command, env=program.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 20/60") for line in process.stdout)
        process.send_signal(signal.SIGHUP)
        program.take_steps(STEPS)
        assert any(line.startswith("step 60/60") for line in process.stdout)
        program.end()
        assert process.wait(60) == 0
