"""Private APIs of Ray's core that grpo_ray uses, each with the reason why no public one is enough.

All other modules import them from here, and those of Ray Train from `ray_train_internals.py`, which takes seconds to
import. `tests/unit/resilience/test_ray_internals.py` fails if Ray moves one of them, changes its signature, or changes
the source of a function that we extend or depend on.
"""

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_ray_address_file
from ray._private import parameter, services, worker
from ray._private.state import available_resources_per_node, state
from ray._private.utils import detect_fate_sharing_support
from ray._raylet import RAY_NODE_ID_KEY, GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.util.placement_group import PlacementGroup

__all__ = [
    "RecordedCluster",
    "Resources",
    "ended_cluster_process",
    "exclude_nodes",
    "free_resources",
    "has_autoscaler",
    "longer_start",
    "orphaned_placement_groups",
    "own_session",
    "raylet_executable",
    "recorded_cluster",
    "without_monitors",
    "without_prestarted_workers",
]

Resources = Mapping[str, float]
"""Name of a resource ("CPU", "GPU") -> amount."""

PRESTARTED = "--num_prestart_python_workers="
"""Argument of the raylet's program."""

PROBE_SECONDS = 2.0
"""Time limit of a connection to the head of a recorded cluster."""


@dataclass(frozen=True)
class RecordedCluster:
    """Cluster that the last `ray start` on this machine started or joined, as Ray has recorded it in a file."""

    address: str
    """Host and port of its head."""
    file: str
    """Path of Ray's file."""

    def is_alive(self) -> bool:
        """Return True if a driver on this machine can join it: one of its nodes runs here, and its head is reachable.

        `ray.init` waits for minutes for a head that is dead, and then ends the process. The file remains when a cluster
        is killed, or when the machine goes down.
        """
        services.find_gcs_addresses.cache_clear()
        if self.address not in services.find_gcs_addresses():
            return False
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
        except (OSError, ValueError):
            return False
        return True


def recorded_cluster() -> RecordedCluster | None:
    """Return the cluster that a plain `ray.init` would join without RAY_ADDRESS; None if there is no record of one.

    No public function reports it.
    """
    file = get_ray_address_file(None)
    try:
        address = Path(file).read_text().strip()
    except OSError:
        return None
    return RecordedCluster(address, file) if address else None


def free_resources() -> dict[str, Resources]:
    """Return the resources of each node (id) that no task, actor or placement group holds.

    `ray.available_resources` gives only the sum over the cluster, which does not show whether a worker fits on a node.
    """
    return dict(available_resources_per_node())


def exclude_nodes(node_ids: list[str]) -> dict[str, str]:
    """Return the label selector of workers that must not run on these nodes. Ray has no public name for the label."""
    return {RAY_NODE_ID_KEY: f"!in({','.join(node_ids)})"}


def orphaned_placement_groups() -> list[PlacementGroup]:
    """Return the placement groups of this process's job whose creators, all of them actors, have ended.

    Ray keeps such a group, and its resources, until the job ends. Ray Train's own cleaner needs the dashboard, and no
    public function reports the creator.
    """
    accessor = state._connect_and_get_accessor()
    groups = map(PlacementGroupTableData.FromString, accessor.get_placement_group_table())
    job = bytes.fromhex(ray.get_runtime_context().get_job_id())
    no_actor = (b"", ray.ActorID.nil().binary())  # of a group that this process has created
    return [
        PlacementGroup(ray.PlacementGroupID(group.placement_group_id))
        for group in groups
        if group.creator_job_id == job
        and group.creator_actor_id not in no_actor
        and group.creator_actor_dead
        and group.state != PlacementGroupTableData.REMOVED
    ]


def has_autoscaler() -> bool:
    """Return True if the cluster has an autoscaler that may add nodes.

    Detects version 2 of Ray's autoscaler, which `ray up` and KubeRay start. Public APIs do not report its presence.
    """
    reply = GetClusterStatusReply()
    reply.ParseFromString(GcsClient(ray.get_runtime_context().gcs_address).get_cluster_status())
    return bool(reply.HasField("autoscaling_state"))


@contextmanager
def own_session() -> Iterator[None]:
    """Start the processes of a cluster in a session of their own, which a signal to this process group does not reach.

    `timeout`, batch systems and terminals signal the whole group; the driver then still needs the cluster to save the
    step. Ray has no setting for this. Its processes still end with this process: on Linux the kernel kills them
    (PR_SET_PDEATHSIG). Elsewhere Ray relies on the process group to clean up, and nothing is changed.
    """
    if not detect_fate_sharing_support():
        yield
        return
    original = services.ConsolePopen
    services.ConsolePopen = partial(original, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = original


@contextmanager
def longer_start(seconds: float) -> Iterator[None]:
    """Have `ray.init` wait up to `seconds` for the node that it starts; Ray's limit of 30 s cannot be configured.

    The raylet registers the node after its agents have started. They need 8 CPU seconds, and longer on a machine that
    computes something else.
    """
    original = services.get_node
    limit = time.monotonic() + seconds

    def get_node(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return original(gcs_address, node_id)
            except RuntimeError:  # the node is not registered yet
                if time.monotonic() >= limit:
                    raise
                time.sleep(0.1)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = original


@contextmanager
def without_prestarted_workers() -> Iterator[None]:
    """Start a cluster whose raylet starts workers only when they are needed.

    By default it starts one for each core at once. A worker that starts before there is a job cannot be forked from a
    warm server, and most would never be used. Ray has no setting for their number.
    """
    original = services.ConsolePopen

    def start(command: list[str], **settings: Any) -> Any:
        return original([PRESTARTED + "0" if each.startswith(PRESTARTED) else each for each in command], **settings)

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = original


@contextmanager
def without_monitors() -> Iterator[None]:
    """Start a cluster without two processes that take 2 CPU seconds to start and that a run on one machine needs not.

    One copies the workers' log to the driver, which `log_to_driver=False` ignores. The other starts and stops nodes of
    a cloud. `ray.init` has no setting for either.
    """
    original = parameter.RayParams
    parameter.RayParams = partial(original, include_log_monitor=False, no_monitor=True)
    try:
        yield
    finally:
        parameter.RayParams = original


def raylet_executable() -> str:
    """Return the path of the program that starts a node's workers; Ray has no public name for it."""
    return str(services.RAYLET_EXECUTABLE)


def ended_cluster_process() -> str | None:
    """Return the name of a necessary process of the cluster that this process started, if one has ended.

    No public function reports that before Ray's calls time out.
    """
    node = worker._global_node
    ended = [str(name) for name, _ in node.dead_processes()] if node is not None else []
    return next((name for name in ended if name in ("gcs_server", "raylet")), None)
