"""Callback in Ray Train's controller for each report and each failed attempt, which may end the run."""

from typing import Any

import ray
import ray.train

from grpo_ray.resilience.error_triage import RepeatedErrorDetector, describe_worker_error, raise_if_fatal, root_cause
from grpo_ray.storage.checkpoints import SCORE


class CoordinatorCallback(ray.train.UserCallback):
    """Callback in Ray Train's controller that records rank 0's metrics and the failures of attempts.

    Also ends the run on errors that a new attempt would repeat, such as the same error at the same step twice.

    Args:
        coordinator: handle of the run's `RunCoordinator` actor.
    """

    def __init__(self, coordinator: Any):
        self.coordinator = coordinator
        self._repeated_errors = RepeatedErrorDetector()

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Record the metrics of rank 0."""
        row = {name: value for name, value in metrics[0].items() if name != SCORE}
        # Wait for the actor: the driver's last read at the end of the run has to find every row.
        ray.get(self.coordinator.record_metrics.remote(row))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Record the failure; raise an error that ends the run if a new attempt would fail in the same way."""
        rank, error = root_cause(worker_exceptions)
        ray.get(self.coordinator.record_event.remote("failed", rank=rank, what=describe_worker_error(error)))
        self.coordinator.set_status.remote("starting the workers again")
        raise_if_fatal(error)
        self._repeated_errors.check(worker_exceptions)
