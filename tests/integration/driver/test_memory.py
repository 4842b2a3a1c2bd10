"""Test of the memory of a whole run, including its Ray cluster."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

GIB = 2**30


class MemoryWatch:
    """Sampler of the memory of a process and its descendants, with shared pages counted once (PSS)."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self.peak = max(self.peak, sum(map(self._pss, self._process_tree())))

    def _process_tree(self) -> Iterator[int]:
        parents = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:  # the process has just ended
                    continue
        for process in parents:
            ancestor = process
            while ancestor in parents and ancestor != self.root:
                ancestor = parents[ancestor]
            if ancestor == self.root:
                yield process

    @staticmethod
    def _pss(process: int) -> int:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.mark.slow
def test_run_of_two_workers_stays_under_6_gib(policy: Path, tmp_path: Path) -> None:
    """Measure the command with its own Ray cluster: driver, controller, workers, engines, verifiers."""
    environment = os.environ | {"RAY_ADDRESS": "local"}
    command = [
        sys.executable, "-m", "grpo_ray.cli", "train", f"run.storage_path={tmp_path}", f"model.path={policy}",
        "grpo.max_steps=3", "grpo.max_completion_length=40",
    ]  # fmt: skip
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run,
        MemoryWatch(run.pid) as memory,
    ):
        output, _ = run.communicate()
    assert run.returncode == 0 and "held-out after" in output
    assert 1 * GIB < memory.peak < 6 * GIB, f"{memory.peak / GIB:.2f} GiB"
