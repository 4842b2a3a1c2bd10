"""Test of the stop request on its way from the board to the workers."""

from typing import Any

import ray
from failing_storage import wait_for

from grpo_ray.resilience.signals import StopRequest
from grpo_ray.telemetry.coordinator import RunCoordinator


def test_stop_asked_returns_before_board_answers(cluster: None) -> None:
    board: Any = ray.remote(num_cpus=0)(RunCoordinator).remote()
    asked = StopRequest(board)
    assert asked() is False
    ray.get(board.stop.remote())
    wait_for(asked, "the board's answer")
    assert asked() is True
