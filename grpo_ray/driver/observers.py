"""Optional followers of a run, as its config asks for them."""

from collections.abc import Callable, Mapping
from typing import Any

from grpo_ray.driver.health_monitor import HealthMonitor
from grpo_ray.driver.preflight import RunContext
from grpo_ray.driver.ray_metrics import RayMetrics
from grpo_ray.telemetry.feed import RunObserver


def build_observers(
    context: RunContext, publish: Callable[[Mapping[str, Any]], None], request_stop: Callable[[str], None]
) -> list[RunObserver]:
    """Create the run's optional observers, in the order in which they receive its progress.

    Args:
        publish: passes an event on to all observers.
        request_stop: ends the run after its current step, for the reason given.
    """
    observers: list[RunObserver] = [RayMetrics(context.config)]
    if context.config.run.notify is not None:
        from grpo_ray.driver.notify import Notifier  # imports the report, which most runs do not need

        observers.append(Notifier(context.config, context.folder.uri, context.progress.notice))
    # Last: when it warns of a step, the others know the step already.
    return [*observers, HealthMonitor(context.config, publish, request_stop)]
