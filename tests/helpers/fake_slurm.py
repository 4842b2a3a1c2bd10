"""A small stand-in for Slurm on network namespaces: `srun`, `scontrol`, requeues, and a job's loss of a node.

Each machine runs `slurmd`, which starts the tasks that it finds in its folder of the spool. As in Slurm, the batch
script runs on the first node, `srun` starts one task on each node, signals of `sbatch --signal=B:...` reach the batch
script alone, and a job that is requeued starts anew on nodes without its old processes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from network_namespaces import Network, host_name, unsupported_reason

POLL_SECONDS = 0.1
JOB = 4711
LONG = 600.0
"""Seconds that a job may take for an action on a busy machine."""


class FakeSlurm(Network):
    """Machines 1, 2, ... with `slurmd`, and one job at a time."""

    started_line = "slurmd has started"

    def __init__(self, folder: Path, path: Sequence[Path], cpus: int):
        """
        Args:
            folder: folder for the spool, the home of the user and Ray's files; a short path.
            path: folders of programs for the job, before those of the system.
            cpus: CPUs of each node, for Ray and the job.
        """
        home, programs = folder / "home", folder / "bin"
        home.mkdir()
        programs.mkdir()
        for name in ("srun", "scontrol"):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
            program.chmod(0o755)
        found = os.pathsep.join([*map(str, path), str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.spool, self.output = folder / "spool", folder / "slurm.out"
        super().__init__(folder, PATH=found, HOME=str(home), FAKE_SLURM=str(self.spool))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # the job makes its own token
            del self.environment[name]
        self.cpus, self.starts = cpus, 0

    def command(self, number: int, *options: str) -> list[str]:
        (self.spool / host_name(number)).mkdir(parents=True)
        return [sys.executable, __file__, "slurmd", host_name(number)]

    def sbatch(self, script: Path, arguments: Sequence[str], nodes: Sequence[int]) -> None:
        """Start a job, or start it again on these nodes; its output is appended to `output`."""
        names = [host_name(number) for number in nodes]
        variables = {
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": f"node-[{','.join(map(str, nodes))}]",
            "SLURM_JOB_NUM_NODES": len(nodes),
            "SLURM_CPUS_ON_NODE": self.cpus,
            "SLURM_RESTART_COUNT": self.starts,
        }
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        self.starts += 1
        self._script, self._arguments, self._nodes = script, list(arguments), list(nodes)
        (self.spool / "requeue").unlink(missing_ok=True)
        self._batch = Task(self.spool / names[0], f"batch-{self.starts}")
        self._batch.start(["bash", str(script), *arguments], environment, self.output)

    def signal(self, name: str) -> None:
        """Send a signal to the batch script, as Slurm does before the end of the job's time."""
        self._batch.signal(name)

    def status(self) -> int | None:
        """Return the exit status of the batch script; None while it runs."""
        return self._batch.status()

    def wait(self) -> int:
        """Wait for the end of the batch script; return its exit status."""
        wait_for(lambda: self.status() is not None, "the end of the job", LONG)
        status = self.status()
        assert status is not None
        return status

    def is_requeued(self) -> bool:
        """Return True once the job has called `scontrol requeue`."""
        return (self.spool / "requeue").exists()

    def restart(self, nodes: Sequence[int] | None = None) -> None:
        """End all processes of the job, and start it again, on other nodes if any are given."""
        for number in self._nodes:
            if self._machines[number].is_alive():
                self.clean(number)
        self.sbatch(self._script, self._arguments, nodes or self._nodes)

    def clean(self, number: int) -> None:
        """End all processes of the job on a node."""
        request = self.spool / host_name(number) / "clean"
        request.touch()
        wait_for(lambda: not request.exists(), f"the end of the job on node {number}", LONG)


class Task:
    """Process of a job on a node, known by its files in the node's folder."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self._write("json", json.dumps([list(command), dict(environment), str(output)]))

    def signal(self, name: str) -> None:
        self._write("signal", name)

    def status(self) -> int | None:
        """Return the exit status, as a shell does; None while it runs."""
        path = self.folder / f"{self.name}.status"
        return int(path.read_text()) if path.exists() else None

    def _write(self, kind: str, text: str) -> None:
        draft = self.folder / f".{self.name}.{kind}"
        draft.write_text(text)
        draft.rename(self.folder / f"{self.name}.{kind}")  # `slurmd` sees whole files only


@contextmanager
def fake_slurm(nodes: int, *path: Path, cpus: int = 3) -> Iterator[FakeSlurm]:
    """Start machines with `slurmd`. Skip the test where namespaces are not supported."""
    if reason := unsupported_reason():
        pytest.skip(f"network namespaces are not supported: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    slurm = FakeSlurm(folder, path, cpus)
    try:
        slurm.add_head()
        for _ in range(nodes - 1):
            slurm.add_node()
        yield slurm
    finally:
        slurm.close()
        shutil.rmtree(folder, ignore_errors=True)


def spool() -> Path:
    return Path(os.environ["FAKE_SLURM"])


def slurmd(node: str) -> None:
    """Start the tasks of this node, pass on their signals, and write their exit statuses."""
    folder = spool() / node
    running: dict[str, subprocess.Popen[bytes]] = {}
    print(FakeSlurm.started_line, file=sys.stderr, flush=True)
    while True:
        for path in sorted(folder.glob("*.json")):
            command, environment, output = json.loads(path.read_text())
            path.unlink()
            # Nodes have disks of their own.
            environment["RAY_TMPDIR"] = os.environ["RAY_TMPDIR"]
            with open(output, "ab") as file:
                running[path.stem] = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
        for path in folder.glob("*.signal"):
            number = signal.Signals[f"SIG{path.read_text()}"]
            path.unlink()
            if path.stem in running:
                # A task's processes all get it, the batch script gets it alone.
                send = os.kill if path.stem.startswith("batch") else os.killpg
                send(running[path.stem].pid, number)
        for name, process in list(running.items()):
            if (code := process.poll()) is not None:
                del running[name]
                (folder / f".{name}").write_text(str(code if code >= 0 else 128 - code))
                (folder / f".{name}").rename(folder / f"{name}.status")
        if (request := folder / "clean").exists():
            while others := processes_of_jobs():
                for pid in others:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(POLL_SECONDS)
                for process in running.values():
                    process.poll()
            running.clear()
            request.unlink()
        time.sleep(POLL_SECONDS)


def processes_of_jobs() -> list[int]:
    """Return the living processes of this machine that are not in the session of `slurmd`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            state = (path / "stat").read_text().rpartition(")")[2].split()
            if state[0] != "Z" and int(state[3]) != os.getsid(0):
                found.append(int(path.name))
    return found


def srun(arguments: Sequence[str]) -> int:
    """Start a command on all nodes of the job; return the highest exit status."""
    options = [word for word in arguments[: next(i for i, w in enumerate(arguments) if not w.startswith("-"))]]
    command, names = arguments[len(options) :], expand(os.environ["SLURM_JOB_NODELIST"])
    assert f"--nodes={len(names)}" in options and "--ntasks-per-node=1" in options, options
    environment = dict(os.environ)
    step = f"step-{os.environ['SLURM_RESTART_COUNT']}-{os.getpid()}"
    tasks = [Task(spool() / name, step) for name in names]

    def forward(number: int, frame: Any) -> None:
        for task in tasks:
            task.signal(signal.Signals(number).name.removeprefix("SIG"))

    signal.signal(signal.SIGTERM, forward)
    for number, task in enumerate(tasks):
        output = spool().parent / "slurm.out"
        task.start(command, environment | {"SLURM_NODEID": str(number), "SLURM_PROCID": str(number)}, output)
    while None in (codes := [task.status() for task in tasks]):
        if "--kill-on-bad-exit=1" in options and any(codes):
            for task, code in zip(tasks, codes, strict=True):
                if code is None:
                    task.signal("KILL")
        time.sleep(POLL_SECONDS)
    return max(code for code in codes if code is not None)


def expand(names: str) -> list[str]:
    """Return the hosts of `node-[1,3]` or `node-1`."""
    found = re.fullmatch(r"([^\[]+)\[([\d,]+)\]", names)
    return [found[1] + number for number in found[2].split(",")] if found else [names]


def scontrol(arguments: Sequence[str]) -> int:
    """Serve `scontrol show hostnames LIST` and `scontrol requeue JOB`."""
    match list(arguments):
        case ["show", "hostnames", names]:
            print("\n".join(expand(names)))
        case ["requeue", job] if job == str(JOB):
            (spool() / "requeue").touch()
        case _:
            print(f"scontrol: unknown command: {arguments}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    program, words = sys.argv[1], sys.argv[2:]
    if program == "slurmd":
        slurmd(*words)
    sys.exit(srun(words) if program == "srun" else scontrol(words))
