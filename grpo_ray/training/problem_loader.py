"""Problems of one worker: its part of each plan, in batches of whole groups, and the record of the groups used.

Every worker draws its own part of each step. At each checkpoint and at the end of each epoch, the groups of all workers
are gathered. Rank 0 then marks their problems in the ledger, which is part of the checkpoint, and writes the groups to
`rollouts/`.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ray.config.schema import Config
from grpo_ray.data.curriculum import plan_curriculum
from grpo_ray.data.ledger import Ledger, ids_to_uint64
from grpo_ray.data.mixture import MAX_PLAN_PROBLEMS, MixturePlan
from grpo_ray.data.mixture_ledger import MixtureLedger, with_drawn
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
        ledger: MixtureLedger,
        folder: RunFolder,
        publish_plan: Callable[[EpochPlan | MixturePlan], None],
        rows: Callable[[], Iterator[dict[str, Any]]],
        start_step: int = 0,
    ) -> None:
        """
        Args:
            ledger: ledgers of the checkpoint that the worker started from; updated on rank 0 only.
            publish_plan: passes a plan to the tasks that read problems; called on rank 0.
            rows: returns this worker's rows of the plan that was published last.
            start_step: step of the checkpoint; the groups of all steps up to it are in the run folder.
        """
        self.config = config
        self.ledger = ledger
        self.folder = folder
        self.publish_plan = publish_plan
        self.rows = rows
        self._planned_epoch: int | None = None
        """Epoch of the last plan of a single dataset."""
        self._drawn: dict[tuple[str, int, str], None] = {}
        """Source, epoch and id of this worker's problems that are drawn and not yet recorded, in the order of drawing.
        A mixture needs them, whose plans end in the middle of an epoch, and so does a checkpoint with completions of
        later steps."""
        self._own: list[GroupRecord] = []
        self._own_tokens: list[LossTokens] = []
        self._unwritten: list[GroupRecord] = []
        self._unwritten_tokens: list[LossTokens] = []
        """Tokens of the samples among the unwritten groups, as any worker has read them."""
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
        return self._plans(self._begin_plan([]), prefetch_first(self.rows()))

    def _plans(self, steps: int, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[Problem, int]]:
        """Yield the problems of one plan after the other; the arguments are those of the plan that has begun."""
        while True:
            for number in range(steps * self.config.sizes.prompts_per_worker):
                row = next(rows, None)
                if row is None:
                    raise DataError(
                        f"the stream of problems ended after {number} problems of a worker, before {steps} steps"
                    )
                problem = self._known(from_row(row))
                if self.config.is_mixture or self.config.rollout.max_staleness:
                    self._drawn[problem.source, row["epoch"], problem.id] = None
                yield problem, row["epoch"]
            # Workers get blocks in turn, and less than a step is left: joined by rank, the rows keep their order.
            carried_over = [row for rest in all_gather_object(list(rows)) for row in rest]
            steps = self._begin_plan(carried_over)
            rows = self.rows()

    def _known(self, problem: Problem) -> Problem:
        """Return a problem of the stream; raise DataError if the dataset did not have it when the run was launched."""
        if not self.ledger.ledgers[problem.source].contains([problem.id])[0]:
            dataset = self.config.training_sources[problem.source].label
            raise DataError(
                f"data.train={dataset} has changed since the run was launched: it now has the problem "
                f"{problem.id}; launch the run again, with data.accept_changes=true to go on with the changed problems"
            )
        return problem

    def record(self, groups: Sequence[GroupRecord]) -> None:
        """Record the groups of a step that is about to be taken."""
        self._own += groups
        for group in groups:
            self._drawn.pop((group.source, group.epoch, group.problem), None)

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
        is_ahead = self.config.rollout.max_staleness > 0
        drawn = [each for drawn in all_gather_object(list(self._drawn)) for each in drawn] if is_ahead else []
        if is_rank_zero():
            self.ledger.add_open(drawn)
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

    def _begin_plan(self, carried_over: list[dict[str, Any]]) -> int:
        """Publish the next plan, and return its number of whole steps; collective.

        Args:
            carried_over: rows of the last plan that did not fill a step; none in a mixture.
        """
        self._gather()
        drawn = [each for drawn in all_gather_object(list(self._drawn)) for each in drawn]
        steps = 0
        if is_rank_zero():
            plan, steps = self._plan_mixture(drawn) if self.config.is_mixture else self._plan_epoch(carried_over)
            self.publish_plan(plan)
        return all_gather_object(steps)[0]

    def _plan_epoch(self, carried_over: list[dict[str, Any]]) -> tuple[EpochPlan, int]:
        """Return the plan of the next epoch of a single dataset, and its number of whole steps."""
        (ledger,) = self.ledger.ledgers.values()
        epoch = ledger.epoch if self._planned_epoch is None else self._planned_epoch + 1
        self._planned_epoch = epoch
        plan = self._rest_of_epoch("", epoch, [], self.config.grpo.prompts_per_step)
        steps = (ledger.remaining(epoch) + len(carried_over)) // self.config.grpo.prompts_per_step
        return replace(plan, carried_over=tuple(carried_over)), steps

    def _plan_mixture(self, drawn: Sequence[tuple[str, int, str]]) -> tuple[MixturePlan, int]:
        """Return a plan and its number of whole steps; it ends before the next step in which a source begins an epoch.

        The next plan begins with that step, and includes the source's next epoch. So the curriculum of an epoch is
        derived at its first step, whether the run was interrupted or not.

        Args:
            drawn: source, epoch and id of the problems that are drawn and not yet recorded.
        """
        draws, size = with_drawn(self.ledger.draws, (source for source, *_ in drawn)), self.config.grpo.prompts_per_step
        epochs: dict[str, list[EpochPlan]] = {name: [] for name in self.ledger.ledgers}
        available = dict.fromkeys(epochs, 0)
        beginning = list(epochs)
        while True:
            for name in beginning:
                last = epochs[name][-1].epoch if epochs[name] else self.ledger.ledgers[name].epoch - 1
                pending = [each for source, epoch, each in drawn if source == name and epoch == last + 1]
                least = math.ceil(draws.shares[name] * size)
                epochs[name].append(self._rest_of_epoch(name, last + 1, pending, least))
                available[name] += self.ledger.ledgers[name].remaining(last + 1) - len(pending)
            steps, beginning = draws.whole_steps(available, size, max(1, MAX_PLAN_PROBLEMS // size))
            if steps:
                plans = {name: tuple(plans) for name, plans in epochs.items()}
                return MixturePlan(draws, plans, steps * size), steps

    def _rest_of_epoch(self, source: str, epoch: int, pending: Sequence[str], least: int) -> EpochPlan:
        """Return the plan of an epoch's remaining problems; if none is drawn yet, derive the epoch's curriculum first.

        Args:
            pending: problems of the epoch that are drawn and not yet recorded.
            least: minimum number of problems that the curriculum leaves in the epoch.
        """
        ledger = self.ledger.ledgers[source]
        # Open problems were drawn before the checkpoint, by the curriculum that it holds.
        if not len(ledger.used(epoch)) and not len(ledger.open(epoch)) and not pending:
            self._apply_curriculum(ledger, epoch, least)
        excluded = np.union1d(ledger.used(epoch), ledger.skipped(epoch))
        if pending:
            excluded = np.union1d(excluded, ids_to_uint64(pending))
        return EpochPlan(epoch, excluded, ledger.preferred(epoch))

    @property
    def _has_curriculum(self) -> bool:
        return self.config.data.skip_solved is not None or self.config.data.prefer_mixed

    def _apply_curriculum(self, ledger: Ledger, epoch: int, least: int) -> None:
        """Choose the problems that an epoch skips and prefers, by the groups so far.

        No problem is skipped if fewer than `least` would be left.
        """
        if not self._has_curriculum:
            return
        data = self.config.data
        with self._files_lock:
            groups, last_step = list(self._not_in_files), self._last_step_in_files
        # Files of later steps are not read: some may still be uploading.
        table = groups_table(groups, read_rollouts(self.folder, up_to_step=last_step, limit=None))
        plan = plan_curriculum(table, epoch, data.skip_solved, data.prefer_mixed)
        # The groups are those of all problems so far, some of which may have been removed from the dataset.
        skipped, preferred = (list(itertools.compress(ids, ledger.contains(ids))) for ids in plan)
        # An attempt before this one may have recorded a curriculum of this epoch, which is replaced.
        unused = ledger.remaining(epoch) + len(ledger.skipped(epoch))
        if unused - len(skipped) < least:
            skipped = []  # all problems are solved, and an epoch without steps would never end
        ledger.set_curriculum(epoch, skipped, preferred)

    def _gather(self) -> None:
        """Gather all workers' groups on rank 0, and mark their problems as used; collective."""
        gathered = all_gather_object((self._own, self._own_tokens))
        self._own, self._own_tokens = [], []
        if not is_rank_zero():
            return
        groups = [group for groups_of_worker, _ in gathered for group in groups_of_worker]
        # If a step's groups are gathered in the middle of the step, its other tokens are gathered next time.
        self._unwritten_tokens += [row for _, rows in gathered for row in rows]
        for source, epoch in sorted({(group.source, group.epoch) for group in groups}):
            used = [group.problem for group in groups if (group.source, group.epoch) == (source, epoch)]
            self.ledger.mark(source, epoch, used)
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
