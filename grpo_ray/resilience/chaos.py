"""Fault injection: failures planned from a seed and triggered inside a run, to test that the run survives them.

`grpo-ray chaos` and the fault-injection tests use it. A plan is a list of `Fault`: a kind of failure, a step, and a
worker. On that worker, a `FaultInjector` wraps the methods in which the failures happen (generation, backward pass,
reward computation, checkpoint upload). When a wrapped method is called at the planned step, the wrapper first writes a
marker file to the run folder and then causes the failure: it kills the process, raises, sleeps, or damages a file. The
marker makes each fault happen once in the life of a run, although the step is repeated after the restart.

The wrapped methods are private and are named by strings in `FaultInjector.install`: renaming one of them requires the
same change there.
"""

import json
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from grpo_ray.errors import ConfigError
from grpo_ray.storage.checkpoint_upload import CheckpointUploader
from grpo_ray.storage.checkpoints import list_checkpoints
from grpo_ray.storage.jsonl import read_events
from grpo_ray.storage.records.rollout_files import read_rollouts
from grpo_ray.storage.run_folder import RunFolder

FOLDER = "chaos"
"""Folder in the run folder that holds the markers."""
FAULT_KINDS = {
    "kill-generation": "SIGKILL while the engine generates",
    "kill-backward": "SIGKILL in the backward pass",
    "kill-upload": "SIGKILL while a checkpoint is uploaded",
    "kill-commit": "SIGKILL when a checkpoint is uploaded but not yet reported to Ray Train",
    "torn-checkpoint": "the newest checkpoint is truncated, then SIGKILL",
    "flipped-byte": "one byte of the newest checkpoint is changed, then SIGKILL",
    "storage-error": "writing a checkpoint fails for some seconds",
    "hang": "a reward function never returns",
    "non-finite": "the loss of a step is NaN",
    "exception": "an exception in the training step",
    "kill-engine": "SIGKILL of a dedicated engine while it generates",
    "hang-engine": "a dedicated engine makes no further step",
}
"""Kind of fault -> effect."""
UPLOAD_FAULTS = {"kill-upload", "kill-commit", "storage-error"}
"""Faults injected at the first checkpoint at or after their step."""
ENGINE_FAULTS = {"kill-engine": "kill", "hang-engine": "hang"}
"""Faults of dedicated engines, and the name of each in `EngineProcess.disturb`."""
SAMPLING_FAULTS = {"kill-generation", *ENGINE_FAULTS}
"""Faults injected while an engine generates for training, for the first time in their step or a later one."""
GENERATION_FAULTS = {"hang", *SAMPLING_FAULTS}
"""Faults injected while completions are collected, in the first optimizer step on a generation batch."""
CORRUPTION_FAULTS = {"torn-checkpoint", "flipped-byte"}
"""Faults that damage the newest checkpoint."""
FAULTS_WITHOUT_RESTART = {"storage-error", "non-finite", *ENGINE_FAULTS}
"""Faults after which no worker restarts."""
STORAGE_ERROR_SECONDS = 5.0
"""Duration of the fault `storage-error`."""
UPLOAD_TIMEOUT_SECONDS = 120.0
"""Longest time that a corruption fault waits for the upload of the newest checkpoint."""


@dataclass(frozen=True)
class Fault:
    """One planned fault."""

    kind: str
    """Key of `FAULT_KINDS`."""
    step: int
    """Step in which it is injected, from 1."""
    rank: int = 0
    """Rank of the worker that injects it, modulo the number of workers."""

    @property
    def marker(self) -> str:
        """Name of the marker file, which exists once the fault was injected."""
        return f"{self.kind}-step-{self.step}-worker-{self.rank}.json"


def fault_kinds(has_dedicated_engines: bool) -> list[str]:
    """Return the kinds of faults that a run can have."""
    return [kind for kind in FAULT_KINDS if has_dedicated_engines or kind not in ENGINE_FAULTS]


def require_engines(kinds: Sequence[str], has_dedicated_engines: bool) -> None:
    """Raise ConfigError if a fault needs dedicated engines, and the run has none."""
    if needing := [kind for kind in kinds if kind in ENGINE_FAULTS and not has_dedicated_engines]:
        raise ConfigError(f"fault {needing[0]} needs dedicated engines; set engine.placement=dedicated")


def plan_faults(
    seed: int,
    kinds: Sequence[str],
    max_steps: int,
    save_steps: int,
    workers: int,
    steps_per_batch: int = 1,
    max_staleness: int = 0,
) -> list[Fault]:
    """Draw one fault of each kind, with random steps and workers.

    Faults that damage a checkpoint come after the second checkpoint, so that the run has one to fall back to. The last
    `max_staleness` steps of a run begin no completions, so faults of sampling come before them.

    Args:
        seed: seed of the draw.
        kinds: keys of `FAULT_KINDS`.
        max_steps: steps of the run.
        save_steps: steps between checkpoints.
        workers: largest number of workers.
        steps_per_batch: optimizer steps on each generation batch.
        max_staleness: `rollout.max_staleness`.

    Returns:
        The faults, ordered by step.

    Raises:
        ConfigError: a kind is unknown, or the run is too short for it.
    """
    if unknown := sorted(set(kinds) - set(FAULT_KINDS)):
        raise ConfigError(f"unknown fault: {', '.join(unknown)}; choose from {', '.join(FAULT_KINDS)}")
    draw = random.Random(seed)
    faults = []
    for kind in kinds:
        if kind in UPLOAD_FAULTS:
            step = save_steps * draw.randint(1, max(1, max_steps // save_steps))
        else:
            first = 2 * save_steps + 1 if kind in CORRUPTION_FAULTS else 1
            if first > max_steps:
                raise ConfigError(
                    f"fault {kind} needs two earlier checkpoints; grpo.max_steps={max_steps} must be above {first - 1}"
                )
            last = max(1, max_steps - max_staleness) if kind in SAMPLING_FAULTS else max_steps
            step = draw.randint(first, last)
            if kind in GENERATION_FAULTS:
                step -= (step - 1) % steps_per_batch
        # Rank 0 commits checkpoints, so the faults of a whole checkpoint are injected there.
        rank = 0 if kind in {"kill-commit", *CORRUPTION_FAULTS} else draw.randrange(workers)
        faults.append(Fault(kind, step, rank))
    return sorted(faults, key=lambda fault: fault.step)


def describe_plan(faults: Sequence[Fault], hang_seconds: float) -> list[str]:
    """Describe the planned faults in one line each, and how long it takes until a hang is detected.

    Args:
        hang_seconds: `run.hang_seconds`.
    """
    lines = [f"fault in step {fault.step}, worker {fault.rank}: {FAULT_KINDS[fault.kind]}" for fault in faults]
    if any(fault.kind == "hang" for fault in faults):
        lines.append(
            f"the hang ends when the watchdog notices it, after run.hang_seconds={hang_seconds:g} or, if that is "
            "longer, run.hang_factor times the usual longest pause without progress"
        )
    return lines


def was_injected(folder: RunFolder, fault: Fault) -> bool:
    """Return True if the fault's marker exists."""
    return folder.exists(FOLDER, fault.marker)


@dataclass(frozen=True)
class FaultOutcome:
    """Effect of one fault on the run."""

    fault: Fault
    injected: bool
    recovery_seconds: float | None
    """Time from the fault until training continued; None if no worker restarted."""


def fault_outcomes(folder: RunFolder, faults: Sequence[Fault]) -> list[FaultOutcome]:
    """Determine the effect of each fault from its marker and the run's events."""
    training_starts = [event["at"] for event in read_events(folder) if event["event"] == "training"]
    outcomes = []
    for fault in faults:
        if not was_injected(folder, fault):
            outcomes.append(FaultOutcome(fault, False, None))
            continue
        at = json.loads(folder.read_text(FOLDER, fault.marker))["at"]
        resumed = min((start for start in training_starts if start > at), default=None)
        seconds = None if resumed is None or fault.kind in FAULTS_WITHOUT_RESTART else resumed - at
        outcomes.append(FaultOutcome(fault, True, seconds))
    return outcomes


def count_lost_and_repeated(folder: RunFolder, steps: int, groups: int) -> tuple[int, int]:
    """Count violations of exactly-once in `rollouts/`.

    Args:
        steps: optimizer steps of the run.
        groups: number of groups that these steps train on.

    Returns:
        Number of groups missing from the run's steps, and number of repeated uses of a problem within an epoch.
    """
    table = read_rollouts(folder, up_to_step=steps)
    per_epoch = Counter(zip(table["epoch"].to_pylist(), table["problem"].to_pylist(), strict=True))
    return groups - sum(table["trained"].to_pylist()), sum(count - 1 for count in per_epoch.values())


Wrapper = Callable[..., Any]
"""Function called in place of a method, as `wrapper(original, *args, **kwargs)`."""


class FaultInjector:
    """Injector of the faults planned for one worker."""

    def __init__(
        self,
        faults: Sequence[Fault],
        folder: RunFolder,
        rank: int,
        workers: int,
        notify: Callable[[str], object] = lambda text: None,
    ):
        """
        Args:
            faults: all planned faults of the run.
            folder: run folder, with the markers.
            rank: rank of this worker.
            workers: number of workers.
            notify: shows a line to the user; called at the start of a hang.
        """
        self.notify = notify
        self.rank = rank
        self.folder = folder
        self.pending = [f for f in faults if f.rank % workers == rank and not was_injected(folder, f)]
        self._engine: Any = None
        self._current_step: Callable[[], int] = lambda: 0
        self._save_steps = 1
        self._storage_fails_until = 0.0

    def install(self, learner: Any) -> None:
        """Wrap the methods of the learner, its engine and the uploader; without pending faults, change nothing."""
        if not self.pending:
            return
        self._current_step = lambda: learner.state.global_step + 1
        self._save_steps = learner.args.save_steps
        self._engine = learner.engine
        _wrap(learner.engine, "rounds", self._fail_while_generating)  # held-out measurements use `heldout_rounds`
        _wrap(learner.accelerator, "backward", self._before("kill-backward", lambda: _die_in_backward(learner.model)))
        if hasattr(learner, "collector"):  # of GRPO
            _wrap(learner.collector.scorer, "score", self._before("hang", self._hang))
            _wrap(learner, "_compute_loss", self._make_loss_nan)
        _wrap(learner, "training_step", self._before("exception", _raise))
        _wrap(learner, "training_step", self._before("torn-checkpoint", lambda: self._damage_checkpoint(_truncate)))
        _wrap(learner, "training_step", self._before("flipped-byte", lambda: self._damage_checkpoint(_flip_bit)))
        _wrap(CheckpointUploader, "_copy_file", self._fail_or_die_in_upload)
        _wrap(CheckpointUploader, "__call__", self._die_before_commit)

    def _take_due(self, kind: str, step: int | None = None) -> bool:
        """Return True if a fault of a kind is due; it is then marked as injected and never due again."""
        step = self._current_step() if step is None else step
        for fault in self.pending:
            due = fault.step <= step if kind in UPLOAD_FAULTS | SAMPLING_FAULTS else fault.step == step
            if fault.kind == kind and due:
                self.pending.remove(fault)
                self.folder.write_json(asdict(fault) | {"at": time.time()}, FOLDER, fault.marker)
                return True
        return False

    def _before(self, kind: str, inject: Callable[[], None]) -> Wrapper:
        def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._take_due(kind):
                inject()
            return original(*args, **kwargs)

        return wrapper

    @contextmanager
    def _fail_while_generating(
        self, original: Callable[[], AbstractContextManager[Callable[..., Any]]]
    ) -> Iterator[Callable[..., Any]]:
        with original() as run_round:

            def run(prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: Callable[..., None]) -> Any:
                if prompts and self._take_due("kill-generation"):
                    # At the first finished completion, while the others are still being generated.
                    return run_round(prompts, sampling, lambda index, token_ids: _die())
                for kind, name in ENGINE_FAULTS.items():
                    if prompts and self._take_due(kind):
                        return run_round(prompts, sampling, self._disturb_engine(name, on_finished))
                return run_round(prompts, sampling, on_finished)

            yield run

    def _disturb_engine(self, kind: str, on_finished: Callable[..., None]) -> Callable[..., None]:
        """Return a function that disturbs an engine when it is first called for a completion."""
        pending = [kind]

        def disturb(index: int, token_ids: list[int]) -> None:
            if pending:
                self._engine.disturb(self.rank, pending.pop())
            on_finished(index, token_ids)

        return disturb

    def _hang(self) -> None:
        """Sleep until the watchdog ends this process."""
        self.notify(f"worker {self.rank} hangs on purpose in step {self._current_step()}: waiting for the watchdog")
        _sleep_forever()

    def _make_loss_nan(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        return loss * math.nan if self._take_due("non-finite") else loss

    def _fail_or_die_in_upload(self, original: Callable[..., Any], upload: CheckpointUploader, *args: Any) -> Any:
        step = int(upload.metrics["step"])
        if self._take_due("storage-error", step):
            self._storage_fails_until = time.monotonic() + STORAGE_ERROR_SECONDS
        if time.monotonic() < self._storage_fails_until:
            raise ConnectionError("injected fault")
        checksum = original(upload, *args)
        if self._take_due("kill-upload", step):  # one file is uploaded, the others are not
            _die()
        return checksum

    def _die_before_commit(self, original: Callable[..., Any], upload: CheckpointUploader, *args: Any) -> Any:
        checkpoint = original(upload, *args)
        if self._take_due("kill-commit", int(upload.metrics["step"])):
            _die()
        return checkpoint

    def _damage_checkpoint(self, damage: Callable[[bytes], bytes]) -> None:
        """Change the largest file of the newest checkpoint on storage, and die."""
        last_saved_step = (self._current_step() - 1) // self._save_steps * self._save_steps
        deadline = time.monotonic() + UPLOAD_TIMEOUT_SECONDS
        while not (saved := list_checkpoints(self.folder)) or saved[-1].step < last_saved_step:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)  # its upload has not finished
        newest = saved[-1]
        name = max(newest.files, key=lambda file: newest.files[file]["bytes"])
        self.folder.write_bytes(damage(self.folder.read_bytes(newest.name, name)), newest.name, name)
        _die()


def _wrap(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Replace the method `name` of an object or class by one that calls `wrapper(original, ...)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_backward(model: Any) -> None:
    """Die when the gradient reaches the first layer: late in the backward pass, and before the optimizer step."""
    first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    first.register_hook(lambda gradient: _die())


def _sleep_forever() -> None:
    while True:
        time.sleep(1)


def _raise() -> None:
    raise RuntimeError("injected fault")


def _truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
