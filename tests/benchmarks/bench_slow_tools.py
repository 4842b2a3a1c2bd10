"""Time of a step with a slow tool: colocated against dedicated engines.

    python tests/benchmarks/bench_slow_tools.py [--steps N]

Devices, engines and learner are those of `bench_staleness.py`: they sleep. Each completion calls a tool in each of its
turns but the last, and the tool answers after a set time. Pool, sampler, schedule, turn loop, chat template and the
reading of calls are those of a run. So this process has work of its own in each round: rendering and reading turns.

Prints the median seconds of a step, and the prediction: per step of the learner one round, whose turns take the time
of the engines, by the simulation (`grpo_ray/driver/placement_model/engine.py`), and that of the tool. Takes two
minutes.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from bench_staleness import (
    COLOCATED,
    DEDICATED,
    DEVICES,
    LAST_STEP,
    LEARNER,
    SPEED,
    WORKERS,
    Engines,
    Placement,
    bounded_sampler,
    cluster,
)
from scripted_tools import tool_tokenizer
from sleeping_engines import TurnLengths, sleeping_pool
from transformers import TrainerState

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.driver.placement_model.engine import Engine, Request
from grpo_ray.inference.conversation_sampler import ConversationSampler
from grpo_ray.inference.sampling import RunRound
from grpo_ray.learner.rollouts.conversation_rounds import ConversationRounds
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.sampler import MultiTurn, OnPolicySampler, Sampler, WeightSync
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule
from grpo_ray.telemetry.profiler import PhaseProfiler
from grpo_ray.tools.sandbox.protocol import CallResult

TURNS, GROUPS, GROUP = 8, 8, 4
"""Turns of each completion, groups of a step, and completions of a group."""
TOKENIZER = tool_tokenizer()
CALL = TOKENIZER('<|call|>{"name": "multiply", "arguments": {"a": 6, "b": 7}}<|end|>', add_special_tokens=False)
"""Turn of every completion."""
LENGTH = len(CALL["input_ids"])


class SlowEpisode:
    """Process of a completion whose tool answers after a set time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def call(self, name: str, arguments: Mapping[str, Any]) -> "Future[CallResult]":
        future: Future[CallResult] = Future()
        timer = threading.Timer(self.seconds, future.set_result, [CallResult("ok", "42")])
        timer.daemon = True
        timer.start()
        return future

    def close(self) -> None:
        pass


class SlowPool:
    """Pool of such processes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def open(self, *arguments: Any) -> SlowEpisode:
        return SlowEpisode(self.seconds)


class TurnEngines(Engines):
    """Access of the only worker to the pool, whose engines generate turns."""

    def is_any_active(self, is_active: bool) -> bool:
        return is_active

    @contextmanager
    def rounds(self) -> Iterator[RunRound]:
        yield self.run_requests


def new_sampler(engines: TurnEngines, staleness: int, tool_seconds: float) -> Sampler:
    """Return the sampler of a run with this staleness."""
    config = load_config(
        None,
        [
            f"rollout.max_staleness={staleness}",
            "rollout.tools=['grpo_ray.tools.examples:multiply']",
            f"rollout.max_turns={TURNS}",
            "grpo.max_completion_length=10000",
        ],
    )
    access: Any = engines
    source = ConversationSampler(config, TOKENIZER)
    source.pool = SlowPool(tool_seconds)  # type: ignore[assignment]
    turns = MultiTurn(config, access, source, None, WORKERS, PhaseProfiler(), lambda metrics: None)
    if not staleness:
        return OnPolicySampler(WeightSync(access, lambda: engines.version), turns, WORKERS, PhaseProfiler())
    schedule = StalenessSchedule(staleness, 10_000, LAST_STEP)
    return bounded_sampler(engines, schedule, ConversationRounds(turns, source, schedule))


def measure(pool: Any, placement: Placement, steps: int, tool_seconds: float) -> list[float]:
    """Take the steps of a run; return the seconds of each measured one."""
    engines = TurnEngines(pool, f"{placement.name} with tools", 10_000)
    sampler = new_sampler(engines, placement.staleness, tool_seconds)
    prompt = [{"role": "user", "content": "What is 6 * 7?"}]
    stream = [(Problem(id=f"{n:016x}", prompt=prompt, solution="42"), 0) for n in range(GROUPS * (steps + 20))]
    batches = iter(sampler.attach(GroupBatches(stream, GROUPS, num_generations=GROUP, repeats=1)))
    seconds = []
    for step in range(placement.staleness + 1 + steps):
        began = time.perf_counter()
        completions = sampler.sample(next(batches))
        sampler.start_ahead(TrainerState(global_step=step, max_steps=LAST_STEP))
        time.sleep(learner_seconds(placement))
        sampler.finish_ahead()
        engines.version += 1
        seconds.append(time.perf_counter() - began)
        if completions.lengths != [TURNS * LENGTH] * (GROUPS * GROUP):
            raise RuntimeError(f"{placement.name}: a completion of step {step} has other turns")
    return seconds[placement.staleness + 1 :]


def learner_seconds(placement: Placement) -> float:
    """Return the time of the learner for a step; it reads the policy's tokens."""
    return LEARNER.seconds([[TURNS * LENGTH] * GROUP] * GROUPS, placement.learner_devices)


def predict(placement: Placement, tool_seconds: float) -> float:
    """Simulate a step, without the work of this process."""
    rounds = max(1, placement.staleness)  # in which a completion takes its turns
    rows = GROUPS * GROUP * rounds // placement.engines
    generating = Engine(SPEED).run(Request(row, 0, LENGTH) for row in range(rows))
    turns = TURNS // rounds
    waits = turns - (rounds == 1)  # with more, some completions call the tool in the last turn of a round
    sampling = turns * generating + waits * tool_seconds
    learning = learner_seconds(placement)
    return max(sampling, learning) if placement.staleness else sampling + learning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each run")
    parser.add_argument("--tool-seconds", type=float, default=1.0, help="time of a call")
    options = parser.parse_args()
    print("| engines | s per step | gain | simulated s | simulated gain | difference |\n|---|---|---|---|---|---|")
    first: tuple[float, float] | None = None
    began = time.perf_counter()
    with cluster():
        for placements in ((COLOCATED,), DEDICATED):
            with sleeping_pool(placements[0].engines, SPEED, TurnLengths(CALL["input_ids"])) as pool:
                for placement in placements:
                    measured = statistics.median(measure(pool, placement, options.steps, options.tool_seconds))
                    predicted = predict(placement, options.tool_seconds)
                    first = first or (measured, predicted)
                    print(
                        f"| {placement.name} | {measured:.3f} | {first[0] / measured:.2f} | {predicted:.3f} "
                        f"| {first[1] / predicted:.2f} | {measured / predicted - 1:+.1%} |",
                        flush=True,
                    )
    print(f"\nmeasured in {time.perf_counter() - began:.0f} s on {os.cpu_count()} cores, {DEVICES} devices")


if __name__ == "__main__":
    main()
