"""Mixture of several sources: which source each problem of a step comes from, and the stream of their problems.

A source has an order and epochs of its own (`stream.EpochReader`), and a small source begins its next epoch sooner. The
source of the next problem is the one that is furthest behind its share. After any number n of problems, a source with
share w has therefore contributed w n of them, up to a difference below the number of sources: each step, and each
worker's part of it, has the shares of the mixture.

    draws = Draws({"games": Fraction(1, 4), "math": Fraction(3, 4)})
    list(itertools.islice(draws.order(), 8))
    # ["math", "games", "math", "math", "math", "games", "math", "math"]

The order depends on nothing but the shares and the numbers of problems drawn so far, which checkpoints hold. It is
therefore the same for any number of workers, and after any interruption.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from grpo_ray.data.stream import EpochPlan, EpochReader, Split, make_epoch_reader

if TYPE_CHECKING:
    import ray.data

MAX_PLAN_PROBLEMS = 100_000
"""Largest number of problems in one plan; bounds the time to compute it."""
BLOCK_BYTES = 256 * 1024
"""Size of the blocks of the stream, bytes. With Ray Data's default of 128 MiB, the first problems would arrive only
after thousands more have been read."""


@dataclass(frozen=True)
class Draws:
    """Shares of the sources, and the number of problems drawn from each under these shares."""

    shares: Mapping[str, Fraction]
    """Share of each source, above 0; they add up to 1."""
    drawn: Mapping[str, int] = field(default_factory=dict)
    """Problems drawn from each source; 0 for one that is missing."""

    def order(self) -> Iterator[str]:
        """Yield the sources of the following problems, without end."""
        # Whole numbers: the distances from the shares are exact, and so is every comparison.
        scale = math.lcm(*(share.denominator for share in self.shares.values()))
        weights = {name: int(share * scale) for name, share in sorted(self.shares.items())}
        total = sum(self.drawn.values())
        behind = {name: weight * total - self.drawn.get(name, 0) * scale for name, weight in weights.items()}
        while True:
            for name, weight in weights.items():
                behind[name] += weight
            first = max(behind, key=behind.__getitem__)  # of equals the first by name
            behind[first] -= scale
            yield first

    def whole_steps(self, available: Mapping[str, int], problems: int, most: int) -> tuple[int, list[str]]:
        """Count the steps that the sources can serve.

        Args:
            available: problems left of each source.
            problems: problems of one step.
            most: number of steps after which counting ends.

        Returns:
            Number of whole steps, at most `most`, and the sources that have too few problems for the step after them
            (none if `most` was reached).
        """
        left, order = dict(available), self.order()
        for step in range(most):
            needed = dict.fromkeys(left, 0)
            for name in itertools.islice(order, problems):
                needed[name] += 1
            if short := [name for name in left if needed[name] > left[name]]:
                return step, short
            for name, count in needed.items():
                left[name] -= count
        return most, []


@dataclass(frozen=True)
class MixturePlan:
    """The problems that one execution of the training dataset yields."""

    draws: Draws
    """Shares, and the number of problems drawn before the plan's first one."""
    epochs: Mapping[str, tuple[EpochPlan, ...]]
    """Source -> the rest of its epochs, in the order in which they are read."""
    problems: int
    """Number of problems of the plan."""


def read_mixture(readers: Mapping[str, EpochReader], plan: MixturePlan) -> Iterator[dict[str, Any]]:
    """Yield the rows of a plan.

    Args:
        readers: reader of each source.
    """
    rows = {
        name: itertools.chain.from_iterable(map(readers[name].read_epoch, plans)) for name, plans in plan.epochs.items()
    }
    for name in itertools.islice(plan.draws.order(), plan.problems):
        if (row := next(rows[name], None)) is None:
            return  # the files have changed: the workers miss a row, and report it
        yield row


def mixture_stream(
    splits: Mapping[str, Split],
    seed: int,
    coordinator: Any,
    with_preferred: bool = True,
    most_problems: int | None = None,
) -> "ray.data.Dataset":
    """Create the training dataset of a mixture; each execution yields the rows of the coordinator's plan at that time.

    One task reads all sources, because the order of their problems is known only to a reader that counts them. Parsing
    takes a small part of the time in which the problems are trained on.

    Args:
        splits: training split of each source, from `build_index`.
        seed, coordinator, with_preferred, most_problems: as in `stream.training_stream`.
    """
    import ray.data

    readers = {name: make_epoch_reader(split, seed, with_preferred) for name, split in splits.items()}

    def read(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        (plan,) = ray.get(coordinator.epoch_plan.remote())
        return itertools.islice(read_mixture(readers, ray.get(plan)), most_problems)

    dataset = ray.data.from_items([0], override_num_blocks=1).flat_map(read)
    dataset.context.target_max_block_size = BLOCK_BYTES
    return dataset
