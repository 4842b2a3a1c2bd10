"""Elastic runs: how many workers a run has while machines come and go, and what it does when one is about to go.

Ray Train's elastic policy, narrowed in what costs steps or contradicts law 1: worker counts that do not divide the
step, growth in the middle of a step, machines that are dead, leaving or taken by somebody else.
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
from ray._private.state import available_resources_per_node
from ray.train import CheckpointConsistencyMode
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.controller.state import ReschedulingState
from ray.train.v2._internal.execution.preemption import _get_draining_nodes
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision, ResizeDecision

from grpo_ray.config.schema import Config

SETTLE_SECONDS = 60.0
"""A worker group is not resized sooner than so long after its start."""
WAIT_SECONDS = 0.5
"""Between two looks for machines while there are too few of them."""
ANSWER_SECONDS = 2.0
"""A machine that does not take a connection within so long is not used."""

Resources = Mapping[str, float]


class PreemptibleTrainer(TorchTrainer):
    """Ray Train's own trainer; an elastic run is scaled by `DivisibleScalingPolicy`.

    worker_counts: the numbers of workers that the run may have. Without elastic scaling they do not matter.
    take_signals: called once Ray Train has set its own handler of Ctrl-C, which aborts the run.
    """

    def __init__(
        self, *args: Any, worker_counts: Sequence[int], take_signals: Callable[[], None] = lambda: None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.worker_counts = worker_counts
        self.take_signals = take_signals

    def _initialize_and_run_controller(self, **parts: Any) -> ray.train.Result:
        if self.scaling_config.elasticity_enabled:
            parts["scaling_policy"] = DivisibleScalingPolicy(self.scaling_config, self.worker_counts)
        return super()._initialize_and_run_controller(**parts)

    def _register_sigint_handler(self, controller: Any) -> None:
        super()._register_sigint_handler(controller)
        self.take_signals()


class DivisibleScalingPolicy(ElasticScalingPolicy):
    """Takes the most workers that share the step evenly, and changes their number only where no step is lost.

    - A running group is resized in the very look that commits a checkpoint, once `elastic_resize_monitor_interval_s`
      have passed since its start. A group that lost a worker starts again at once, with what is left.
    - Only machines count, and are used, that answer and were not announced to go: Ray itself takes a machine whose
      processes were killed for alive for 15 s more, a silent one for 63 s, and would wait a minute for workers on it.
    - After a start that did not come about, only what is free counts.
    """

    def __init__(self, scaling_config: ray.train.ScalingConfig, worker_counts: Sequence[int]):
        super().__init__(scaling_config)
        self.worker_counts = sorted(worker_counts)
        self._group: float | None = None
        self._commits = Commits()
        self._start_failed = False

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        if worker_group_state.start_time != self._group:
            self._group, self._commits = worker_group_state.start_time, Commits()
        if not self._commits.look(worker_group_status.worker_statuses):
            self._maybe_send_resource_request()
            return NoopDecision()
        self._latest_monitor_time = float("-inf")  # the next commit may be an hour away: ask now
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        workers = worker_group_state.num_workers
        if not isinstance(decision, ResizeDecision) or decision.num_workers < workers:
            return decision
        count = self._even(min(decision.num_workers, workers + self._room()))
        return self._get_resize_decision(count) if count > workers else NoopDecision()

    def make_decision_for_non_running_worker_group(self) -> Any:
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, NoopDecision):
            time.sleep(WAIT_SECONDS)  # Ray's controller asks again without a pause
        return decision

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        self._start_failed = isinstance(current_state, ReschedulingState)

    def _get_reserved_resources(self) -> Any:
        # Ray's coordinator looks at the cluster every 20 s only. Its actor takes calls in turn: the next one, Ray's
        # own, finds what this one reckons anew.
        self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True)
        return super()._get_reserved_resources()

    def _count_possible_workers(self, reserved_resources: Mapping[str, Resources]) -> int:
        usable = self._usable_nodes()
        count = super()._count_possible_workers({k: v for k, v in reserved_resources.items() if k in usable})
        if self._start_failed:
            count = min(count, worker_slots(self._free(usable), self.scaling_config._resources_per_worker_not_none))
        return self._even(count)

    def _even(self, count: int) -> int:
        """The most workers, up to so many, that share the step evenly; 0 if none do."""
        return max((allowed for allowed in self.worker_counts if allowed <= count), default=0)

    def _room(self) -> int:
        """By how many workers a group can grow, so that it is not torn down for what others hold.

        CPUs are left out: the tasks of the run's own data stream come and go on them, and end with the group.
        """
        per_worker = self.scaling_config._resources_per_worker_not_none
        scarce = {name: amount for name, amount in per_worker.items() if name != "CPU" and amount > 0}
        return worker_slots(self._free(self._usable_nodes()), scarce) if scarce else self.scaling_config.max_workers

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        """The label selector that keeps workers off the nodes that do not count."""
        usable = self._usable_nodes()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in usable]
        return {ray._raylet.RAY_NODE_ID_KEY: f"!in({','.join(others)})"} if others else None

    def _usable_nodes(self) -> set[str]:
        """Ids of the nodes that a new worker can be put on."""
        leaving = _get_draining_nodes() or {}
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]
        with ThreadPoolExecutor(max_workers=32) as pool:
            return {node["NodeID"] for node, answers in zip(nodes, pool.map(_answers, nodes), strict=True) if answers}

    def _free(self, usable: set[str]) -> dict[str, Resources]:
        """What nobody holds at the moment, on each usable node."""
        return {node: free for node, free in available_resources_per_node().items() if node in usable}


class Commits:
    """In which look at a worker group a checkpoint is committed.

    As Ray Train reckons: the n-th reports of all ranks belong together, and are committed when the last one is in.
    """

    def __init__(self) -> None:
        self._reports: Counter[int] = Counter()
        self._with_checkpoint: set[int] = set()

    def look(self, statuses: Mapping[int, Any]) -> bool:
        """Count this look's reports (rank -> Ray's WorkerStatus); whether they complete one with a checkpoint."""
        before = min(self._reports[rank] for rank in statuses)
        for rank, status in statuses.items():
            if status.training_report is None:
                continue
            if status.training_report.checkpoint is not None:
                self._with_checkpoint.add(self._reports[rank])
            self._reports[rank] += 1
        after = min(self._reports[rank] for rank in statuses)
        return any(number in self._with_checkpoint for number in range(before, after))


def _answers(node: Mapping[str, Any]) -> bool:
    """Whether a node's Ray process takes connections."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def worker_slots(nodes: Mapping[str, Resources], per_worker: Resources) -> int:
    """How many workers fit on the nodes, each worker on one of them."""
    needed = {name: amount for name, amount in per_worker.items() if amount > 0}
    return sum(int(min(node.get(name, 0) // amount for name, amount in needed.items())) for node in nodes.values())


def scaling_config(config: Config, settle_seconds: float = SETTLE_SECONDS) -> ray.train.ScalingConfig:
    """What the run takes of the cluster, in Ray Train's terms."""
    cluster = config.cluster
    fixed = isinstance(cluster.num_workers, int)
    return ray.train.ScalingConfig(
        num_workers=cluster.num_workers if fixed else (config.worker_counts[0], config.worker_counts[-1]),
        use_gpu=cluster.use_gpu,
        resources_per_worker={"CPU": cluster.cpus_per_worker} | ({"GPU": 1} if cluster.use_gpu else {}),
        elastic_resize_monitor_interval_s=settle_seconds,
    )


def explain_scaling(config: Config) -> str | None:
    """The sentence that an elastic run begins with, or None for a fixed number of workers."""
    cluster, grpo = config.cluster, config.grpo
    if isinstance(cluster.num_workers, int):
        return None
    counts = config.worker_counts
    said = f"cluster.num_workers={list(cluster.num_workers)}: the run takes {_either(counts)} workers"
    left_out = [n for n in range(cluster.min_workers, cluster.max_workers + 1) if n not in counts]
    if not left_out:
        return said
    step = f"grpo.prompts_per_step={grpo.prompts_per_step}"
    if any(grpo.prompts_per_step % n == 0 for n in left_out):
        step += f" and grpo.micro_batch_size={config.micro_batch_size}"
    return f"{said}; {_either(left_out)} {'does' if len(left_out) == 1 else 'do'} not divide {step}"


def _either(numbers: Sequence[int]) -> str:
    """[1, 2, 4] -> "1, 2 or 4"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


class PreemptionNotice:
    """Whether a machine of this worker group was announced to be taken away."""

    def __init__(self) -> None:
        self.announced = False

    def __call__(self) -> bool:
        """True once: at the first call after the announcement. A barrier: every worker calls it equally often."""
        if self.announced or ray.train.get_preemption_info() is None:
            return False
        self.announced = True
        return True

    def leave(self) -> NoReturn:
        """End this attempt as soon as all that was reported is committed; every worker calls it. Raises Drained."""
        ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
        raise PreemptedError()


class PreemptedError(ray.exceptions.RayActorError):
    """Ends the train function of every worker once the checkpoint for a leaving machine is committed.

    To Ray Train it is the machine's end come early: the group starts again at once on the machines that stay, not at
    the announced time, and `max_failures` is left alone. Returning instead would end the run as finished.
    """

    def __init__(self, message: str = "a machine of this worker group is about to be taken away"):
        super().__init__(error_msg=message, preempted=True)
