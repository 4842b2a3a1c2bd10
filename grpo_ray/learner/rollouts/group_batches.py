"""Batches of whole groups, made of a worker's stream of problems."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from grpo_ray.data.problem import Problem
from grpo_ray.errors import DataError


class GroupBatches:
    """Batches of one worker: `prompts` problems at a time, each repeated `num_generations` times in a row.

    TRL generates once for a batch and takes several forward passes (and perhaps several optimizer steps) on it; its
    loop takes the batch again each time. A step with dynamic sampling draws further batches in between.
    """

    def __init__(
        self, problems: Iterable[tuple[Problem, int]], prompts: int, num_generations: int, repeats: int
    ) -> None:
        """
        Args:
            problems: problems with their epochs.
            prompts: problems of one batch.
            num_generations: rows for each problem.
            repeats: number of times that each batch is yielded.
        """
        self.problems = iter(problems)
        self.prompts = prompts
        self.num_generations = num_generations
        self.repeats = repeats

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for first in self.problems:
            yield from itertools.repeat(self._batch([first]), self.repeats)

    def draw(self) -> list[dict[str, Any]]:
        """Draw one more batch, for the step under way.

        Raises:
            DataError: there are not enough problems left.
        """
        return self._batch([])

    def _batch(self, drawn: list[tuple[Problem, int]]) -> list[dict[str, Any]]:
        drawn += itertools.islice(self.problems, self.prompts - len(drawn))
        if len(drawn) < self.prompts:
            raise DataError(f"the stream of problems ended with {len(drawn)} of a step's {self.prompts} problems")
        return [problem.as_row(epoch, index) for problem, epoch in drawn for index in range(self.num_generations)]
