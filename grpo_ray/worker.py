"""What one worker does, from top to bottom."""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train

from grpo_ray.checkpoint import load_reward_states, opened
from grpo_ray.config import Config
from grpo_ray.data.stream import from_row
from grpo_ray.ledger import Ledger
from grpo_ray.problem import Problem
from grpo_ray.storage import RunFolder, fetch_folder


@dataclass(frozen=True)
class Assignment:
    """What the driver tells every worker."""

    config: Config
    model_path: str
    """Local folder, URI or hub id of the policy that the run begins with."""
    start: str | None
    """Checkpoint to go on from at launch, or None."""
    latest: str | None
    """The latest checkpoint at launch; a later one was written by this launch and goes before `start`."""
    board: Any
    """Handle of the driver's `Board`, for the progress line."""


def train_worker(settings: dict[str, Assignment]) -> None:
    """Train until `grpo.max_steps`, from wherever the run is; Ray Train's `train_loop_per_worker`."""
    assignment = settings["assignment"]
    config, rank = assignment.config, ray.train.get_context().get_world_rank()
    folder = RunFolder(config.run.storage_path, config.run.name)
    _send_output_to(folder, rank)

    def say(phase: str) -> None:
        if rank == 0:
            assignment.board.phase.remote(phase)

    say("loading libraries")
    from grpo_ray.learner import Learner
    from grpo_ray.report import ReportCallback

    heldout = [from_row(row) for row in ray.train.get_dataset_shard("heldout").iter_rows()]
    per_step = config.grpo.prompts_per_step
    with opened(_checkpoint(assignment, folder)) as (checkpoint, ledger):
        report = ReportCallback(
            folder,
            config.completions_per_step,
            measure=lambda: learner.heldout_accuracy(heldout),
            ledger_at=lambda step: Ledger(problems_used=-(-step // config.num_iterations) * per_step),
            reward_states=lambda: learner.reward_states(),
            say=say,
        )
        learner = Learner(
            config,
            model_path=fetch_folder(assignment.model_path),
            # A folder for this attempt alone: what a dead attempt left half-written is never found again.
            output_dir=tempfile.mkdtemp(prefix=f"grpo_ray-{config.run.name}-{rank}-"),
            problems=_problems(skip=ledger.problems_used // config.cluster.num_workers),
            callbacks=[report],
            say=say,
        )
        if checkpoint is not None:
            learner.load_reward_states(load_reward_states(Path(checkpoint), rank))
        learner.train(resume_from_checkpoint=checkpoint)


def _checkpoint(assignment: Assignment, folder: RunFolder) -> ray.train.Checkpoint | None:
    """The checkpoint to go on from: one of this launch if there is one, else what the launch was told."""
    latest = ray.train.get_checkpoint()
    if latest is not None and latest.path != assignment.latest:
        return latest
    if assignment.start is None:
        return None
    return ray.train.Checkpoint(assignment.start, filesystem=folder.filesystem)


def _problems(skip: int) -> Iterator[tuple[Problem, int]]:
    """This worker's own problems with their epochs, from the first one that is not yet used."""
    rows = ray.train.get_dataset_shard("train").iter_rows()
    for number, row in enumerate(rows):
        if number >= skip:
            yield from_row(row), row["epoch"]


def _send_output_to(folder: RunFolder, rank: int) -> None:
    """Send all that this process and its libraries print to a file of the run folder, not over the driver's bar."""
    if folder.local is None:
        return  # Ray keeps it in its own log folder on each node
    logs = folder.local / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    file = os.open(logs / f"worker-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)
