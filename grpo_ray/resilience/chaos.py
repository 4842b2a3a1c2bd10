"""Faults put into a run on purpose, from a seed: `grpo-ray chaos`, and the tests of everything that must survive them.

A fault is injected by the worker itself, at a step and a place that are told beforehand, and once in the life of a
run: a mark in the run folder, made before it strikes, says that it has struck.
"""

import json
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_ray.errors import ConfigError
from grpo_ray.storage.checkpoints import CheckpointUploader, stored_checkpoints
from grpo_ray.storage.jsonl import EventsFile
from grpo_ray.storage.rollouts import read_rollouts
from grpo_ray.storage.run_folder import RunFolder

FOLDER = "chaos"
KINDS = {
    "kill-generation": "SIGKILL while the engine generates",
    "kill-backward": "SIGKILL in the backward pass",
    "kill-upload": "SIGKILL while a checkpoint is written",
    "kill-commit": "SIGKILL when a checkpoint is written, before Ray Train knows of it",
    "torn-checkpoint": "the newest checkpoint is cut short, then SIGKILL",
    "flipped-byte": "one byte of the newest checkpoint is changed, then SIGKILL",
    "storage-error": "writing a checkpoint fails for some seconds",
    "hang": "a reward function never returns",
    "non-finite": "the loss of a step is not a number",
    "exception": "an exception in the training step",
}
"""Kind of fault -> what happens."""
AT_SAVE = {"kill-upload", "kill-commit", "storage-error"}
"""Faults that strike at the first checkpoint of their step or a later one."""
SPOILING = {"torn-checkpoint", "flipped-byte"}
"""Faults that spoil the newest checkpoint."""
STORAGE_SECONDS = 5.0
"""How long storage fails."""
UPLOAD_SECONDS = 120.0
"""How long a fault that spoils the newest checkpoint waits for it to be there."""
CALM = {"storage-error", "non-finite"}
"""Faults that no worker has to start again for."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: str
    step: int
    """Step in which it strikes, from 1."""
    rank: int = 0
    """Worker that it strikes; counted round where there are fewer workers."""

    @property
    def mark(self) -> str:
        """File in the run folder that says that it has struck."""
        return f"{self.kind}-step-{self.step}-worker-{self.rank}.json"


def plan_faults(seed: int, kinds: Sequence[str], max_steps: int, save_steps: int, workers: int) -> list[Fault]:
    """One fault of each kind, at steps and workers drawn from a seed. Raises ConfigError for an unknown kind.

    What spoils a checkpoint comes when there are two, so that there is one to fall back on.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ConfigError(f"no such fault: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    draw = random.Random(seed)
    faults = []
    for kind in kinds:
        if kind in AT_SAVE:
            step = save_steps * draw.randint(1, max(1, max_steps // save_steps))
        else:
            first = 2 * save_steps + 1 if kind in SPOILING else 1
            if first > max_steps:
                raise ConfigError(f"{kind} needs two checkpoints to be there: set grpo.max_steps above {first - 1}")
            step = draw.randint(first, max_steps)
        # The checkpoint's name is given by rank 0: the other faults of it strike there.
        rank = 0 if kind in {"kill-commit", *SPOILING} else draw.randrange(workers)
        faults.append(Fault(kind, step, rank))
    return sorted(faults, key=lambda fault: fault.step)


def was_injected(folder: RunFolder, fault: Fault) -> bool:
    """Whether a fault has struck."""
    return folder.exists(FOLDER, fault.mark)


@dataclass(frozen=True)
class FaultOutcome:
    """What came of one fault."""

    fault: Fault
    struck: bool
    seconds: float | None
    """From the fault to training again; None where nothing had to start again."""


def fault_outcomes(folder: RunFolder, faults: Sequence[Fault]) -> list[FaultOutcome]:
    """What came of each fault, from its mark and from what happened after it."""
    training = [event["at"] for event in EventsFile(folder).rows if event["event"] == "training"]
    found = []
    for fault in faults:
        if not was_injected(folder, fault):
            found.append(FaultOutcome(fault, False, None))
            continue
        at = json.loads(folder.read_text(FOLDER, fault.mark))["at"]
        again = min((began for began in training if began > at), default=None)
        found.append(FaultOutcome(fault, True, None if again is None or fault.kind in CALM else again - at))
    return found


def count_lost_and_repeated(folder: RunFolder, steps: int, prompts_per_step: int) -> tuple[int, int]:
    """Groups that the run's steps lack, and problems used more than once in an epoch; from `rollouts/`."""
    table = read_rollouts(folder, up_to_step=steps)
    per_epoch = Counter(zip(table["epoch"].to_pylist(), table["problem"].to_pylist(), strict=True))
    return steps * prompts_per_step - sum(table["trained"].to_pylist()), sum(count - 1 for count in per_epoch.values())


class Chaos:
    """Injects one worker's faults into its learner."""

    def __init__(self, faults: Sequence[Fault], folder: RunFolder, rank: int, workers: int):
        self.folder = folder
        self.waiting = [f for f in faults if f.rank % workers == rank and not was_injected(folder, f)]
        self._step: Callable[[], int] = lambda: 0
        self._save_steps = 1

    def install(self, learner: Any) -> None:
        """Put the faults in their places; nothing is touched where there are none."""
        if not self.waiting:
            return
        self._step = lambda: learner.state.global_step + 1
        self._save_steps = learner.args.save_steps
        _around(learner.engine, "generate", self._while_generating(learner.engine))
        _around(learner.accelerator, "backward", self._before("kill-backward", lambda: _die_in_backward(learner.model)))
        _around(learner, "_calculate_rewards", self._before("hang", _sleep_for_ever))
        _around(learner, "training_step", self._before("exception", _fail))
        _around(learner, "training_step", self._before("torn-checkpoint", lambda: self._spoil(_cut)))
        _around(learner, "training_step", self._before("flipped-byte", lambda: self._spoil(_flip)))
        _around(learner, "_compute_loss", self._not_a_number)
        _around(CheckpointUploader, "_copy", self._while_copying)
        _around(CheckpointUploader, "__call__", self._before_commit)

    def _due(self, kind: str, step: int | None = None) -> bool:
        """Whether a fault of a kind strikes now; if so it is marked, and never strikes again."""
        step = self._step() if step is None else step
        for fault in self.waiting:
            on_time = fault.step <= step if kind in AT_SAVE else fault.step == step
            if fault.kind == kind and on_time:
                self.waiting.remove(fault)
                self.folder.write_json(asdict(fault) | {"at": time.time()}, FOLDER, fault.mark)
                return True
        return False

    def _before(self, kind: str, strike: Callable[[], None]) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._due(kind):
                strike()
            return original(*args, **kwargs)

        return around

    def _while_generating(self, engine: Any) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._due("kill-generation"):
                engine.on_finished = lambda index, token_ids: _die()  # with the first completion, the others under way
            return original(*args, **kwargs)

        return around

    def _not_a_number(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        return loss * math.nan if self._due("non-finite") else loss

    def _while_copying(self, original: Callable[..., Any], upload: CheckpointUploader, *args: Any) -> Any:
        step = int(upload.metrics["step"])
        if self._due("storage-error", step):
            self._failing_until = time.monotonic() + STORAGE_SECONDS
        if time.monotonic() < getattr(self, "_failing_until", 0.0):
            raise ConnectionError("a fault put in on purpose")
        checksum = original(upload, *args)
        if self._due("kill-upload", step):  # one file is there, the others are not
            _die()
        return checksum

    def _before_commit(self, original: Callable[..., Any], upload: CheckpointUploader, *args: Any) -> Any:
        written = original(upload, *args)
        if self._due("kill-commit", int(upload.metrics["step"])):
            _die()
        return written

    def _spoil(self, how: Callable[[bytes], bytes]) -> None:
        """Change the largest file of the newest checkpoint behind the run's back, and die."""
        saved = (self._step() - 1) // self._save_steps * self._save_steps
        end = time.monotonic() + UPLOAD_SECONDS
        while (newest := stored_checkpoints(self.folder)[-1]).step < saved and time.monotonic() < end:
            time.sleep(0.1)  # it is still on its way
        name = max(newest.files, key=lambda file: newest.files[file]["bytes"])
        self.folder.write_bytes(how(self.folder.read_bytes(newest.name, name)), newest.name, name)
        _die()


def _around(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by one that calls `around(original, ...)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_backward(model: Any) -> None:
    """Die when the gradient reaches the first layers: most of the backward pass is over, and no step is taken."""
    first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    first.register_hook(lambda gradient: _die())


def _sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def _fail() -> None:
    raise RuntimeError("an exception put in on purpose")


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
