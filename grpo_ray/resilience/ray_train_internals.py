"""Private APIs of Ray Train that grpo_ray uses, each with the reason why no public one is enough.

All other modules import them from here; those of Ray's core are in `ray_internals.py`.
`tests/unit/resilience/test_ray_internals.py` fails if Ray moves one of them, changes its signature, or changes the
source of a function that we extend or depend on.
"""

from collections.abc import Mapping
from typing import Any

import ray.train
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

from grpo_ray.resilience.ray_internals import Resources

__all__ = [
    "ControlledTrainer",
    "ElasticPolicy",
    "NoopDecision",
    "ReschedulingState",
    "ResizeDecision",
    "ScalingDecision",
    "WorkerGroupPollStatus",
    "WorkerGroupState",
    "WorkerStatus",
    "draining_nodes",
    "resources_per_worker",
]


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that are draining: announced to be removed.

    `ray.train.get_preemption_info` works on workers only, and for their own nodes only.
    """
    return set(_get_draining_nodes() or {})


def resources_per_worker(scaling_config: ray.train.ScalingConfig) -> dict[str, float]:
    """Return the resources of one worker with Ray Train's defaults filled in; the public field may be None."""
    return dict(scaling_config._resources_per_worker_not_none)


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
