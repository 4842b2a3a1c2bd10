"""A real Ray cluster of several nodes on this machine, for tests in which machines come and go.

A process can be connected to one cluster only, and the other tests' own is connected in theirs. So what a test runs on
this cluster it runs in a process of its own (`Nodes.drive`), and the cluster is kept by one of its own too: starting a
head turns Ray's connection of the whole process (its key-value store) towards it.
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
    """A head without CPUs, and nodes that are added, killed and drained. A node is known by its id (hex)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.workers: list[str] = []
        """The nodes in the order of their coming, gone ones too."""
        self._environment = os.environ | {
            # Ray writes the address of the latest cluster to a file there, where a plain ray.init() would find it.
            "RAY_TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
        }
        self._drivers: list[subprocess.Popen[bytes]] = []
        with (folder / "keeper.log").open("wb") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, __file__, str(folder)],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.address = self._answer()
        """What RAY_ADDRESS is set to."""

    def add_node(self, cpus: int = 2, **environment: str) -> str:
        """One more node, alive on return.

        environment: variables that its processes have besides.
        """
        self.workers.append(self._ask("add", cpus=cpus, environment=environment))
        return self.workers[-1]

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once (SIGKILL), as when a machine loses power."""
        self._ask("kill", node=node)

    def drain_node(self, node: str, deadline_s: float) -> None:
        """Announce, as a cloud does, that the node will be taken away in so many seconds.

        Ray ends it as soon as nothing runs on it; if something still does at that time, ending it is the caller's.
        """
        self._ask("drain", node=node, deadline_ms=int((time.time() + deadline_s) * 1000))

    def drive(self, function: Callable[..., None], **settings: Any) -> subprocess.Popen[bytes]:
        """Start a top-level function of a test module in a process of its own, connected to this cluster.

        settings: its arguments, in JSON's types. What it prints goes to `driver.log` of the folder.
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
        """End every process that was started here."""
        for driver in self._drivers:
            driver.kill()
            driver.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(300)

    def _ask(self, what: str, **settings: Any) -> str:
        assert self._keeper.stdin is not None
        print(json.dumps({"what": what, **settings}), file=self._keeper.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        assert line, f"the cluster's keeper has ended: {(self.folder / 'keeper.log').read_text()[-2000:]}"
        return str(json.loads(line))


@contextmanager
def several_nodes(*cpus: int) -> Iterator[Nodes]:
    """A cluster with a node for each number of CPUs, besides its head, which takes no work."""
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))  # a short path: Ray puts sockets there
    (folder / "ray").mkdir()
    nodes = Nodes(folder)
    try:
        for count in cpus:
            nodes.add_node(count)
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


def keep(folder: str) -> None:
    """The cluster's keeper: does what it reads, a line of JSON each, and ends all nodes when there is no more."""
    from ray._raylet import GcsClient
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

    def add(cpus: int, environment: dict[str, str]) -> str:
        node = cluster.add_node(num_cpus=cpus, temp_dir=folder, env_vars=environment)
        nodes[node.node_id] = node
        return node.node_id

    def kill(node: str) -> str:
        cluster.remove_node(nodes.pop(node), allow_graceful=False)
        return node

    def drain(node: str, deadline_ms: int) -> str:
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = GcsClient(address=cluster.address)
        accepted, why_not = client.drain_node(node, reason, "the test takes the node away", deadline_ms)
        assert accepted, why_not
        return node

    deeds = {"add": add, "kill": kill, "drain": drain}
    print(json.dumps(cluster.address), flush=True)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(deeds[asked.pop("what")](**asked)), flush=True)
    finally:
        for node in nodes.values():
            cluster.remove_node(node, allow_graceful=False)
        cluster.remove_node(cluster.head_node, allow_graceful=False)


if __name__ == "__main__":
    keep(sys.argv[1])
