"""What failures and waste cost a run: reckoned from its `events.jsonl` and `metrics.jsonl` alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Goodput:
    """What a run cost beyond its steps, over all of its launches. Seconds are rounded to a tenth."""

    failures: int
    """Attempts and launches that ended without being wanted. A change of the worker count is none."""
    redone_steps: int
    """Steps thrown away, each as often as it was: those past the checkpoint that the next attempt went on from."""
    redone_seconds: float
    """From that checkpoint's step to the end of the attempt; a step that was under way is in it."""
    restart_seconds: float
    """From each failure, once noticed, to training again; of a launch after a death, from the command to training."""
    startup_seconds: float
    """The same of the first launch and of each launch after one that ended in order: no price of failure."""
    no_signal_seconds: float
    """Seconds of steps times their share of groups with equal rewards, as if all groups took equally long.

    It may overlap the next two.
    """
    truncated_seconds: float
    """Seconds of steps times their share of completions cut off at the longest allowed."""
    unscorable_seconds: float
    """Seconds of steps times their share of completions without a verdict."""
    gpu_seconds_lost: float
    """`redone_seconds` and `restart_seconds`, each times the workers of its attempt; 0 on the CPU."""
    trained_seconds: float
    """Of all steps that stand at the end, checkpoints and measuring included."""
    put_aside_seconds: float = 0.0
    """Seconds of steps times their share of groups that were generated and that no step was taken on
    (`grpo.dynamic_sampling`), as if all groups took equally long. Most of them are without signal too."""


def compute_goodput(events: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], use_gpu: bool) -> Goodput:
    """Reckon a run's price. An odd sequence of events raises nothing: what can be known of it is counted.

    events: the lines of `events.jsonl`, in the order of writing; doubled ones count once, unknown kinds not at all.
    rows: the metrics of the steps that stand at the end, each step once.
    """
    timeline = _Timeline()
    for event in _once(events):
        timeline.take(event)
    timeline.close()

    def seconds(share: str | None = None) -> float:
        return round(sum(row["step/seconds"] * (row.get(share, 0.0) if share else 1.0) for row in rows), 1)

    return Goodput(
        failures=timeline.failures,
        redone_steps=timeline.redone_steps,
        redone_seconds=round(timeline.redone_seconds, 1),
        restart_seconds=round(timeline.restart_seconds, 1),
        startup_seconds=round(timeline.startup_seconds, 1),
        no_signal_seconds=seconds("group/equal_share"),
        truncated_seconds=seconds("completion/truncated_share"),
        unscorable_seconds=seconds("reward/unscorable_share"),
        gpu_seconds_lost=round(timeline.worker_seconds, 1) if use_gpu else 0.0,
        trained_seconds=seconds(),
        put_aside_seconds=round(sum(row["step/seconds"] * (1 - 1 / row.get("group/rounds", 1.0)) for row in rows), 1),
    )


def goodput_rows(goodput: Goodput) -> list[tuple[str, str]]:
    """Name and value of each part of the price that is not zero, for the table at the end of a run."""

    def of_training(seconds: float) -> str:
        return f"{_shown(seconds)} of training ({seconds / goodput.trained_seconds:.0%})".replace("%", " %")

    said = []
    if goodput.startup_seconds:
        said.append(("starting", _shown(goodput.startup_seconds)))
    if goodput.failures:
        said.append(("failures", str(goodput.failures)))
    if goodput.redone_steps or goodput.redone_seconds:
        steps = {0: "part of a step", 1: "1 step"}.get(goodput.redone_steps, f"{goodput.redone_steps} steps")
        said.append(("work done again", f"{steps}, {_shown(goodput.redone_seconds)}"))
    if goodput.restart_seconds:
        said.append(("restarts", _shown(goodput.restart_seconds)))
    if goodput.gpu_seconds_lost:
        said.append(("GPU time lost", f"{_shown(goodput.gpu_seconds_lost)}, all workers together"))
    if goodput.no_signal_seconds:
        said.append(("steps without signal", f"{of_training(goodput.no_signal_seconds)}, groups of equal rewards"))
    if goodput.put_aside_seconds:
        said.append(("groups put aside", f"{of_training(goodput.put_aside_seconds)}, generated and not trained on"))
    if goodput.truncated_seconds:
        said.append(("truncated completions", of_training(goodput.truncated_seconds)))
    if goodput.unscorable_seconds:
        said.append(("unscorable completions", of_training(goodput.unscorable_seconds)))
    return said


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _once(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The events that matter, without those that a repeated write doubled."""
    seen = set()
    for event in events:
        if event["event"] in _TAKES and (key := (event["event"], event["at"], event.get("step"))) not in seen:
            seen.add(key)
            yield event


def _between(start: float, end: float) -> float:
    return max(0.0, end - start)  # the board's clock may be set back


@dataclass
class _Attempt:
    """A worker group's time, and those of its steps that stand."""

    start: int
    """The step that it went on from."""
    workers: int
    reached: list[tuple[int, float]] = field(default_factory=list)
    """Steps that stand and when each was reported, rising; first its start and when training began."""
    ended: float | None = None
    """When it failed; None while it runs, and where nobody saw it end."""

    @property
    def end(self) -> float:
        return self.reached[-1][1] if self.ended is None else self.ended

    def throw_away(self, step: int) -> tuple[int, float]:
        """Throw away the steps after `step`: how many they were, and the seconds that they took."""
        # Without a report of that step or a later one, nothing is known to be lost: the step itself may have been
        # what was under way when the attempt ended.
        at = next((at for reached, at in self.reached if reached >= step), None)
        if at is None:
            return 0, 0.0
        lost = self.reached[-1][0] - max(step, self.start), _between(at, self.end)
        self.reached = [each for each in self.reached if each[0] < step]
        if self.reached:
            self.reached.append((step, at))
        self.ended = at
        return lost


class _Timeline:
    """Follows a run's events. At every time it either trains, or starts (at first, or again), or stands still."""

    def __init__(self) -> None:
        self.failures = self.redone_steps = 0
        self.redone_seconds = self.restart_seconds = self.startup_seconds = self.worker_seconds = 0.0
        self._standing: list[_Attempt] = []
        self._running: _Attempt | None = None
        self._workers = 0
        """Of the newest attempt."""
        self._launched = False
        """Whether a launch is under way: it has not ended in order."""
        self._counted = False
        """Whether the end of what runs is counted as a failure already."""
        self._starting_since: float | None = None
        self._again = False
        """Whether what starts does so because something broke off."""
        self._last = 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        _TAKES[event["event"]](self, event)
        self._last = event["at"]

    def close(self) -> None:
        """The events end, wherever they do."""
        self._started(self._last)

    def launch(self, event: Mapping[str, Any]) -> None:
        died = self._launched
        if died and not self._counted:
            self.failures += 1
        self._started(self._last)  # the launch that died had spent so long on starting, if it was starting
        self._starts(event["at"], again=died)
        self._running, self._launched, self._counted = None, True, False

    def begin(self, event: Mapping[str, Any]) -> None:
        if self._starting_since is None:
            # Nothing failed: the worker count was changed, or machines were announced to go and left in order.
            resized = self._running is not None
            self._starts(self._running.end if self._running else event["at"], again=resized)
        self._throw_away(event["step"])
        self._running = _Attempt(event["step"], event["workers"])
        self._standing.append(self._running)
        self._workers = event["workers"]
        self._launched, self._counted = True, False

    def train(self, event: Mapping[str, Any]) -> None:
        if self._running and not self._running.reached:
            self._running.reached.append((self._running.start, event["at"]))
            self._started(event["at"])

    def step(self, event: Mapping[str, Any]) -> None:
        self.train(event)  # where its own event is missing
        if self._running and event["step"] > self._running.reached[-1][0]:
            self._running.reached.append((event["step"], event["at"]))

    def fail(self, event: Mapping[str, Any]) -> None:
        self.failures += 1
        if self._running:
            self._running.ended = event["at"]
        self._started(event["at"])  # what broke off while starting for the first time was no restart
        self._starts(event["at"], again=True)
        self._running, self._launched, self._counted = None, True, True

    def finish(self, event: Mapping[str, Any]) -> None:
        self._starting_since = None  # a launch of a run that has all of its steps trains nothing
        self._running, self._launched, self._counted = None, False, False

    def _starts(self, at: float, again: bool) -> None:
        self._starting_since, self._again = at, again

    def _started(self, at: float) -> None:
        """What was starting trains now, or broke off."""
        if self._starting_since is None:
            return
        seconds = _between(self._starting_since, at)
        if self._again:
            self.restart_seconds += seconds
            self.worker_seconds += seconds * self._workers
        else:
            self.startup_seconds += seconds
        self._starting_since = None

    def _throw_away(self, step: int) -> None:
        for attempt in self._standing:
            steps, seconds = attempt.throw_away(step)
            self.redone_steps += steps
            self.redone_seconds += seconds
            self.worker_seconds += seconds * attempt.workers
        self._standing = [attempt for attempt in self._standing if attempt.reached]


_TAKES: dict[str, Callable[[_Timeline, Mapping[str, Any]], None]] = {
    "launched": _Timeline.launch,
    "began": _Timeline.begin,
    "training": _Timeline.train,
    "step": _Timeline.step,
    "failed": _Timeline.fail,
    "ended": _Timeline.finish,
}
"""Event -> what it means for the timeline; all others are left out."""
