"""A real Ray cluster whose network can be cut: a head and several nodes, each in its own Linux namespaces.

A machine consists of a network namespace with one interface and a tree of processes. When the first process of the
tree ends, the kernel kills the whole tree, as at a power failure, and removes the interface. The first process ends
when its standard input is closed, so nothing is left over even if the tests are killed. Apart from files, nothing is
visible outside the namespaces: several clusters can run side by side with the same names and addresses.
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
HEAD, MAX_NODES = 1, 20
"""Number of the head node, and the largest number of a node."""
START_TIMEOUT_SECONDS = 300.0
"""Time limit for the start of a node on a busy machine, seconds."""


class Machine:
    """Linux namespaces, and the processes in them."""

    def __init__(self, log: Path, name: str, hosts: Path, command: list[str], environment: Mapping[str, str]):
        """
        Args:
            log: file for the output of its processes.
            name: host name.
            hosts: file mounted as /etc/hosts, where libraries look up addresses and names.
            command: command that runs once the network is connected.
            environment: environment variables of the command.
        """
        set_name = f"echo {name} > /proc/sys/kernel/hostname && mount --bind {hosts} /etc/hosts"
        # The first process ends when the command ends or when standard input is closed.
        script = f"{set_name} && echo ready; read -r; exec 3<&0; {shlex.join(command)} >&2 & cat <&3 & wait -n"
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
        assert self._outer.stdout.readline() == "ready\n", log.read_text()
        self.log = log
        self.pid = self._outer.pid
        """Process in its network namespace."""
        self.first = int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text())
        """First process: when it ends, all others on the machine end."""

    def connect(self, address: str) -> None:
        """Configure its network interface and start its command."""
        self.ip("link set lo up")
        self.ip(f"addr add {address}/24 dev cable")
        self.ip("link set cable up")
        self.ip("route add default dev cable")  # libraries use the default route to find their own address
        assert self._outer.stdin is not None
        print(file=self._outer.stdin, flush=True)

    def ip(self, command: str) -> None:
        """Run an `ip` command in its network namespace."""
        subprocess.run(["nsenter", "--net", f"--target={self.pid}", "ip", *command.split()], check=True)

    def enter(self) -> list[str]:
        """Return the prefix of a command that runs on this machine."""
        return ["nsenter", *NAMESPACES, f"--target={self.first}", "--"]

    def is_alive(self) -> bool:
        return self._outer.poll() is None

    def kill(self) -> None:
        """Kill all of its processes with SIGKILL; return once they are gone."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.first, 9)
            self._outer.wait()


class Network:
    """Head node without CPUs, and nodes that join and leave, identified by their number, from 2."""

    started_line = "Ray runtime started"
    """Text in the log of a machine whose command has started."""

    def __init__(self, folder: Path, **environment: str):
        """
        Args:
            folder: folder for Ray's files; a short path, because the paths of sockets are limited.
            environment: environment variables of all processes on all machines.
        """
        self.folder = folder
        self.address = f"{address(HEAD)}:6379"
        """Value for RAY_ADDRESS."""
        self.workers: list[int] = []
        """Numbers of all nodes ever added, in order."""
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **environment,
        }
        self._hosts = folder / "hosts"
        names = "".join(f"{address(number)} {host_name(number)}\n" for number in range(HEAD, MAX_NODES + 1))
        self._hosts.write_text("127.0.0.1 localhost\n" + names)
        self._machines: dict[int, Machine] = {}
        self._drivers: list[subprocess.Popen[str]] = []

    def add_head(self) -> None:
        head = self._machine(HEAD, "--head", "--num-cpus=0", "--include-dashboard=false")
        head.ip("link add cable type bridge")
        head.ip("link add unplugged up type bridge")
        self._start(HEAD)

    def add_node(self, cpus: int = 3) -> int:
        """Add a node and return its number once it is alive; `cpus` is the number of CPUs that it reports to Ray."""
        number = max(self._machines) + 1
        node = self._machine(number, f"--address={self.address}", f"--num-cpus={cpus}")
        self._ip(f"link add port-{number} type veth peer name cable netns {node.pid}")
        self._ip(f"link set port-{number} master cable up")
        self._start(number)
        self.workers.append(number)
        return number

    def kill_node(self, number: int) -> None:
        """Kill all processes of a node at once. The kernel still closes their connections."""
        self._machines[number].kill()

    def cut_node(self, number: int) -> None:
        """Disconnect a node from all others. No connection is closed: packets are dropped silently."""
        self._ip(f"link set port-{number} master unplugged")

    def reconnect_node(self, number: int) -> None:
        """Undo `cut_node`."""
        self._ip(f"link set port-{number} master cable")

    def cut_between(self, *numbers: int) -> None:
        """Disconnect nodes from each other, but not from the head."""
        for number in numbers:
            self._ip(f"link set port-{number} type bridge_slave isolated on")

    def reconnect_between(self, *numbers: int) -> None:
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
        """End all processes of the cluster and its drivers."""
        for machine in reversed(self._machines.values()):
            machine.kill()
        for driver in self._drivers:
            driver.wait()

    def command(self, number: int, *options: str) -> list[str]:
        """Return the command that runs on a machine; `options` are those of `ray start`."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        return [*ray, f"--node-ip-address={address(number)}", f"--temp-dir={self._temporary(number)}", *options]

    def _machine(self, number: int, *options: str) -> Machine:
        environment = self.environment | {"RAY_TMPDIR": self._temporary(number)}
        log, name = self.folder / f"{number}.log", host_name(number)
        self._machines[number] = Machine(log, name, self._hosts, self.command(number, *options), environment)
        return self._machines[number]

    def _start(self, number: int) -> None:
        machine = self._machines[number]
        machine.connect(address(number))

        def started_or_ended() -> bool:
            return self.started_line in machine.log.read_text() or not machine.is_alive()

        wait_for(started_or_ended, f"node {number}", START_TIMEOUT_SECONDS)
        assert machine.is_alive(), machine.log.read_text()[-2000:]

    def _temporary(self, number: int) -> str:
        return str(self.folder / str(number))

    def _ip(self, command: str) -> None:
        self._machines[HEAD].ip(command)


def address(number: int) -> str:
    return f"10.77.0.{number}"


def host_name(number: int) -> str:
    return f"node-{number}"


def unsupported_reason() -> str | None:
    """Return the reason why namespaces cannot be created on this machine, or None."""
    tools = ["unshare", "nsenter", "ip", "bash"]
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"missing tools: {', '.join(missing)}"
    bridge = "ip link add cable type bridge && ip link add port type veth peer name away"
    attempt = subprocess.run([*UNSHARE, "bash", "-c", bridge], capture_output=True, text=True)
    return None if attempt.returncode == 0 else attempt.stderr.strip()


@contextmanager
def separate_nodes(*cpus: int, **environment: str) -> Iterator[Network]:
    """Start a cluster with one node per number of CPUs, and a head. Skip the test where this is not supported."""
    if reason := unsupported_reason():
        pytest.skip(f"network namespaces are not supported: {reason}")
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
