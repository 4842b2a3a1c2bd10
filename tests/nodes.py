"""A real Ray cluster of several nodes on this machine, for tests in which machines come and go.

A process can be connected to one cluster only, and the other tests' own is connected here; so what a test runs on
this cluster it runs in a process of its own (`Nodes.drive`).
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

import ray._private.services
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

TESTS = Path(__file__).parent


class Nodes:
    """A head without CPUs, and nodes that are added, killed and drained.

    workers: handles of the nodes that it began with.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self._environment = {
            # Ray writes the address of the latest cluster to a file there, where a plain ray.init() would find it.
            "RAY_TMPDIR": folder,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
        }
        (self.folder / "ray").mkdir()
        self.workers: list[Any] = []
        self._drivers: list[subprocess.Popen[bytes]] = []
        with patched(self._environment):
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0,
                    "include_dashboard": False,
                    "dashboard_agent_listen_port": 0,
                    "temp_dir": folder,
                },
            )

    @property
    def address(self) -> str:
        """What RAY_ADDRESS is set to."""
        return self._cluster.address

    def add_node(self, cpus: int = 2) -> Any:
        """One more node, alive on return; its handle has a `node_id` (hex)."""
        with patched(self._environment):
            return self._cluster.add_node(num_cpus=cpus, temp_dir=str(self.folder))

    def kill_node(self, node: Any) -> None:
        """Kill all processes of a node at once (SIGKILL), as when a machine loses power."""
        self._cluster.remove_node(node, allow_graceful=False)

    def drain_node(self, node: Any, deadline_s: float) -> None:
        """Announce that the node will be taken away in so many seconds. Taking it away is the caller's."""
        accepted, why_not = GcsClient(address=self.address).drain_node(
            node.node_id,
            DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "the test takes the node away",
            int((time.time() + deadline_s) * 1000),
        )
        assert accepted, why_not

    def drive(self, function: Callable[..., None], **settings: Any) -> subprocess.Popen[bytes]:
        """Start a top-level function of a test module in a process of its own, connected to this cluster.

        settings: its arguments, in JSON's types. What it prints goes to `driver.log` of the folder.
        """
        code = f"import json, sys, {function.__module__} as m; m.{function.__name__}(**json.loads(sys.argv[1]))"
        with (self.folder / "driver.log").open("ab") as log:
            driver = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(settings)],
                env=os.environ | self._environment | {"RAY_ADDRESS": self.address},
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
        # Not Cluster.shutdown(): it also resets the connection of this process to its own cluster.
        with patched(self._environment):
            for node in [*self._cluster.worker_nodes, self._cluster.head_node]:
                self._cluster.remove_node(node, allow_graceful=False)
        ray._private.services.find_gcs_addresses.cache_clear()


@contextmanager
def several_nodes(*cpus: int) -> Iterator[Nodes]:
    """A cluster with a node for each number of CPUs, besides its head, which takes no work."""
    folder = tempfile.mkdtemp(prefix="nodes-", dir="/tmp")  # a short path: Ray puts sockets there
    nodes = Nodes(folder)
    try:
        nodes.workers = [nodes.add_node(count) for count in cpus]
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def patched(environment: dict[str, str]) -> Iterator[None]:
    """The environment with some variables set, as it was afterwards."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
