"""What one worker does, from top to bottom."""

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.train

from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint, Ledger
from grpo_ray.data.stream import from_row
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.errors import CheckpointError, ConfigError
from grpo_ray.evaluation.baseline import Baseline, measure_baseline
from grpo_ray.resilience.chaos import Chaos, Fault
from grpo_ray.resilience.error_triage import error_context
from grpo_ray.resilience.nodes import differences, versions
from grpo_ray.resilience.watchdog import Watchdog
from grpo_ray.storage import checkpoints
from grpo_ray.storage.checkpoints import CheckpointInfo
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.rollouts import drop_rollouts_after
from grpo_ray.storage.run_folder import RunFolder, fetch_folder
from grpo_ray.telemetry.profiler import PhaseProfiler
from grpo_ray.training.problem_loader import ProblemLoader

LOCK = "lock"
"""File in a worker's own folder that it holds while it lives."""


@dataclass(frozen=True)
class WorkerSpec:
    """What the driver tells every worker."""

    config: Config
    model_path: str
    """Local folder, URI or hub id of the policy that the run begins with."""
    contents: DatasetFingerprint
    """Contents of the training problems."""
    heldout: DatasetFingerprint
    """Contents of the held-out problems."""
    numbers: Any
    """Object reference of the problems' numbers where they are not those that the run began with; else None."""
    serial: int
    """Number of the last checkpoint before this launch; later ones were written by it."""
    board: Any
    """Handle of the run's `Board`."""
    versions: dict[str, str] = field(default_factory=dict)
    """What the driver runs with (`nodes.versions`); empty, anything goes."""
    faults: Sequence[Fault] = ()
    """What is put into the run on purpose."""
    measures_before: bool = False
    """Whether the policy is to be measured on the held-out problems before the first step."""


def train_worker(settings: dict[str, WorkerSpec]) -> None:
    """Train until `grpo.max_steps`, from wherever the run is; Ray Train's `train_loop_per_worker`."""
    assignment, context = settings["assignment"], ray.train.get_context()
    config, rank = assignment.config.with_workers(context.get_world_size()), context.get_world_rank()
    folder = RunFolder(config.run.storage_path, config.run.name, config.run.storage_patience)
    board = assignment.board
    check_machine(assignment, folder)
    own = attempt_folder(config.run.name)
    _send_output_to(folder, rank)

    def say(phase: str) -> None:
        if rank == 0:
            board.phase.remote(phase)

    say("looking for a checkpoint")
    # First of all: what an attempt before this one has not named by now it never will.
    fence = FencingToken(folder, all_gather_object(FencingToken.take(folder).token if is_rank_zero() else "")[0])
    start, serial = choose_start(config, folder, assignment)
    heldout = [from_row(row) for row in ray.train.get_dataset_shard("heldout").iter_rows()]
    at: dict[str, Any] = {"step": start.step if start else 0, "checkpoint": start.name if start else None}
    learner: Any = None
    with open_checkpoint(start) as local, error_context(lambda: learner.state.global_step if learner else at["step"]):
        course = ProblemLoader(
            config,
            ledger_of(local, assignment),
            folder,
            board,
            rows=lambda: iter(ray.train.get_dataset_shard("train").iter_rows()),
            start_step=at["step"],
        )
        rows = checkpoints.load_rows(local) if local else []
        if is_rank_zero():
            checkpoints.clear_unfinished(folder)
            drop_rollouts_after(folder, at["step"])
            ray.get(board.happened.remote("began", rows=rows, workers=context.get_world_size(), **at))
        if start is not None and start.step >= config.grpo.max_steps:
            # The last checkpoint was written, and a worker died before Ray Train knew: the trainer would take one more.
            return
        problems = course.problems()  # the first ones are on their way while libraries, policy and engine are loaded
        say("loading libraries")
        from grpo_ray.resilience.elastic import PreemptionNotice
        from grpo_ray.resilience.nonfinite import NonFiniteMonitor
        from grpo_ray.resilience.signals import StopRequest
        from grpo_ray.training.one_step_off_policy import learner_class
        from grpo_ray.training.report_callback import BaselineCallback, OptimizerTimer, ReportCallback, WatchdogCallback

        bad_numbers = NonFiniteMonitor(
            config.run.max_bad_steps,
            groups=lambda: learner.groups_for_study(),
            save=lambda groups, step: _save_for_study(folder, groups, step, rank),
        )
        phases = PhaseProfiler(trace=config.run.trace)
        report = ReportCallback(
            config,
            folder,
            course,
            rows=rows,
            serial=serial + 1,
            measure=lambda: learner.heldout(heldout),
            measured_on=assignment.heldout,
            reward_states=lambda: learner.reward_states(),
            skipped=lambda: bad_numbers.skipped,
            draining=PreemptionNotice(),
            stopping=StopRequest(board),
            fence=fence,
            phases=phases,
            board=board,
        )
        watchdog = Watchdog(
            Path(own, f"stacks-worker-{rank}.txt"),  # on this machine, since the storage may be what hangs
            config.run.hang_factor,
            config.run.hang_seconds,
            _hanging(folder, rank, board),
        )
        measures = []
        if local is None and assignment.measures_before:
            before = Baseline(folder, assignment.heldout)
            measures = [BaselineCallback(lambda: measure_baseline(before, learner.solve, heldout, say, _notice(board)))]
        learner = learner_class(config)(
            config,
            model_path=fetch_folder(assignment.model_path, config.run.storage_patience, into=own),
            output_dir=own,
            problems=problems,
            # The watchdog last: it must know whether the step ends with a checkpoint.
            callbacks=[*measures, OptimizerTimer(phases), bad_numbers, report, WatchdogCallback(watchdog)],
            record=course.record,
            see_loss=bad_numbers.see_loss,
            say=say,
            phases=phases,
        )
        Chaos(assignment.faults, folder, rank, context.get_world_size()).install(learner)
        if local is not None:
            learner.load_reward_states(checkpoints.load_reward_states(local, rank))
        with watchdog:
            learner.train(resume_from_checkpoint=str(local) if local else None)


def check_machine(assignment: WorkerSpec, folder: RunFolder) -> None:
    """Refuse a machine that came after the driver's own look (`nodes.py`) and is unlike it; raises ConfigError."""
    # Of our own source the driver's look is enough: whoever edits it meanwhile should not lose the run.
    wanted = assignment.versions and assignment.versions | {"grpo_ray": versions()["grpo_ray"]}
    faults = differences(wanted) if wanted else []
    if not folder.exists("config.yaml"):
        faults.append(f"{folder.uri} is not there: it must lie on storage that all nodes see")
    if faults:
        raise ConfigError(f"node {ray.util.get_node_ip_address()}: {'; '.join(faults)}")


def attempt_folder(run: str) -> str:
    """A folder of this machine for this attempt alone: what a dead attempt left half-written is never found again.

    Those of workers that have ended on this machine, of whatever run, are deleted: a checkpoint may lie in each.
    """
    prefix = f"grpo_ray-{run}-"
    for left in Path(tempfile.gettempdir()).glob(f"grpo_ray-*/{LOCK}"):
        with suppress(OSError), open(left) as lock:  # held by a living worker, another user's, or just deleted
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)
    own = Path(tempfile.mkdtemp(prefix=prefix))
    fcntl.flock(os.open(own / "new", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)  # until this process ends
    (own / "new").rename(own / LOCK)  # nobody sees it before it is held
    return str(own)


def choose_start(config: Config, folder: RunFolder, assignment: WorkerSpec) -> tuple[CheckpointInfo | None, int]:
    """The checkpoint that all workers go on from, verified by all of them, and the last serial number given.

    One that is not whole is named, and the one before it is taken. Raises CheckpointError if none is whole.
    """
    found: list[CheckpointInfo] = []
    if is_rank_zero():
        for name in checkpoints.unreadable_manifests(folder):
            _notice(assignment.board)(f"{name} is not whole: its manifest cannot be read; it is passed over")
        found = checkpoints.resume_candidates(
            folder, config.run.resume, config.run.best_metric, after=assignment.serial
        )
        if not found and config.run.from_checkpoint:
            found = [checkpoints.open_foreign_checkpoint(config.run.from_checkpoint, config.run.best_metric)]
    found = all_gather_object(found)[0]
    last = max((stored.serial for stored in found), default=0)
    for number, stored in enumerate(found):
        per_worker = all_gather_object(checkpoints.find_faults(stored, *_part()))
        wrong = sorted({fault for faults in per_worker for fault in faults})
        if not wrong:
            return stored, last
        if is_rank_zero():
            instead = found[number + 1].name if number + 1 < len(found) else "nothing"
            say = _notice(assignment.board)
            say(f"{stored.name} is not whole: {'; '.join(wrong)}; going on from {instead} instead")
            if stored.folder.uri == folder.uri:  # another run's is not ours to touch
                checkpoints.mark_damaged(stored, wrong)
    if found:
        raise CheckpointError(
            f"{folder.uri}: no checkpoint is whole; set run.resume=never to start over, which keeps this folder"
        )
    return None, last


def _part() -> tuple[int, int]:
    context = ray.train.get_context()
    return context.get_world_rank(), context.get_world_size()


def ledger_of(local: Path | None, assignment: WorkerSpec) -> Ledger:
    """The ledger of the checkpoint that the run goes on from, or an empty one."""
    ledger = Ledger.load(local) if local else Ledger()
    if assignment.numbers is not None:
        ledger.keep_only(ray.get(assignment.numbers))
    ledger.contents = assignment.contents
    return ledger


@contextmanager
def open_checkpoint(stored: CheckpointInfo | None) -> Iterator[Path | None]:
    """A local folder with the checkpoint; None for a run that begins."""
    if stored is None:
        yield None
        return
    with ray.train.Checkpoint(stored.path, filesystem=stored.folder.filesystem).as_directory() as local:
        yield Path(local)


def _notice(board: Any) -> Callable[[str], None]:
    """What lets the user know of something, in a line that stays."""
    return lambda text: board.happened.remote("notice", what=text)


def _hanging(folder: RunFolder, rank: int, board: Any) -> Callable[[str, Path], None]:
    """What is done about a worker that hangs, beside writing its stacks and ending it."""

    def tell(message: str, stacks: Path) -> None:
        _notice(board)(f"worker {rank}: {message}; stacks of all threads are in {folder.uri_of('logs', stacks.name)}")
        folder.write_text(stacks.read_text(), "logs", stacks.name)

    return tell


def _save_for_study(folder: RunFolder, groups: list[dict[str, Any]], step: int, rank: int) -> str:
    """Keep groups whose numbers went bad; gives the place."""
    name = f"step-{step:06d}-worker-{rank}.json"
    folder.write_text(json.dumps(groups, indent=1) + "\n", "bad_numbers", name)
    return folder.uri_of("bad_numbers", name)


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
