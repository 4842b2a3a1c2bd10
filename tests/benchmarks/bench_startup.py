"""Seconds from the command to the first step, split by what is being done: python tests/benchmarks/bench_startup.py

Runs `grpo-ray train grpo.max_steps=1` with the overrides given, in a run folder of its own that is deleted at the end,
and takes down when each phase is announced. The embedded policy must have been built before, or its warm-up counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EVENTS = {"began": "drawing from the ledger, opening callbacks", "training": "first problems, first step"}
"""Event of `events.jsonl` -> what it begins; the other phases say themselves what they are."""

RESULT = "held-out accuracy before training"
"""Begins a line that ends a phase and begins none."""


def announced(command: list[str]) -> tuple[list[tuple[float, str]], int]:
    """What a command printed, each line with the seconds since 1970 at which it came, and its exit status."""
    lines = [(time.time(), "starting Python, importing the driver's libraries")]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.time(), line.strip()))
    return lines, process.returncode


def split(lines: list[tuple[float, str]], events: list[dict]) -> list[tuple[str, float]]:
    """What was done from the command to the first step, in order, with its seconds."""
    first_step = next(event["at"] for event in events if event["event"] == "step")
    phases = [each for each in lines if not each[1].startswith(RESULT)]
    begun = phases + [(event["at"], EVENTS[event["event"]]) for event in events if event["event"] in EVENTS]
    begun = sorted(each for each in begun if each[0] < first_step)
    ends = [at for at, _ in begun[1:]] + [first_step]
    return [(what, end - at) for (at, what), end in zip(begun, ends, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="[CONFIG.yaml] section.field=value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_startup-") as folder:
        overrides = [*arguments.overrides, "grpo.max_steps=1", f"run.storage_path={folder}", "run.name=run"]
        lines, status = announced([sys.executable, "-m", "grpo_ray.cli", "train", *overrides])
        if status:
            raise SystemExit("\n".join(text for _, text in lines[1:]))
        events = [json.loads(row) for row in Path(folder, "run", "events.jsonl").read_text().splitlines()]
    parts = split(lines, events)
    for what, seconds in parts:
        print(f"{seconds:6.1f} s  {what}")
    print(f"{sum(seconds for _, seconds in parts):6.1f} s  to the first step; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
