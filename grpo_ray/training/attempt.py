"""One worker's part of an attempt to train: its arguments, its folders, and the checks before it begins."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray.train

from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.resilience.chaos import Fault
from grpo_ray.resilience.nodes import check_joined_node
from grpo_ray.rewards.verdicts import keep_verdicts
from grpo_ray.storage import checkpoint_upload, checkpoints
from grpo_ray.storage.checkpoints import CheckpointInfo
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.process_output import redirect_output
from grpo_ray.storage.records.heldout_files import drop_heldout_after
from grpo_ray.storage.records.rollout_files import drop_rollouts_after
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.scratch_folder import create_scratch_folder
from grpo_ray.training.start_point import StartPoint


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Arguments of a worker, the same for all workers of a launch."""

    config: Config
    model_path: str = field(repr=False)  # Ray Train records the arguments of workers as text, and a URI may have keys
    """Local folder, URI or hub id of the policy that the run begins with."""
    training_fingerprints: Mapping[str, DatasetFingerprint]
    """Fingerprint of the training problems of each source."""
    heldout_conditions: Mapping[str, Any]
    """Key of each held-out set -> conditions of its measurement (`metrics.measurement_conditions`)."""
    training_ids: Any
    """Object reference of the ids of the training problems of each source, sorted, (P,) uint64."""
    last_serial: int
    """Serial number of the last checkpoint before this launch; this launch wrote those with higher ones."""
    coordinator: Any
    """Handle of the run's `RunCoordinator` actor."""
    initial_checkpoint: CheckpointInfo | None = None
    """Checkpoint of another run that this one begins with; None: the run begins with `model_path`, or has checkpoints
    of its own."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the driver (`nodes.versions`) that workers must have too; empty for no check."""
    pool: Any = None
    """Handle of the run's `EnginePool` actor; None with colocated engines."""
    faults: Sequence[Fault] = ()
    """Faults injected on purpose (`chaos.py`)."""
    baseline_setup: Mapping[str, Any] | None = None
    """Setup of the baseline (`baseline.baseline_setup`), whose missing held-out sets are measured before the first
    step; None: no worker measures them."""


@dataclass(frozen=True)
class Attempt:
    """One worker's part of one attempt to train: its rank, its folders, and its messages to the driver."""

    spec: WorkerSpec
    config: Config
    """The spec's config with this attempt's number of workers."""
    rank: int
    workers: int
    folder: RunFolder
    """Run folder, on storage that all nodes see."""
    scratch: str
    """Local folder of this worker and this attempt alone."""

    def set_status(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Replace the status that the driver shows; all ranks but 0 do nothing.

        Args:
            done, total: progress inside the activity, in any unit; None: unknown.
        """
        if self.rank == 0:
            self.spec.coordinator.set_status.remote(text, done, total)

    def notify(self, text: str, event: str = "notice") -> None:
        """Show the user a permanent line, and record it as an event of a kind that is a `NOTICE` in `events.EVENTS`."""
        self.spec.coordinator.record_event.remote(event, what=text)


class GroupProgress:
    """Progress of all workers of the attempt, which exchange it through the coordinator.

    Args:
        own_progress: returns a value that changes with this worker's progress.
    """

    TIMEOUT_SECONDS = 5.0

    def __init__(self, attempt: Attempt, own_progress: Callable[[], Any]):
        self.attempt, self.own_progress = attempt, own_progress
        self._others: dict[int, Any] = {}

    def __call__(self) -> dict[int, Any]:
        """Return the progress of each worker by rank; without a response, the last known progress of the others."""
        own = self.own_progress()
        if self.attempt.workers > 1:
            answer = self.attempt.spec.coordinator.exchange_progress.remote(self.attempt.rank, own)
            with suppress(ray.exceptions.RayError):
                self._others = ray.get(answer, timeout=self.TIMEOUT_SECONDS)
        return self._others | {self.attempt.rank: own}


def start_attempt(spec: WorkerSpec) -> Attempt:
    """Check this node, create the scratch folder, and send the process's output to the run folder."""
    context = ray.train.get_context()
    config, rank = spec.config.with_workers(context.get_world_size()), context.get_world_rank()
    folder = RunFolder(config.run.storage_path, config.run.name, config.run.storage_retry_seconds)
    check_joined_node(spec.versions, folder)
    attempt = Attempt(spec, config, rank, context.get_world_size(), folder, create_scratch_folder(config.run.name))
    redirect_output(folder, f"worker-{rank}.log")
    keep_verdicts(folder, rank)
    return attempt


def take_fence(folder: RunFolder) -> FencingToken:
    """Take the run folder over for this attempt, and return its token; collective."""
    return FencingToken(folder, all_gather_object(FencingToken.take(folder).token if is_rank_zero() else "")[0])


def announce_start(attempt: Attempt, start: StartPoint, history: Iterable[dict[str, Any]]) -> None:
    """Record that the attempt began, with the latest metrics up to its first step; rank 0 only."""
    if not is_rank_zero():
        return
    name = start.checkpoint.name if start.checkpoint else None
    if start.checkpoint is not None and start.is_of_other_run:
        name = f"{start.checkpoint.folder.name}/{name}"
    event = attempt.spec.coordinator.record_event
    ray.get(event.remote("began", rows=list(history), workers=attempt.workers, step=start.step, checkpoint=name))


def remove_leftovers(attempt: Attempt, start: StartPoint) -> None:
    """Delete unfinished checkpoints of earlier attempts, and records of steps that are taken again; rank 0 only.

    The user gets a list of the files. Called after the first step and before the first checkpoint of an attempt, so
    that an attempt that cannot train deletes nothing.
    """
    if not is_rank_zero():
        return
    if names := checkpoint_upload.clear_unfinished(attempt.folder):
        attempt.notify(f"deleted unfinished checkpoints of an earlier attempt: {', '.join(names)}")
    if start.checkpoint is not None and not start.is_of_other_run:
        checkpoints.record_return(attempt.folder, start.checkpoint.serial, start.last_serial)
    if names := drop_rollouts_after(attempt.folder, start.step):
        attempt.notify(f"deleted rollouts of steps after {start.step}, which are taken again: {', '.join(names)}")
    if names := drop_heldout_after(attempt.folder, start.step):
        attempt.notify(f"deleted held-out completions of steps after {start.step}: {', '.join(names)}")
