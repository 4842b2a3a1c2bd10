"""Rules by which a sweep launches and compares its trials; nothing is read or started here.

A launch of a trial ends by itself: at the next rung at which trials are compared, at the end of the trial's turn, or at
its last step. Pauses change nothing of a run (`run.pause_at`), so only the order of the work depends on these rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrialProgress:
    """Position of an active trial."""

    name: str
    step: int
    """Steps taken and saved."""
    max_steps: int
    is_running: bool = False
    is_unmeasured: bool = False
    """True if the latest checkpoint lacks the metric that trials are compared by, because a stop or a killed driver has
    left it so, and no launch has measured it since."""

    @property
    def is_finished(self) -> bool:
        """True if the trial has taken all of its steps."""
        return self.step >= self.max_steps

    def has_reached(self, rung: int) -> bool:
        """Return True if the trial can be compared at a rung: it has taken its steps, and is measured there."""
        return self.step >= min(rung, self.max_steps) and not self.needs_measurement(rung)

    def needs_measurement(self, rung: int | None) -> bool:
        """Return True if the trial is to be launched for a measurement only: at a rung, beyond it, or at its end."""
        is_at_rung = rung is not None and self.step >= rung
        return self.is_unmeasured and (is_at_rung or self.is_finished)


@dataclass(frozen=True, kw_only=True)
class TrialLaunch:
    """Trial to be launched next."""

    name: str
    pause_at: int | None
    """Step at which the launch ends; None: the trial's last one. A launch that begins there or later takes no step, but
    measures the checkpoint."""


def next_rung(rungs: Sequence[int], decided: Sequence[int]) -> int | None:
    """Return the step of the next comparison; None if there is none.

    Args:
        rungs: steps of all comparisons, rising.
        decided: steps of those that were made.
    """
    last = max(decided, default=0)
    return next((step for step in rungs if step > last), None)


def is_due(rung: int | None, trials: Sequence[TrialProgress]) -> bool:
    """Return True if all active trials wait at a rung, or have ended before it, and some have steps left."""
    if rung is None or not trials:
        return False
    waits = all(not each.is_running and each.has_reached(rung) for each in trials)
    return waits and any(not each.is_finished for each in trials)


def goal_of(trial: TrialProgress, rung: int | None) -> int:
    """Return the step up to which a trial may go before the next comparison."""
    return trial.max_steps if rung is None else min(rung, trial.max_steps)


def plan_launches(
    trials: Sequence[TrialProgress], rung: int | None, turn: int | None, free: int | None
) -> list[TrialLaunch]:
    """Return the trials to launch now: those with the fewest steps first, then in the order of the sweep.

    Args:
        trials: active trials.
        rung: step of the next comparison; None if there is none.
        turn: steps of a turn (`turns`); None for no turns.
        free: number of trials that may be launched; None for no limit.
    """
    waiting = [
        each
        for each in trials
        if not each.is_running and (each.step < goal_of(each, rung) or each.needs_measurement(rung))
    ]
    waiting.sort(key=lambda each: each.step)  # stable
    first = waiting if free is None else waiting[:free]
    # Without a trial that waits for its turn, pauses would only cost time.
    takes_turns = turn is not None and len(first) < len(waiting)
    launches = []
    for each in first:
        goal = goal_of(each, rung)
        if takes_turns and turn is not None:
            goal = min(goal, (each.step // turn + 1) * turn)
        launches.append(TrialLaunch(name=each.name, pause_at=None if goal >= each.max_steps else goal))
    return launches
