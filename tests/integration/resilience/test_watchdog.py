"""Tests of the hang watchdog. Each runs in its own process, because the watchdog ends the process."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_ray.resilience.watchdog import HANG_EXIT_CODE

SETUP = """
import ctypes, os, threading, time
from pathlib import Path
from grpo_ray.resilience.watchdog import Watchdog

def report(message, stacks):
    print("reported:", message, "and", Path(stacks).read_text().count("File"), "frames", flush=True)

STACKS = Path("stacks.txt")
SETTINGS = {"factor": 3, "floor": 0.5, "grace": 0.3}
"""

PROCESSES = {
    # The save takes longer than a step may, because each activity has its own limit. The step waits for a thread.
    "hang": """
        def spin_forever():
            while True:
                pass

        def join_forever(thread):
            thread.start()
            thread.join()

        # The grace is long so that, even on a busy machine, faulthandler's timer does not end the process first.
        with Watchdog(STACKS, on_hang=report, factor=3, floor=0.5, grace=6) as watchdog:
            watchdog.timeout.record("save", 1000)
            watchdog.heartbeat("save", 6)
            time.sleep(1.5)
            watchdog.heartbeat("step", 7)
            join_forever(threading.Thread(target=spin_forever))
    """,
    "native": """
        def hold_interpreter_lock():
            ctypes.PyDLL(None).sleep(1000)

        with Watchdog(STACKS, on_hang=report, **SETTINGS) as watchdog:
            watchdog.heartbeat("step")
            hold_interpreter_lock()
    """,
    "report raises": """
        def report(message, stacks):
            raise OSError("storage is gone")

        def end():
            # After limit and grace: the other workers of the group need that time to write their stacks.
            print("waited", time.monotonic() - begun >= 0.5 + 4, flush=True)
            os._exit(5)

        begun = time.monotonic()
        with Watchdog(STACKS, factor=3, floor=0.5, grace=4, on_hang=report, end=end) as watchdog:
            watchdog.heartbeat("step")
            time.sleep(1000)
    """,
    "report hangs": """
        def report(message, stacks):
            time.sleep(1000)

        with Watchdog(STACKS, on_hang=report, **SETTINGS) as watchdog:
            watchdog.heartbeat("step")
            time.sleep(1000)
    """,
    # One activity of 6 s, whose limit of 2 s and faulthandler's timer of 2 + 2 x 0.3 + 1 s are both shorter.
    "progress": """
        tokens = 0
        with Watchdog(STACKS, on_hang=report, factor=3, floor=2, grace=0.3, read_progress=lambda: tokens) as watchdog:
            watchdog.heartbeat("step", 1)
            for tokens in range(120):
                time.sleep(0.05)
        print("done", STACKS.exists())
    """,
    "progress ends": """
        tokens = 0
        with Watchdog(STACKS, on_hang=report, factor=3, floor=2, grace=3, read_progress=lambda: tokens) as watchdog:
            watchdog.heartbeat("step", 1)
            for tokens in range(60):
                time.sleep(0.05)
            time.sleep(1000)
    """,
    "unreadable progress": """
        def read_progress():
            raise RuntimeError("the cluster is gone")

        with Watchdog(STACKS, on_hang=report, factor=3, floor=2, grace=3, read_progress=read_progress) as watchdog:
            watchdog.heartbeat("step", 1)
            time.sleep(1000)
    """,
    # The pause exceeds the limit of 4 s and faulthandler's timer of 4 + 2 x 0.3 + 1 s, but nothing is watched then.
    "steady": """
        with Watchdog(STACKS, on_hang=report, factor=3, floor=4, grace=0.3) as watchdog:
            for step in range(30):
                watchdog.heartbeat("step", step)
                watchdog.heartbeat("save", step)
            watchdog.suspend()
            time.sleep(6)
            watchdog.heartbeat("step")
        print("done", STACKS.exists())
    """,
}


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a process, and the contents of its stacks file; empty if there is no file."""

    code: int
    output: str
    stacks: str


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """Return the outcomes of PROCESSES, which run concurrently because they mostly wait."""
    started = {}
    try:
        for name, body in PROCESSES.items():
            folder = tmp_path_factory.mktemp("process")
            process = subprocess.Popen(
                [sys.executable, "-c", SETUP + textwrap.dedent(body)],
                cwd=folder,
                env={"PYTHONPATH": str(Path(__file__).parents[3])},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started[name] = process, folder / "stacks.txt"
        results = {}
        for name, (process, stacks) in started.items():
            output, _ = process.communicate(timeout=300)
            results[name] = Outcome(process.returncode, output, stacks.read_text() if stacks.exists() else "")
        yield results
    finally:
        for process, _ in started.values():
            process.kill()
            process.wait()


def test_watchdog_hanging_step_ends_process(outcomes: dict[str, Outcome]) -> None:
    hang = outcomes["hang"]
    assert hang.code == HANG_EXIT_CODE
    assert "reported: step (step 7) hangs" in hang.output
    assert "from run.hang_seconds=0.5; if nothing was wrong, raise run.hang_seconds" in hang.output
    assert " 0 frames" not in hang.output


def test_watchdog_stacks_name_functions_of_all_threads(outcomes: dict[str, Outcome]) -> None:
    stacks = outcomes["hang"].stacks
    assert "step (step 7) hangs" in stacks
    assert "in join_forever" in stacks and "in spin_forever" in stacks


def test_watchdog_slow_activity_has_own_limit(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["hang"].stacks.count("hangs:") == 1 and "save" not in outcomes["hang"].output


def test_watchdog_native_code_holding_gil_is_ended(outcomes: dict[str, Outcome]) -> None:
    native = outcomes["native"]
    assert native.code == 1  # the exit code of faulthandler
    assert "in hold_interpreter_lock" in native.stacks and "reported" not in native.output


def test_watchdog_report_raising_still_ends_after_grace(outcomes: dict[str, Outcome]) -> None:
    raising = outcomes["report raises"]
    assert raising.code == 5 and "waited True" in raising.output and "hangs" in raising.stacks


def test_watchdog_report_hanging_still_ends_process(outcomes: dict[str, Outcome]) -> None:
    hanging = outcomes["report hangs"]
    assert hanging.code == 1 and "hangs" in hanging.stacks  # ended by faulthandler


def test_watchdog_long_activity_with_progress_keeps_running(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["progress"] == Outcome(0, "done False\n", "")


@pytest.mark.parametrize("name", ["progress ends", "unreadable progress"])
def test_watchdog_without_further_progress_ends_process(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].code == HANG_EXIT_CODE and "step (step 1) hangs" in outcomes[name].output


def test_watchdog_steady_loop_keeps_running(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["steady"] == Outcome(0, "done False\n", "")
