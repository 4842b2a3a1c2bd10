"""Seconds per step of a run whose engines share the learner's GPUs, or have GPUs of their own.

- `colocated_step`: all GPUs generate a batch, then all of them learn from it.
- `dedicated_step`: engines and learner work at the same time, by the rule of `rollout.max_staleness`, k. While the
  learner takes step t, round t begins batch t + k and continues batches t + 1 to t + k - 1, each completion by at most
  ceil(L / k) tokens. Step and round begin together, and the next ones begin when both have ended and the weights are
  published. With k = 0 the round generates batch t, and the step follows.
- `clocked_step`: the schedule of other systems, as a reference. Engines take new groups as soon as there is room, as
  long as no more than (1 + staleness) batches are begun and not trained on; running completions are interrupted for new
  weights, and continued. The learner takes an optimizer step as soon as enough groups have ended.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from grpo_ray.driver.placement_model.engine import Engine, EngineSpeed, Request
from grpo_ray.driver.placement_model.learner import LearnerSpeed
from grpo_ray.driver.placement_model.lengths import Batch, DrawBatch

FIRST, CONTINUED = "first", "continued"
"""Keys of the requests of a completion's first and of its later segments."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Work of a run: its batches, and how fast engines and learner do it."""

    draw: DrawBatch
    longest: int
    """Longest completion allowed (L), tokens."""
    prompt_tokens: int
    engine: EngineSpeed
    learner: LearnerSpeed
    gpus_per_engine: int = 1
    publish_seconds: float = 0.0
    """Time in which dedicated engines receive new weights."""
    switch_seconds: float = 0.0
    """Time per step in which colocated GPUs change between generating and learning, weight sync included."""
    colocated_engine: EngineSpeed | None = None
    """Speed of a colocated engine, if it differs: the learner takes a part of the memory for keys and values."""
    gpus_per_colocated_engine: int | None = None
    """None: as many as a dedicated one has."""
    seed: int = 0

    def batches(self) -> Iterator[Batch]:
        """Yield batches without end; the same ones each time."""
        rng = random.Random(self.seed)
        return (self.draw(rng) for _ in itertools.count())


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Mean durations of a step, seconds."""

    seconds: float
    engine_seconds: float
    """Generation: of a whole batch, or of a round on its slowest engine."""
    learner_seconds: float
    recomputed_share: float = 0.0
    """Prompt tokens and earlier tokens computed again for continued completions, as a share of the generated tokens."""


def colocated_step(work: Workload, gpus: int, steps: int = 3) -> StepTime:
    """Simulate steps in which all GPUs generate, then all of them learn.

    Each engine generates whole groups, as each worker does.
    """
    engines = max(1, gpus // (work.gpus_per_colocated_engine or work.gpus_per_engine))
    speed = work.colocated_engine or work.engine
    batches = list(itertools.islice(work.batches(), steps))
    generating = [_generate_groups(batch, engines, speed, work.prompt_tokens) for batch in batches]
    learning = [work.learner.seconds(batch, gpus) for batch in batches]
    engine, learner = _mean(generating), _mean(learning)
    return StepTime(seconds=engine + learner + work.switch_seconds, engine_seconds=engine, learner_seconds=learner)


def dedicated_step(
    work: Workload, engine_gpus: int, learner_gpus: int, staleness: int, steps: int = 3, shards: int | None = None
) -> StepTime:
    """Simulate steps of dedicated engines by the rule of `rollout.max_staleness`.

    Args:
        engine_gpus: GPUs of all engines together.
        staleness: k, weight versions.
        steps: steps that are measured, after the k first ones.
        shards: number of engines; None: as many as the GPUs hold.
    """
    shards = shards or max(1, engine_gpus // work.gpus_per_engine)
    if staleness == 0:
        return _on_policy(work, shards, learner_gpus, steps)
    batches, window = work.batches(), deque[OpenBatch]()
    cycles, generating, learning, tokens, recomputed = [], [], [], 0, 0
    for number in range(staleness + steps):
        window.append(OpenBatch(next(batches)))
        requests = [each for batch in window for each in batch.next_round(work, staleness, shards)]
        durations = [Engine(work.engine).run(row for shard, row in requests if shard == at) for at in range(shards)]
        trained = window[0] if len(window) > staleness else None
        if trained is not None:
            window.popleft()
        if number < staleness or trained is None:
            continue
        learner = work.learner.seconds(trained.lengths, learner_gpus)
        generating.append(max(durations))
        learning.append(learner)
        cycles.append(max(generating[-1], learner) + work.publish_seconds)
        tokens += sum(row.tokens for _, row in requests)
        recomputed += sum(row.prefix for _, row in requests if row.key == CONTINUED)
    return StepTime(
        seconds=_mean(cycles),
        engine_seconds=_mean(generating),
        learner_seconds=_mean(learning),
        recomputed_share=recomputed / max(1, tokens),
    )


@dataclass
class OpenBatch:
    """Batch whose completions are generated over several rounds."""

    lengths: Batch
    done: list[list[int]] = field(default_factory=list)
    """Tokens generated so far, for each completion."""

    def __post_init__(self) -> None:
        self.done = [[0] * len(group) for group in self.lengths]

    def next_round(self, work: Workload, staleness: int, shards: int) -> list[tuple[int, Request]]:
        """Return the shard and the next segment of each unfinished completion, and count it as generated.

        The key of a request is FIRST or CONTINUED.
        """
        most = math.ceil(work.longest / staleness)
        found = []
        for group, (lengths, done) in enumerate(zip(self.lengths, self.done, strict=True)):
            for at, (length, so_far) in enumerate(zip(lengths, done, strict=True)):
                if tokens := min(most, length - so_far):
                    found.append(
                        (group % shards, Request(CONTINUED if so_far else FIRST, work.prompt_tokens + so_far, tokens))
                    )
                    done[at] += tokens
        return found

    @property
    def is_complete(self) -> bool:
        """True if every completion has all of its tokens."""
        return self.done == self.lengths


def _on_policy(work: Workload, engines: int, learner_gpus: int, steps: int) -> StepTime:
    """Simulate dedicated engines with k = 0: engines wait for the learner, and the learner for the engines."""
    batches = list(itertools.islice(work.batches(), steps))
    engine = _mean([_generate_groups(batch, engines, work.engine, work.prompt_tokens) for batch in batches])
    learner = _mean([work.learner.seconds(batch, learner_gpus) for batch in batches])
    return StepTime(seconds=engine + learner + work.publish_seconds, engine_seconds=engine, learner_seconds=learner)


def _generate_groups(batch: Batch, engines: int, speed: EngineSpeed, prompt_tokens: int) -> float:
    """Return the seconds until the last engine has generated its groups: group g is on engine g mod engines.

    With fewer groups than engines, groups are divided.
    """
    if len(batch) < engines:
        batch = [[length] for group in batch for length in group]
    parts = [batch[at::engines] for at in range(engines)]
    return max(
        Engine(speed).run(Request(FIRST, prompt_tokens, length) for group in part for length in group) for part in parts
    )


@dataclass(frozen=True, kw_only=True)
class Clocked:
    """Settings of a schedule that is driven by the clock."""

    staleness: float
    """Batches that may be begun beyond the one that is trained on; a fraction is a part of a batch."""
    parts: int = 1
    """Parts of a batch that the learner takes one after the other, each as soon as it is complete."""
    interrupts: bool = True
    """True if running completions get new weights; False if new weights wait for them."""


class ClockedRun:
    """Event-driven simulation of `clocked_step`. Events are the ends of completions and of the learner's parts."""

    def __init__(self, work: Workload, engine_gpus: int, learner_gpus: int, settings: Clocked):
        self.work, self.settings, self.learner_gpus = work, settings, learner_gpus
        self.engines = [Engine(work.engine) for _ in range(max(1, engine_gpus // work.gpus_per_engine))]
        self.now = 0.0
        self.version_times: list[float] = []
        """Time at which each version was published."""
        self._batches = work.batches()
        self._groups: deque[list[int]] = deque()
        """Groups that have been drawn and not begun."""
        self._batch_size = 0
        self.begun = self.trained = 0
        self._open: dict[int, int] = {}
        """Number of a group -> its unfinished completions."""
        self._lengths: dict[int, list[int]] = {}
        self._complete: deque[list[int]] = deque()
        self._learning: list[list[int]] = []
        self._learner_end = math.inf
        self._versions = 0
        self._ends: list[tuple[float, int, int]] = []
        """Heap of (time of an engine's next end, its number, its stamp then)."""
        self._stamps = [0] * len(self.engines)
        self._begin_groups()

    def run(self, versions: int) -> None:
        """Simulate until so many versions have been published."""
        while len(self.version_times) < versions:
            if self._learner_end <= self._next_end():
                self.now = self._learner_end
                self._end_part()
            else:
                self._end_completions()
            self._start_part()
            self._begin_groups()

    def _next_end(self) -> float:
        """Return the time at which a completion ends next; infinity if none is running."""
        while self._ends and self._ends[0][2] != self._stamps[self._ends[0][1]]:
            heapq.heappop(self._ends)  # the engine has got new requests since then
        return self._ends[0][0] if self._ends else math.inf

    def _end_completions(self) -> None:
        """Advance to the next end of a completion. Other engines are advanced when something happens to them."""
        self.now, number = self._next_end(), self._ends[0][1]
        self._collect(self.engines[number].advance(self.now))
        self._note_end(number)

    def _note_end(self, number: int) -> None:
        self._stamps[number] += 1
        end = self.engines[number].next_end()
        if end < math.inf:
            heapq.heappush(self._ends, (end, number, self._stamps[number]))

    def _submit(self, number: int, requests: list[Request]) -> None:
        engine = self.engines[number]
        self._collect(engine.advance(max(engine.now, self.now)))
        engine.submit(requests)
        self._note_end(number)

    def _collect(self, ended: list[Request]) -> None:
        for request in ended:
            group = request.key
            assert isinstance(group, int)
            self._open[group] -= 1
            if not self._open[group]:
                del self._open[group]
                self._complete.append(self._lengths.pop(group))

    def _begin_groups(self) -> None:
        """Give new groups to the engines with the fewest completions, while there is room and staleness allows."""
        if not self._groups:
            self._refill()
        allowed = self._batch_size * (self._versions + 1 + self.settings.staleness)
        if self.begun >= allowed - 1e-9:
            return
        counts = [(len(engine), number) for number, engine in enumerate(self.engines)]
        heapq.heapify(counts)
        room, given = self.work.engine.max_running, dict[int, list[Request]]()
        while self.begun < allowed - 1e-9 and counts[0][0] < room:
            if not self._groups:
                self._refill()
            lengths = self._groups.popleft()
            self._open[self.begun], self._lengths[self.begun] = len(lengths), lengths
            for length in lengths:
                count, number = counts[0]
                given.setdefault(number, []).append(Request(self.begun, self.work.prompt_tokens, length))
                heapq.heapreplace(counts, (count + 1, number))
            self.begun += 1
        for number, requests in given.items():
            self._submit(number, requests)

    def _refill(self) -> None:
        batch = next(self._batches)
        self._batch_size = len(batch)
        self._groups.extend(batch)

    def _start_part(self) -> None:
        size = -(-self._batch_size // self.settings.parts)
        if self._learner_end == math.inf and len(self._complete) >= size:
            self._learning = [self._complete.popleft() for _ in range(size)]
            seconds = self.work.learner.seconds(self._learning, self.learner_gpus)
            self._learner_end = self.now + seconds

    def _end_part(self) -> None:
        self.trained += len(self._learning)
        self._learner_end = math.inf
        if self.trained >= self._batch_size * (self._versions + 1):
            self._publish()

    def _publish(self) -> None:
        """Give the engines new weights; what they are generating is interrupted and continued, or ends first."""
        self._versions += 1
        if not self.settings.interrupts:
            while self._next_end() < math.inf:
                self._end_completions()
        self.version_times.append(self.now)
        resumed = self.now + self.work.publish_seconds
        for number, engine in enumerate(self.engines):
            self._collect(engine.advance(max(engine.now, self.now)))
            stopped = engine.interrupt()
            engine.advance(max(engine.now, resumed))
            engine.submit(
                Request(request.key, request.prefix + done, request.tokens - done) for request, done in stopped
            )
            self._note_end(number)


def clocked_step(
    work: Workload, engine_gpus: int, learner_gpus: int, settings: Clocked, steps: int = 4, warm_up: int = 3
) -> float:
    """Return the mean seconds per step of a schedule driven by the clock, after some first steps."""
    run = ClockedRun(work, engine_gpus, learner_gpus, settings)
    run.run(warm_up + steps)
    return (run.version_times[-1] - run.version_times[warm_up - 1]) / steps


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
