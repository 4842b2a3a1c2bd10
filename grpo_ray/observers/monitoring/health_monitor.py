"""Warnings during a run, as events; those in `run.stop_on` end the run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.observers.feed import RunObserver
from grpo_ray.telemetry.health import HealthWarning, RunHealth
from grpo_ray.telemetry.run_facts import RunFacts


class HealthMonitor(RunObserver):
    """Publisher of warnings, one event `warning` each.

    Args:
        publish: passes an event on to all observers of the run.
        request_stop: ends the run after its current step; gets the name of the warning.
    """

    def __init__(
        self, config: Config, publish: Callable[[Mapping[str, Any]], None], request_stop: Callable[[str], None]
    ):
        self._health = RunHealth(config.health, RunFacts.of(config))
        self._stop_on, self._publish, self._request_stop = config.run.stop_on, publish, request_stop

    def resumed(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._health.resume(step, rows)

    def step(self, row: Mapping[str, Any], at: float) -> None:
        self._warn(self._health.observe(row), at)

    def event(self, entry: Mapping[str, Any]) -> None:
        """Check a measurement of memory; ignore other events, including those of this observer."""
        if entry["event"] == "memory":
            self._warn(self._health.observe_memory(entry.get("measured")), entry["at"])

    def _warn(self, warnings: Sequence[HealthWarning], at: float) -> None:
        for warning in warnings:
            self._publish(
                {"event": "warning", "at": at, "step": warning.step, "name": warning.name, "what": warning.what}
            )
            if warning.name in self._stop_on:
                self._request_stop(warning.name)
