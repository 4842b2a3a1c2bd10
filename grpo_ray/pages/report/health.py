"""Health of a run: its status, failures, wasted work, and the event log."""

import math
from dataclasses import dataclass
from typing import Literal

from grpo_ray.pages.report.charts import short
from grpo_ray.pages.report.facts import (
    MAX_LINE_CHARS,
    MAX_NAME_CHARS,
    MEDIAN_WINDOW,
    checkpoint_rows,
    finite_mean,
    format_utc,
    last_step,
    max_steps,
    phase_shares,
    run_goodput,
)
from grpo_ray.pages.report.read import RunData
from grpo_ray.storage.numbers import to_float
from grpo_ray.telemetry.events import event_text
from grpo_ray.telemetry.health import LONG_WINDOW, RunHealth
from grpo_ray.telemetry.measures import heldout_title
from grpo_ray.telemetry.placement_rule import GenerationFacts, placement_advice
from grpo_ray.telemetry.run_facts import RunFacts, recorded_thresholds
from grpo_ray.text.display import pluralize, safe_text

Level = Literal["ok", "warning", "error"]

MAX_EVENTS = 100
"""Newest events in the event log."""
SILENT_SECONDS = 900.0
"""Seconds without an event after which a run no longer counts as running. Every reported step is an event, so a longer
silence usually means that the driver is dead."""
MAX_WARNINGS = 30
"""Kinds of warnings that are shown."""
MAX_ROWS_JUDGED = 1000
"""Latest rows of metrics that the health rules are applied to, besides the first rows of the run."""
STATUS_EVENTS = ("launched", "began", "training", "failed", "ended")
"""Events that change the status of a run."""


@dataclass(frozen=True)
class HealthFinding:
    """One line about the run's health, with its severity."""

    level: Level
    text: str
    is_folded: bool = False
    """True for a rule within its threshold, which is shown on demand."""


def run_status(run: RunData, now: float) -> HealthFinding:
    """Determine from the events whether the run is running, finished or interrupted.

    Args:
        run: The run.
        now: Current time, seconds since 1970.
    """
    changes = [event["event"] for event in run.events if event["event"] in STATUS_EVENTS]
    latest = changes[-1] if changes else None
    planned, taken = max_steps(run), last_step(run)
    silence = max(0.0, now - to_float(run.events[-1]["at"])) if run.events else math.nan
    if latest == "ended":
        if planned is None or taken >= planned:
            return HealthFinding("ok", "finished")
        stopped = run.summary.get("stopped")
        ending = f"stopped by {safe_text(stopped, MAX_NAME_CHARS)}" if stopped else "ended"
        return HealthFinding("warning", f"{ending} at step {taken} of {planned}")
    if latest == "failed":
        return HealthFinding("error", f"a worker failed {format_duration(silence)} ago; no new attempt has started")
    if latest is None:
        return HealthFinding("warning", "no launch recorded yet")
    if silence < SILENT_SECONDS:
        return HealthFinding("ok", f"running; last event {format_duration(silence)} ago")
    return HealthFinding("warning", f"not finished; no event for {format_duration(silence)}")


def format_duration(seconds: float) -> str:
    """Format a duration in the largest unit that fits into it at least twice."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if math.isfinite(seconds) else "some time"


def health_findings(run: RunData) -> list[HealthFinding]:
    """Check the run for the problems that an operator looks for first. Warnings are rules of thumb."""
    unreadable = [HealthFinding("warning", safe_text(note, MAX_LINE_CHARS)) for note in run.notes]
    return [
        *unreadable,
        *_check_failures(run),
        *_check_notices(run),
        *_check_warnings(run),
        *_check_rules(run),
        *_check_totals(run),
        *_check_weight_sync(run),
        *_check_heldout_accuracy(run),
        *_check_placement(run),
    ]


def _check_failures(run: RunData) -> list[HealthFinding]:
    goodput = run_goodput(run)
    if goodput and goodput.failures:
        text = f"{pluralize(goodput.failures, 'failure')}, {pluralize(goodput.redone_steps, 'step')} repeated"
        failed = [event for event in run.events if event["event"] == "failed"]
        if failed:
            text += f"; last: {event_text(failed[-1])}"
        return [HealthFinding("warning", safe_text(text, MAX_LINE_CHARS))]
    return [HealthFinding("ok", "no worker failures")] if goodput and run.events else []


def _check_notices(run: RunData) -> list[HealthFinding]:
    findings = []
    for kind in ("hang", "damaged_checkpoint"):
        if texts := [event_text(event) for event in run.events if event["event"] == kind]:
            text = f"{pluralize(len(texts), kind.replace('_', ' '))}; last: {texts[-1]}"
            findings.append(HealthFinding("error", safe_text(text, MAX_LINE_CHARS)))
    return findings


def _check_warnings(run: RunData) -> list[HealthFinding]:
    """List the latest warning of each kind, in the order of their names (`telemetry/health.py`)."""
    steps: dict[str, list[float]] = {}
    latest: dict[str, str] = {}
    for event in run.events:
        if event["event"] == "warning":
            name = safe_text(event.get("name", "?"), MAX_NAME_CHARS)
            steps.setdefault(name, []).append(to_float(event.get("step")))
            latest[name] = safe_text(event.get("what", ""), MAX_LINE_CHARS)
    findings = []
    for name in sorted(steps)[:MAX_WARNINGS]:
        last = steps[name][-1]
        repeated = f", {len(steps[name])} times in all" if len(steps[name]) > 1 else ""
        at = f"warning at step {last:.0f}{repeated}" if math.isfinite(last) else f"warning{repeated}"
        findings.append(HealthFinding("warning", f"{at}: {latest[name]} ({name})"))
    return findings


def _check_rules(run: RunData) -> list[HealthFinding]:
    """Apply the rules that warn during a run to the latest logging steps, in the order of the rules."""
    thresholds = recorded_thresholds(run.config)
    rules = RunHealth(thresholds, RunFacts.recorded(run.config))
    first = LONG_WINDOW * thresholds.window
    rules.resume(0, [*run.rows[:first], *run.rows[first:][-MAX_ROWS_JUDGED:]])
    memory = [event.get("measured") for event in run.events if event["event"] == "memory"]
    for measured in memory[-1:]:
        rules.observe_memory(measured)
    return [
        HealthFinding("warning", f"now: {judgement.text} ({name})")
        if judgement.is_exceeded
        else HealthFinding("ok", f"{judgement.text} ({name})", is_folded=True)
        for name, judgement in rules.judgements().items()
    ]


def _check_totals(run: RunData) -> list[HealthFinding]:
    """Report skipped steps and verifier limits reached, over the whole run."""
    findings = []
    if skipped := run.latest("learner/skipped_steps"):
        text = f"{pluralize(skipped, 'step')} skipped because of a non-finite loss or gradient"
        findings.append(HealthFinding("error", text))
    if timeouts := sum(value for _, value in run.series("reward/verifier_timeouts") if math.isfinite(value)):
        text = f"verifications reached a time or memory limit: {short(timeouts)} in all (reward/verifier_timeouts)"
        findings.append(HealthFinding("warning", text))
    return findings


def _check_weight_sync(run: RunData) -> list[HealthFinding]:
    """Compare the largest log-probability gap between engine and learner with the tolerance of the sync proof."""
    gaps = [value for _, value in run.series("engine/logprob_gap_mean") if math.isfinite(value)]
    if not gaps:
        return []
    tolerance = RunFacts.recorded(run.config).logprob_tolerance
    text = (
        f"largest mean log-probability gap between engine and learner: {short(max(gaps), 2)} nats "
        f"(tolerance {short(tolerance)})"
    )
    return [HealthFinding("ok" if max(gaps) <= tolerance else "error", text)]


def _check_heldout_accuracy(run: RunData) -> list[HealthFinding]:
    """Report each held-out set whose latest interval lies below that of its best checkpoint."""
    findings = []
    rows, noun = checkpoint_rows(run), RunFacts.recorded(run.config).heldout_noun
    for key in run.heldout_keys:
        measured = [(row.step, accuracy) for row in rows if (accuracy := row.heldout[key])]
        if not measured:
            continue
        best_step, best = max(measured, key=lambda each: each[1].value)
        _, latest = measured[-1]
        if latest.high < best.low:
            title = heldout_title(key, noun)
            text = f"{title} has fallen since step {best_step}; its intervals there and now do not overlap"
            findings.append(HealthFinding("error", text))
    return findings


CONVERSATIONS = ("tools", "environment", "function")
"""Fields of `rollout` with which the advice on engines does not reckon."""


def _check_placement(run: RunData) -> list[HealthFinding]:
    """Advise dedicated engines if colocated ones take most of the time."""
    rollout = run.section("rollout")
    if run.section("engine").get("placement") == "dedicated" or rollout.get("max_staleness"):
        return []
    if run.section("grpo").get("dynamic_sampling") or any(rollout.get(name) for name in CONVERSATIONS):
        return []
    shares = {each.phase: each.share for each in phase_shares(run)}
    lengths = [
        finite_mean(value for _, value in run.series(name)[-MEDIAN_WINDOW:])
        for name in ("completion/length_mean", "completion/length_max")
    ]
    if lengths[0] is None or lengths[1] is None:
        return []
    text = placement_advice(
        GenerationFacts(
            generating_share=shares.get("generate", 0.0) + shares.get("wait_workers", 0.0),
            mean_length=lengths[0],
            longest=lengths[1],
            max_completion_length=RunFacts.recorded(run.config).max_completion_length,
            gpus=_recorded_gpus(run),
        )
    )
    return [] if text is None else [HealthFinding("ok", text)]


def _recorded_gpus(run: RunData) -> int:
    """Return the workers' GPUs: those of the latest attempt with workers; 0 if the run has none."""
    if not run.section("cluster").get("use_gpu"):
        return 0
    workers = [to_float(event.get("workers")) for event in run.events if event["event"] == "began"]
    return int(workers[-1]) if workers and math.isfinite(workers[-1]) else 0


@dataclass(frozen=True)
class EventRow:
    """Row of the event log."""

    at: str
    """Date and time, UTC."""
    elapsed: str
    """Time since the first event, h:mm:ss."""
    kind: str
    text: str


def event_rows(run: RunData) -> tuple[list[EventRow], int]:
    """Return the newest events without the reported steps, and the number of older ones that are omitted."""
    events = [event for event in run.events if event["event"] != "step"]
    rows = []
    for event in events[-MAX_EVENTS:]:
        elapsed = to_float(event["at"]) - to_float(run.events[0]["at"])
        rows.append(
            EventRow(
                at=format_utc(to_float(event["at"])),
                elapsed=_format_elapsed(elapsed),
                kind=safe_text(event["event"], MAX_NAME_CHARS),
                text=safe_text(event_text(event, run.heldout_keys), MAX_LINE_CHARS),
            )
        )
    return rows, len(events) - len(rows)


def _format_elapsed(seconds: float) -> str:
    if not 0 <= seconds < 1e9:
        return "?"
    minutes, seconds_left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds_left:02d}"
