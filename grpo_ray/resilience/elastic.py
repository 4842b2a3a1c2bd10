"""Elastic runs: the number of workers while nodes join and leave, and the reaction to a preemption notice.

Extends Ray Train's elastic policy with the rules that worker-count invariance and cheap recovery need: only worker
counts that divide the step, growth only where no step is lost, and no workers on nodes that are dead, draining or
occupied by other jobs.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import ray
import ray.exceptions
import ray.train
from ray.train import CheckpointConsistencyMode

from grpo_ray.config.schema import Config
from grpo_ray.resilience.ray_internals import Resources, exclude_nodes, free_resources
from grpo_ray.resilience.ray_train_internals import (
    ControlledTrainer,
    ElasticPolicy,
    NoopDecision,
    ReschedulingState,
    ResizeDecision,
    ScalingDecision,
    WorkerGroupPollStatus,
    WorkerGroupState,
    WorkerStatus,
    draining_nodes,
    resources_per_worker,
)

MIN_SECONDS_BETWEEN_RESIZES = 60.0
"""Age that a worker group must reach before it may be resized."""
RETRY_SECONDS = 0.5
"""Interval at which nodes are counted again while there are too few of them."""
CONNECT_TIMEOUT_SECONDS = 2.0
"""Time in which a node must accept a connection to be used."""


class PreemptibleTrainer(ControlledTrainer):
    """Ray Train's `TorchTrainer`; an elastic run is scaled by `DivisibleScalingPolicy`."""

    def __init__(
        self,
        *args: Any,
        worker_counts: Sequence[int],
        spare_workers: int = 0,
        install_signal_handlers: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ):
        """
        Args:
            worker_counts: allowed numbers of workers; ignored without elastic scaling.
            spare_workers: see `DivisibleScalingPolicy`.
            install_signal_handlers: called after Ray Train has installed its own SIGINT handler, which aborts the run.
        """
        super().__init__(*args, **kwargs)
        self.worker_counts = worker_counts
        self.spare_workers = spare_workers
        self.install_signal_handlers = install_signal_handlers

    def choose_scaling_policy(self, default: Any) -> Any:
        if self.scaling_config.elasticity_enabled:
            return DivisibleScalingPolicy(self.scaling_config, self.worker_counts, self.spare_workers)
        return default

    def after_sigint_handler(self) -> None:
        self.install_signal_handlers()


class DivisibleScalingPolicy(ElasticPolicy):
    """Scaling policy that uses the largest allowed number of workers and resizes only where no step is lost.

    - A running group is resized at the poll that commits a checkpoint, once it is `elastic_resize_monitor_interval_s`
      old. A group that lost a worker restarts at once with the remaining nodes.
    - Only nodes that accept connections and are not draining are counted and used. Ray itself considers a node alive
      for 15 s after its processes were killed and for 63 s after its network was cut, and would wait a minute for
      workers to start there.
    - After a start that failed, only free resources are counted.
    """

    def __init__(self, scaling_config: ray.train.ScalingConfig, worker_counts: Sequence[int], spare_workers: int = 0):
        """
        Args:
            scaling_config: Ray Train's config, with the smallest and largest number of workers.
            worker_counts: allowed numbers of workers: those that divide the step.
            spare_workers: number of workers whose resources are left free, for dedicated engines, an
                engine that measures beside training, and reward models.
        """
        super().__init__(scaling_config)
        self.worker_counts = sorted(worker_counts)
        self.spare_workers = spare_workers
        self._group_start: float | None = None
        self._commits = CommitTracker()
        self._start_failed = False

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        if worker_group_state.start_time != self._group_start:
            self._group_start, self._commits = worker_group_state.start_time, CommitTracker()
        if not self._commits.observe(worker_group_status.worker_statuses):
            self.request_resources()
            return NoopDecision()
        self.allow_immediate_resize()  # the next commit may be an hour away
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        workers = worker_group_state.num_workers
        if not isinstance(decision, ResizeDecision) or decision.num_workers < workers:
            return decision
        count = self._largest_allowed(min(decision.num_workers, workers + self._free_slots()))
        return self.resize_to(count) if count > workers else NoopDecision()

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, NoopDecision):
            time.sleep(RETRY_SECONDS)  # Ray's controller calls again without a pause
        return decision

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        self._start_failed = isinstance(current_state, ReschedulingState)

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        """Return the label selector that keeps workers off unusable nodes."""
        usable = self._usable_nodes()
        unusable = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in usable]
        return exclude_nodes(unusable) if unusable else None

    def possible_workers(self, reserved: Mapping[str, Resources]) -> int:
        """Return the largest allowed number of workers that fit on the usable nodes; 0 if none does."""
        usable, needed = self._usable_nodes(), resources_per_worker(self.scaling_config)
        count = super().possible_workers({node: held for node, held in reserved.items() if node in usable})
        if self.spare_workers:  # on all resources, since at most the largest number of workers is reserved
            count = min(count, worker_slots(self._total_resources(usable), needed) - self.spare_workers)
        if self._start_failed:
            count = min(count, worker_slots(self._free_resources(usable), needed))
        return self._largest_allowed(count)

    def _largest_allowed(self, count: int) -> int:
        """Return the largest allowed number of workers that is at most `count`; 0 if there is none."""
        return max((allowed for allowed in self.worker_counts if allowed <= count), default=0)

    def _free_slots(self) -> int:
        """Return the number of further workers that fit on free resources beside the running group.

        Without this limit the group would be torn down to grow onto resources that other jobs hold. CPUs are not
        counted: the tasks of the run's own data stream use them intermittently, and end with the group.
        """
        needed = resources_per_worker(self.scaling_config)
        scarce = {name: amount for name, amount in needed.items() if name != "CPU" and amount > 0}
        if not scarce:
            return int(self.scaling_config.max_workers)
        return worker_slots(self._free_resources(self._usable_nodes()), scarce)

    def _usable_nodes(self) -> set[str]:
        """Return the ids of the nodes that new workers can run on."""
        draining = draining_nodes()
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining]
        with ThreadPoolExecutor(max_workers=32) as pool:
            reachable = pool.map(_accepts_connections, nodes)
            return {node["NodeID"] for node, accepts in zip(nodes, reachable, strict=True) if accepts}

    def _total_resources(self, usable: set[str]) -> dict[str, Resources]:
        return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["NodeID"] in usable}

    def _free_resources(self, usable: set[str]) -> dict[str, Resources]:
        return {node: free for node, free in free_resources().items() if node in usable}


class CommitTracker:
    """Detector of the poll in which a worker group's checkpoint is committed.

    Ray Train's rule: the n-th reports of all ranks belong together, and are committed once the last one has arrived.
    """

    def __init__(self) -> None:
        self._reports: Counter[int] = Counter()
        """Rank -> reports received."""
        self._with_checkpoint: set[int] = set()
        """Numbers of the reports with a checkpoint."""

    def observe(self, statuses: Mapping[int, WorkerStatus]) -> bool:
        """Count the reports of one poll (rank -> status); return True if they commit a checkpoint."""
        before = min(self._reports[rank] for rank in statuses)
        for rank, status in statuses.items():
            if status.training_report is None:
                continue
            if status.training_report.checkpoint is not None:
                self._with_checkpoint.add(self._reports[rank])
            self._reports[rank] += 1
        after = min(self._reports[rank] for rank in statuses)
        return any(number in self._with_checkpoint for number in range(before, after))


def _accepts_connections(node: Mapping[str, Any]) -> bool:
    """Return True if the node's raylet accepts a connection."""
    try:
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        socket.create_connection(address, CONNECT_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True


def worker_slots(nodes: Mapping[str, Resources], per_worker: Resources) -> int:
    """Count the workers that fit on the nodes (id -> resources), each worker on a single node."""
    needed = {name: amount for name, amount in per_worker.items() if amount > 0}
    return sum(int(min(node.get(name, 0) // amount for name, amount in needed.items())) for node in nodes.values())


def scaling_config(config: Config, resize_seconds: float = MIN_SECONDS_BETWEEN_RESIZES) -> ray.train.ScalingConfig:
    """Build Ray Train's ScalingConfig for a run.

    Args:
        config: config of the run.
        resize_seconds: age that a worker group must reach before it may be resized.
    """
    cluster = config.cluster
    fixed = isinstance(cluster.num_workers, int)
    return ray.train.ScalingConfig(
        num_workers=cluster.num_workers if fixed else (config.sizes.worker_counts[0], config.sizes.worker_counts[-1]),
        use_gpu=cluster.use_gpu,
        resources_per_worker={"CPU": cluster.cpus_per_worker}
        | ({"GPU": config.gpus_per_worker} if cluster.use_gpu else {}),
        elastic_resize_monitor_interval_s=resize_seconds,
    )


def explain_scaling(config: Config) -> str | None:
    """Return a sentence about the worker counts of an elastic run; None for a fixed number of workers."""
    cluster, grpo = config.cluster, config.grpo
    if isinstance(cluster.num_workers, int):
        return None
    allowed = config.sizes.worker_counts
    text = f"cluster.num_workers={list(cluster.num_workers)}: the run uses {_alternatives(allowed)} workers"
    excluded = [n for n in range(cluster.min_workers, cluster.max_workers + 1) if n not in allowed]
    if not excluded:
        return text
    step = f"grpo.prompts_per_step={grpo.prompts_per_step}"
    if any(grpo.prompts_per_step % n == 0 for n in excluded):
        step += f" and grpo.micro_batch_size={config.sizes.micro_batch_size}"
    return f"{text}; {_alternatives(excluded)} {'does' if len(excluded) == 1 else 'do'} not divide {step}"


def _alternatives(numbers: Sequence[int]) -> str:
    """Format [1, 2, 4] as "1, 2 or 4"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


class PreemptionNotice:
    """Check, on the workers, for a preemption notice for a node of their group."""

    def __init__(self) -> None:
        self.announced = False
        """True once a notice was received."""

    def __call__(self) -> bool:
        """Return True at the first call after the notice.

        Collective: every rank must call it the same number of times.
        """
        if self.announced or ray.train.get_preemption_info() is None:
            return False
        self.announced = True
        return True

    def leave(self) -> NoReturn:
        """Wait until all reports are committed, then end the attempt. Collective: every rank must call it.

        Raises:
            PreemptedError: always.
        """
        ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
        raise PreemptedError()


class PreemptedError(ray.exceptions.RayActorError):
    """End of the train function on every worker, once the checkpoint for a preempted node is committed.

    Ray Train handles it like the node's death: the group restarts at once on the remaining nodes, instead of at the
    announced time, and `max_failures` does not count it. Returning from the train function would finish the run.
    """

    def __init__(self, message: str = "a node of this worker group is being preempted"):
        super().__init__(error_msg=message, preempted=True)
