"""Observer that sets a run's metrics in Ray, whose agents export them to Prometheus beside Ray's own.

They are set in the driver, the one process that lives through all attempts of the run. It is connected to the cluster,
so the agent of its node exports them; under `ray job submit` that is the head node.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ray.util.metrics import Counter, Gauge

from grpo_ray.config.reward_names import reward_name
from grpo_ray.config.schema import Config
from grpo_ray.observers.feed import RunObserver
from grpo_ray.observers.monitoring.exported_metrics import (
    EXPORTED,
    FAILURES,
    GOODPUT,
    MAX_STEPS,
    REDONE_STEPS,
    TRAINING,
    WARNINGS,
    LaunchGoodput,
    Sample,
    exported_name,
    samples_of_row,
)
from grpo_ray.telemetry.health import SKIPPED
from grpo_ray.text.redaction import redact

REFRESH_SECONDS = 1.0
"""Seconds between two settings of the gauges. Ray's report interval is 10 s by default, and at least 1 s."""


@cache
def _instruments() -> dict[str, Gauge | Counter]:
    """Return this process's metrics in Ray by name. A second run in one process uses them too, with another label."""
    return {
        name: (Counter if metric.is_counter else Gauge)(name, metric.description, metric.labels)
        for name, metric in EXPORTED.items()
    }


class RayMetrics(RunObserver):
    """Ray's metrics of one run, labelled with its name. Setting one takes microseconds and reaches no other process.

    Ray drops a gauge that was not set again within two of its report intervals, and a step may take minutes. A thread
    therefore sets the latest values again until the run is closed.
    """

    def __init__(self, config: Config):
        self._run = redact(config.run.name)
        self._reward_functions = [reward_name(function) for function in config.rewards.functions]
        self._goodput: LaunchGoodput | None = None
        self._latest: dict[tuple[str, str | None], float] = {}
        """(name, label) of each gauge -> its latest value."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._set(Sample(MAX_STEPS, config.grpo.max_steps))
        self._set(Sample(TRAINING, 0))
        self._thread = threading.Thread(target=self._refresh, daemon=True)
        self._thread.start()

    def event(self, entry: Mapping[str, Any]) -> None:
        """Follow the state of the run, and count failures and warnings."""
        kind = entry["event"]
        if kind == "launched":
            self._goodput = LaunchGoodput(entry["at"])
        elif kind == "baseline":
            self._set_row(entry["metrics"])
        elif kind == "training":
            self._set(Sample(TRAINING, 1))
        elif kind in ("began", "failed", "ended"):
            self._set(Sample(TRAINING, 0))
        if kind == "failed":
            self._count(FAILURES, 1)
        elif kind == "warning":
            self._count(WARNINGS, 1, entry["name"])

    def resumed(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count the steps that are taken again."""
        if self._goodput is not None and (redone := self._goodput.discard_after(step)):
            self._count(REDONE_STEPS, redone)

    def step(self, row: Mapping[str, Any], at: float) -> None:
        """Set the metrics of the step, and the goodput so far."""
        # Missing while it is 0, also after a restart that has set it back.
        counts = {SKIPPED: 0.0} if (exported_name(SKIPPED), None) in self._latest else {}
        self._set_row({**counts, **row})
        if self._goodput is not None:
            self._goodput.add(int(row["step"]), row.get("step/seconds", 0.0))
            self._set(Sample(GOODPUT, self._goodput.share(at)))

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Set the held-out metrics."""
        self._set_row(metrics)

    def close(self) -> None:
        """Stop setting the gauges, so that Ray drops them: a run that has ended has no current values."""
        self._closed.set()
        self._thread.join()

    def _refresh(self) -> None:
        while not self._closed.wait(REFRESH_SECONDS):
            with self._lock:
                latest = list(self._latest.items())
            for (name, label), value in latest:
                self._gauge(name).set(value, self._tags(name, label))

    def _set_row(self, row: Mapping[str, Any]) -> None:
        for sample in samples_of_row(row, self._reward_functions):
            self._set(sample)

    def _set(self, sample: Sample) -> None:
        with self._lock:
            self._latest[sample.name, sample.label] = sample.value
        self._gauge(sample.name).set(sample.value, self._tags(sample.name, sample.label))

    def _gauge(self, name: str) -> Gauge:
        gauge = _instruments()[name]
        assert isinstance(gauge, Gauge)
        return gauge

    def _count(self, name: str, increment: int, label: str | None = None) -> None:
        counter = _instruments()[name]
        assert isinstance(counter, Counter)
        counter.inc(increment, self._tags(name, label))

    def _tags(self, name: str, label: str | None) -> dict[str, str]:
        key = EXPORTED[name].label
        return {"run": self._run} if key is None else {"run": self._run, key: label or ""}
