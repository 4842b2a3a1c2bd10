"""How a run is: whether it goes on, what broke, what is wasted, and what happened when."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from grpo_ray.report.charts import short
from grpo_ray.report.facts import LINE, NAME, checkpoints, clock, goodput, max_steps, mean, steps_of
from grpo_ray.report.read import Run, number
from grpo_ray.report.text import counted, plain

MOST_EVENTS = 100
SILENT = 900.0
"""Seconds without an event after which a run is no longer said to be under way."""


@dataclass(frozen=True)
class HealthCheck:
    """One line of the run's health."""

    kind: Literal["fine", "look", "bad"]
    text: str


def status(run: Run, now: float) -> HealthCheck:
    """Whether the run goes on, has ended or broke off, as far as its events say."""
    telling = [event for event in run.events if event["event"] in ("launched", "began", "training", "failed", "ended")]
    last = telling[-1]["event"] if telling else None
    wanted, taken = max_steps(run), steps_of(run)
    since = max(0.0, now - number(run.events[-1]["at"])) if run.events else math.nan
    if last == "ended":
        if wanted is None or taken >= wanted:
            return HealthCheck("fine", "finished")
        stopped = run.summary.get("stopped")
        return HealthCheck(
            "look", f"{f'stopped by {plain(stopped, NAME)}' if stopped else 'ended'} at step {taken} of {wanted}"
        )
    if last == "failed":
        return HealthCheck("bad", f"a worker failed {ago(since)} ago, and nothing was started since")
    if last is None:
        return HealthCheck("look", "no word of a launch yet")
    if since < SILENT:
        return HealthCheck("fine", f"under way; the last word of it is {ago(since)} old")
    return HealthCheck("look", f"not ended, and silent for {ago(since)}")


def ago(seconds: float) -> str:
    """A span of time in one unit."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if math.isfinite(seconds) else "some time"


def health(run: Run) -> list[HealthCheck]:
    """What an operator looks at first. What is unusual by a rule of thumb is marked, and the rule is said."""
    found = [HealthCheck("look", plain(note, LINE)) for note in run.notes]
    cost = goodput(run)
    notices = [plain(event.get("what", ""), LINE) for event in run.events if event["event"] == "notice"]
    if cost and cost.failures:
        said = f"{counted(cost.failures, 'failure')}, {counted(cost.redone_steps, 'step')} taken again"
        failed = [event for event in run.events if event["event"] == "failed"]
        latest = f"; the last: worker {failed[-1].get('rank', '?')}: {failed[-1].get('what', '')}" if failed else ""
        found.append(HealthCheck("look", plain(said + latest, LINE)))
    elif cost and run.events:
        found.append(HealthCheck("fine", "no worker failed"))
    if hangs := [text for text in notices if " hangs: " in text]:
        found.append(HealthCheck("bad", f"{counted(len(hangs), 'hang')}, the last: {hangs[-1]}"))
    if spoilt := [text for text in notices if "is not whole" in text]:
        found.append(HealthCheck("bad", spoilt[-1]))
    if skipped := run.last("learner/skipped_steps"):
        found.append(
            HealthCheck("bad", f"{counted(skipped, 'step')} skipped: loss or gradient was not a finite number")
        )
    found += _waste(run)
    if gap := _gap(run):
        found.append(gap)
    saved = [each for each in checkpoints(run) if each.heldout]
    best = max(saved, key=lambda each: each.heldout.value if each.heldout else 0.0, default=None)
    if best and best.heldout and saved[-1].heldout and saved[-1].heldout.high < best.heldout.low:
        found.append(
            HealthCheck(
                "bad", f"held-out accuracy has fallen since step {best.step}, by more than its intervals explain"
            )
        )
    entropies = [value for _, value in run.values("policy/entropy") if math.isfinite(value)]
    first, last = mean(entropies[:10]), mean(entropies[-10:])
    if first is not None and last is not None and len(entropies) >= 20:
        kind: Literal["fine", "look"] = "look" if last < 0.1 * first else "fine"
        found.append(
            HealthCheck(
                kind,
                f"entropy {short(first)} → {short(last)} nats (below a tenth of the first there is little left to try)",
            )
        )
    return found


def _waste(run: Run) -> list[HealthCheck]:
    """What no gradient came of, in the last ten logging steps."""
    found = []
    for metric, what, most in (
        ("group/equal_share", "of the groups have equal rewards and teach nothing", 0.8),
        ("completion/truncated_share", "of the completions are cut off at the longest allowed", 0.2),
        ("reward/unscorable_share", "of the completions have no verdict, because the solution is not understood", 0.05),
    ):
        share = mean([value for _, value in run.values(metric)][-10:])
        if share is not None and (share or metric != "reward/unscorable_share"):
            kind: Literal["fine", "look"] = "look" if share > most else "fine"
            found.append(HealthCheck(kind, f"{share:.1%} {what} (last ten logging steps)".replace("%", " %", 1)))
    if timeouts := sum(value for _, value in run.values("reward/verifier_timeouts") if math.isfinite(value)):
        found.append(
            HealthCheck(
                "look", f"verdicts hit a time or memory limit ({short(timeouts)} in all): reward/verifier_timeouts"
            )
        )
    return found


def _gap(run: Run) -> HealthCheck | None:
    gaps = [value for _, value in run.values("engine/logprob_gap_mean") if math.isfinite(value)]
    if not gaps:
        return None
    model, engine = run.fields("model"), run.fields("engine")
    short_floats = model.get("dtype") in ("bfloat16", "float16") or (
        model.get("dtype") is None and bool(run.fields("cluster").get("use_gpu"))
    )
    tolerance = number(engine.get("logprob_tolerance"))
    tolerance = tolerance if math.isfinite(tolerance) else (0.05 if short_floats else 0.001)
    said = f"engine and learner agree to {short(max(gaps), 2)} nats at worst (tolerance {short(tolerance)})"
    return HealthCheck("fine" if max(gaps) <= tolerance else "bad", said)


@dataclass(frozen=True)
class EventLine:
    """A line of the run's log."""

    at: str
    after: str
    """Time since the first event."""
    kind: str
    text: str


def event_lines(run: Run) -> tuple[list[EventLine], int]:
    """The newest events, reported steps aside, and how many older ones there are."""
    events = [event for event in run.events if event["event"] != "step"]
    shown = []
    for event in events[-MOST_EVENTS:]:
        after = number(event["at"]) - number(run.events[0]["at"])
        kind = event["event"]
        text = event.get("what", "")
        if kind == "began":
            start = event.get("checkpoint") or "the beginning"
            text = f"{number(event['workers']):.0f} workers, from {start}"
        elif kind == "failed":
            text = f"worker {event.get('rank', '?')}: {text}"
        elif kind in ("training", "measured"):
            score = event.get("metrics")
            value = number(score.get("heldout/accuracy")) if isinstance(score, Mapping) else math.nan
            text = f"step {event.get('step', '?')}" + (
                f": held-out accuracy {value:.3f}" if math.isfinite(value) else ""
            )
        shown.append(EventLine(clock(number(event["at"])), _span(after), plain(kind, NAME), plain(text, LINE)))
    return shown, len(events) - len(shown)


def _span(seconds: float) -> str:
    if not 0 <= seconds < 1e9:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
