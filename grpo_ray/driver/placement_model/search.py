"""Search of the best split of a number of GPUs into engines and learner."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_ray.driver.placement_model.placements import StepTime, Workload, colocated_step, dedicated_step

PARTS = (2, 3, 4, 5, 6)
"""Eighths of the GPUs that engines may have."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Dedicated engines on a part of the GPUs."""

    engine_gpus: int
    learner_gpus: int
    staleness: int
    """k, weight versions."""
    step: StepTime


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both placements on the same GPUs."""

    gpus: int
    colocated: StepTime
    dedicated: tuple[Split, ...]
    """Best split for each staleness."""

    @property
    def best(self) -> Split:
        """The fastest split; of equally fast ones that with the least staleness."""
        return min(self.dedicated, key=lambda split: (round(split.step.seconds, 3), split.staleness))

    def gain(self, split: Split) -> float:
        """Return the steps of a split in the time of one colocated step."""
        return self.colocated.seconds / split.step.seconds


def possible_splits(
    gpus: int, gpus_per_engine: int = 1, fits: Callable[[int], bool] = lambda learner: True
) -> Iterator[tuple[int, int]]:
    """Yield GPUs of engines and of the learner: whole engines, about as large as one of PARTS.

    Args:
        fits: tells if a learner may have so many GPUs.
    """
    seen = set()
    for part in PARTS:
        engines = max(1, round(part * gpus / 8 / gpus_per_engine)) * gpus_per_engine
        learner = gpus - engines
        while learner > 0 and not fits(learner):  # the GPUs that a learner cannot use stay with the engines
            learner -= gpus_per_engine
        if learner > 0 and learner not in seen:
            seen.add(learner)
            yield gpus - learner, learner


STEPS = 2
"""Steps that are simulated for each split."""


def compare_placements(
    work: Workload, gpus: int, stalenesses: tuple[int, ...], fits: Callable[[int], bool] = lambda learner: True
) -> Comparison | None:
    """Compare colocated engines with the best split for each staleness; None if there is no split."""
    splits = list(possible_splits(gpus, work.gpus_per_engine, fits))
    if not splits or not stalenesses:
        return None
    return Comparison(
        gpus=gpus,
        colocated=colocated_step(work, gpus, STEPS),
        dedicated=tuple(
            min(
                (
                    Split(engine_gpus=e, learner_gpus=t, staleness=k, step=dedicated_step(work, e, t, k, STEPS))
                    for e, t in splits
                ),
                key=lambda split: split.step.seconds,
            )
            for k in stalenesses
        ),
    )
