"""Tests of one simulated engine; durations are worked by hand."""

import math
import random

import pytest

from grpo_ray.driver.placement_model.engine import Engine, EngineSpeed, Request


def speed_of(**changed: float) -> EngineSpeed:
    durations = {"step_seconds": 1.0, "sequence_seconds": 0.0, "context_seconds": 0.0, "prefill_seconds": 0.0}
    return EngineSpeed(**(durations | changed))  # type: ignore[arg-type]


def requests(*tokens: int, prefix: int = 0) -> list[Request]:
    return [Request(key, prefix, each) for key, each in enumerate(tokens)]


def test_engine_few_completions_take_one_step_per_token() -> None:
    assert Engine(speed_of()).run(requests(3, 10, 7)) == pytest.approx(10)


def test_engine_many_completions_are_bound_by_arithmetic() -> None:
    # Three run for 2 steps of 1.5 s, two for 2 steps of 1 s, one for 4 steps of 1 s.
    assert Engine(speed_of(sequence_seconds=0.5)).run(requests(2, 4, 8)) == pytest.approx(3 + 2 + 4)


def test_engine_reads_a_growing_context() -> None:
    # The context grows from 5 to 9 tokens in 4 steps: 7 on average.
    engine = Engine(speed_of(step_seconds=0.0, context_seconds=1.0))
    assert engine.run(requests(4, prefix=5)) == pytest.approx(4 * 7)


def test_engine_computes_prefixes_before_it_decodes() -> None:
    assert Engine(speed_of(prefill_seconds=0.1)).run(requests(2, 2, prefix=30)) == pytest.approx(6 + 2)


def test_engine_completions_beyond_its_room_wait() -> None:
    engine = Engine(
        EngineSpeed(step_seconds=1, sequence_seconds=0, context_seconds=0, prefill_seconds=0, max_running=2)
    )
    # 5 and 3 begin; the third takes the place of the 3, and ends at 3 + 4.
    assert engine.run(requests(5, 3, 4)) == pytest.approx(7)


def test_engine_full_cache_delays_a_completion() -> None:
    engine = Engine(speed_of(cache_tokens=12))
    # 10 tokens of context at first; the second prompt does not fit before the first completion has ended.
    assert engine.run(requests(3, 3, prefix=10)) == pytest.approx(6)


def test_engine_interrupted_completions_have_the_rest_to_go() -> None:
    engine = Engine(speed_of())
    engine.submit(requests(3, 9))
    assert engine.advance(2.5) == []
    assert [(request.tokens, done) for request, done in engine.interrupt()] == [(3, 2), (9, 2)]
    assert len(engine) == 0 and engine.next_end() == math.inf


@pytest.mark.parametrize("seed", range(20))
def test_engine_every_completion_gets_all_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    speed = EngineSpeed(
        step_seconds=rng.random(),
        sequence_seconds=rng.random() / 10,
        context_seconds=rng.random() / 1000,
        prefill_seconds=rng.random() / 100,
        max_running=rng.randint(1, 9),
        cache_tokens=rng.choice([math.inf, 200]),
    )
    given = [Request(key, rng.randint(0, 50), rng.randint(1, 90)) for key in range(40)]
    engine, ended = Engine(speed), list[Request]()
    engine.submit(given)
    while len(engine):
        # Pauses at times at which nothing ends must not change anything.
        middle = engine.now + rng.random() * (engine.next_end() - engine.now)
        assert engine.advance(middle) == []
        ended += engine.advance(engine.next_end())
    assert sorted(request.key for request in ended) == list(range(40))  # type: ignore[type-var]
    assert engine.generated == pytest.approx(sum(request.tokens for request in given))
    assert engine.now == pytest.approx(Engine(speed).run(given))
