"""Tests of whole runs on a terminal that is interrupted or lost, or shows a worker that dies."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from small_runs import rows_of, small_settings

pytest.importorskip("pyte", reason="pyte, the terminal emulator, is in the extra `test`")

from terminal import Terminal, wait_for
from terminal_recording import kill_worker

from grpo_ray.observers.terminal.screen import DEATH_NOTICE

STEPS = 12


def train_on_terminal(name: str, tmp_path: Path, policy: Path, *overrides: str) -> Terminal:
    settings = [*small_settings(name, tmp_path, policy), *overrides]
    left_out = ("COLUMNS", "LINES", "NO_COLOR")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    command = [sys.executable, "-m", "grpo_ray.cli", "train", *settings]
    return Terminal(command, 100, 30, env=environment | {"RAY_ADDRESS": "local", "TERM": "xterm-256color"})


@pytest.mark.slow
def test_ctrl_c_run_on_terminal_is_saved_and_summed_up(policy: Path, tmp_path: Path) -> None:
    endless = ["grpo.max_steps=5000", "grpo.save_steps=5000"]
    with train_on_terminal("stopped", tmp_path, policy, *endless) as terminal:
        settings = terminal.settings()
        terminal.wait_for(lambda: "✓ indexing the training problems" in terminal.text, "the start is not shown")
        terminal.wait_for(lambda: "/5000" in terminal.text and "s/step" in terminal.text, "no step is shown")
        assert "started in " in terminal.text and not terminal.shows_cursor
        terminal.type(b"\x03")
        terminal.wait_for(lambda: "SIGINT: the run stops" in terminal.text, "the message is not shown")
        assert terminal.process.wait(600) == 128 + signal.SIGINT
        terminal.wait_for(lambda: "by SIGINT; run the same command to continue" in terminal.text, "no last line")
        assert "── summary ─" in terminal.text and "s/step" not in terminal.text
        assert terminal.shows_cursor and terminal.settings() == settings
    (checkpoint,) = (tmp_path / "stopped").glob("checkpoint-*/manifest.json")
    assert checkpoint.exists()


@pytest.mark.slow
def test_lost_terminal_run_ends_as_usual(policy: Path, tmp_path: Path) -> None:
    with train_on_terminal("lost", tmp_path, policy, f"grpo.max_steps={STEPS}") as terminal:
        terminal.wait_for(lambda: f"/{STEPS}" in terminal.text and "s/step" in terminal.text, "no step is shown")
        terminal.hang_up()
        summary = tmp_path / "lost" / "summary.json"
        wait_for(summary.exists, lambda: "the run did not end")
        assert terminal.process.wait(600) == 0, terminal.text
    assert [row["step"] for row in rows_of(tmp_path / "lost")] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_dead_worker_is_one_line_above_the_view(policy: Path, tmp_path: Path) -> None:
    overrides = [f"grpo.max_steps={STEPS}", "grpo.save_steps=2", "run.max_failures=2"]
    with train_on_terminal("killed", tmp_path, policy, *overrides) as terminal:
        terminal.wait_for(lambda: f" 3/{STEPS}" in terminal.text, "no third step is shown")
        kill_worker(terminal.process.pid)
        terminal.wait_for(lambda: "failures    1  last: worker" in terminal.text, "no failure is shown")
        assert terminal.process.wait(600) == 0, terminal.text
        terminal.wait_for(lambda: "── summary ─" in terminal.text, "no summary is shown")
    output = terminal.output.decode()
    failure = re.search(r"worker \d failed: ", output)
    assert failure and "started in " in output[failure.end() :]
    assert DEATH_NOTICE not in output  # of Ray, ten lines that say less
