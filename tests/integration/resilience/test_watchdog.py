"""Tests of the hang watchdog, in processes of their own, because it ends the process."""

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
from grpo_ray.failures import Watchdog

def report(message, stacks):
    print("reported:", message, "and", Path(stacks).read_text().count("File"), "frames", flush=True)

STACKS = Path("stacks.txt")
SETTINGS = {"factor": 3, "floor": 0.5, "grace": 0.3}
"""

PROCESSES = {
    # The save takes longer than a step may, because each kind has its own limit. The step waits for another thread.
    "hang": """
        def spins_for_ever():
            while True:
                pass

        def waits_for_ever(thread):
            thread.start()
            thread.join()

        # With a long grace: on a busy machine faulthandler's own timer must not be the first to end the process.
        with Watchdog(STACKS, on_hang=report, factor=3, floor=0.5, grace=6) as watchdog:
            watchdog.pace.add("save", 1000)
            watchdog.beat("save", 6)
            time.sleep(1.5)
            watchdog.beat("step", 7)
            waits_for_ever(threading.Thread(target=spins_for_ever))
    """,
    "native": """
        def never_lets_go():
            ctypes.PyDLL(None).sleep(1000)

        with Watchdog(STACKS, on_hang=report, **SETTINGS) as watchdog:
            watchdog.beat("step")
            never_lets_go()
    """,
    "report raises": """
        def report(message, stacks):
            raise OSError("storage is gone")

        def end():
            # Limit and grace together: the other workers of the group get that time to report their own stacks.
            print("waited", time.monotonic() - begun >= 0.5 + 4, flush=True)
            os._exit(5)

        begun = time.monotonic()
        with Watchdog(STACKS, factor=3, floor=0.5, grace=4, on_hang=report, end=end) as watchdog:
            watchdog.beat("step")
            time.sleep(1000)
    """,
    "report hangs": """
        def report(message, stacks):
            time.sleep(1000)

        with Watchdog(STACKS, on_hang=report, **SETTINGS) as watchdog:
            watchdog.beat("step")
            time.sleep(1000)
    """,
    # While suspended it outlasts the limit of 4 s, and the timer of faulthandler after 4 + 2 x 0.3 + 1 s.
    "steady": """
        with Watchdog(STACKS, on_hang=report, factor=3, floor=4, grace=0.3) as watchdog:
            for step in range(30):
                watchdog.beat("step", step)
                watchdog.beat("save", step)
            watchdog.suspend()
            time.sleep(6)
            watchdog.beat("step")
        print("done", STACKS.exists())
    """,
}


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a process, and the contents of its stacks file, empty if there is none."""

    code: int
    output: str
    stacks: str


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """Outcomes of PROCESSES, which run at the same time because they spend most of it waiting."""
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
        found = {}
        for name, (process, stacks) in started.items():
            output, _ = process.communicate(timeout=300)
            found[name] = Outcome(process.returncode, output, stacks.read_text() if stacks.exists() else "")
        yield found
    finally:
        for process, _ in started.values():
            process.kill()
            process.wait()


def test_watchdog_hanging_step_ends_process(outcomes: dict[str, Outcome]) -> None:
    hang = outcomes["hang"]
    assert hang.code == HANG_EXIT_CODE
    assert "reported: step (step 7) hangs" in hang.output and "usually not known" in hang.output
    assert " 0 frames" not in hang.output


def test_watchdog_stacks_name_functions_of_all_threads(outcomes: dict[str, Outcome]) -> None:
    stacks = outcomes["hang"].stacks
    assert "step (step 7) hangs" in stacks
    assert "in waits_for_ever" in stacks and "in spins_for_ever" in stacks


def test_watchdog_slow_kind_has_own_limit(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["hang"].stacks.count("hangs:") == 1 and "save" not in outcomes["hang"].output


def test_watchdog_native_code_holding_gil_is_ended(outcomes: dict[str, Outcome]) -> None:
    native = outcomes["native"]
    assert native.code == 1  # the exit code of faulthandler
    assert "in never_lets_go" in native.stacks and "reported" not in native.output


def test_watchdog_report_raising_still_ends_after_grace(outcomes: dict[str, Outcome]) -> None:
    raising = outcomes["report raises"]
    assert raising.code == 5 and "waited True" in raising.output and "hangs" in raising.stacks


def test_watchdog_report_hanging_still_ends_process(outcomes: dict[str, Outcome]) -> None:
    hanging = outcomes["report hangs"]
    assert hanging.code == 1 and "hangs" in hanging.stacks  # ended by faulthandler


def test_watchdog_steady_loop_is_left_alone(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["steady"] == Outcome(0, "done False\n", "")
