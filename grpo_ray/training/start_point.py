"""Start point of an attempt: the newest complete checkpoint, verified by all workers, and the ledger that it holds."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from fractions import Fraction
from pathlib import Path

import ray.train

from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint, IdArray
from grpo_ray.data.mixture_ledger import MixtureLedger
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.errors import CheckpointError
from grpo_ray.storage import checkpoint_integrity, checkpoint_upload, checkpoints
from grpo_ray.storage.checkpoints import CheckpointInfo
from grpo_ray.storage.records import open_rollouts
from grpo_ray.storage.run_folder import SMALL_FILE_BYTES, RunFolder

TRAINER_STATE = "trainer_state.json"
"""File of a checkpoint with the position of transformers' trainer."""
OF_THE_RUN = ("metrics.jsonl", "rewards_*.json", open_rollouts.FILE_NAME, checkpoints.MANIFEST, TRAINER_STATE)
"""Files that are not taken over from another run's checkpoint; `at_step_zero` writes the trainer's state anew."""


@dataclass(frozen=True)
class StartPoint:
    """State that an attempt starts from."""

    checkpoint: CheckpointInfo | None
    """None for a run that begins with `model.path`."""
    last_serial: int
    """Highest serial number of the run's checkpoints, damaged ones included; 0 if there are none."""
    is_of_other_run: bool = False
    """True for a run that begins with another run's checkpoint (`run.from_checkpoint`)."""

    @property
    def step(self) -> int:
        """Optimizer steps that the run has taken so far; another run's do not count."""
        return self.checkpoint.step if self.checkpoint and not self.is_of_other_run else 0


def choose_start(
    config: Config,
    folder: RunFolder,
    last_serial: int,
    report_damage: Callable[[str], None],
    initial: CheckpointInfo | None = None,
) -> StartPoint:
    """Choose the checkpoint that all workers start from; collective.

    All workers verify it together. A damaged one is reported and marked, and the one before it is tried.

    Args:
        last_serial: serial number of the last checkpoint before this launch.
        report_damage: gets a line about each damaged checkpoint; called on rank 0.
        initial: checkpoint of another run that this one begins with while it has none of its own.

    Raises:
        CheckpointError: there are checkpoints, or there were before an earlier launch marked them, and all are damaged.
    """
    candidates, last = all_gather_object(
        _candidates(config, folder, last_serial, report_damage, initial) if is_rank_zero() else ([], 0)
    )[0]
    for number, checkpoint in enumerate(candidates):
        is_of_other_run = checkpoint.folder.uri != folder.uri
        if not (faults := _find_faults(checkpoint)):
            return StartPoint(checkpoint, last, is_of_other_run)
        if is_rank_zero():
            following = candidates[number + 1].name if number + 1 < len(candidates) else "nothing"
            report_damage(f"{checkpoint.name} is damaged: {'; '.join(faults)}; resuming from {following} instead")
            if not is_of_other_run:  # a checkpoint of another run is never changed
                checkpoint_integrity.mark_damaged(checkpoint, faults)
    if candidates and candidates[0].folder.uri != folder.uri:
        raise CheckpointError(f"run.from_checkpoint: {candidates[0].uri} is damaged; name another checkpoint")
    if candidates:
        raise checkpoints.no_intact_checkpoint(folder)
    return StartPoint(None, last)


def _candidates(
    config: Config,
    folder: RunFolder,
    last_serial: int,
    report_damage: Callable[[str], None],
    initial: CheckpointInfo | None,
) -> tuple[list[CheckpointInfo], int]:
    """Return the checkpoints that the run may start from, the preferred one first, and the highest serial number.

    The number covers all checkpoints, including later ones that `run.resume=best` discards, so that new checkpoints get
    higher numbers.
    """
    checkpoint_upload.finish_commits(folder)
    for name in checkpoints.unreadable_manifests(folder):
        report_damage(f"{name} is damaged: its manifest cannot be read; it is ignored")
    found = checkpoints.resume_candidates(folder, config.run.resume, config.ranking_metric, after=last_serial)
    if not found and checkpoints.has_damaged_checkpoints(folder):
        # The run has taken steps. At step 0 it would delete their records.
        raise checkpoints.no_intact_checkpoint(folder)
    if not found and initial is not None:
        found = [initial]
    serials = (checkpoint.serial for checkpoint in checkpoints.list_checkpoints(folder))
    return found, max(last_serial, *serials, 0)


def _find_faults(checkpoint: CheckpointInfo) -> list[str]:
    """Return the faults of a checkpoint's files, which the workers verify in equal parts; collective."""
    context = ray.train.get_context()
    own = checkpoint_integrity.find_faults(checkpoint, context.get_world_rank(), context.get_world_size())
    return sorted({fault for faults in all_gather_object(own) for fault in faults})


def load_ledger(
    checkpoint: Path | None,
    shares: Mapping[str, Fraction],
    training_ids: Mapping[str, IdArray],
    fingerprints: Mapping[str, DatasetFingerprint],
    *,
    is_of_other_run: bool = False,
) -> MixtureLedger:
    """Load the ledgers of a local checkpoint folder, or create empty ones, for the problems of this launch.

    Args:
        shares: share of each source.
        training_ids: ids of the training problems of each source, sorted, (P,) uint64.
        fingerprints: fingerprint of the training problems of each source.
        is_of_other_run: True for the checkpoint of another run, whose open problems are not this run's.
    """
    ledger = MixtureLedger.load(checkpoint, shares)
    if is_of_other_run:
        ledger.clear_open()
    ledger.set_datasets(training_ids, fingerprints)
    return ledger


@contextmanager
def open_checkpoint(start: StartPoint, scratch: str) -> Iterator[Path | None]:
    """Yield a local folder with the checkpoint; None for a run that begins with `model.path`.

    Args:
        scratch: local folder of this attempt.
    """
    checkpoint = start.checkpoint
    if checkpoint is None:
        yield None
        return
    stored = ray.train.Checkpoint(checkpoint.path, filesystem=checkpoint.folder.filesystem)
    with stored.as_directory() as local:
        yield at_step_zero(Path(local), Path(scratch, "initial")) if start.is_of_other_run else Path(local)


def at_step_zero(checkpoint: Path, view: Path) -> Path:
    """Make a folder with the files of another run's checkpoint for a run that has taken no step.

    Weights, optimizer state, ledger and random states are links. Steps, metrics and states of rewards begin anew,
    completions of later steps are left out, and the learner restores no position in the schedule at step 0.

    Args:
        view: folder to make.

    Raises:
        CheckpointError: the trainer's state is larger than any that grpo_ray writes.
    """
    view.mkdir()
    for path in checkpoint.iterdir():
        if not any(fnmatch(path.name, pattern) for pattern in OF_THE_RUN):
            (view / path.name).symlink_to(path.absolute())
    path = checkpoint / TRAINER_STATE
    if (size := path.stat().st_size) > SMALL_FILE_BYTES:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes; the limit is {SMALL_FILE_BYTES}")
    state = json.loads(path.read_text(encoding="utf-8"))
    state |= {"global_step": 0, "epoch": 0.0, "log_history": [], "num_input_tokens_seen": 0, "total_flos": 0}
    state["stateful_callbacks"].pop("NonFiniteMonitor", None)  # its count of the steps that the other run has skipped
    (view / TRAINER_STATE).write_text(json.dumps(state), encoding="utf-8")
    return view
