"""A real Ray cluster whose network can be cut: a head and several nodes, each in Linux namespaces of its own.

A machine is a network with one cable, and a tree of processes below a first one; when that one ends, the kernel ends
the whole tree, as when a machine loses power, and takes the cable away. The first one ends when its input does, so
nothing is left over even when the tests themselves are killed. Nothing of all this can be seen from outside but
files: any number of clusters stand side by side with the same names and addresses.
"""

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from failing_storage import wait_for

HELPERS = Path(__file__).parent
NAMESPACES = ["--net", "--pid", "--mount", "--uts"]
UNSHARE = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
HEAD, MOST = 1, 20
LONG = 300.0
"""Seconds that a busy machine may take to start a node."""


class Machine:
    """Namespaces, and what runs in them."""

    def __init__(self, log: Path, name: str, hosts: Path, command: list[str], environment: Mapping[str, str]):
        """
        log: file for what its processes print.
        name: its host name.
        hosts: its /etc/hosts, in which libraries look up addresses and names.
        command: what runs on it once it is plugged in, with this environment.
        """
        named = f"echo {name} > /proc/sys/kernel/hostname && mount --bind {hosts} /etc/hosts"
        # Its first process ends when the command does, and when its own input does.
        script = f"{named} && echo made; read -r; exec 3<&0; {shlex.join(command)} >&2 & cat <&3 & wait -n"
        with log.open("ab") as file:
            self._outer = subprocess.Popen(
                [*UNSHARE, "bash", "-c", script],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        assert self._outer.stdin is not None and self._outer.stdout is not None
        assert self._outer.stdout.readline() == "made\n", log.read_text()
        self.log = log
        self.pid = self._outer.pid
        """A process in its network."""
        self.first = int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text())
        """The process that all others on it end with."""

    def plug_in(self, address: str) -> None:
        """Set its end of the cable up, and begin what runs on it."""
        self.ip("link set lo up")
        self.ip(f"addr add {address}/24 dev cable")
        self.ip("link set cable up")
        self.ip("route add default dev cable")  # libraries ask for the way out to learn their own address
        assert self._outer.stdin is not None
        print(file=self._outer.stdin, flush=True)

    def ip(self, command: str) -> None:
        """Run a command of `ip` in its network."""
        subprocess.run(["nsenter", "--net", f"--target={self.pid}", "ip", *command.split()], check=True)

    def enter(self) -> list[str]:
        """What to write before a command that is to run on it."""
        return ["nsenter", *NAMESPACES, f"--target={self.first}", "--"]

    def lives(self) -> bool:
        return self._outer.poll() is None

    def kill(self) -> None:
        """Kill all that runs on it at once (SIGKILL); they are gone on return."""
        if self.lives():
            with suppress(ProcessLookupError):
                os.kill(self.first, 9)
            self._outer.wait()


class Network:
    """A head, which takes no work, and nodes that come and go. A node is known by its number, from 2 on."""

    def __init__(self, folder: Path, **environment: str):
        """
        folder: for what Ray writes; a short path, since it puts sockets there.
        environment: of all processes on all machines.
        """
        self.folder = folder
        self.address = f"{address(HEAD)}:6379"
        """What RAY_ADDRESS is set to."""
        self.workers: list[int] = []
        """The nodes in the order of their coming, gone ones too."""
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **environment,
        }
        self._hosts = folder / "hosts"
        names = "".join(f"{address(number)} {host_name(number)}\n" for number in range(HEAD, MOST + 1))
        self._hosts.write_text("127.0.0.1 localhost\n" + names)
        self._machines: dict[int, Machine] = {}
        self._drivers: list[subprocess.Popen[str]] = []

    def add_head(self) -> None:
        head = self._machine(HEAD, "--head", "--num-cpus=0", "--include-dashboard=false")
        head.ip("link add cable type bridge")
        head.ip("link add nowhere up type bridge")
        self._begin(HEAD)

    def add_node(self, cpus: int = 3) -> int:
        """One more node, alive on return; its CPUs are what it says it has."""
        number = max(self._machines) + 1
        node = self._machine(number, f"--address={self.address}", f"--num-cpus={cpus}")
        self._ip(f"link add port-{number} type veth peer name cable netns {node.pid}")
        self._ip(f"link set port-{number} master cable up")
        self._begin(number)
        self.workers.append(number)
        return number

    def kill_node(self, number: int) -> None:
        """Kill all processes of a node at once. Its system still closes their connections."""
        self._machines[number].kill()

    def cut_node(self, number: int) -> None:
        """Cut a node off from all others. Nobody is told: what is sent is lost."""
        self._ip(f"link set port-{number} master nowhere")

    def mend_node(self, number: int) -> None:
        """Undo `cut_node`."""
        self._ip(f"link set port-{number} master cable")

    def cut_between(self, *numbers: int) -> None:
        """Cut nodes off from each other, but not from the head."""
        for number in numbers:
            self._ip(f"link set port-{number} type bridge_slave isolated on")

    def mend_between(self, *numbers: int) -> None:
        """Undo `cut_between`."""
        for number in numbers:
            self._ip(f"link set port-{number} type bridge_slave isolated off")

    def train(self, overrides: Sequence[str]) -> subprocess.Popen[str]:
        """Start `grpo-ray train` on the head."""
        driver = subprocess.Popen(
            [*self._machines[HEAD].enter(), sys.executable, "-m", "grpo_ray.cli", "train", *overrides],
            env=self.environment | {"RAY_ADDRESS": self.address, "RAY_TMPDIR": self._temporary(HEAD)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._drivers.append(driver)
        return driver

    def close(self) -> None:
        """End every process that was started here."""
        for machine in reversed(self._machines.values()):
            machine.kill()
        for driver in self._drivers:
            driver.wait()

    def _machine(self, number: int, *options: str) -> Machine:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        ray += [f"--node-ip-address={address(number)}", f"--temp-dir={self._temporary(number)}", *options]
        environment = self.environment | {"RAY_TMPDIR": self._temporary(number)}
        log, name = self.folder / f"{number}.log", host_name(number)
        self._machines[number] = Machine(log, name, self._hosts, ray, environment)
        return self._machines[number]

    def _begin(self, number: int) -> None:
        machine = self._machines[number]
        machine.plug_in(address(number))
        wait_for(
            lambda: "Ray runtime started" in machine.log.read_text() or not machine.lives(), f"node {number}", LONG
        )
        assert machine.lives(), machine.log.read_text()[-2000:]

    def _temporary(self, number: int) -> str:
        return str(self.folder / str(number))

    def _ip(self, command: str) -> None:
        self._machines[HEAD].ip(command)


def address(number: int) -> str:
    return f"10.77.0.{number}"


def host_name(number: int) -> str:
    return f"node-{number}"


def why_not() -> str | None:
    """Why no namespaces can be made here, or None."""
    needed = ["unshare", "nsenter", "ip", "bash"]
    if missing := [tool for tool in needed if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} here"
    bridge = "ip link add cable type bridge && ip link add port type veth peer name away"
    tried = subprocess.run([*UNSHARE, "bash", "-c", bridge], capture_output=True, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip()


@contextmanager
def separate_nodes(*cpus: int, **environment: str) -> Iterator[Network]:
    """A cluster with a node for each number of CPUs, besides its head. Skips the test where it cannot be made."""
    if reason := why_not():
        pytest.skip(f"no network namespaces can be made: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="net-", dir="/tmp"))
    network = Network(folder, **environment)
    try:
        network.add_head()
        for count in cpus:
            network.add_node(count)
        yield network
    finally:
        network.close()
        shutil.rmtree(folder, ignore_errors=True)
