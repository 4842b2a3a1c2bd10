"""Cost of a killed worker on the embedded task: python tests/benchmarks/bench_failure.py [section.field=value ...]

Kills four workers in a run of 100 steps (with --short, two in 30 steps). Prints for each failure: seconds until Ray
Train has detected it, until a new worker group has chosen its checkpoint (processes, libraries), until its engine and
learner are ready, and until the lost step has been repeated; and the CPU seconds of all processes in that time. Linux
only.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
from pathlib import Path

from bench_startup import CpuClock

from grpo_ray.config.loader import load_config
from grpo_ray.driver.run import train
from grpo_ray.resilience.chaos import Fault

ROOT = Path(__file__).parents[2]
FAULTS = [
    Fault("kill-generation", 14, 0),
    Fault("kill-backward", 28, 1),
    Fault("kill-generation", 55, 1),
    Fault("kill-backward", 79, 0),
]
KINDS = ("kill-generation", "kill-backward")
PHASES = ("detection", "restart", "engine and learner", "repeated steps", "total", "CPU seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="two kills in 30 steps")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--at", type=int, nargs="+", metavar="STEP", help="kill worker 0 at these steps instead")
    arguments = parser.parse_args()
    faults = FAULTS[:2] if arguments.short else FAULTS
    if arguments.at:
        faults = [Fault(kind, step, 0) for step, kind in zip(arguments.at, itertools.cycle(KINDS), strict=False)]
    with tempfile.TemporaryDirectory() as folder, CpuClock(os.getpid()) as clock:
        settings = [f"run.storage_path={folder}", "run.name=failures", "grpo.save_steps=10", "run.max_failures=9"]
        if arguments.short:
            settings.append("grpo.max_steps=30")
        config = load_config(ROOT / "jobs/configs/arithmetic.yaml", [*settings, *arguments.overrides])
        train(config, faults=faults)
        run = Path(folder, "failures")
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        table = []
        for fault in faults:
            at = json.loads((run / "chaos" / fault.marker).read_text())["at"]

            def first(event: str, since: float, step: int = 0) -> float:
                return min(e["at"] for e in events if e["event"] == event and e["at"] > since and e["step"] >= step)

            detected = min(e["at"] for e in events if e["event"] == "failed" and e["at"] > at)
            began, training = first("began", detected), first("training", detected)
            repeated = first("step", training, fault.step - 1)
            cpu = clock.total_at(repeated) - clock.total_at(at)
            table.append([detected - at, began - detected, training - began, repeated - training, repeated - at, cpu])
        print(f"{'seconds':20}" + "".join(f"{fault.kind} {fault.step:<4}" for fault in faults) + "median")
        for name, values in zip(PHASES, zip(*table, strict=True), strict=True):
            print(f"{name:20}" + "".join(f"{value:<20.1f}" for value in values) + f"{statistics.median(values):.1f}")
        saves = [row["phase/checkpoint"] for row in rows if "checkpoint" in row]
        total = sum(row["step/seconds"] for row in rows)
        print(
            f"checkpoints: {len(saves)}, training waited {sum(saves):.2f} s of {total:.1f} s ({sum(saves) / total:.1%})"
        )
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
