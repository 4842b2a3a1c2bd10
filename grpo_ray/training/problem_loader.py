"""One worker's way through the run's problems: what it draws, round after round, and the record of what it used.

Every worker draws its own part of each step. What became of the groups is gathered at each checkpoint and at the end
of each epoch; rank 0 then marks the ledger, which travels in the checkpoint, and lays the groups into `rollouts/`.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch.distributed as dist

from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import Ledger
from grpo_ray.data.problem import Problem
from grpo_ray.data.stream import EpochPlan, from_row
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.errors import DataError
from grpo_ray.storage.rollouts import GroupRecord, groups_table, plan_curriculum, read_rollouts, write_rollouts
from grpo_ray.storage.run_folder import RunFolder


class ProblemLoader:
    """One worker's course. All of its methods that gather are barriers: every worker calls them equally often."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        folder: RunFolder,
        board: Any,
        rows: Callable[[], Iterator[dict[str, Any]]],
        start_step: int = 0,
    ):
        """
        ledger: the one of the checkpoint that the worker went on from; kept up to date on rank 0 alone.
        board: actor that shows the round to the tasks that read (`stream.training_stream`).
        rows: gives this worker's rows of the round that is on the board.
        start_step: the checkpoint's step; the groups up to it lie in the run folder.
        """
        self.config = config
        self.ledger = ledger
        self.folder = folder
        self.board = board
        self.rows = rows
        self.start_step = start_step
        self._mine: list[GroupRecord] = []
        self._unwritten: list[GroupRecord] = []
        self._since_start: list[GroupRecord] = []

    def problems(self) -> Iterator[tuple[Problem, int]]:
        """This worker's problems with their epochs, without end, from the first one that is not yet used.

        The first round begins with this call and not with the first problem that is asked for: what reads it takes
        seconds to start, in which the caller may load a policy.
        """
        epoch = self.ledger.epoch
        return self._rounds(epoch, self._begin_round(epoch, []), fetching(self.rows()))

    def _rounds(self, epoch: int, steps: int, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[Problem, int]]:
        """Round after round; `epoch`, `steps` and `rows` are those of the one that has begun."""
        while True:
            for number in range(steps * self.config.prompts_per_worker):
                row = next(rows, None)
                if row is None:
                    raise DataError(
                        f"the stream of problems ended after {number} problems of a worker, before {steps} steps"
                    )
                yield from_row(row), row["epoch"]
            # Blocks are dealt in turn and less than a step is left, so the order of ranks is the order of the stream.
            carried = [row for rest in all_gather_object(list(rows)) for row in rest]
            epoch += 1
            steps = self._begin_round(epoch, carried)
            rows = self.rows()

    def record(self, groups: Sequence[GroupRecord]) -> None:
        """Take down what became of the groups of a step that is about to be taken."""
        self._mine += groups

    def settle(self, checkpoint: Path) -> Callable[[], None]:
        """Write the ledger into a checkpoint's folder; gives what writes the rollouts since the last one."""
        self._gather()
        groups, self._unwritten = self._unwritten, []
        if is_rank_zero():
            self.ledger.save(checkpoint)
        folder = self.folder

        def write() -> None:
            write_rollouts(folder, groups)

        return write

    def _begin_round(self, epoch: int, carried: list[dict[str, Any]]) -> int:
        """Put a round on the board; gives the number of whole steps in it."""
        self._gather()
        steps = [0]
        if is_rank_zero():
            if not len(self.ledger.used(epoch)):
                self._choose(epoch)
            done = np.union1d(self.ledger.used(epoch), self.ledger.passed_over(epoch))
            round = EpochPlan(epoch, done, self.ledger.preferred(epoch), tuple(carried))
            # By reference, in a list so that it stays one: 8 bytes a used problem, for each of thousands of tasks.
            ray.get(self.board.begin_round.remote([ray.put(round)]))
            steps = [(self.ledger.remaining(epoch) + len(carried)) // self.config.grpo.prompts_per_step]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(steps)
        return steps[0]

    @property
    def _has_curriculum(self) -> bool:
        return self.config.data.skip_solved is not None or self.config.data.prefer_mixed

    def _choose(self, epoch: int) -> None:
        """Apply the curriculum to an epoch that begins."""
        if not self._has_curriculum:
            return
        data = self.config.data
        # Of later files some may still be on their way to the storage.
        table = groups_table(self._since_start, read_rollouts(self.folder, up_to_step=self.start_step))
        passed_over, preferred = plan_curriculum(table, epoch, data.skip_solved, data.prefer_mixed)
        if self.ledger.remaining(epoch) - len(passed_over) < self.config.grpo.prompts_per_step:
            passed_over = []  # all is solved: an epoch of nothing would have no end
        self.ledger.open_round(epoch, passed_over, preferred)

    def _gather(self) -> None:
        """Bring every worker's groups to rank 0, and mark their problems as used."""
        groups = [group for some in all_gather_object(self._mine) for group in some]
        self._mine = []
        if not is_rank_zero():
            return
        for epoch in sorted({group.epoch for group in groups}):
            self.ledger.mark(epoch, [group.problem for group in groups if group.epoch == epoch])
        self._unwritten += groups
        if self._has_curriculum:
            # Without the texts, which a long run could not hold.
            self._since_start += [replace(group, prompt=None, completions=None) for group in groups]


class GroupBatches:
    """The batches of one worker: `prompts` problems at a time, each `num_generations` times in a row.

    TRL generates once for a batch and takes several forward passes (and, with num_iterations > 1, several steps)
    from it; its loop asks for the batch again each time. A step that is topped up draws further ones in between.
    """

    def __init__(self, problems: Iterable[tuple[Problem, int]], prompts: int, num_generations: int, repeats: int):
        self.problems = iter(problems)
        self.prompts = prompts
        self.num_generations = num_generations
        self.repeats = repeats

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for first in self.problems:
            yield from itertools.repeat(self._batch([first]), self.repeats)

    def draw(self) -> list[dict[str, Any]]:
        """One more batch, for the step that is under way. Raises DataError if there is none."""
        return self._batch([])

    def _batch(self, drawn: list[tuple[Problem, int]]) -> list[dict[str, Any]]:
        drawn += itertools.islice(self.problems, self.prompts - len(drawn))
        if len(drawn) < self.prompts:
            raise DataError(f"the stream of problems ended with {len(drawn)} of a step's {self.prompts} problems")
        return [
            problem.row() | {"epoch": epoch, "index": index}
            for problem, epoch in drawn
            for index in range(self.num_generations)
        ]


def fetching(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same rows; the first of them is fetched in the background from now on."""
    first: Future[list[dict[str, Any]]] = Future()

    def fetch() -> None:
        try:
            first.set_result(list(itertools.islice(rows, 1)))
        except BaseException as error:  # raised where the row is asked for
            first.set_exception(error)

    threading.Thread(target=fetch, name="first-row", daemon=True).start()

    def all_of_them() -> Iterator[dict[str, Any]]:
        yield from first.result()
        yield from rows

    return all_of_them()
