"""Published seconds per step of colocated and dedicated engines, and their prediction by the simulation of placements.

Sources, by the names of their pages: verl, docs/advance/fully_async.md and docs/advance/one_step_off.md, and scripts of
recipe/fully_async_policy/shell; NeMo RL, docs/about/performance-summary.md (v0.6) and its recipes in
examples/configs/recipes/llm/performance; AReaL, blog/AReaL_v0_3.md and arXiv 2505.24298.

Fitted numbers. Of each system, on one row with both of its placements (`FITTED_ON`):

    verl      mean length (from the dedicated learner's seconds at LEARN_EFFICIENCY), and the factor by which a
              colocated learner is slower than a dedicated one on as many GPUs, since it moves weights and optimizer
    NeMo RL   efficiency of the learner, and fixed cost of a decode step
    AReaL     the same two

Of every row its colocated seconds, as `grpo-ray check` uses a run's own recorded steps. verl publishes them by phase:
they give the fixed cost of a decode step and the learner's seconds per token. For NeMo RL and AReaL they are one
number, by which both durations are scaled. So the dedicated seconds of a row are predicted from its colocated ones;
only those of the rows in `FITTED_ON` are used. `predict_alone` predicts both from the fitted row alone.

Not published, and assumed: spreads of lengths, AReaL's mean length, prompts, the batch of verl's run one step ahead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from grpo_ray.driver.placement_model.engine import EngineSpeed
from grpo_ray.driver.placement_model.hardware import (
    GB200,
    H20,
    H100,
    Gpu,
    ModelSize,
    engine_speed,
    learner_token_seconds,
)
from grpo_ray.driver.placement_model.learner import LearnerSpeed
from grpo_ray.driver.placement_model.lengths import LogNormalLengths
from grpo_ray.driver.placement_model.placements import Clocked, Workload, clocked_step, colocated_step, dedicated_step

QWEN_7B = ModelSize(parameters=7.6e9, active=7.6e9, cache_bytes=57_344)
QWEN_1_5B = ModelSize(parameters=1.54e9, active=1.54e9, cache_bytes=28_672)
QWEN_30B_A3B = ModelSize(parameters=30.5e9, active=3.3e9, cache_bytes=98_304)
QWEN_235B_A22B = ModelSize(parameters=235e9, active=22e9, cache_bytes=192_512)
DEEPSEEK_V3 = ModelSize(parameters=671e9, active=37e9, cache_bytes=70_272)

System = Literal["verl", "NeMo RL", "AReaL"]


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Published seconds of a colocated step's phases."""

    generate: float
    log_probs: float
    """Passes without gradient that dedicated runs leave out."""
    update: float
    """Passes that both have."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Comparison of two placements of the same run."""

    name: str
    system: System
    model: ModelSize
    gpu: Gpu
    gpus: int
    """GPUs of the colocated run."""
    engine_gpus: int
    learner_gpus: int
    gpus_per_engine: int
    colocated_gpus_per_engine: int
    groups: int
    completions: int
    longest: int
    mean: float | None
    """Published mean length; None: that of the system."""
    spread: float
    updates: int
    gpus_per_rank: int
    schedule: Clocked | int
    """Schedule driven by the clock, or k of the rule."""
    colocated: float
    """Published seconds per step."""
    dedicated: float
    phases: Phases | None = None
    prompt: int = 150


VERL = Row(
    name="7B, 28k, 64 + 64 GPUs", system="verl", model=QWEN_7B, gpu=H20, gpus=128, engine_gpus=64, learner_gpus=64,
    gpus_per_engine=4, colocated_gpus_per_engine=4, groups=512, completions=16, longest=28_672, mean=None, spread=1.2,
    updates=16, gpus_per_rank=4, schedule=Clocked(staleness=0.5, parts=4), colocated=356.3, dedicated=150.63,
    phases=Phases(generate=177.85, log_probs=53.92, update=113.81),
)  # fmt: skip
NEMO = Row(
    name="30B-A3B, 16 + 16 H100", system="NeMo RL", model=QWEN_30B_A3B, gpu=H100, gpus=32, engine_gpus=16,
    learner_gpus=16, gpus_per_engine=2, colocated_gpus_per_engine=2, groups=64, completions=32, longest=4096 - 100,
    mean=3_100, spread=0.8, updates=1, gpus_per_rank=2, schedule=Clocked(staleness=1), colocated=192, dedicated=152,
    prompt=100,
)  # fmt: skip
AREAL = Row(
    name="1.5B, 96 + 32 GPUs", system="AReaL", model=QWEN_1_5B, gpu=H100, gpus=32, engine_gpus=24, learner_gpus=8,
    gpus_per_engine=1, colocated_gpus_per_engine=1, groups=128, completions=16, longest=27_648, mean=8_000, spread=0.8,
    updates=4, gpus_per_rank=1, schedule=Clocked(staleness=8), colocated=41.0 * 3.6, dedicated=14.8 * 3.6,
)  # fmt: skip

ROWS = (
    VERL,
    replace(
        VERL, name="7B, 28k, 32 + 32 GPUs", gpus=64, engine_gpus=32, learner_gpus=32, colocated=365.28,
        dedicated=189.26, phases=Phases(generate=150.72, log_probs=70.26, update=133.41),
    ),
    replace(
        VERL, name="7B, 28k, 16 + 16 GPUs", gpus=32, engine_gpus=16, learner_gpus=16, colocated=790.10,
        dedicated=294.77, phases=Phases(generate=357.41, log_probs=107.71, update=313.81),
    ),
    replace(VERL, name="the first row, staleness 0", schedule=Clocked(staleness=0, parts=4), dedicated=231.34),
    replace(VERL, name="the first row, staleness 0.1", schedule=Clocked(staleness=0.1, parts=4), dedicated=171.30),
    replace(VERL, name="the first row, staleness 0.3", schedule=Clocked(staleness=0.3, parts=4), dedicated=146.11),
    replace(
        VERL, name="30B-A3B, 8k, 96 + 32 GPUs", model=QWEN_30B_A3B, engine_gpus=96, learner_gpus=32, longest=8_192,
        updates=4, colocated=497.89, dedicated=282.75,
        phases=Phases(generate=348.05, log_probs=28.73, update=86.27 + 20.86),
    ),
    replace(
        VERL, name="7B, 10k, 8 + 8 GPUs", gpus=16, engine_gpus=8, learner_gpus=8, longest=10_240, colocated=484.62,
        dedicated=489.95, phases=Phases(generate=52.94, log_probs=0.0, update=430.26),
    ),
    replace(
        VERL, name="7B, 20k, one step ahead, 4 + 12 GPUs", gpus=16, engine_gpus=4, learner_gpus=12, longest=20_480,
        gpus_per_engine=2, colocated_gpus_per_engine=2, schedule=1, colocated=749, dedicated=520,
        phases=Phases(generate=247, log_probs=0.0, update=286 + 88),
    ),
    NEMO,
    replace(
        NEMO, name="30B-A3B, 8 + 8 GB200", gpu=GB200, gpus=16, engine_gpus=8, learner_gpus=8, gpus_per_engine=1,
        colocated_gpus_per_engine=1, gpus_per_rank=1, colocated=221, dedicated=301,
    ),
    replace(
        NEMO, name="235B-A22B, 128 + 128 H100", model=QWEN_235B_A22B, gpus=256, engine_gpus=128, learner_gpus=128,
        gpus_per_engine=8, colocated_gpus_per_engine=16, groups=16, longest=8192 - 100, mean=5_600, gpus_per_rank=32,
        colocated=312, dedicated=231,
    ),
    replace(
        NEMO, name="DeepSeek V3, 256 + 256 H100", model=DEEPSEEK_V3, gpus=512, engine_gpus=256, learner_gpus=256,
        gpus_per_engine=32, colocated_gpus_per_engine=32, groups=16, longest=1536 - 100, mean=640, gpus_per_rank=16,
        colocated=111, dedicated=64,
    ),
    AREAL,
    replace(
        AREAL, name="7B, 144 + 48 GPUs", model=QWEN_7B, gpus=32, engine_gpus=24, learner_gpus=8, groups=85,
        colocated=57.7 * 3.6, dedicated=25.4 * 3.6,
    ),
)  # fmt: skip
"""Compared rows, the fitted one of each system first. NeMo RL's mean lengths are without the prompt."""

# AReaL's batch of 512 prompts is simulated in part, on as small a part of the GPUs: engines and ranks are alike.

FITTED_ON = (VERL, NEMO, AREAL)

DEDICATED_UPDATE = 113.16
"""Published seconds of the learner's passes of a step on the dedicated learner GPUs of the row VERL."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Numbers of a system that its other rows use."""

    mean: float | None = None
    """Mean length, tokens; None: published, or that of the row."""
    colocated_learner: float = 1.0
    """Seconds of a colocated learner, as a multiple of a dedicated one's on as many GPUs."""
    overhead_seconds: float | None = None
    """Fixed cost of a decode step; None: fitted to the phases of each row."""
    efficiency: float | None = None
    """Part of the GPU's operations that the learner reaches; None: fitted to the phases of each row."""


def workload(row: Row, mean: float, overhead_seconds: float, token_seconds: float) -> Workload:
    """Return a row's work with dedicated engines, and with colocated ones of its own size."""
    engine, colocated = (
        engine_speed(row.model, row.gpu, gpus, overhead_seconds=overhead_seconds)
        for gpus in (row.gpus_per_engine, row.colocated_gpus_per_engine)
    )
    mean = min(mean, 0.8 * row.longest)
    return Workload(
        draw=LogNormalLengths(
            groups=row.groups, completions=row.completions, mean=mean, longest=row.longest, spread=row.spread
        ),
        longest=row.longest,
        prompt_tokens=row.prompt,
        engine=engine,
        colocated_engine=colocated,
        learner=LearnerSpeed(
            token_seconds=token_seconds, updates=row.updates, gpus_per_rank=row.gpus_per_rank,
            prompt_tokens=row.prompt, keeps_groups=False,
        ),
        gpus_per_engine=row.gpus_per_engine,
        gpus_per_colocated_engine=row.colocated_gpus_per_engine,
    )  # fmt: skip


def dedicated_seconds(row: Row, work: Workload) -> float:
    """Predict the seconds per step of a row's dedicated engines."""
    if isinstance(row.schedule, int):
        return dedicated_step(work, row.engine_gpus, row.learner_gpus, row.schedule).seconds
    return clocked_step(work, row.engine_gpus, row.learner_gpus, row.schedule)


def bisect(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return about the argument, on a logarithmic scale, at which a rising function has a value; an end if none."""
    for _ in range(10):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return math.sqrt(low * high)


def secant(function: Callable[[float], float], wanted: float, first: float, second: float) -> float:
    """Return about the argument, at least `first`, at which a rising and almost straight function has a value."""
    low, high = (first, function(first)), (second, function(second))
    for _ in range(3):
        slope = (high[1] - low[1]) / (high[0] - low[0])
        found = max(first, high[0] + (wanted - high[1]) / slope) if slope > 0 else first
        if abs(found - high[0]) < 1e-3 * high[0]:
            return found
        low, high = high, (found, function(found))
    return high[0]


def scaled(work: Workload, engine: float, learner: float) -> Workload:
    """Return work whose durations are multiplied by factors."""

    def slower(speed: EngineSpeed) -> EngineSpeed:
        names = ("step_seconds", "sequence_seconds", "context_seconds", "prefill_seconds")
        return replace(speed, **{name: engine * getattr(speed, name) for name in names})

    colocated = work.colocated_engine or work.engine
    token_seconds = learner * work.learner.token_seconds
    return replace(
        work,
        engine=slower(work.engine),
        colocated_engine=slower(colocated),
        learner=replace(work.learner, token_seconds=token_seconds),
    )


@cache
def from_phases(row: Row, fit: Fit) -> Workload:
    """Fit the work of a row to the phases of its colocated step."""
    assert row.phases is not None and fit.mean is not None
    mean, wanted = fit.mean, row.phases.generate

    def generating(overhead: float) -> float:
        work = workload(row, mean, overhead, token_seconds=0.0)
        return colocated_step(work, row.gpus, steps=1).engine_seconds

    work = workload(row, mean, secant(generating, wanted, 1e-4, 0.01), token_seconds=1.0)
    step = colocated_step(work, row.gpus)
    learner = row.phases.update / fit.colocated_learner / step.learner_seconds
    return scaled(work, wanted / step.engine_seconds, learner)


def from_total(row: Row, fit: Fit) -> Workload:
    """Fit the work of a row to the seconds of its colocated step: one factor for engine and learner."""
    assert fit.overhead_seconds is not None and fit.efficiency is not None and row.mean is not None
    token_seconds = learner_token_seconds(row.model, row.gpu, fit.efficiency)
    work = workload(row, row.mean, fit.overhead_seconds, token_seconds)
    factor = row.colocated / colocated_step(work, row.gpus).seconds
    return scaled(work, factor, factor)


def fit_phases(row: Row, dedicated_update: float) -> Fit:
    """Fit a system with published phases on a row: mean length, and cost of a colocated learner."""
    assert row.phases is not None
    token_seconds = learner_token_seconds(row.model, row.gpu)

    def updating(mean: float, gpus: int) -> float:
        work = workload(row, mean, 0.0, token_seconds)
        return work.learner.seconds(next(work.batches()), gpus)

    mean = bisect(lambda mean: updating(mean, row.learner_gpus), dedicated_update, 50, 0.7 * row.longest)
    return Fit(mean=mean, colocated_learner=row.phases.update / updating(mean, row.gpus))


def fit_total(row: Row) -> Fit:
    """Fit a system without published phases on a row: both of its numbers give the share of generating in a step.

    Two shares can fit, one with engines and one with a learner that the other waits for. The smaller one is taken.
    """
    assert row.mean is not None
    mean = row.mean

    def generating(overhead: float) -> float:
        return colocated_step(workload(row, mean, overhead, 0.0), row.gpus, steps=1).engine_seconds

    def with_share(share: float) -> tuple[float, Fit]:
        overhead = secant(generating, share * row.colocated, 1e-4, 0.01)
        work = workload(row, mean, overhead, 1.0)
        step = colocated_step(work, row.gpus)
        token_seconds = max(1e-9, row.colocated - step.engine_seconds) / step.learner_seconds
        efficiency = learner_token_seconds(row.model, row.gpu, 1.0) / token_seconds
        seconds = dedicated_seconds(row, scaled(work, 1.0, token_seconds))
        return seconds, Fit(overhead_seconds=overhead, efficiency=efficiency)

    shares = [share / 10 for share in range(4, 10)] + [0.95]
    found = [with_share(share)[0] for share in shares]
    crossing = next(
        (at for at in range(1, len(shares)) if (found[at - 1] - row.dedicated) * (found[at] - row.dedicated) <= 0), None
    )
    assert crossing is not None, f"no share of generating explains the row {row.name}"
    low, high = shares[crossing - 1], shares[crossing]
    for _ in range(5):
        middle = (low + high) / 2
        is_before = (with_share(middle)[0] - row.dedicated) * (found[crossing - 1] - row.dedicated) > 0
        low, high = (middle, high) if is_before else (low, middle)
    return with_share((low + high) / 2)[1]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted seconds per step of a row's dedicated engines."""

    row: Row
    seconds: float
    is_fitted: bool
    """True if the row's own dedicated seconds were used."""

    @property
    def error(self) -> float:
        """Predicted over published seconds, minus 1."""
        return self.seconds / self.row.dedicated - 1


def predict_alone(row: Row, fit: Fit) -> tuple[float, float] | None:
    """Predict colocated and dedicated seconds of a row from the fitted row of its system alone.

    None for verl's rows with other models or settings, since the fixed cost of a decode step is that of one model.
    """
    if row.system != "verl":
        assert fit.overhead_seconds is not None and fit.efficiency is not None and row.mean is not None
        token_seconds = learner_token_seconds(row.model, row.gpu, fit.efficiency)
        work = workload(row, row.mean, fit.overhead_seconds, token_seconds)
        return colocated_step(work, row.gpus).seconds, dedicated_seconds(row, work)
    if (row.model, row.longest) != (VERL.model, VERL.longest) or VERL.phases is None:
        return None
    work = from_phases(replace(VERL, name="", schedule=0, dedicated=0.0), fit)
    step, phases = colocated_step(work, row.gpus), VERL.phases
    passes = step.learner_seconds * fit.colocated_learner * (1 + phases.log_probs / phases.update)
    rest = VERL.colocated - phases.generate - phases.log_probs - phases.update
    return step.engine_seconds + passes + rest, dedicated_seconds(row, work)


def fit_systems() -> dict[System, Fit]:
    """Fit each system on its row of `FITTED_ON`."""
    return {"verl": fit_phases(VERL, DEDICATED_UPDATE), "NeMo RL": fit_total(NEMO), "AReaL": fit_total(AREAL)}


def predict_rows(fits: Mapping[System, Fit], rows: Sequence[Row] = ROWS) -> list[Prediction]:
    """Predict the dedicated seconds of rows."""
    found = []
    for row in rows:
        fit = fits[row.system]
        without = replace(row, name="", schedule=0, dedicated=0.0)  # not read by the fit
        work = from_phases(without, fit) if row.phases else from_total(row, fit)
        found.append(Prediction(row=row, seconds=dedicated_seconds(row, work), is_fitted=row in FITTED_ON))
    return found
