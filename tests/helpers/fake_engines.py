"""Dedicated engines without vLLM, in real Ray actors: their completions are a function of request and weights."""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from grpo_ray.errors import SyncError
from grpo_ray.inference.pool.engine_process import EngineProcess, RoundAborted
from grpo_ray.inference.pool.messages import EngineFacts, EngineRequest
from grpo_ray.inference.pool.pool import EnginePool
from grpo_ray.inference.sampling import Completion

POISON = 666
"""First token of a prompt that kills the engine."""
SLOW = 999
"""First token of a prompt that takes until a file is there."""
LIMIT = 150.0
"""Seconds that a client waits for the pool: a pool that has lost work would keep it waiting for ever."""


class FakeProcess(EngineProcess):
    """An engine whose weights are one number, and whose completion is the seed, the number and the prompt's length."""

    def __init__(self, spec: Any, number: int, rank: int) -> None:
        self._spec, self._number, self._rank = spec, number, rank
        self._ended, self._hangs = set(), threading.Event()
        self.weight = -1
        self.owner: Any = None

    def start(self, store: Any, lora_ranks: Mapping[str, int] | None) -> EngineFacts:
        if any(Path(self._spec.model_path, name).exists() for name in ("cannot-start", f"cannot-start-{self._number}")):
            raise RuntimeError("no memory for the weights")
        return EngineFacts("fake", 100, 10, ray.get_runtime_context().get_node_id())

    def load(self, chunks: Sequence[Any], updates: Any) -> dict[str, str]:
        for chunk in chunks:
            self.weight = ray.get(chunk)
        return {"weight": "float32"}

    def prove(self, learner: Any) -> None:
        if Path(self._spec.model_path, f"stale-{self._number}").exists():
            self.weight -= 1
        if learner != self.weight:
            raise SyncError("the engine does not hold the learner's weights")

    def run(
        self, token: str, owner: Any, prompts: list[list[int]], sampling: list[dict[str, Any]]
    ) -> Iterator[list[tuple[int, Completion]]]:
        folder = Path(self._spec.model_path)
        for index, (prompt, arguments) in enumerate(zip(prompts, sampling, strict=True)):
            if prompt[0] == POISON:
                os._exit(1)
            if prompt[0] == SLOW:
                (folder / f"waiting-{self._number}").touch()
                while not (folder / "go").exists():
                    time.sleep(0.02)
                    if token in self._ended:
                        raise RoundAborted
            tokens = [arguments["seed"], self.weight, len(prompt)]
            yield [(index, Completion(tokens, False, [0.0] * 3, []))]


class FakePool(EnginePool):
    process_class = FakeProcess
    answer_grace = 0.0  # its processes have no watchdog, which would need the time


class Client:
    """All workers of an attempt, in one process."""

    def __init__(self, pool: Any, token: str, workers: int = 1) -> None:
        self.pool, self.token, self.workers = pool, token, workers
        self.rounds = 0
        self.call("begin", workers, None)

    def call(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.pool, method).remote(self.token, *arguments), timeout=LIMIT)

    def load(self, weight: int) -> None:
        assert self.call("load", [ray.put(weight)], []) == {"weight": "float32"}

    def prove(self, weight: int) -> int:
        engines, _ = self.call("prove", [ray.put(weight)])
        return int(engines)

    def sync(self, weight: int) -> int:
        self.load(weight)
        return self.prove(weight)

    def submit(self, *prompts_of_workers: list[list[int]]) -> int:
        self.rounds += 1
        for rank, prompts in enumerate(prompts_of_workers):
            requests = [EngineRequest(prompt, {"seed": 10 * rank + i}) for i, prompt in enumerate(prompts)]
            self.call("submit", self.rounds, 1, rank, requests)
        return self.rounds

    def collect(self, number: int, rank: int, count: int) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        deadline = time.monotonic() + LIMIT
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} completions arrived"
            finished, _ = self.call("results", number, rank)
            for index, completion in finished:
                assert index not in found
                found[index] = completion.token_ids
        self.call("end_round", number, rank)
        return [found[index] for index in range(count)]

    def sample(self, *prompts_of_workers: list[list[int]]) -> list[list[list[int]]]:
        number = self.submit(*prompts_of_workers)
        return [self.collect(number, rank, len(each)) for rank, each in enumerate(prompts_of_workers)]


class Notes:
    """Recorder of events in place of the run's coordinator."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def record_event(self, event: str, what: str) -> None:
        self.notes.append(what)

    def read(self) -> list[str]:
        return self.notes
