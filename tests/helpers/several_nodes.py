"""A real Ray cluster of several nodes on this machine, for tests in which nodes join and leave.

A process can be connected to one cluster only, and the test process is connected to the cluster of the other tests.
So drivers of this cluster run in separate processes (`Nodes.drive`). The cluster itself is managed by a separate
process too, because starting a head node redirects Ray's key-value store in the whole process.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent


class Nodes:
    """Head node without CPUs, and nodes that can be added, killed and drained, identified by their id (hex)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.workers: list[str] = []
        """Ids of all nodes ever added, in order."""
        self._environment = os.environ | {
            # Ray stores the address of the latest cluster in this folder; a plain ray.init() connects to it.
            "RAY_TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
        }
        self._drivers: list[subprocess.Popen[bytes]] = []
        with (folder / "manager.log").open("wb") as log:
            self._manager = subprocess.Popen(
                [sys.executable, __file__, str(folder)],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.address = self._response()
        """Value for RAY_ADDRESS."""

    def add_node(self, cpus: int = 2, gpus: int = 0, **environment: str) -> str:
        """Add a node and return its id once it is alive.

        Args:
            gpus: GPUs that Ray counts; they need not exist.
            environment: additional environment variables of its processes.
        """
        self.workers.append(self._request("add", cpus=cpus, gpus=gpus, environment=environment))
        return self.workers[-1]

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once (SIGKILL), as when a machine loses power."""
        self._request("kill", node=node)

    def drain_node(self, node: str, deadline_s: float) -> None:
        """Announce, like a cloud provider, that the node will be taken away in `deadline_s` seconds.

        Ray ends the node once nothing runs on it. If something still runs at the deadline, the caller has to end it.
        """
        self._request("drain", node=node, deadline_ms=int((time.time() + deadline_s) * 1000))

    def drive(self, function: Callable[..., None], **settings: Any) -> subprocess.Popen[bytes]:
        """Start a top-level function of a test module in a separate process that is connected to this cluster.

        Args:
            function: the function; its output goes to `driver.log` in the folder.
            settings: its arguments, in JSON's types.
        """
        code = f"import json, sys, {function.__module__} as m; m.{function.__name__}(**json.loads(sys.argv[1]))"
        with (self.folder / "driver.log").open("ab") as log:
            driver = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(settings)],
                env=self._environment | {"RAY_ADDRESS": self.address},
                stdout=log,
                stderr=log,
            )
        self._drivers.append(driver)
        return driver

    def close(self) -> None:
        """End all processes of the cluster and its drivers."""
        for driver in self._drivers:
            driver.kill()
            driver.wait()
        assert self._manager.stdin is not None
        self._manager.stdin.close()
        self._manager.wait(300)

    def _request(self, command: str, **settings: Any) -> str:
        assert self._manager.stdin is not None
        print(json.dumps({"command": command, **settings}), file=self._manager.stdin, flush=True)
        return self._response()

    def _response(self) -> str:
        assert self._manager.stdout is not None
        line = self._manager.stdout.readline()
        assert line, f"the manager of the cluster ended: {(self.folder / 'manager.log').read_text()[-2000:]}"
        return str(json.loads(line))


@contextmanager
def several_nodes(*cpus: int) -> Iterator[Nodes]:
    """Start a cluster with one node per number of CPUs, and a head node without CPUs."""
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))  # short: paths of sockets are limited
    (folder / "ray").mkdir()
    nodes = Nodes(folder)
    try:
        for count in cpus:
            nodes.add_node(count)
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


def manage(folder: str) -> None:
    """Execute the commands on standard input, one JSON object per line; at its end, stop all nodes."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # not in Ray's stub
    from ray.cluster_utils import Cluster
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "dashboard_agent_listen_port": 0,
            "temp_dir": folder,
        },
    )
    nodes: dict[str, Any] = {}

    def add(cpus: int, gpus: int, environment: dict[str, str]) -> str:
        node = cluster.add_node(num_cpus=cpus, num_gpus=gpus, temp_dir=folder, env_vars=environment)
        nodes[node.node_id] = node
        return node.node_id

    def kill(node: str) -> str:
        cluster.remove_node(nodes.pop(node), allow_graceful=False)
        return node

    def drain(node: str, deadline_ms: int) -> str:
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = GcsClient(address=cluster.address)
        accepted, reason_refused = client.drain_node(node, reason, "drained by a test", deadline_ms)
        assert accepted, reason_refused
        return node

    commands: dict[str, Callable[..., str]] = {"add": add, "kill": kill, "drain": drain}
    print(json.dumps(cluster.address), flush=True)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(commands[request.pop("command")](**request)), flush=True)
    finally:
        for node in nodes.values():
            cluster.remove_node(node, allow_graceful=False)
        cluster.remove_node(cluster.head_node, allow_graceful=False)


if __name__ == "__main__":
    manage(sys.argv[1])
