"""Order in which the learner reads the micro-batches of one generation batch: optimizer steps, and epochs over it.

A generation batch has a part for each optimizer step of an epoch (`grpo.steps_per_generation`): the groups of
`grpo.prompts_per_step` problems, in the order in which problems were drawn over all workers. TRL divides a worker's
rows at random instead, so the rows of a step would depend on the number of workers. All parts are read `grpo.epochs`
times.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from grpo_ray.learner.collectives import Workers

if TYPE_CHECKING:
    from trl import GRPOConfig


@dataclass(frozen=True)
class BatchSchedule:
    """Division of one worker's generation batch.

    The argument `count` of its methods is TRL's number of micro-batches that this attempt has read before, `_step`. An
    attempt begins with a generation batch, since checkpoints are saved at the ends of generation batches.
    """

    micro_batches: int
    """Micro-batches of a generation batch."""
    per_part: int
    """Micro-batches of one part."""
    epochs: int = 1
    """Number of times that each part is read."""

    @staticmethod
    def of(args: "GRPOConfig") -> "BatchSchedule":
        """Return the schedule of TRL's arguments, whose `steps_per_generation` counts micro-batches.

        A part is never larger than an optimizer step, also where a step has several generation batches, as TRL allows.
        """
        per_part = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        return BatchSchedule(args.steps_per_generation, per_part, args.num_iterations)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.micro_batches // self.per_part

    @property
    def reads(self) -> int:
        """Number of micro-batches that are read until the next generation batch."""
        return self.micro_batches * self.epochs

    def begins_batch(self, count: int) -> bool:
        """Return True if the next micro-batch is the first one of a generation batch."""
        return count % self.reads == 0

    def begins_part(self, count: int) -> bool:
        """Return True if the next micro-batch is the first one of a part, so that the previous part has ended."""
        return count % self.per_part == 0

    def is_first_epoch(self, count: int) -> bool:
        """Return True if the next micro-batch has not been read before."""
        return count % self.reads < self.micro_batches

    def part(self, count: int) -> int:
        """Return the part of the next micro-batch."""
        return count % self.micro_batches // self.per_part

    def place(self, count: int) -> int:
        """Return the place of the next micro-batch in its generation batch."""
        return count % self.micro_batches

    def place_in_part(self, count: int) -> int:
        """Return the place of the next micro-batch in its part."""
        return count % self.per_part


@dataclass(frozen=True)
class DrawOrder:
    """Order in which the rows of a generation batch were drawn, over all workers.

    The stream gives each worker one block of each optimizer step (`data/split.py`), so that the parts of the workers
    alternate: with two workers and two steps the order is the first worker's rows of the first step, the second
    worker's rows of the first step, the first worker's rows of the second step, and so on.
    """

    workers: Workers
    parts: int = 1
    """Parts of the generation batch, one for each optimizer step."""

    def sort(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of all workers, (W B, ...), from rank order to drawing order."""
        blocks = by_rank.view(self.workers.count, self.parts, -1, *by_rank.shape[1:])
        return blocks.transpose(0, 1).reshape(by_rank.shape)

    def own_rows(self, drawn: torch.Tensor) -> torch.Tensor:
        """Select this worker's rows, (B, ...), from the rows of all workers in drawing order, (W B, ...)."""
        blocks = drawn.view(self.parts, self.workers.count, -1, *drawn.shape[1:])
        return blocks[:, self.workers.rank].reshape(-1, *drawn.shape[1:])
