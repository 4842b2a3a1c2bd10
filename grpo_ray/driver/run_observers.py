"""Optional observers of a run, created from its config."""

from collections.abc import Callable, Mapping
from typing import Any

from grpo_ray.config.sources import describe_training
from grpo_ray.driver.cluster.connection import WarmStartEnd
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.summary import describe_run
from grpo_ray.observers.feed import RunObserver
from grpo_ray.observers.monitoring.health_monitor import HealthMonitor
from grpo_ray.observers.monitoring.ray_metrics import RayMetrics
from grpo_ray.observers.trackers.dispatcher import TrackerDispatcher
from grpo_ray.observers.trackers.history import EventList, TrackerFile
from grpo_ray.observers.trackers.tracker import TrackedRun, flatten
from grpo_ray.text.display import safe_text

TAG_CHARS = 64
"""Length of the longest tag that every tracker accepts; W&B refuses a run with a longer one."""


def tag(path: str) -> str:
    """Return a path or hub id as a tag; of a long one the end is kept, because paths differ there."""
    text = safe_text(path)
    return text if len(text) <= TAG_CHARS else f"…{text[1 - TAG_CHARS :]}"


def build_observers(
    context: RunContext, publish: Callable[[Mapping[str, Any]], None], request_stop: Callable[[str], None]
) -> list[RunObserver]:
    """Create the run's optional observers, in the order in which they receive its progress.

    Args:
        publish: passes an event on to all observers.
        request_stop: ends the run after its current step, for the reason given.
    """
    observers: list[RunObserver] = [RayMetrics(context.config), *_trackers(context)]
    if context.config.rollout.has_conversations and context.owns_cluster:
        observers.append(WarmStartEnd())
    if context.config.run.notify is not None:
        from grpo_ray.observers.monitoring.notify import Notifier  # imports the report, which most runs do not need

        observers.append(Notifier(context.config, context.folder.uri, context.progress.notice))
    # Last, so that the other observers receive a step before the warnings about it.
    return [*observers, HealthMonitor(context.config, publish, request_stop)]


def _trackers(context: RunContext) -> list[RunObserver]:
    """Create the dispatcher of `run.trackers`, if there are any."""
    config, folder = context.config, context.folder
    if not config.run.trackers:
        return []

    def describe(run_id: str) -> TrackedRun:
        return TrackedRun(
            id=run_id,
            name=config.run.name,
            project=config.run.project,
            config=dict(flatten(describe_run(config))),
            tags={"model": tag(config.model.path), "data": tag(describe_training(config))},
            folder=folder,
            group=config.run.group,
        )

    trackers_file, events = TrackerFile(folder, config.run.name), EventList(folder)
    return [TrackerDispatcher(config.run.trackers, trackers_file, events, describe, context.progress.notice)]
