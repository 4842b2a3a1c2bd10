"""Test of the stop request on its way from the coordinator to the workers."""

from typing import Any

import ray
from failing_storage import wait_for

from grpo_ray.resilience.signals import StopRequest
from grpo_ray.telemetry.coordinator import RunCoordinator


def test_stop_request_does_not_wait_for_coordinator(cluster: None) -> None:
    coordinator: Any = ray.remote(num_cpus=0)(RunCoordinator).remote()
    stop_requested = StopRequest(coordinator)
    assert stop_requested() is False
    ray.get(coordinator.request_stop.remote())
    wait_for(stop_requested, "the coordinator's answer")
    assert stop_requested() is True
