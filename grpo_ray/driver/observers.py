"""Optional followers of a run, as its config asks for them."""

from grpo_ray.driver.preflight import RunContext
from grpo_ray.driver.ray_metrics import RayMetrics
from grpo_ray.telemetry.feed import RunObserver


def build_observers(context: RunContext) -> list[RunObserver]:
    """Create the run's optional observers, in the order in which they receive its progress."""
    return [RayMetrics(context.config)]
