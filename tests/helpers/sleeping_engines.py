"""Dedicated engines that sleep instead of computing, in real Ray actors: continuous batching with given step times."""

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from failing_storage import wait_for
from fake_engines import FakeProcess, Notes

from grpo_ray.config.loader import load_config
from grpo_ray.driver.placement_model.engine import EngineSpeed
from grpo_ray.driver.placement_model.lengths import SPREAD
from grpo_ray.inference.pool.engine_process import EngineSpec, RoundAborted
from grpo_ray.inference.pool.pool import EnginePool
from grpo_ray.inference.sampling import Completion

VOCABULARY = 2**31
"""First tokens of completions are below this number."""
START_SECONDS = 300.0
"""Time limit of the start of all engines."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Log-normal lengths of completions, cut off at the longest allowed.

    The first token of a completion determines its length, so that an engine can continue one that another has begun.
    """

    median: float
    """Median length before lengths are cut off, tokens."""
    longest: int
    """Longest completion allowed, tokens."""

    def of(self, first_token: int) -> int:
        """Return the length of the completion with this first token."""
        length = self.median * random.Random(first_token).lognormvariate(0, SPREAD)
        return max(1, min(self.longest, round(length)))


@dataclass(frozen=True)
class TurnLengths:
    """Completions that are all the same turn."""

    token_ids: list[int]


def first_token(seed: int) -> int:
    """Return the first token of a completion.

    Args:
        seed: seed of its first request.
    """
    return seed % VOCABULARY


@dataclass(frozen=True, kw_only=True)
class SleepingSpec(EngineSpec):
    """Arguments of engines that sleep."""

    speed: EngineSpeed
    """Durations of their work; `max_running` and `cache_tokens` are not used: all requests run at once."""
    lengths: Lengths | TurnLengths


class SleepingProcess(FakeProcess):
    """Engine that sleeps for each decode step, in which every running request gets one token.

    Prompts are one token. The other tokens are zeros, except the first one; log-probabilities are minus the weight.
    """

    _spec: SleepingSpec

    def run(
        self, token: str, owner: Any, prompts: list[list[int]], sampling: list[dict[str, Any]]
    ) -> Iterator[list[tuple[int, Completion]]]:
        speed, running = self._spec.speed, len(prompts)
        ends = defaultdict(list)
        for index, (prompt, arguments) in enumerate(zip(prompts, sampling, strict=True)):
            completion = self._completion(prompt, arguments)
            ends[len(completion.token_ids)].append((index, completion))
        # Sleeps until set times, as a device computes on while its process waits for a core.
        end = time.perf_counter() + speed.prefill_seconds * sum(map(len, prompts))
        for step in range(1, max(ends) + 1):
            end += max(speed.step_seconds, running * speed.sequence_seconds)
            time.sleep(max(0.0, end - time.perf_counter()))
            if token in self._ended:
                raise RoundAborted
            if finished := ends.pop(step, []):
                running -= len(finished)
                yield finished

    def _completion(self, prompt: list[int], arguments: dict[str, Any]) -> Completion:
        """Return the tokens that a request adds to its completion."""
        if isinstance(self._spec.lengths, TurnLengths):
            tokens = self._spec.lengths.token_ids
            return Completion(tokens, False, [-float(self.weight)] * len(tokens), [])
        _, *earlier = prompt
        first = earlier[0] if earlier else first_token(arguments["seed"])
        missing = self._spec.lengths.of(first) - len(earlier)
        count = min(missing, arguments["max_tokens"])
        tokens = [0] * count if earlier else [first, *[0] * (count - 1)]
        return Completion(tokens, count < missing, [-float(self.weight)] * count, [])


class SleepingPool(EnginePool):
    process_class = SleepingProcess


@contextmanager
def sleeping_pool(engines: int, speed: EngineSpeed, lengths: Lengths | TurnLengths) -> Iterator[Any]:
    """Keep a pool of engines that sleep running in Ray's cluster; yields its handle."""
    settings = ["engine.placement=dedicated", f"engine.replicas={engines}", "cluster.cpus_per_worker=1"]
    spec = SleepingSpec(
        config=load_config(None, settings), model_path="", max_num_seqs=1, versions={}, environment={},
        coordinator=ray.remote(num_cpus=0)(Notes).remote(), speed=speed, lengths=lengths,
    )  # fmt: skip
    pool = ray.remote(num_cpus=0, max_concurrency=100)(SleepingPool).remote(spec)

    def have_started() -> bool:
        return sum(each["node"] is not None for each in ray.get(pool.engines.remote())) == engines

    try:
        ray.get(pool.reserve.remote(), timeout=START_SECONDS)
        ray.get(pool.begin.remote("start", 1, None), timeout=START_SECONDS)
        wait_for(have_started, f"{engines} engines", START_SECONDS)
        yield pool
    finally:
        ray.get(pool.stop.remote(), timeout=START_SECONDS)
        ray.kill(pool)
