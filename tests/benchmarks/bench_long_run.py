"""Memory and files of a run of 10^5 steps: driver, coordinator, worker, checkpoint and report page.

    python tests/benchmarks/bench_long_run.py [--steps 100000] [--metrics 60]

Learner and engine are stubs that leave metrics, logs and events; the coordinator is a real actor, and the worker's
callback, the controller's callback, the driver's follower, the files, the summary and the page are the real ones. Ray
Train between them is left out: it takes one report per poll, so that 10^5 steps would take hours. About three minutes
on 2 cores.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import yaml

from grpo_ray.config.loader import load_config
from grpo_ray.driver.cluster.connection import QUIET
from grpo_ray.driver.summary import HeldoutSummary, summarize_run
from grpo_ray.observers.feed import RunFeed
from grpo_ray.observers.follower import RunFiles, RunFollower
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.resilience.controller_callback import CoordinatorCallback
from grpo_ray.storage.jsonl import save_metrics_history
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.coordinator import RunCoordinator

SAVE_STEPS = 1000


def resident_mib() -> float:
    """Return the resident memory of this process, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class MeasuredCoordinator(RunCoordinator):
    def resident_mib(self) -> float:
        """Return the resident memory of the actor's process, MiB."""
        return resident_mib()


class StubWorker:
    """Worker whose steps consist of their metrics: real `ReportCallback`, then what Ray Train's controller calls."""

    def __init__(self, coordinator: Any, metrics: int, folder: str) -> None:
        from transformers import TrainerState

        from grpo_ray.training.report_callback import ReportCallback, ReportInputs, ReportTarget

        unused: Any = None
        inputs = ReportInputs(
            settle=lambda folder: lambda: None,
            measure_heldout=dict,
            heldout_conditions={},
        )
        self.report = ReportCallback(load_config(), ReportTarget(folder=unused, coordinator=coordinator), inputs)
        self.controller = CoordinatorCallback(coordinator)
        self.state, self.metrics, self.folder = TrainerState(), metrics, Path(folder)

    def take_steps(self, count: int) -> tuple[float, int]:
        """Take steps; return the resident memory, MiB, and the bytes that a checkpoint has for metrics and logs."""
        from transformers import TrainerControl

        saves: Any = TrainerControl(should_save=True)
        unused: Any = None
        size = 0
        for _ in range(count):
            self.state.global_step += 1
            step = self.state.global_step
            logs = {f"reward/metric_{number}": step / (7 + number) for number in range(self.metrics)}
            self.state.log_history.append(logs)
            self.report.on_log(unused, self.state, saves, logs)
            row = self.report._row(self.state, {"reward/mean": 0.5, **logs})
            self.controller.after_report(unused, [row], unused)
            if step % SAVE_STEPS == 0:
                save_metrics_history(self.folder, self.report.target.history)
                self.state.save_to_json(str(self.folder / "trainer_state.json"))
                size = sum(path.stat().st_size for path in self.folder.iterdir())
        return resident_mib(), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--metrics", type=int, default=60, help="metrics of a step")
    parser.add_argument("--rows", type=int, default=10, help="times at which memory is measured")
    options = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, **QUIET)
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(scratch, "run")
        config = load_config(None, [f"grpo.max_steps={options.steps}"])
        folder.write_text(yaml.safe_dump(config.to_dict()), "config.yaml")
        Path(scratch, "checkpoint").mkdir()
        coordinator = ray.remote(num_cpus=0)(MeasuredCoordinator).remote()
        worker = ray.remote(num_cpus=1)(StubWorker).remote(coordinator, options.metrics, f"{scratch}/checkpoint")
        ray.get(coordinator.record_event.remote("began", rows=[], workers=1, step=0, checkpoint=None))
        with open(os.devnull, "w") as nothing:
            from rich.console import Console

            progress = ProgressLine(options.steps, Console(file=nothing))
            feed = RunFeed([RunFiles(folder, print), progress])
            with RunFollower(coordinator, feed, options.steps):
                for _ in range(options.rows):
                    worker_mib, checkpoint_bytes = ray.get(worker.take_steps.remote(options.steps // options.rows))
                    time.sleep(1)  # the follower catches up
                    memory = ray.get(coordinator.resident_mib.remote())
                    row = {"driver_mib": resident_mib(), "coordinator_mib": memory, "worker_mib": worker_mib}
                    rounded = {name: round(value, 1) for name, value in row.items()}
                    print(json.dumps(rounded | {"checkpoint_bytes": checkpoint_bytes}), flush=True)
        begun = time.perf_counter()
        summary = summarize_run(config, folder, {"heldout": HeldoutSummary(problems=1, before={}, after={})}, 1.0)
        print(f"summary of {summary.steps} steps: {time.perf_counter() - begun:.1f} s, {resident_mib():.0f} MiB")
        ray.shutdown()
        from grpo_ray.pages.report import page

        begun = time.perf_counter()
        page.write_page([str(folder.local)])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        sizes = {name: size for name, size in folder.file_sizes().items() if "/" not in name}
        print(f"page: {time.perf_counter() - begun:.1f} s, peak of the process {peak:.0f} MiB; files {sizes}")


if __name__ == "__main__":
    main()
