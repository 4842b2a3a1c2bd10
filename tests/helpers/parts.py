"""Long checks on a rented machine, in parts: each is a command of its own with a time limit.

A part that fails or hangs does not stop the others, and the outcome of each part is written as soon as it ends, so that
a machine that goes back early leaves results behind.
"""

import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

MARKER = "GRPO_RAY_PART"
"""Environment variable by which the processes of a part are found, also those that have left its process group."""
MEMORY_RELEASE = 2.0
"""Seconds until the memory of killed processes is free again on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command with a time limit."""

    name: str
    command: Sequence[str]
    limit: float
    """Seconds after which all its processes are killed."""
    expected: float = 0.0
    """Seconds that it is expected to take. If less is left, it is not started."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of this process."""


@dataclass(frozen=True)
class Outcome:
    """End of a part."""

    name: str
    status: str
    """"passed", "failed", "killed" at its time limit, or "left out" for lack of time."""
    seconds: float
    reason: str
    """Last line of its output, unless it passed."""

    def __str__(self) -> str:
        return f"{self.status:9} {self.name:24} {self.seconds:5.0f} s  {self.reason}".rstrip()


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    seconds: float,
    after: Callable[[Outcome], None] = lambda outcome: None,
    at_once: int = 1,
) -> list[Outcome]:
    """Run parts in order, print their outcomes, and append them to `outcomes.jsonl`.

    Args:
        folder: gets `outcomes.jsonl`, and the output of each part as `<name>.log`.
        seconds: time for all parts together.
        after: called with the outcome of each part that was started; never by two parts at once.
        at_once: parts that run at the same time. More than one where nothing is measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + seconds
    one_at_a_time = threading.Lock()

    def outcome_of(part: Part) -> Outcome:
        left = ends - time.monotonic()
        is_started = left > part.expected
        if is_started:
            outcome = run_part(part, folder, min(left, part.limit))
        else:
            outcome = Outcome(part.name, "left out", 0.0, f"takes about {part.expected:.0f} s, {max(0, left):.0f} left")
        with one_at_a_time:
            if is_started:
                after(outcome)
            print(outcome, flush=True)
            with (folder / "outcomes.jsonl").open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        return outcome

    if at_once == 1:  # in this thread, so that Ctrl-C ends the part
        return [outcome_of(part) for part in parts]
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(outcome_of, parts))


def run_part(part: Part, folder: Path, limit: float) -> Outcome:
    """Run one part; no process of it is left afterwards."""
    began = time.monotonic()
    mark = uuid.uuid4().hex
    log = folder / f"{part.name}.log"
    environment = os.environ | part.environment | {MARKER: mark, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            part.command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            killed = kill_marked(mark)
            process.wait()
    if killed:
        time.sleep(MEMORY_RELEASE)
    seconds = time.monotonic() - began
    if code is None:
        return Outcome(part.name, "killed", seconds, f"not done after {limit:.0f} s; {last_line(log)}")
    return Outcome(part.name, "failed" if code else "passed", seconds, last_line(log) if code else "")


def kill_marked(mark: str) -> int:
    """Kill all processes that were started with a mark in their environment; return how many there were."""
    killed: set[int] = set()
    while found := marked_processes(mark):
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:  # it has ended meanwhile
                continue
        killed |= set(found)
        time.sleep(0.1)
    return len(killed)


def marked_processes(mark: str) -> list[int]:
    """Return the ids of the processes with a mark, without those that have ended and are not yet waited for."""
    wanted = f"{MARKER}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            has_mark = wanted in (folder / "environ").read_bytes().split(b"\0")  # empty for a zombie
        except OSError:  # it has ended, or belongs to another user
            continue
        if has_mark:
            found.append(int(folder.name))
    return found


def last_line(log: Path) -> str:
    """Return the last line of an output that is not empty."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"
