"""Cost of following a run, for each step: everything on against everything off, alternating.

    python tests/benchmarks/bench_observers.py [--rounds 3] [--steps 40] [--trackers NAMES] [OVERRIDE ...]

The embedded task with 512 completions in a step. Off: no tracker, no message, plain lines into a file. On: TensorBoard,
W&B, MLflow and Trackio (offline, on this machine), `run.notify` to a server here, the live view on a terminal, and
`grpo-ray watch` whose page is asked for every 5 seconds, as a browser does. Health rules, Ray's metrics and the records
of rollouts are part of every run, so they are in both.

Prints for each run the median time of a step without the first five, and the processor time per step of the driver, of
the processes that it starts for trackers, and of `watch`. On a machine whose cores all compute, that time is taken from
the workers; it varies less than the time of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
sys.path.insert(0, str(HELPERS))

from terminal import Terminal, wait_for  # noqa: E402
from tracker_readers import isolate_trackers  # noqa: E402
from watched_runs import request, watch_command  # noqa: E402
from webhook import webhook  # noqa: E402

SETTINGS = ["grpo.prompts_per_step=32", "grpo.num_generations=16", "grpo.save_steps=1000", "data.heldout_limit=24"]
FIRST = 5
"""Steps that are left out: the workers' libraries are loaded and compiled in them."""
PAGE_SECONDS = 5.0
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True)
class Cost:
    """Median seconds of a step, and processor seconds of the followers per step."""

    step: float
    processor: float


def measure(folder: Path, steps: int, trackers: str, overrides: Sequence[str]) -> Cost:
    """Train once, and return what a step took; with everything off if `trackers` is empty."""
    settings = [
        str(ROOT / "jobs" / "configs" / "arithmetic.yaml"),
        *("run.name=run", f"run.storage_path={folder}", f"grpo.max_steps={steps}", *SETTINGS, *overrides),
    ]
    environment = {**os.environ, **isolate_trackers(folder), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "grpo_ray.cli", "train", *settings]
    with ExitStack() as stack:
        if trackers:
            command += [f"run.trackers=[{trackers}]"]
            command += [f"run.notify={stack.enter_context(webhook()).address}"]
            terminal = stack.enter_context(Terminal(command, 100, 30, env=environment))
            driver = terminal.process
        else:
            output = stack.enter_context((folder / "output").open("w"))
            driver = subprocess.Popen([*command, "run.trackers=[]"], stdout=output, stderr=output, env=environment)
        metrics = folder / "run" / "metrics.jsonl"
        followers = [psutil.Process(driver.pid)]

        def wait_for_run(condition: Callable[[], bool], failure: str) -> None:
            def holds() -> bool:
                if not (found := condition()) and driver.poll() is not None:
                    printed = (folder / "output").read_text() if not trackers else terminal.text
                    raise SystemExit(f"the run has ended with status {driver.returncode}, {failure}:\n{printed}")
                return found

            wait_for(holds, lambda: failure)

        if trackers:  # while the workers start, so that the page has started before the steps that count
            wait_for_run((folder / "run" / "config.yaml").exists, "it wrote no config")
            followers.append(psutil.Process(stack.enter_context(page_of(folder / "run"))))
        wait_for_run(lambda: count_rows(metrics) >= FIRST, "it took no step")
        before = processor_seconds(followers)
        first = count_rows(metrics)
        wait_for_run(lambda: count_rows(metrics) >= steps - 1, "it took no further step")
        spent = processor_seconds(followers) - before
        taken = count_rows(metrics) - first
        assert driver.wait(600) == 0
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][FIRST:-1]
    return Cost(statistics.median(row["step/seconds"] for row in rows), spent / taken)


@contextmanager
def page_of(folder: Path) -> Iterator[int]:
    """Run `grpo-ray watch` on a run with a page that asks, and give the command's process id."""
    from grpo_ray.storage.run_folder import RunFolder

    closed = threading.Event()

    def ask(port: int) -> None:
        while not closed.wait(PAGE_SECONDS):
            for path in ("/api/state", "/contents"):
                request(port, path)

    with watch_command(RunFolder(str(folder.parent), folder.name)) as (process, url):
        thread = threading.Thread(target=ask, args=(int(url.rstrip("/").rpartition(":")[2]),), daemon=True)
        thread.start()
        yield process.pid
        closed.set()
        thread.join()


def count_rows(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def processor_seconds(followers: Sequence[psutil.Process]) -> float:
    """Return the processor time so far of processes, and of those that they started for trackers."""
    total = 0.0
    for process in followers:
        trackers = [each for each in process.children(recursive=True) if is_tracker(each)]
        for each in (process, *trackers):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def is_tracker(process: psutil.Process) -> bool:
    try:
        return any(name in word for word in process.cmdline()[:4] for name in ("wandb", "trackio", "mlflow"))
    except psutil.Error:  # it has ended
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--trackers", default=",".join(TRACKERS), help="trackers of the runs with observers")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings of all runs")
    arguments = parser.parse_intermixed_args()
    costs: dict[bool, list[Cost]] = {False: [], True: []}
    for number in range(2 * arguments.rounds):
        is_on = number % 2 == 1
        with tempfile.TemporaryDirectory(prefix="grpo_ray-") as folder:
            cost = measure(Path(folder), arguments.steps, arguments.trackers if is_on else "", arguments.overrides)
        costs[is_on].append(cost)
        name = "on" if is_on else "off"
        print(f"{name:<4} step {cost.step:.3f} s  processor {1000 * cost.processor:.1f} ms per step", flush=True)
    off, on = (statistics.median(each.step for each in costs[key]) for key in (False, True))
    cpu = [statistics.median(each.processor for each in costs[key]) for key in (False, True)]
    cores = os.cpu_count() or 1
    share = (cpu[1] - cpu[0]) / (off * cores)
    more = 1000 * (cpu[1] - cpu[0])
    print(f"step {off:.3f} -> {on:.3f} s ({on / off - 1:+.1%}); processor {more:.1f} ms more per step,")
    print(f"{share:.2%} of the {cores} cores in a step")


if __name__ == "__main__":
    main()
