"""Tests of faults without a run. Plans, and faults in runs: tests/fault_injection/test_chaos.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.errors import ConfigError
from grpo_ray.resilience import chaos
from grpo_ray.resilience.chaos import (
    SAMPLING_FAULTS,
    Fault,
    FaultInjector,
    describe_plan,
    fault_kinds,
    plan_faults,
    require_engines,
)
from grpo_ray.storage.run_folder import RunFolder


def test_describe_plan_names_each_fault_and_the_wait_for_a_hang() -> None:
    assert describe_plan([Fault("kill-backward", step=3, rank=1), Fault("hang", step=9)], hang_seconds=60) == [
        "fault in step 3, worker 1: SIGKILL in the backward pass",
        "fault in step 9, worker 0: a reward function never returns",
        "the hang ends when the watchdog notices it, after run.hang_seconds=60 or, if that is longer, run.hang_factor "
        "times the usual longest pause without progress",
    ]


def test_describe_plan_without_hang_waits_for_nothing() -> None:
    assert len(describe_plan([Fault("exception", step=3)], hang_seconds=60)) == 1


def test_kill_while_generating_comes_once_in_any_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions of several turns take several rounds; one of them may have no requests of this worker."""
    deaths = []
    monkeypatch.setattr(chaos, "_die", lambda: deaths.append(len(finished)))
    injector = FaultInjector([Fault("kill-generation", step=1)], RunFolder(str(tmp_path), "run"), rank=0, workers=1)
    injector._current_step = lambda: 1
    finished: list[int] = []

    @contextmanager
    def rounds() -> Iterator[Callable[..., Any]]:
        def run_round(prompts: list[Any], sampling: list[Any], on_finished: Callable[..., None]) -> None:
            for number, prompt in enumerate(prompts):
                on_finished(number, prompt)

        yield run_round

    with injector._fail_while_generating(rounds) as run_round:
        for prompts in ([], [[1], [2]], [[3], [4]]):
            run_round(prompts, [{}] * len(prompts), lambda number, token_ids: finished.append(token_ids[0]))
    assert deaths == [0, 0] and finished == [3, 4]  # the fake death does not end the first round


@pytest.mark.parametrize(("kind", "name"), [("kill-engine", "kill"), ("hang-engine", "hang")])
def test_injector_disturbs_an_engine_once_while_it_generates(tmp_path: Path, kind: str, name: str) -> None:
    calls: list[Any] = []

    class Engine:
        def disturb(self, number: int, kind: str) -> None:
            calls.append((number, kind))

    @contextmanager
    def rounds() -> Iterator[Callable[..., Any]]:
        yield lambda prompts, sampling, on_finished: [on_finished(number, each) for number, each in enumerate(prompts)]

    injector = FaultInjector([Fault(kind, step=1, rank=3)], RunFolder(str(tmp_path), "run"), rank=3, workers=4)
    injector._current_step = lambda: 1
    injector._engine = Engine()
    with injector._fail_while_generating(rounds) as run_round:
        for _ in range(2):
            run_round([[1], [2]], [{}, {}], lambda number, token_ids: calls.append(number))
    assert calls == [(3, name), 0, 1, 0, 1]


def test_two_faults_of_engines_in_one_step_come_one_after_the_other(tmp_path: Path) -> None:
    calls: list[str] = []

    class Engine:
        def disturb(self, number: int, kind: str) -> None:
            calls.append(kind)

    @contextmanager
    def rounds() -> Iterator[Callable[..., Any]]:
        yield lambda prompts, sampling, on_finished: [on_finished(number, each) for number, each in enumerate(prompts)]

    faults = [Fault("kill-engine", step=2), Fault("hang-engine", step=2)]
    injector = FaultInjector(faults, RunFolder(str(tmp_path), "run"), rank=0, workers=1)
    injector._engine = Engine()
    found: dict[int, list[str]] = {}
    injector._current_step = lambda: len(found) + 1
    for step in (1, 2, 3, 4):
        calls.clear()
        with injector._fail_while_generating(rounds) as run_round:
            run_round([] if step == 3 else [[1], [2]], [{}, {}], lambda number, token_ids: None)
        found[step] = list(calls)
    assert found == {1: [], 2: ["kill"], 3: [], 4: ["hang"]}  # step 3 samples nothing on this worker


@pytest.mark.parametrize("kind", sorted(SAMPLING_FAULTS))
def test_plan_faults_of_sampling_are_in_steps_that_begin_completions(kind: str) -> None:
    def steps(staleness: int) -> set[int]:
        return {plan_faults(seed, [kind], 6, 2, 2, max_staleness=staleness)[0].step for seed in range(80)}

    assert steps(0) == {1, 2, 3, 4, 5, 6}
    assert steps(2) == {1, 2, 3, 4}  # batches 5 and 6, the last ones, begin in steps 3 and 4
    assert steps(8) == {1}


def test_fault_of_an_engine_needs_dedicated_engines() -> None:
    with pytest.raises(ConfigError, match=r"kill-engine needs dedicated engines; set engine\.placement=dedicated"):
        require_engines(["hang", "kill-engine"], has_dedicated_engines=False)
    require_engines(fault_kinds(False), has_dedicated_engines=False)
    require_engines(fault_kinds(True), has_dedicated_engines=True)
    assert set(fault_kinds(True)) - set(fault_kinds(False)) == {"kill-engine", "hang-engine"}
