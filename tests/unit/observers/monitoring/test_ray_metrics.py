"""Tests of the values that a run's metrics in Ray have, without a cluster that exports them."""

from grpo_ray.config.loader import load_config
from grpo_ray.observers.monitoring.ray_metrics import RayMetrics


def test_skipped_steps_return_to_0_after_a_restart() -> None:
    metrics = RayMetrics(load_config())
    skipped = ("grpo_ray_learner_skipped_steps", None)
    try:
        metrics.step({"step": 1}, 10.0)
        assert skipped not in metrics._latest
        metrics.step({"step": 2, "learner/skipped_steps": 2.0}, 20.0)
        assert metrics._latest[skipped] == 2.0
        metrics.resumed(1, [])
        metrics.step({"step": 2}, 30.0)
        assert metrics._latest[skipped] == 0.0
    finally:
        metrics.close()
