"""Problems of one worker: its part of each epoch, in batches of whole groups, and the record of the groups used.

Every worker draws its own part of each step. At each checkpoint and at the end of each epoch, the groups of all workers
are gathered. Rank 0 then marks their problems in the ledger, which is part of the checkpoint, and writes the groups to
`rollouts/`.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ray.config.schema import Config
from grpo_ray.data.curriculum import plan_curriculum
from grpo_ray.data.ledger import Ledger
from grpo_ray.data.problem import Problem
from grpo_ray.data.stream import EpochPlan, from_row
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.errors import DataError
from grpo_ray.storage.records.group_columns import groups_table
from grpo_ray.storage.records.groups import GroupRecord, add_loss_tokens, without_texts
from grpo_ray.storage.records.rollout_files import read_rollouts, write_rollouts
from grpo_ray.storage.records.tokens import LossTokens
from grpo_ray.storage.run_folder import RunFolder


class ProblemLoader:
    """Loader of one worker's problems. Collective methods must be called the same number of times by every rank."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        folder: RunFolder,
        publish_plan: Callable[[EpochPlan], None],
        rows: Callable[[], Iterator[dict[str, Any]]],
        start_step: int = 0,
    ) -> None:
        """
        Args:
            ledger: ledger of the checkpoint that the worker started from; updated on rank 0 only.
            publish_plan: passes the plan of an epoch to the tasks that read problems; called on rank 0.
            rows: returns this worker's rows of the epoch that was planned last.
            start_step: step of the checkpoint; the groups of all steps up to it are in the run folder.
        """
        self.config = config
        self.ledger = ledger
        self.folder = folder
        self.publish_plan = publish_plan
        self.rows = rows
        self._own: list[GroupRecord] = []
        self._own_tokens: list[LossTokens] = []
        self._unwritten: list[GroupRecord] = []
        self._unwritten_tokens: list[LossTokens] = []
        """Tokens of the sampled groups among these, as read by any worker."""
        self._not_in_files: list[GroupRecord] = []
        """Groups of all workers that no file of the run folder has yet, without texts; for the curriculum."""
        self._last_step_in_files = start_step
        self._files_lock = threading.Lock()
        """Held while `_not_in_files` or `_last_step_in_files` changes: uploads run in a thread of their own."""

    def problems(self) -> Iterator[tuple[Problem, int]]:
        """Return this worker's problems with their epochs, without end, from the first one that is not yet used.

        Reading begins with this call, before the first problem is drawn: the tasks that read take seconds to start, and
        the caller can load a policy in that time.
        """
        epoch = self.ledger.epoch
        return self._epochs(epoch, self._begin_epoch(epoch, []), prefetch_first(self.rows()))

    def _epochs(self, epoch: int, steps: int, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[Problem, int]]:
        """Yield the problems of one epoch after the other; the arguments are those of the epoch that has begun."""
        while True:
            for number in range(steps * self.config.sizes.prompts_per_worker):
                row = next(rows, None)
                if row is None:
                    raise DataError(
                        f"the stream of problems ended after {number} problems of a worker, before {steps} steps"
                    )
                yield self._known(from_row(row)), row["epoch"]
            # Workers get blocks in turn, and less than a step is left: joined by rank, the rows keep their order.
            carried_over = [row for rest in all_gather_object(list(rows)) for row in rest]
            epoch += 1
            steps = self._begin_epoch(epoch, carried_over)
            rows = self.rows()

    def _known(self, problem: Problem) -> Problem:
        """Return a problem of the stream; raise DataError if the dataset did not have it when the run was launched."""
        if not self.ledger.contains([problem.id])[0]:
            raise DataError(
                f"data.train={self.config.data.train} has changed since the run was launched: it now has the problem "
                f"{problem.id}; launch the run again, with data.accept_changes=true to go on with the changed problems"
            )
        return problem

    def record(self, groups: Sequence[GroupRecord]) -> None:
        """Record the groups of a step that is about to be taken."""
        self._own += groups

    def record_tokens(self, rows: Sequence[LossTokens]) -> None:
        """Record the tokens of sampled completions, of any worker's groups, that this worker has read."""
        self._own_tokens += rows

    def settle(self, checkpoint: Path) -> Callable[[], None]:
        """Write the ledger into a checkpoint's folder; collective.

        Returns:
            Function that writes the rollouts since the last checkpoint.
        """
        self._gather()
        groups, self._unwritten = self._unwritten, []
        tokens, self._unwritten_tokens = self._unwritten_tokens, []
        if is_rank_zero():
            self.ledger.save(checkpoint)
        folder = self.folder

        def write() -> None:
            write_rollouts(folder, add_loss_tokens(groups, tokens))
            if groups:
                self._forget_up_to(max(group.step for group in groups))

        return write

    def _forget_up_to(self, step: int) -> None:
        """Drop the groups of the steps whose files are written, so that memory does not grow with the steps."""
        with self._files_lock:
            self._last_step_in_files = max(step, self._last_step_in_files)
            self._not_in_files = [group for group in self._not_in_files if group.step > self._last_step_in_files]

    def _begin_epoch(self, epoch: int, carried_over: list[dict[str, Any]]) -> int:
        """Publish the plan of an epoch, and return its number of whole steps; collective."""
        self._gather()
        steps = 0
        if is_rank_zero():
            if not len(self.ledger.used(epoch)):
                self._apply_curriculum(epoch)
            excluded = np.union1d(self.ledger.used(epoch), self.ledger.skipped(epoch))
            self.publish_plan(EpochPlan(epoch, excluded, self.ledger.preferred(epoch), tuple(carried_over)))
            steps = (self.ledger.remaining(epoch) + len(carried_over)) // self.config.grpo.prompts_per_step
        return all_gather_object(steps)[0]

    @property
    def _has_curriculum(self) -> bool:
        return self.config.data.skip_solved is not None or self.config.data.prefer_mixed

    def _apply_curriculum(self, epoch: int) -> None:
        """Choose the problems that an epoch skips and prefers, by the groups so far."""
        if not self._has_curriculum:
            return
        data = self.config.data
        with self._files_lock:
            groups, last_step = list(self._not_in_files), self._last_step_in_files
        # Files of later steps are not read: some may still be uploading.
        table = groups_table(groups, read_rollouts(self.folder, up_to_step=last_step, limit=None))
        plan = plan_curriculum(table, epoch, data.skip_solved, data.prefer_mixed)
        # The groups are those of all problems so far, some of which may have been removed from the dataset.
        skipped, preferred = (list(itertools.compress(ids, self.ledger.contains(ids))) for ids in plan)
        # An attempt before this one may have recorded a curriculum of this epoch, which is replaced.
        unused = self.ledger.remaining(epoch) + len(self.ledger.skipped(epoch))
        if unused - len(skipped) < self.config.grpo.prompts_per_step:
            skipped = []  # all problems are solved, and an epoch without steps would never end
        self.ledger.set_curriculum(epoch, skipped, preferred)

    def _gather(self) -> None:
        """Gather all workers' groups on rank 0, and mark their problems as used; collective."""
        gathered = all_gather_object((self._own, self._own_tokens))
        self._own, self._own_tokens = [], []
        if not is_rank_zero():
            return
        groups = [group for groups_of_worker, _ in gathered for group in groups_of_worker]
        # If a step's groups are gathered in the middle of the step, its other tokens are gathered next time.
        self._unwritten_tokens += [row for _, rows in gathered for row in rows]
        for epoch in sorted({group.epoch for group in groups}):
            self.ledger.mark(epoch, [group.problem for group in groups if group.epoch == epoch])
        self._unwritten += groups
        if self._has_curriculum:
            with self._files_lock:
                self._not_in_files += [without_texts(group) for group in groups]


def prefetch_first(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return the same rows, and start fetching the first of them in the background."""
    first: Future[list[dict[str, Any]]] = Future()

    def fetch() -> None:
        try:
            first.set_result(list(itertools.islice(rows, 1)))
        except BaseException as error:  # raised by `first.result()`
            first.set_exception(error)

    threading.Thread(target=fetch, name="first-row", daemon=True).start()

    def all_rows() -> Iterator[dict[str, Any]]:
        yield from first.result()
        yield from rows

    return all_rows()
