"""Private APIs of Ray that grpo_ray uses, each with the reason why no public one is enough.

All other modules import them from here. `tests/unit/resilience/test_ray_internals.py` fails if Ray moves one of them,
changes its signature, or changes the source of a function that we extend or depend on.
"""

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
from ray._common.utils import get_ray_address_file
from ray._private import services, worker
from ray._private.state import available_resources_per_node, state
from ray._private.utils import detect_fate_sharing_support
from ray._raylet import RAY_NODE_ID_KEY, GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.controller.state import ReschedulingState
from ray.train.v2._internal.execution.preemption import _get_draining_nodes
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState, WorkerStatus
from ray.util.placement_group import PlacementGroup

__all__ = [
    "ControlledTrainer",
    "ElasticPolicy",
    "NoopDecision",
    "RecordedCluster",
    "ReschedulingState",
    "ResizeDecision",
    "Resources",
    "ScalingDecision",
    "WorkerGroupPollStatus",
    "WorkerGroupState",
    "WorkerStatus",
    "draining_nodes",
    "ended_cluster_process",
    "exclude_nodes",
    "free_resources",
    "has_autoscaler",
    "longer_start",
    "orphaned_placement_groups",
    "own_session",
    "raylet_executable",
    "recorded_cluster",
    "resources_per_worker",
]

Resources = Mapping[str, float]
"""Name of a resource ("CPU", "GPU") -> amount."""

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


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that are draining: announced to be removed.

    `ray.train.get_preemption_info` works on workers only, and for their own nodes only.
    """
    return set(_get_draining_nodes() or {})


def free_resources() -> dict[str, Resources]:
    """Return the resources of each node (id) that no task, actor or placement group holds.

    `ray.available_resources` gives only the sum over the cluster, which does not show whether a worker fits on a node.
    """
    return dict(available_resources_per_node())


def exclude_nodes(node_ids: list[str]) -> dict[str, str]:
    """Return the label selector of workers that must not run on these nodes. Ray has no public name for the label."""
    return {RAY_NODE_ID_KEY: f"!in({','.join(node_ids)})"}


def resources_per_worker(scaling_config: ray.train.ScalingConfig) -> dict[str, float]:
    """Return the resources of one worker with Ray Train's defaults filled in; the public field may be None."""
    return dict(scaling_config._resources_per_worker_not_none)


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


class ControlledTrainer(TorchTrainer):
    """Trainer with two hooks: the choice of the scaling policy, and a callback after Ray's own SIGINT handler is set.

    Ray Train builds its scaling policy from the ScalingConfig and accepts no other, and it installs a SIGINT handler
    that aborts the run. Both happen inside `fit`.
    """

    def choose_scaling_policy(self, default: Any) -> Any:
        """Return the scaling policy of the run.

        Args:
            default: the policy that Ray Train made.
        """
        return default

    def after_sigint_handler(self) -> None:
        """Run after Ray Train has installed its SIGINT handler; by default do nothing."""

    def _initialize_and_run_controller(self, **parts: Any) -> ray.train.Result:
        parts["scaling_policy"] = self.choose_scaling_policy(parts["scaling_policy"])
        return super()._initialize_and_run_controller(**parts)

    def _register_sigint_handler(self, controller: Any) -> None:
        super()._register_sigint_handler(controller)
        self.after_sigint_handler()


class ElasticPolicy(ElasticScalingPolicy):
    """Ray Train's elastic scaling policy, with public names for the parts that a subclass changes or calls.

    Ray Train has no public interface for a scaling policy.
    """

    def possible_workers(self, reserved: Mapping[str, Resources]) -> int:
        """Return the number of workers that fit on the reserved resources (node id -> resources)."""
        return super()._count_possible_workers(reserved)

    def request_resources(self) -> None:
        """Renew the request for resources at Ray's autoscaling coordinator, at most every 20 s."""
        self._maybe_send_resource_request()

    def allow_immediate_resize(self) -> None:
        """Make the next decision ignore the time since the previous one (`elastic_resize_monitor_interval_s`)."""
        self._latest_monitor_time = float("-inf")

    def resize_to(self, workers: int) -> ResizeDecision:
        """Return the decision to run with this number of workers."""
        return self._get_resize_decision(workers)

    def _count_possible_workers(self, reserved_resources: Mapping[str, Resources]) -> int:
        return self.possible_workers(reserved_resources)

    def _get_reserved_resources(self) -> Any:
        # Ray's autoscaling coordinator updates its view of the cluster only every 20 s. Its actor handles calls in
        # order, so the call of the base class returns the result that this call recomputes.
        self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True)
        return super()._get_reserved_resources()
