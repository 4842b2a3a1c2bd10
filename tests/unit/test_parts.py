"""Tests of the runner of long checks (`tests/helpers/parts.py`)."""

import json
import sys
from pathlib import Path

import pytest
from parts import Part, marked_processes, run_part, run_parts

DAEMON = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.environ["GRPO_RAY_PART"], flush=True)
"""
"""Program that leaves a process in a session of its own behind."""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_run_parts_goes_on_after_a_failure(tmp_path: Path) -> None:
    parts = [
        Part(name="broken", command=python("raise SystemExit('no GPU')"), limit=60),
        Part(name="sound", command=python("print('fine')"), limit=60),
        Part(name="long", command=python("print('fine')"), limit=60, expected=1000),
    ]
    outcomes = run_parts(parts, tmp_path, seconds=100)
    assert [outcome.status for outcome in outcomes] == ["failed", "passed", "left out"]
    assert outcomes[0].reason == "no GPU" and "takes about 1000 s" in outcomes[2].reason
    written = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [row["name"] for row in written] == ["broken", "sound", "long"]
    assert (tmp_path / "sound.log").read_text() == "fine\n"


def test_run_parts_two_at_once_run_at_the_same_time(tmp_path: Path) -> None:
    meet = "import pathlib, sys, time; own, other = map(pathlib.Path, sys.argv[1:]); own.touch()\n"
    meet += "while not other.exists(): time.sleep(0.01)"
    parts = [
        Part(name=own, command=[*python(meet), str(tmp_path / own), str(tmp_path / other)], limit=60)
        for own, other in (("first", "second"), ("second", "first"))
    ]
    outcomes = run_parts(parts, tmp_path, seconds=60, at_once=2)
    assert [(outcome.name, outcome.status) for outcome in outcomes] == [("first", "passed"), ("second", "passed")]
    assert len((tmp_path / "outcomes.jsonl").read_text().splitlines()) == 2


def test_run_part_passes_its_environment(tmp_path: Path) -> None:
    program = "import os; raise SystemExit(os.environ['COLOUR'])"
    part = Part(name="one", command=python(program), limit=60, environment={"COLOUR": "green"})
    assert run_part(part, tmp_path, 60).reason == "green"


@pytest.mark.long
def test_run_part_at_its_limit_leaves_no_process(tmp_path: Path) -> None:
    part = Part(name="hangs", command=python(DAEMON + "time.sleep(600)"), limit=5)
    outcome = run_part(part, tmp_path, 5)
    assert outcome.status == "killed" and outcome.reason.startswith("not done after 5 s")
    assert marked_processes((tmp_path / "hangs.log").read_text().strip()) == []


@pytest.mark.long
def test_run_part_that_passes_leaves_no_process(tmp_path: Path) -> None:
    outcome = run_part(Part(name="ends", command=python(DAEMON), limit=60), tmp_path, 60)
    assert outcome.status == "passed"
    assert marked_processes((tmp_path / "ends.log").read_text().strip()) == []
