"""Tests of the pool's decisions without Ray: an attempt that follows another, and objects of a worker that has died."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from grpo_ray.config.loader import load_config
from grpo_ray.errors import EngineError
from grpo_ray.inference.pool import pool as pool_module
from grpo_ray.inference.pool.engine_process import EngineSpec
from grpo_ray.inference.pool.messages import Announcement, EngineFacts
from grpo_ray.inference.pool.pool import Engine, EnginePool, Version

NOT_A_GROUP: Any = None
"""Place of an engine, which these tests do not use."""


def pool_of(notes: list[str], *overrides: str) -> EnginePool:
    event = SimpleNamespace(remote=lambda event, what: notes.append(what))
    spec = EngineSpec(
        config=load_config(None, ["engine.placement=dedicated", "engine.replicas=3", *overrides]),
        model_path="",
        max_num_seqs=1,
        versions={},
        environment={},
        coordinator=SimpleNamespace(record_event=event),
    )
    return EnginePool(spec)


def engine_of(incarnation: int, loaded: int, **calls: Any) -> Engine:
    facts = EngineFacts("fake", 100, 10, "node")
    process = SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})
    return Engine(incarnation, incarnation, NOT_A_GROUP, [process], facts, loaded=loaded, proven=loaded)


def test_begin_during_a_broadcast_restarts_waiting_engines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(pool_module, "_end", lambda engine: ended.append(engine.incarnation))

    async def begin_twice() -> None:
        notes: list[str] = []
        pool = pool_of(notes)
        # Engine 1 has received version 5, engine 2 waits for it, and engine 3 has started after its announcement.
        engines = [engine_of(1, loaded=5), engine_of(2, loaded=4), engine_of(3, loaded=0)]
        pool._engines = {each.number: each for each in engines}
        pool._version = Version(5, [], None, Announcement("group", ("host", 1), (1, 2), 3, ()))
        await pool.begin("second", 1, None)
        assert ended == [2]
        await pool._lose(engines[1], RuntimeError("killed"), failed_starts=0)
        assert notes == ["engine 2 was lost and is started again: RuntimeError: killed"]
        # Nobody waits for the old version any more, so the loss ends no attempt.
        assert await pool.members("second") == (1, 3)
        await pool.begin("third", 1, None)
        assert ended == [2]

    asyncio.run(begin_twice())


@pytest.mark.parametrize("method", ["load", "prove"])
def test_engine_stays_if_the_worker_that_owned_weights_dies(method: str) -> None:
    async def lost(*arguments: Any) -> Any:
        raise ray.exceptions.OwnerDiedError("id", "address", "call site")

    async def use_lost_objects() -> None:
        pool = pool_of([])
        engine = engine_of(1, 0, **{method: lost})
        pool._engines = {1: engine}
        await pool.begin("first", 1, None)
        version = pool._version = Version(1, [], None, sums="sums")
        await getattr(pool, f"_{method}")(engine, version)
        assert engine.loaded == engine.proven == 0
        with pytest.raises(ConnectionError, match=r"cannot fetch the weights \(OwnerDiedError\)"):
            await pool.members("first")
        await pool.begin("second", 1, None)
        await getattr(pool, f"_{method}")(engine, version)  # for the worker that has died: no error of this attempt
        assert await pool.members("second") == (1,)

    asyncio.run(use_lost_objects())


def test_start_beyond_the_time_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_SECONDS", 0.01)

    class SlowPool(EnginePool):
        def _process(self, engine: Engine, rank: int) -> Any:
            return SimpleNamespace(start=SimpleNamespace(remote=lambda *arguments: asyncio.sleep(600)))

    async def start() -> None:
        engine = engine_of(1, 0)
        engine.processes.clear()
        with pytest.raises(TimeoutError, match=r"it has not started within 0\.01 s"):
            await SlowPool(pool_of([])._spec)._start(engine)

    asyncio.run(start())


def engine_that_answers(answer: Callable[[], Coroutine[Any, Any, int]]) -> Engine:
    engine = engine_of(1, 0)
    engine.processes[0].pid = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=answer))
    return engine


def test_engine_whose_process_is_frozen_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "ANSWER_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(EnginePool, "answer_grace", 0.02)
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("work")

    async def freeze() -> int:
        await asyncio.sleep(600)
        return 1

    async def wait_for_frozen() -> None:
        pool = pool_of([], "run.hang_seconds=0.01")
        with pytest.raises(TimeoutError, match=r"its process has not answered for 0\.03 s \(run\.hang_seconds\)"):
            await pool._while_it_answers(engine_that_answers(freeze), work())
        assert ended == ["work"]

    asyncio.run(wait_for_frozen())


def test_engine_that_answers_works_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "ANSWER_PAUSE_SECONDS", 0.01)
    answers: list[int] = []

    async def answer() -> int:
        answers.append(1)
        return 1

    async def end(broken: BaseException | None = None) -> None:
        while len(answers) < 5:
            await asyncio.sleep(0.01)
        if broken is not None:
            raise broken

    async def work() -> None:
        pool = pool_of([], "run.hang_seconds=600")
        await pool._while_it_answers(engine_that_answers(answer), end())
        with pytest.raises(EngineError, match="no memory"):
            await pool._while_it_answers(engine_that_answers(answer), end(EngineError("no memory")))

    asyncio.run(work())


def test_engine_that_cannot_start_waits_for_another_that_still_starts() -> None:
    async def fail_to_start() -> None:
        pool, broken = pool_of([]), RuntimeError("no GPU")
        engines = [Engine(number, 1, NOT_A_GROUP, []) for number in range(3)]
        pool._engines = {2: engines[2]}  # starts for the first time
        for number, failed in ((0, 3), (1, 3), (2, 2), (0, 4)):
            await pool._lose(engines[number], broken, failed)
            assert await pool.members("") == ()  # engine 2 is started once more
        await pool._lose(engines[2], broken, 3)
        with pytest.raises(EngineError, match="engine 2 cannot be started: RuntimeError: no GPU"):
            await pool.members("")

    asyncio.run(fail_to_start())


def test_engine_that_cannot_start_does_not_wait_for_one_without_a_place() -> None:
    async def fail_to_start() -> None:
        pool = pool_of([])  # engines 1 and 2 have no place in the cluster
        await pool._lose(Engine(0, 1, NOT_A_GROUP, []), RuntimeError("no GPU"), 3)
        with pytest.raises(EngineError, match="engine 0 cannot be started"):
            await pool.members("")

    asyncio.run(fail_to_start())
