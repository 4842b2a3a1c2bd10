"""Seconds from the command to the first step by phase, and CPU seconds by process:

    python tests/benchmarks/bench_startup.py [CONFIG.yaml] [section.field=value ...]

Runs `grpo-ray train grpo.max_steps=1` with the given overrides in a temporary run folder, and records when each phase
is announced. Linux only: reads /proc.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Self

EVENTS = {"began": "drawing from the ledger, opening callbacks", "training": "first problems, first step"}
"""Event of `events.jsonl` -> the phase that starts with it; every other phase is announced by a line of output."""

RESULT = "held-out accuracy before training"
"""Start of an output line that reports a result and does not start a phase."""

TICKS = os.sysconf("SC_CLK_TCK")


class CpuClock:
    """Sampler of the CPU seconds of a process and all of its descendants: `with CpuClock(pid) as clock`.

    Samples every 0.1 s; CPU time after the last sample of a process is not counted.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self.seconds: dict[int, float] = {}
        """Process id -> user and system time, seconds."""
        self.names: dict[int, str] = {}
        """Process id -> its latest title."""
        self.history: list[tuple[float, float]] = []
        """Time (seconds since 1970), and CPU seconds of all processes up to then."""
        self._family = {root}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def by_name(self) -> list[tuple[str, int, float]]:
        """Return title, number of processes and their CPU seconds, largest first."""
        counts: Counter[str] = Counter(self.names.values())
        totals: dict[str, float] = defaultdict(float)
        for process, seconds in self.seconds.items():
            totals[self.names[process]] += seconds
        return sorted(((name, counts[name], total) for name, total in totals.items()), key=lambda row: -row[2])

    def total_at(self, at: float) -> float:
        """Return the CPU seconds of all processes up to a time (seconds since 1970)."""
        return max((total for when, total in self.history if when <= at), default=0.0)

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self._sample()

    def _sample(self) -> None:
        stats: dict[int, tuple[int, float]] = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has just ended
                continue
            stats[int(entry)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
        # A process whose parent has died becomes a child of init, so members are remembered.
        has_grown = True
        while has_grown:
            new = {p for p, (parent, _) in stats.items() if parent in self._family} - self._family
            self._family |= new
            has_grown = bool(new)
        for process in self._family & stats.keys():
            self.seconds[process] = stats[process][1]
            self.names[process] = _title(process) or self.names.get(process, "?")
        self.history.append((time.time(), sum(self.seconds.values())))


def _title(process: int) -> str:
    """Return a short title of a process: `ray::Actor` for Ray's workers, the script or program for others."""
    try:
        words = Path("/proc", str(process), "cmdline").read_text().replace("\0", " ").split()
    except OSError:
        return ""
    if not words:
        return ""
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0].partition("(")[0]
    named = next((word for word in words[1:] if word.endswith(".py")), None)
    if named is None and "-m" in words:
        named = words[words.index("-m") + 1]
    return Path(named or words[0]).name


def run_recorded(command: list[str]) -> tuple[list[tuple[float, str]], int, CpuClock]:
    """Run a command; return its output lines with their times (seconds since 1970), its exit status and a CPU clock."""
    lines = [(time.time(), "starting Python, importing the driver's libraries")]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
        CpuClock(process.pid) as clock,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.time(), line.strip()))
    return lines, process.returncode, clock


def split_phases(lines: list[tuple[float, str]], events: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Return start (seconds since 1970) and name of each phase; the last entry is the end of the first step."""
    first_step = next(event["at"] for event in events if event["event"] == "step")
    lines_of_phases = [each for each in lines if not each[1].startswith(RESULT)]
    started = lines_of_phases + [(event["at"], EVENTS[event["event"]]) for event in events if event["event"] in EVENTS]
    return [*sorted(each for each in started if each[0] < first_step), (first_step, "first step taken")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="[CONFIG.yaml] section.field=value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_startup-") as folder:
        overrides = [*arguments.overrides, "grpo.max_steps=1", f"run.storage_path={folder}", "run.name=run"]
        lines, status, clock = run_recorded([sys.executable, "-m", "grpo_ray.cli", "train", *overrides])
        if status:
            raise SystemExit("\n".join(text for _, text in lines[1:]))
        events = [json.loads(row) for row in Path(folder, "run", "events.jsonl").read_text().splitlines()]
    phases = split_phases(lines, events)
    print(f"{'seconds':>8} {'CPU':>7}  phase")
    for (at, phase), (end, _) in itertools.pairwise(phases):
        print(f"{end - at:8.1f} {clock.total_at(end) - clock.total_at(at):7.1f}  {phase}")
    total, cpu = phases[-1][0] - phases[0][0], clock.total_at(phases[-1][0])
    print(f"{total:8.1f} {cpu:7.1f}  to the first step; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n")
    print(f"{'CPU':>8} {'count':>6}  processes of the whole run ({len(clock.seconds)} in total)")
    for name, count, seconds in clock.by_name():
        print(f"{seconds:8.1f} {count:6}  {name}")
    print(f"{sum(clock.seconds.values()):8.1f}  total, {time.time() - phases[0][0]:.1f} s to the end of the command")


if __name__ == "__main__":
    main()
