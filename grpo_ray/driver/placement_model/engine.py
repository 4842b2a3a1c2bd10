"""One engine with continuous batching, simulated from one end of a completion to the next.

Between two such events all running completions grow by one token in each decode step, so that the duration of m steps
has a closed form. With n running completions and C tokens of context in all, a step takes

    max(step_seconds, n * sequence_seconds) + C * context_seconds

The first term is the time in which the weights are read, or with many completions that of the arithmetic; the second
is the time in which their keys and values are read. Steps are counted as real numbers.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """Durations of one engine's work, on one or more GPUs."""

    step_seconds: float
    """A decode step with few completions: reading the weights, and the fixed cost of a step."""
    sequence_seconds: float
    """Arithmetic of one completion in a decode step."""
    context_seconds: float
    """Reading the keys and values of one token of context in a decode step."""
    prefill_seconds: float
    """Computing one token of a prompt, or of the beginning of a continued completion."""
    max_running: int = 256
    """Completions that decode at the same time; others wait."""
    cache_tokens: float = math.inf
    """Tokens of context above which no further completion begins."""


@dataclass(frozen=True)
class Request:
    """Completion, or its next segment, as one engine gets it."""

    key: Hashable
    prefix: int
    """Tokens before it that the engine computes first: the prompt and, if continued, the tokens so far."""
    tokens: int
    """Tokens to be generated."""


class Engine:
    """Simulated engine; its time starts at 0."""

    def __init__(self, speed: EngineSpeed):
        self.speed = speed
        self.now = 0.0
        self.generated = 0.0
        """Tokens generated so far."""
        self.busy_seconds = 0.0
        """Time in which there was work."""
        self._steps = 0.0
        self._stall = 0.0
        """Seconds of prompts that must be computed before the next decode step."""
        self._context = 0.0
        self._running: list[tuple[float, int, Request]] = []
        """Heap of (decode step at its end, order, request)."""
        self._waiting: deque[Request] = deque()
        self._order = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    def submit(self, requests: Iterable[Request]) -> None:
        """Add requests at the present time. They begin in this order, as soon as there is room."""
        self._waiting.extend(requests)
        self._admit()

    def next_end(self) -> float:
        """Return the time at which a completion ends next; infinity if there is none."""
        return self.now + self._stall + self._duration(self._running[0][0] - self._steps) if self._running else math.inf

    def advance(self, until: float) -> list[Request]:
        """Simulate up to a time, or up to the next end if that is earlier; return the requests that end then."""
        if not self._running:
            self.now = until
            return []
        count, end = len(self._running), self.next_end()
        if until >= end:
            until, steps = end, self._running[0][0] - self._steps
        else:
            steps = self._steps_within(max(0.0, until - self.now - self._stall))
        self.busy_seconds += until - self.now
        self._stall = max(0.0, self._stall - (until - self.now))
        self.now, self._steps = until, self._steps + steps
        self.generated += count * steps
        self._context += count * steps
        return self._take_ended()

    def interrupt(self) -> list[tuple[Request, int]]:
        """Remove all requests; return each with the whole tokens that it has generated."""
        stopped = [
            (request, max(0, request.tokens - math.ceil(end - self._steps - 1e-9)))
            for end, _, request in sorted(self._running)
        ]
        stopped += [(request, 0) for request in self._waiting]
        self._running, self._waiting, self._context, self._stall = [], deque(), 0.0, 0.0
        return stopped

    def run(self, requests: Iterable[Request]) -> float:
        """Generate all requests; return the seconds that this takes."""
        began = self.now
        self.submit(requests)
        while self._running:
            self.advance(math.inf)
        return self.now - began

    def _take_ended(self) -> list[Request]:
        ended = []
        while self._running and self._running[0][0] <= self._steps + 1e-9:
            request = heapq.heappop(self._running)[2]
            self._context -= request.prefix + request.tokens
            ended.append(request)
        self._admit()
        return ended

    def _admit(self) -> None:
        speed = self.speed
        while self._waiting and len(self._running) < speed.max_running:
            request = self._waiting[0]
            if self._running and self._context + request.prefix > speed.cache_tokens:
                return
            self._waiting.popleft()
            self._stall += request.prefix * speed.prefill_seconds
            self._context += request.prefix
            heapq.heappush(self._running, (self._steps + request.tokens, self._order, request))
            self._order += 1

    def _duration(self, steps: float) -> float:
        """Return the seconds of some decode steps in which no completion begins or ends."""
        return steps * self._first_step() + self._growth() * steps**2

    def _steps_within(self, seconds: float) -> float:
        """Return the decode steps of some seconds: the inverse of `_duration`."""
        first, growth = self._first_step(), self._growth()
        # The root of a quadratic equation in the form that is exact for a small quadratic term.
        return 2 * seconds / (first + math.sqrt(first**2 + 4 * growth * seconds)) if seconds else 0.0

    def _first_step(self) -> float:
        speed = self.speed
        return (
            max(speed.step_seconds, len(self._running) * speed.sequence_seconds) + self._context * speed.context_seconds
        )

    def _growth(self) -> float:
        return len(self._running) * self.speed.context_seconds / 2
