"""Health rules over the stream of metrics of a run in progress, each with a threshold and advice.

The rules see one row of metrics after the other and keep a bounded number of values. A rule warns when its threshold is
exceeded, and again only after a full window within the threshold. The report shows the same rules' latest judgements.
Imports no heavy library.

Rows may hold anything: values that are not finite numbers count as missing.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.config.schema import HealthConfig
from grpo_ray.storage.numbers import to_bounded
from grpo_ray.telemetry.run_facts import RunFacts, batch_sums

LONG_WINDOW = 5
"""Windows over which each of two compared levels of the training reward is averaged, since that reward is noisy."""
LENGTH_SHARE = 0.5
"""Share of the maximum completion length above which growing lengths are a problem."""
FALL_ERRORS = 3.0
"""Standard errors by which the reward must have fallen, so that noise does not count."""
MEMORY_SHARE = "memory/used_share"
"""Name under which rules read the events `memory`; not a metric of a row."""
SKIPPED = "learner/skipped_steps"
"""Metric that counts from the start of an attempt, and is missing while it is 0."""
LEAST_BATCHES = 3
"""Generation batches that a median is taken over if a window has fewer."""
UNSCORABLE = {
    "reward/unscorable_share": "no verdict, as their solution cannot be parsed",
    "reward/failed_share": "no reward from a judge or an isolated function, which failed",
    "rollout/lost_share": "no score, as their environment was lost or the remote sandbox was unreachable",
}
"""Metric, a share of completions without a score -> missing result and its cause, for messages."""


@dataclass(frozen=True)
class HealthWarning:
    """Warning of one rule."""

    name: str
    """Name of the rule, and of its threshold in the section `health`."""
    step: int
    what: str
    """Measurement and advice, for the user."""


class Series:
    """First and latest values of one metric, and their number.

    Args:
        size: values kept at each end.
    """

    def __init__(self, size: int):
        self.first: list[float] = []
        self.latest: deque[float] = deque(maxlen=size)
        self.count = 0
        self._size = size

    def add(self, value: float) -> None:
        """Append a value."""
        self.count += 1
        self.latest.append(value)
        if len(self.first) < self._size:
            self.first.append(value)


@dataclass
class History:
    """Values of the metrics that rules read, and the best reward."""

    window: int
    """Logging steps that are judged together."""
    step: int = 0
    first_step: int = 0
    """First step that was added."""
    best_reward: tuple[float, float] | None = None
    """Mean and standard error of the best window of rewards, or of the first half window."""
    _series: dict[str, Series] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> set[str]:
        """Add a row, and return the names of its metrics that rules read and that are numbers."""
        step = to_bounded(row.get("step"))
        self.step = self.step if step is None else int(step)
        self.first_step = self.first_step or self.step
        values = {name: value for name in METRICS if (value := to_bounded(row.get(name))) is not None}
        for name, value in values.items():
            if name not in self._series:
                self._series[name] = Series(LONG_WINDOW * self.window)
            self._series[name].add(value)
        if "reward/mean" in values and (rewards := self.latest("reward/mean") or self._first_half("reward/mean")):
            level = mean_and_error(rewards)
            self.best_reward = max(self.best_reward or level, level)
        return set(values)

    def _first_half(self, metric: str) -> Sequence[float]:
        """Return the values of the first half window at the row that completes it; empty at all other rows.

        They give a first level of the reward, in case the reward falls within the first window. Empty too if some of
        them were forgotten, because a launch continued within that half window.
        """
        size = self.window // 2
        values = self.latest_at_most(metric, size)
        return values if self._series[metric].count == size == len(values) >= 2 else []

    def forget_latest(self) -> None:
        """Forget the latest values and the best reward; keep the first values and their number."""
        self.best_reward = None
        for series in self._series.values():
            series.latest.clear()

    def latest(self, metric: str, windows: int = 1) -> Sequence[float]:
        """Return the latest values of a metric, `windows` windows of them; empty until there are enough."""
        size = windows * self.window
        values = self.latest_at_most(metric, size)
        return values if len(values) == size else []

    def latest_at_most(self, metric: str, count: int) -> Sequence[float]:
        """Return up to `count` latest values of a metric."""
        return list(self._series[metric].latest)[-count:] if metric in self._series else []

    def mean(self, metric: str) -> float:
        """Return the mean of the latest values of a metric, up to one window; at least one is required."""
        return _mean(self.latest_at_most(metric, self.window))

    def least_mean(self, metric: str) -> float:
        """Return the mean of a metric over the latest window, in which missing rows count as 0.

        While the first window is incomplete, this is a lower bound of its final mean, if the metric is never negative.
        """
        return sum(self.latest_at_most(metric, self.window)) / self.window

    def first_and_latest(self, metric: str, windows: int = 1) -> tuple[Sequence[float], Sequence[float]] | None:
        """Return the first and the latest values of a metric; None while they overlap."""
        size, latest = windows * self.window, self.latest(metric, windows)
        if not latest or self._series[metric].count < 2 * size:
            return None
        return self._series[metric].first[:size], latest


@dataclass(frozen=True)
class Judgement:
    """Result of one rule at one logging step."""

    text: str
    """Measurement."""
    is_exceeded: bool
    """True if the measurement is beyond the threshold."""


Check = Callable[[History, Any, RunFacts], Judgement | None]
"""Function of history, threshold and facts. Returns None while too little was measured."""


@dataclass(frozen=True)
class Rule:
    """Row of the table of rules. Its name is that of its threshold in the section `health`."""

    metrics: tuple[str, ...]
    """Metrics that it reads. The rule skips a row without any of them."""
    check: Check
    advice: str
    """Remedies."""


def _check_signal(history: History, threshold: float, facts: RunFacts) -> Judgement | None:
    # With dynamic sampling `group/equal_share` counts groups that no step is trained on.
    trained_on = history.latest("group/signal_share")
    if not trained_on and not history.latest_at_most("group/equal_share", 1):
        return None
    least = 1 - _mean(trained_on) if trained_on else history.least_mean("group/equal_share")
    share = least if trained_on else history.mean("group/equal_share")
    return Judgement(f"{_percent(share)} of the groups have equal rewards, and so no gradient", least > threshold)


def _check_reward_rises(history: History, threshold: int, facts: RunFacts) -> Judgement | None:
    steps = history.step - history.first_step + 1
    ends = history.first_and_latest("reward/mean", LONG_WINDOW)
    if not facts.has_equal_difficulty or steps < threshold or ends is None:
        return None
    (first, first_error), (latest, latest_error) = (mean_and_error(values) for values in ends)
    is_stuck = latest - first <= math.hypot(first_error, latest_error)
    change = "has not risen measurably" if is_stuck else "has risen"
    return Judgement(f"the reward {change} in {steps} steps: {first:.3g} at first, {latest:.3g} now", is_stuck)


def _check_reward_holds(history: History, threshold: float, facts: RunFacts) -> Judgement | None:
    rewards, ends = history.latest("reward/mean"), history.first_and_latest("reward/std")
    if not facts.has_equal_difficulty or not rewards or ends is None or history.best_reward is None:
        return None
    (latest, error), (best, best_error) = mean_and_error(rewards), history.best_reward
    if best - latest <= max(threshold * _mean(ends[0]), FALL_ERRORS * math.hypot(error, best_error)):
        return Judgement(f"the reward is {latest:.3g}; its best level was {best:.3g}", False)
    return Judgement(f"the reward has fallen from {best:.3g} to {latest:.3g}", True)


def _check_length(history: History, threshold: float, facts: RunFacts) -> Judgement | None:
    if (ends := history.first_and_latest("completion/length_mean")) is None:
        return None
    first, latest = map(_mean, ends)
    allowed = f"{facts.max_completion_length} are allowed"
    if latest > max(threshold * first, LENGTH_SHARE * facts.max_completion_length):
        return Judgement(
            f"completions have grown from {first:.0f} to {latest:.0f} tokens on average, and {allowed}", True
        )
    return Judgement(f"completions have {latest:.0f} tokens on average, {first:.0f} at first; {allowed}", False)


def _check_entropy(history: History, threshold: float, facts: RunFacts) -> Judgement | None:
    if (ends := history.first_and_latest("policy/entropy")) is None:
        return None
    first, latest = map(_mean, ends)
    if latest < threshold * first:
        text = f"the policy's entropy has fallen from {first:.3g} to {latest:.3g} nats, so that it explores little"
        return Judgement(text, True)
    return Judgement(f"the policy's entropy was {first:.3g} nats at first and is {latest:.3g} now", False)


def _check_gradient(history: History, threshold: float, facts: RunFacts) -> Judgement | None:
    if (ends := history.first_and_latest("learner/gradient_norm")) is None:
        return None
    first, latest = map(statistics.median, ends)
    if latest > threshold * first > 0:
        return Judgement(f"the norm of the gradient has grown from {first:.3g} to {latest:.3g}", True)
    return Judgement(f"the norm of the gradient is {latest:.3g}; it was {first:.3g} at first", False)


def _check_skipped_steps(history: History, threshold: int, facts: RunFacts) -> Judgement:
    # Includes the value before the window, for the first difference. A resume sets the count back to that of
    # the checkpoint, which does not count as a rise.
    counts = history.latest_at_most(SKIPPED, history.window + 1)
    before = [0.0] if len(counts) <= history.window else []
    rises = (b - a for a, b in zip([*before, *counts], [*before, *counts][1:], strict=False))
    skipped = sum(rise for rise in rises if rise > 0)
    text = f"{skipped:.0f} of the latest steps were skipped because loss or gradient was not finite"
    return Judgement(text, skipped > threshold)


def _check_timeouts(history: History, threshold: float, facts: RunFacts) -> Judgement:
    share = history.mean("reward/verifier_timeouts") / facts.completions_per_call
    return Judgement(
        f"the verdicts of {_percent(share)} of the completions hit a time or memory limit, and count as wrong",
        history.least_mean("reward/verifier_timeouts") / facts.completions_per_call > threshold,
    )


def _check_sync_gap(history: History, threshold: float, facts: RunFacts) -> Judgement:
    gap, tolerance = history.mean("engine/logprob_gap_mean"), facts.logprob_tolerance
    return Judgement(
        f"the log-probabilities of engine and learner differ by {gap:.2g} nats; at {tolerance:.2g} the run stops",
        history.least_mean("engine/logprob_gap_mean") > threshold * tolerance,
    )


def _check_data_wait(history: History, threshold: float, facts: RunFacts) -> Judgement | None:
    if not history.latest("phase/wait") or not history.latest("step/seconds"):
        return None
    # Only the first row of a generation batch waits for problems.
    rows = facts.rows_per_batch
    size = max(history.window, LEAST_BATCHES * rows)
    waits, steps = (batch_sums(history.latest_at_most(name, size), rows) for name in ("phase/wait", "step/seconds"))
    # The median, since the first step of an attempt and of an epoch wait longer.
    shares = [wait / seconds for wait, seconds in zip(waits, steps, strict=False) if seconds > 0]
    if not shares:
        return None
    share = statistics.median(shares)
    return Judgement(f"the learner waits for problems in {_percent(share)} of the time", share > threshold)


def _check_memory(history: History, threshold: float, facts: RunFacts) -> Judgement:
    (share,) = history.latest_at_most(MEMORY_SHARE, 1)
    return Judgement(f"{_percent(share)} of the memory is in use", share > threshold)


def _mean_above(metric: str, text: str) -> Callable[[History, float, RunFacts], Judgement]:
    """Return a check that warns if a mean share is above the threshold; `text` has a placeholder for the share."""

    def check(history: History, threshold: float, facts: RunFacts) -> Judgement:
        return Judgement(text.format(_percent(history.mean(metric))), history.least_mean(metric) > threshold)

    return check


def _check_unscorable(history: History, threshold: float, facts: RunFacts) -> Judgement:
    judgements = [
        _mean_above(metric, f"{{}} of the completions have {reason}")(history, threshold, facts)
        for metric, reason in UNSCORABLE.items()
        if history.latest_at_most(metric, 1)
    ]
    return next((judgement for judgement in judgements if judgement.is_exceeded), judgements[0])


def _check_diversity(history: History, threshold: float, facts: RunFacts) -> Judgement | None:
    if not (values := history.latest("group/distinct_share")):
        return None
    share = _mean(values)
    if share < threshold:
        text = f"the completions of a group are almost all the same: only {_percent(share)} differ from the others"
        return Judgement(text, True)
    return Judgement(f"{_percent(share)} of the completions of a group differ from the others", False)


def _check_kl(history: History, threshold: float, facts: RunFacts) -> Judgement | None:
    if not (values := history.latest("policy/kl")):
        return None
    median = statistics.median(values)
    return Judgement(f"the policy is {median:.2g} nats per token away from the reference", median > threshold)


def _check_ratio(history: History, threshold: float, facts: RunFacts) -> Judgement | None:
    if not (ratios := history.latest("engine/ratio_mean")):
        return None
    text = f"the importance ratio of learner to engine is {statistics.median(ratios):.2f} on average"
    if statistics.median(abs(ratio - 1) for ratio in ratios) > threshold:
        return Judgement(f"{text}, instead of 1", True)
    return Judgement(text, False)


RULES: dict[str, Rule] = {
    "no_signal": Rule(
        ("group/equal_share", "group/signal_share"),
        _check_signal,
        "check that the rewards of a group can differ; use problems that are sometimes solved (data.prefer_mixed, "
        "data.skip_solved, grpo.dynamic_sampling), more grpo.num_generations or a higher grpo.temperature",
    ),
    "low_diversity": Rule(
        ("group/distinct_share",),
        _check_diversity,
        "raise grpo.temperature, lower grpo.learning_rate, or add grpo.entropy_coef or grpo.beta",
    ),
    "reward_stuck": Rule(
        ("reward/mean",),
        _check_reward_rises,
        "look at completions in the report; raise grpo.learning_rate or the number of completions per step, or use "
        "easier problems",
    ),
    "reward_fallen": Rule(
        ("reward/mean",),
        _check_reward_holds,
        "resume from the best checkpoint (run.resume=best) with a lower grpo.learning_rate, or with grpo.beta above 0",
    ),
    "length_growth": Rule(
        ("completion/length_mean",),
        _check_length,
        "check that no reward favours length; add the reward soft_overlong, or raise grpo.max_completion_length",
    ),
    "truncation": Rule(
        ("completion/truncated_share",),
        _mean_above("completion/truncated_share", "{} of the completions are cut off at the longest allowed"),
        "raise grpo.max_completion_length, or add the reward soft_overlong",
    ),
    "high_kl": Rule(
        ("policy/kl",),
        _check_kl,
        "lower grpo.learning_rate, or raise grpo.beta",
    ),
    "ratio_drift": Rule(
        ("engine/ratio_mean",),
        _check_ratio,
        "set grpo.vllm_importance_sampling_mode=token_truncate, or model.dtype=float32 for an exact engine",
    ),
    "clipping": Rule(
        ("policy/clipped_share",),
        _mean_above("policy/clipped_share", "{} of the tokens have left the trust region, and have no gradient"),
        "lower grpo.learning_rate, grpo.steps_per_generation or grpo.epochs, or raise grpo.epsilon",
    ),
    "entropy_collapse": Rule(
        ("policy/entropy",),
        _check_entropy,
        "lower grpo.learning_rate, raise grpo.epsilon_high or grpo.temperature, or add grpo.entropy_coef",
    ),
    "gradient_growth": Rule(
        ("learner/gradient_norm",),
        _check_gradient,
        "lower grpo.learning_rate or grpo.max_grad_norm",
    ),
    "skipped_steps": Rule(
        (SKIPPED,),
        _check_skipped_steps,
        "lower grpo.learning_rate, or use model.dtype=bfloat16 in place of float16",
    ),
    "verifier_timeouts": Rule(
        ("reward/verifier_timeouts",),
        _check_timeouts,
        "raise rewards.time_limit, or give the machines more free cores",
    ),
    "unscorable": Rule(
        tuple(UNSCORABLE),
        _check_unscorable,
        "run grpo-ray check, which names these problems and leaves them out, and tries environments and sandbox; the "
        "workers' logs have the first failure of each step",
    ),
    "sync_gap": Rule(
        ("engine/logprob_gap_mean",),
        _check_sync_gap,
        "use model.dtype=float32 or an engine without quantization; raise engine.logprob_tolerance only if the gap is "
        "rounding",
    ),
    "data_wait": Rule(
        ("phase/wait",),
        _check_data_wait,
        "put the data onto faster storage or into parquet files, or leave cores for Ray Data's tasks",
    ),
    "memory": Rule(
        (MEMORY_SHARE,),
        _check_memory,
        "lower grpo.tokens_per_micro_batch or, with colocated engines, engine.gpu_memory_utilization; without GPUs, "
        "cluster.num_workers",
    ),
}
"""Name of a warning -> its rule."""

METRICS = tuple(
    dict.fromkeys([metric for rule in RULES.values() for metric in rule.metrics] + ["reward/std", "step/seconds"])
)
"""Metrics that rules read."""


class RunHealth:
    """Evaluator of the rules on a run's metrics, one row after the other.

    Args:
        settings: thresholds.
    """

    def __init__(self, settings: HealthConfig, facts: RunFacts):
        self.settings, self.facts = settings, facts
        self._history = History(settings.window)
        self._rows_held: dict[str, int] = {}
        """Rule that has warned -> rows within its threshold since then; after a window of them it may warn again."""
        self._launch_step: int | None = None
        """Step that the launch continued from."""

    def resume(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Return to a step, from which an attempt continues; every rule may warn again.

        A launch checks only its own steps, since it may have other settings; earlier steps only provide the first
        values.

        Args:
            rows: latest rows up to this step.
        """
        if self._launch_step is None or step < self._launch_step:
            self._launch_step = step
        self._history, self._rows_held = History(self.settings.window), {}
        has_begun = False
        for row in rows:
            if not has_begun and (to_bounded(row.get("step")) or 0) > self._launch_step:
                self._history.forget_latest()
                has_begun = True
            self._history.add({SKIPPED: 0.0, **row})
        if not has_begun:
            self._history.forget_latest()

    def observe(self, row: Mapping[str, Any]) -> list[HealthWarning]:
        """Check the row of a logging step, and return the warnings that begin with it."""
        return self._warnings({SKIPPED: 0.0, **row})

    def observe_memory(self, measured: Any) -> list[HealthWarning]:
        """Check a measurement of memory, the field `measured` of an event `memory`."""
        share = used_share(measured) if isinstance(measured, Mapping) else None
        return [] if share is None else self._warnings({MEMORY_SHARE: share})

    def judgements(self) -> dict[str, Judgement]:
        """Judge the latest values by each rule that has a threshold and enough values; keys are names of rules."""
        measured = {name: self._judge(name) for name in RULES}
        return {name: judgement for name, judgement in measured.items() if judgement is not None}

    def _warnings(self, row: Mapping[str, Any]) -> list[HealthWarning]:
        """Add a row, and return the warnings that begin with it."""
        present, warnings = self._history.add(row), []
        for name, rule in RULES.items():
            if present.isdisjoint(rule.metrics):
                continue
            judgement = self._judge(name)
            if judgement is None or not judgement.is_exceeded:
                self._count_held(name)
                continue
            if name not in self._rows_held:
                warnings.append(HealthWarning(name, self._history.step, f"{judgement.text}; {rule.advice}"))
            self._rows_held[name] = 0
        return warnings

    def _judge(self, name: str) -> Judgement | None:
        rule, threshold = RULES[name], getattr(self.settings, name)
        if threshold is None or not any(self._history.latest_at_most(metric, 1) for metric in rule.metrics):
            return None
        return rule.check(self._history, threshold, self.facts)

    def _count_held(self, name: str) -> None:
        if name in self._rows_held:
            self._rows_held[name] += 1
            if self._rows_held[name] >= self.settings.window:
                del self._rows_held[name]


def used_share(measured: Mapping[str, Any]) -> float | None:
    """Return the share of memory in use that cannot be freed, of a GPU or else of a machine; None if unknown.

    Args:
        measured: measurements by name (`training/memory_use.py`).
    """
    total = to_bounded(measured.get("total_gib"))
    if total is None:
        return to_bounded(measured.get("host_used_share"))
    used, reserved, allocated = (
        to_bounded(measured.get(name)) for name in ("used_gib", "reserved_peak_gib", "allocated_peak_gib")
    )
    if used is None or reserved is None or allocated is None or total <= 0:
        return None
    # torch keeps memory that it no longer needs, and frees it when there is none left.
    return (allocated + max(0.0, used - reserved)) / total


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values, and its standard error; there must be at least two."""
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
