"""Metrics of a run that Ray exports to Prometheus: their names, labels, and values.

A metric of `docs/metrics.md` keeps its name, with the prefix `grpo_ray_` and `_` in place of `/`. Families of metrics
become one metric with a label: the phases, the held-out sets, the reward functions. Imports no heavy library.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.heldout_keys import HELDOUT, heldout_label
from grpo_ray.storage.numbers import to_finite
from grpo_ray.telemetry.measures import ACCURACY_MEASURES, is_heldout
from grpo_ray.training.metric_names import METRICS, OWN_METRICS

PREFIX = "grpo_ray_"
RAY_PREFIX = "ray_"
"""Prefix that Ray puts before the name of every metric."""

ROW_METRICS: tuple[str, ...] = (
    "step",
    "reward/mean",
    "reward/std",
    "group/equal_share",
    "step/completions_per_second",
    "engine/tokens_per_second",
    "learner/tokens_per_second",
    "step/seconds",
    "step/overhead_share",
    "completion/length_mean",
    "completion/truncated_share",
    "policy/entropy",
    "policy/kl",
    "policy/clipped_share",
    "learner/gradient_norm",
    "learner/skipped_steps",
    "engine/logprob_gap_mean",
    "engine/ratio_mean",
    "reward/verifier_timeouts",
    "reward/unscorable_share",
)
"""Metrics of a logging step that are exported with the label `run` only."""


@dataclass(frozen=True)
class ExportedMetric:
    """A metric in Ray, without the prefix that Ray adds."""

    name: str
    description: str
    label: str | None = None
    """Name of its label besides `run`; None if it has no other."""
    is_counter: bool = False
    """True for a counter, whose name in Prometheus ends with `_total`; otherwise it is a gauge."""

    @property
    def labels(self) -> tuple[str, ...]:
        return ("run",) if self.label is None else ("run", self.label)

    @property
    def prometheus_name(self) -> str:
        """Name in the text that Prometheus collects."""
        return f"{RAY_PREFIX}{self.name}{'_total' if self.is_counter else ''}"


@dataclass(frozen=True)
class Sample:
    """Value of one exported metric."""

    name: str
    value: float
    label: str | None = None
    """Value of its label besides `run`."""


def exported_name(metric: str) -> str:
    """Return the exported name of a metric: `reward/mean` -> `grpo_ray_reward_mean`."""
    return PREFIX + metric.replace("/", "_")


PHASE_SECONDS, REWARD_OF_FUNCTION = f"{PREFIX}phase_seconds", f"{PREFIX}reward_function_mean"
SIGNAL_SHARE, GOODPUT, TRAINING = f"{PREFIX}group_signal_share", f"{PREFIX}goodput", f"{PREFIX}training"
MAX_STEPS, FAILURES, REDONE_STEPS = f"{PREFIX}max_steps", f"{PREFIX}failures", f"{PREFIX}redone_steps"
WARNINGS = f"{PREFIX}warnings"

_DESCRIPTIONS = OWN_METRICS | {name: text for name, (_, text) in METRICS.items()}

EXPORTED: dict[str, ExportedMetric] = {
    metric.name: metric
    for metric in (
        *(ExportedMetric(exported_name(name), _DESCRIPTIONS[name]) for name in ROW_METRICS),
        *(
            ExportedMetric(exported_name(f"{HELDOUT}/{name}"), _DESCRIPTIONS[f"{HELDOUT}/{name}"], "heldout")
            for name in ACCURACY_MEASURES
        ),
        ExportedMetric(PHASE_SECONDS, "Seconds of each phase of a step (`phase/*`).", "phase"),
        ExportedMetric(REWARD_OF_FUNCTION, "Mean of each reward function (`reward/<name>_mean`).", "function"),
        ExportedMetric(
            SIGNAL_SHARE,
            "Share of the groups trained on whose rewards differ, so that they have a gradient "
            "(`group/signal_share`; without grpo.dynamic_sampling 1 - `group/equal_share`).",
        ),
        ExportedMetric(
            GOODPUT,
            "Share of this launch's wall time, up to the latest step, spent on steps that are part of the result. "
            "Startup, restarts and steps that are taken again are not.",
        ),
        ExportedMetric(TRAINING, "1 while the workers take steps; 0 while they start, restart or end."),
        ExportedMetric(MAX_STEPS, "Last step of the run, `grpo.max_steps`."),
        ExportedMetric(FAILURES, "Attempts of this launch that failed.", is_counter=True),
        ExportedMetric(
            REDONE_STEPS,
            "Steps of this launch that are taken again, because an attempt continued from an earlier checkpoint.",
            is_counter=True,
        ),
        ExportedMetric(WARNINGS, "Health warnings of this launch, by their name.", "warning", is_counter=True),
    )
}
"""Name -> metric, in the order of the documentation."""


def samples_of_row(row: Mapping[str, Any], reward_functions: Sequence[str]) -> Iterator[Sample]:
    """Yield the samples of one logging step, or of the held-out metrics of a checkpoint.

    Args:
        row: metrics by name; values that are not finite numbers are left out.
        reward_functions: names of the reward functions in metrics.
    """
    numbers = {name: number for name, value in row.items() if (number := to_finite(value)) is not None}
    for metric in ROW_METRICS:
        if metric in numbers:
            yield Sample(exported_name(metric), numbers[metric])
    for function in reward_functions:
        if f"reward/{function}_mean" in numbers:
            yield Sample(REWARD_OF_FUNCTION, numbers[f"reward/{function}_mean"], function)
    if "group/signal_share" in numbers:
        yield Sample(SIGNAL_SHARE, numbers["group/signal_share"])
    elif "group/equal_share" in numbers:
        yield Sample(SIGNAL_SHARE, 1 - numbers["group/equal_share"])
    for metric, value in numbers.items():
        prefix, _, measure = metric.rpartition("/")
        if prefix == "phase":
            yield Sample(PHASE_SECONDS, value, measure)
        elif measure in ACCURACY_MEASURES and is_heldout(prefix):
            yield Sample(exported_name(f"{HELDOUT}/{measure}"), value, heldout_label(prefix))


class LaunchGoodput:
    """Share of a launch's wall time spent on steps that are part of the result so far.

    Args:
        launched_at: start of the launch, seconds since 1970.
    """

    def __init__(self, launched_at: float):
        self.launched_at = launched_at
        self._steps: list[tuple[int, float]] = []
        """(step, seconds) of each report that is part of the result, ascending."""
        self._seconds = 0.0

    def add(self, step: int, seconds: float) -> None:
        """Add a report: its step, and the seconds since the report before it."""
        self._steps.append((step, seconds))
        self._seconds += seconds

    def discard_after(self, step: int) -> int:
        """Discard the reports after a step; return the number of steps that are taken again."""
        last = self._steps[-1][0] if self._steps else step
        while self._steps and self._steps[-1][0] > step:
            self._seconds -= self._steps.pop()[1]
        return max(0, last - step)

    def share(self, now: float) -> float:
        """Return the share, 0 to 1, at a time in seconds since 1970."""
        elapsed = now - self.launched_at
        return min(1.0, max(0.0, self._seconds / elapsed)) if elapsed > 0 else 0.0
