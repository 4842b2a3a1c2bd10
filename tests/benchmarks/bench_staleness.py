"""Time of a step with slow engines and heavy-tailed lengths: colocated against dedicated engines.

    python tests/benchmarks/bench_staleness.py [--steps N]

Four devices: four colocated engines, after which the learner uses all four devices, or two dedicated engines beside a
learner on the other two, with a staleness of 0, 1, 2 and 4. The pool of engines in a Ray cluster, the samplers and
their schedule are those of a run. The engines sleep for each decode step, and the learner in proportion to the tokens
of its batch, so that the devices need no cores; lengths are log-normal. The colocated engines are in a pool too.

Prints the median seconds of a step, of the same batches in each row, and the prediction of the simulation
(`grpo_ray/driver/placement_model`) for the same durations and lengths. Completions have one turn;
`bench_slow_tools.py` measures steps with a tool. Takes two to three minutes.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
# The engines' processes import their class from there.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path[:2], os.environ.get("PYTHONPATH")]))

import ray  # noqa: E402
import torch  # noqa: E402
from fake_engines import Client  # noqa: E402
from sleeping_engines import Lengths, first_token, sleeping_pool  # noqa: E402
from transformers import TrainerState  # noqa: E402

from grpo_ray.config.loader import load_config  # noqa: E402
from grpo_ray.driver.cluster.connection import QUIET  # noqa: E402
from grpo_ray.driver.placement_model import lengths as model_lengths  # noqa: E402
from grpo_ray.driver.placement_model.engine import EngineSpeed  # noqa: E402
from grpo_ray.driver.placement_model.learner import LearnerSpeed  # noqa: E402
from grpo_ray.driver.placement_model.placements import Workload, colocated_step, dedicated_step  # noqa: E402
from grpo_ray.inference.arguments import request_seed  # noqa: E402
from grpo_ray.inference.pool.messages import EngineRequest  # noqa: E402
from grpo_ray.inference.sampling import Completion, OnFinished, ignore_finished  # noqa: E402
from grpo_ray.learner.batch import Batch  # noqa: E402
from grpo_ray.learner.collectives import Workers  # noqa: E402
from grpo_ray.learner.rollouts.bounded_staleness import BoundedStalenessSampler  # noqa: E402
from grpo_ray.learner.rollouts.padding import Padding  # noqa: E402
from grpo_ray.learner.rollouts.rollout import Rows  # noqa: E402
from grpo_ray.learner.rollouts.rounds import Rounds  # noqa: E402
from grpo_ray.learner.rollouts.sampler import OnPolicySampler, Sampler, SingleTurn, WeightSync  # noqa: E402
from grpo_ray.learner.rollouts.segment_rounds import SegmentRounds  # noqa: E402
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule  # noqa: E402
from grpo_ray.learner.rollouts.sync_probe import SyncProbe  # noqa: E402
from grpo_ray.telemetry.profiler import PhaseProfiler  # noqa: E402

SPEED = EngineSpeed(step_seconds=0.006, sequence_seconds=0.00015, context_seconds=0.0, prefill_seconds=0.00002)
"""Durations of an engine's work. With more than 40 completions, each further one makes a decode step longer."""
LEARNER = LearnerSpeed(token_seconds=0.0002)
DEVICES = 4
WORKERS = Workers(gather_objects=lambda own: [own])
"""The only worker."""
LAST_STEP = 10**6
"""Steps of the run, of which only the first ones are taken: its last ones begin no batches."""


@dataclass(frozen=True)
class Placement:
    """Division of the devices between engines and learner."""

    name: str
    engines: int
    learner_devices: int
    staleness: int = 0

    @property
    def is_colocated(self) -> bool:
        """True if engines and learner use the same devices."""
        return self.engines + self.learner_devices > DEVICES


COLOCATED = Placement("colocated", DEVICES, DEVICES)
DEDICATED = tuple(Placement(f"dedicated, k = {k}", DEVICES // 2, DEVICES // 2, k) for k in (0, 1, 2, 4))
FIRST = 1 + max(placement.staleness for placement in DEDICATED)
"""First batch that is measured, in each placement. The first k + 1 steps of a run are not: they begin its batches."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Batches of the run."""

    groups: int
    completions: int
    """Completions of a group."""
    lengths: Lengths
    run_seed: int = 0

    def rows(self, batch: int) -> Rows:
        """Return the rows of a batch. A prompt is the number of its problem."""
        return [
            {"id": f"{problem:016x}", "epoch": 0, "index": index, "prompt": problem}
            for problem in range(batch * self.groups, (batch + 1) * self.groups)
            for index in range(self.completions)
        ]

    def batch_lengths(self, batch: int) -> model_lengths.Batch:
        """Return the lengths of the completions in each group of a batch."""
        seeds = [request_seed(self.run_seed, row["id"], row["epoch"], row["index"]) for row in self.rows(batch)]
        return self.in_groups([self.lengths.of(first_token(seed)) for seed in seeds])

    def in_groups(self, lengths: Sequence[int]) -> model_lengths.Batch:
        """Divide the lengths of a batch's completions into its groups."""
        return [list(lengths[at : at + self.completions]) for at in range(0, len(lengths), self.completions)]


FULL = Sizes(groups=16, completions=4, lengths=Lengths(median=56, longest=256))
TINY = Sizes(groups=4, completions=2, lengths=Lengths(median=12, longest=32))


class Engines:
    """Access of the only worker to the pool, in place of `DedicatedEngine`. The weights are the version's number."""

    def __init__(self, pool: Any, name: str, longest: int) -> None:
        self.client = Client(pool, name)
        self.training_sampling = {"max_tokens": longest}
        self.max_model_len = 1 + longest
        self.version = self.proofs = self.round = 0

    def sync_weights(self) -> None:
        self.client.load(self.version)
        self.prove_weights()

    def prove_weights(self) -> None:
        self.client.prove(self.version)
        self.proofs += 1

    def run_requests(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished = ignore_finished
    ) -> list[Completion]:
        self.round += 1
        number, rank = self.round, 0
        self.client.call("submit", number, number, rank, list(map(EngineRequest, prompts, sampling)))
        completions: dict[int, Completion] = {}
        while len(completions) < len(prompts):
            finished, _ = self.client.call("results", number, rank)
            for index, completion in finished:
                completions[index] = completion
                on_finished(index, completion.token_ids)
        self.client.call("end_round", number, rank)
        return [completions[index] for index in range(len(prompts))]

    # The learner's passes, for the proof of a round

    def logps(self, batch: Batch) -> torch.Tensor:
        return torch.full(batch["completion_ids"].shape, -float(self.version))

    def check_sync(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        if not torch.equal(learner_logps[mask.bool()], engine_logps[mask.bool()]):
            raise RuntimeError("a round was sampled with weights of another version than the learner's")


class NumberedTurn(SingleTurn):
    """Single turn whose prompt is one token, the problem's number."""

    def render(self, rows: Rows) -> list[list[int]]:
        return [[row["prompt"]] for row in rows]


def new_sampler(engines: Engines, sizes: Sizes, staleness: int) -> Sampler:
    """Return the sampler of a run with this staleness."""
    longest = sizes.lengths.longest
    config = load_config(
        None,
        [
            f"run.seed={sizes.run_seed}",
            f"rollout.max_staleness={staleness}",
            f"grpo.max_completion_length={longest}",
        ],
    )
    access: Any = engines
    turn = NumberedTurn(config, access, tokenizer=None, start_grading=None)
    if not staleness:
        return OnPolicySampler(WeightSync(access, lambda: engines.version), turn, WORKERS, PhaseProfiler())
    schedule = StalenessSchedule(staleness, longest, LAST_STEP)
    return bounded_sampler(engines, schedule, SegmentRounds(turn, schedule))


def bounded_sampler(engines: Engines, schedule: StalenessSchedule, rounds: Rounds) -> BoundedStalenessSampler:
    """Return the sampler of a run with tokens of older weights."""
    access: Any = engines
    return BoundedStalenessSampler(
        schedule,
        WeightSync(access, lambda: engines.version),
        rounds,
        SyncProbe(engines, Padding(0, None, 1.0), WORKERS),
        repeats=1,
        workers=WORKERS,
        profiler=PhaseProfiler(),
        append_metrics=lambda values: None,
        notify=print,
    )


def measure(pool: Any, placement: Placement, sizes: Sizes, steps: int) -> list[float]:
    """Take the steps of a run; return the seconds of each measured one."""
    engines = Engines(pool, placement.name, sizes.lengths.longest)
    sampler = new_sampler(engines, sizes, placement.staleness)
    unmeasured = placement.staleness + 1
    numbers = itertools.count(FIRST - unmeasured)
    batches = iter(sampler.attach(map(sizes.rows, numbers)))
    seconds = []
    for step in range(unmeasured + steps):
        began = time.perf_counter()
        completions = sampler.sample(next(batches))
        sampler.start_ahead(TrainerState(global_step=step, max_steps=LAST_STEP))
        lengths = sizes.in_groups(completions.lengths)
        time.sleep(LEARNER.seconds(lengths, placement.learner_devices))
        sampler.finish_ahead()
        engines.version += 1
        seconds.append(time.perf_counter() - began)
        if lengths != sizes.batch_lengths(FIRST - unmeasured + step):
            raise RuntimeError(f"{placement.name}: completions of step {step} have other lengths than the simulated")
    return seconds[unmeasured:]


@dataclass(frozen=True, kw_only=True)
class GivenBatches(Workload):
    """Work of a run with known batches."""

    sizes: Sizes
    first: int
    """Number of the first batch."""

    def batches(self) -> Iterator[model_lengths.Batch]:
        return map(self.sizes.batch_lengths, itertools.count(self.first))


def predict(placement: Placement, sizes: Sizes, steps: int) -> list[float]:
    """Simulate the measured steps; return the seconds of each."""
    seconds = []
    for batch in range(FIRST, FIRST + steps):
        work = GivenBatches(
            draw=lambda rng: [],  # `batches` is overridden
            longest=sizes.lengths.longest,
            prompt_tokens=1,
            engine=SPEED,
            learner=LEARNER,
            sizes=sizes,
            first=batch,
        )
        if placement.is_colocated:
            step = colocated_step(work, DEVICES, steps=1)
        else:
            step = dedicated_step(work, placement.engines, placement.learner_devices, placement.staleness, steps=1)
        seconds.append(step.seconds)
    return seconds


@contextmanager
def cluster() -> Iterator[None]:
    """Connect to a new Ray cluster, unless this process is connected to one."""
    if ray.is_initialized():
        yield
        return
    ray.init("local", num_cpus=DEVICES, include_dashboard=False, **QUIET)
    try:
        yield
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="measured steps of each run")
    parser.add_argument("--tiny", action="store_true", help="short completions, to try the script")
    options = parser.parse_args()
    sizes = TINY if options.tiny else FULL
    began = time.perf_counter()
    print("| engines | s per step | gain | simulated s | simulated gain | difference |\n|---|---|---|---|---|---|")
    first: tuple[float, float] | None = None
    with cluster():
        for placements in ((COLOCATED,), DEDICATED):
            with sleeping_pool(placements[0].engines, SPEED, sizes.lengths) as pool:
                for placement in placements:
                    measured = statistics.median(measure(pool, placement, sizes, options.steps))
                    predicted = statistics.median(predict(placement, sizes, options.steps))
                    first = first or (measured, predicted)
                    print(
                        f"| {placement.name} | {measured:.3f} | {first[0] / measured:.2f} | {predicted:.3f} "
                        f"| {first[1] / predicted:.2f} | {measured / predicted - 1:+.1%} |",
                        flush=True,
                    )
    print(f"\nmeasured in {time.perf_counter() - began:.0f} s on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
