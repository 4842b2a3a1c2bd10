"""Tests of an engine's process without vLLM: broadcasts of one attempt after the other, and the end of old work."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ray.config.loader import load_config
from grpo_ray.inference.pool import broadcast
from grpo_ray.inference.pool.broadcast import Channel, open_store
from grpo_ray.inference.pool.engine_process import EngineProcess, EngineSpec, RoundAborted
from grpo_ray.inference.pool.messages import Announced, Announcement

CPU = torch.device("cpu")


class Engine:
    """Engine that keeps the weights that it receives."""

    def __init__(self) -> None:
        self.device = CPU
        self.weights: dict[str, list[float]] = {}
        self.profiler = SimpleNamespace(wait_for_device=lambda: None)
        self.weight_proof = SimpleNamespace(precision=lambda: {name: torch.float32 for name in self.weights})

    def receive_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: weight.tolist() for name, weight in weights}

    def empty_prefix_cache(self) -> None:
        pass


class SharedEngine(Engine):
    """Engine of two processes, each in a thread of its own, with a thousand steps of work."""

    tensor_parallel_size = 2

    def __init__(self, rank: int, answers: list[bool], barrier: Barrier) -> None:
        super().__init__()
        self.rank, self.answers, self.barrier = rank, answers, barrier
        self.taken = 0

    def steps(self, prompts: Any, sampling: Any) -> Iterator[list[Any]]:
        for _ in range(1000):
            self.taken += 1
            yield []

    def gather_in_group(self, answer: bool) -> list[bool]:
        self.answers[self.rank] = answer
        self.barrier.wait(60)
        found = list(self.answers)
        self.barrier.wait(60)
        return found


class NoWatchdog:
    def heartbeat(self, activity: str) -> None:
        pass

    def suspend(self) -> None:
        pass


def process_of(engine: Engine) -> EngineProcess:
    spec = EngineSpec(
        config=load_config(None, ["engine.placement=dedicated"]),
        model_path="",
        max_num_seqs=1,
        versions={},
        environment={},
        coordinator=None,
    )
    process: Any = EngineProcess(spec, 0, 0)
    process._engine, process._watchdog = engine, NoWatchdog()
    return process


class Attempt:
    """Learner of an attempt that broadcasts to one engine, which is the same one in every attempt."""

    def __init__(self, name: str) -> None:
        self.name, self.store = name, open_store()
        self.channel: Channel | None = None

    def send(self, process: EngineProcess, *values: float) -> dict[str, str]:
        weight = Announced("weight", "float32", (len(values),))
        announcement = Announcement(self.name, ("127.0.0.1", self.store.port), (1,), 2, (weight,))
        with ThreadPoolExecutor(1) as executor:
            received = executor.submit(process.receive, announcement, 1)
            self.channel = self.channel or Channel(self.store, 0, 2, CPU)
            self.channel.send([("weight", torch.tensor(values))])
            return received.result()


def test_receive_joins_the_group_of_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is restarted opens a group of its own for the same engines, which stay."""
    monkeypatch.setattr(broadcast, "TIMEOUT", timedelta(seconds=20))
    engine = Engine()
    process = process_of(engine)
    first = Attempt("first")
    assert first.send(process, 1.0, 2.0) == {"weight": "float32"}
    assert engine.weights == {"weight": [1.0, 2.0]}
    first.send(process, 3.0, 4.0)  # in the same group
    assert engine.weights == {"weight": [3.0, 4.0]}
    Attempt("second").send(process, 5.0)
    assert engine.weights == {"weight": [5.0]}


def test_processes_of_one_engine_end_old_work_after_the_same_step() -> None:
    answers, barrier = [False, False], Barrier(2)
    engines = [SharedEngine(rank, answers, barrier) for rank in range(2)]
    first, second = map(process_of, engines)
    second.abort("earlier")  # the call has not reached the first process yet

    def run(process: EngineProcess, token: str) -> None:
        process.follow(token, 1, [[1]], [{}])

    with ThreadPoolExecutor(2) as executor:
        for ended in [executor.submit(run, process, "earlier") for process in (first, second)]:
            with pytest.raises(RoundAborted):
                ended.result()
        assert engines[0].taken == engines[1].taken < 1000
        for each in [executor.submit(run, process, "later") for process in (first, second)]:
            each.result()
