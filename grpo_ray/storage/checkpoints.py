"""What a checkpoint holds, how it is written, and which one a run goes on from.

A checkpoint is a plain Hugging Face folder (`config.json`, safetensors, tokenizer), so `from_pretrained` and
`vllm serve` take it as it is. Beside the weights lie the optimizer, the scheduler, the trainer's state, the random
states of every worker, the states of rewards, the ledger and the metrics so far.

It is complete or it does not exist. The workers write into a folder with another name, read back what the storage
holds, and leave word of their files; when all have, rank 0 writes the manifest (sizes and checksums of everything)
and only then gives the folder its name. An object store cannot rename: there the manifest, written last, is the name.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.train

from grpo_ray.errors import CheckpointError
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.retry import retry_transient
from grpo_ray.storage.run_folder import RunFolder, split_path

SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray Train's own record of a run's checkpoints."""
MANIFEST = "manifest.json"
DAMAGED = "damaged.json"
"""Takes the manifest's place in a checkpoint that was found not to be whole; says what is wrong."""
UNFINISHED = "unfinished"
"""Lies in a checkpoint on an object store until the manifest is there."""
MEASURED = "measured.json"
"""`metrics` measured of a checkpoint after it was written, and the problems that they were `measured_on`."""
SCORE = "checkpoint/score"
"""What Ray Train ranks checkpoints by: `run.best_metric`, a hair less for each step, so that of equals the first is
the best."""
PREFIX = "checkpoint-"
ASIDE = ".part"
POLL_SECONDS = 0.1
BLOCK = 1 << 24


@dataclass(frozen=True)
class CheckpointInfo:
    """A whole checkpoint in a run folder, with what was measured of it."""

    folder: RunFolder
    name: str
    metrics: Mapping[str, Any]
    serial: int
    """Number in the order of writing; a run that goes back writes a step's checkpoint again under a later one."""
    files: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """File -> `bytes` and `sha256`."""
    measured_on: Mapping[str, Any] | None = None
    """Contents (`ledger.Contents`) of the held-out problems that `metrics` were measured on; None: not measured."""

    @property
    def path(self) -> str:
        """As the run folder's filesystem wants it."""
        return self.folder.path(self.name)

    @property
    def uri(self) -> str:
        return self.folder.uri_of(self.name)

    @property
    def step(self) -> int:
        return int(self.metrics["step"])


def stored_checkpoints(folder: RunFolder) -> list[CheckpointInfo]:
    """All whole checkpoints of a run, in the order of writing."""
    found = []
    for name in folder.list_folders(PREFIX):
        if name.endswith(ASIDE) or not folder.exists(name, MANIFEST):
            continue
        try:
            manifest = json.loads(folder.read_text(name, MANIFEST))
            metrics, serial, files = manifest["metrics"], manifest["serial"], manifest["files"]
        except (ValueError, KeyError, TypeError):  # spoilt: `unreadable` names it
            continue
        measured_on = manifest.get("measured_on")
        if folder.exists(name, MEASURED):
            measured = json.loads(folder.read_text(name, MEASURED))
            metrics |= measured["metrics"]
            measured_on = measured["measured_on"]
        found.append(CheckpointInfo(folder, name, metrics, serial, files, measured_on))
    return sorted(found, key=lambda stored: stored.serial)


def unreadable_manifests(folder: RunFolder) -> list[str]:
    """Names of the checkpoints whose manifest was spoilt; they are none of `stored_checkpoints`."""
    whole = {stored.name for stored in stored_checkpoints(folder)}
    names = [name for name in folder.list_folders(PREFIX) if name not in whole and not name.endswith(ASIDE)]
    return [name for name in names if folder.exists(name, MANIFEST)]


def best_checkpoint(checkpoints: Sequence[CheckpointInfo], metric: str) -> CheckpointInfo | None:
    """The checkpoint with the highest value of a metric; of equals the earliest."""
    ranked = [stored for stored in checkpoints if stored.metrics.get(metric) is not None]
    return max(ranked, key=lambda stored: (stored.metrics[metric], -stored.step, -stored.serial), default=None)


def resume_candidates(folder: RunFolder, resume: str, metric: str, after: int = 0) -> list[CheckpointInfo]:
    """The checkpoints that a run may go on from, the one to take first, then those to fall back on.

    after: a checkpoint with a later serial number was written by this launch; of those the latest goes first whatever
    `resume` says, since the launch has already gone back to its best.
    """
    latest_first = stored_checkpoints(folder)[::-1]
    new = [stored for stored in latest_first if stored.serial > after]
    old = [stored for stored in latest_first if stored.serial <= after]
    if resume == "best" and (best := best_checkpoint(old, metric)) is not None:
        old = [best, *(stored for stored in old if stored.serial < best.serial)]
    return [*new, *old]


def open_foreign_checkpoint(path: str, metric: str) -> CheckpointInfo:
    """The checkpoint that `run.from_checkpoint` names: itself, or the best of a run folder.

    Raises CheckpointError if there is none.
    """
    storage_path, name = split_path(path)
    if name.startswith(PREFIX):
        for stored in stored_checkpoints(RunFolder(*split_path(storage_path))):
            if stored.name == name:
                return stored
        raise CheckpointError(f"run.from_checkpoint={path}: is not a whole checkpoint")
    stored_there = stored_checkpoints(RunFolder(storage_path, name))
    if not stored_there:
        raise CheckpointError(f"run.from_checkpoint={path}: has no whole checkpoint")
    return best_checkpoint(stored_there, metric) or stored_there[-1]


def find_faults(stored: CheckpointInfo, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint: files that are missing, cut short or altered. Each in a few words.

    part, parts: look at the contents of every `parts`-th file only, so that workers share the reading; sizes are
    cheap and always looked at.
    """
    sizes = stored.folder.file_sizes(stored.name)
    wrong = []
    for name, was in stored.files.items():
        if name not in sizes:
            wrong.append(f"{name} is missing")
        elif sizes[name] != was["bytes"]:
            wrong.append(f"{name} has {sizes[name]} of {was['bytes']} bytes")
    if wrong:
        return wrong
    by_size = sorted(stored.files, key=lambda name: (-stored.files[name]["bytes"], name))
    return [
        f"{name} was altered"
        for name in by_size[part::parts]
        if _checksum(stored.folder, stored.name, name) != stored.files[name]["sha256"]
    ]


def _checksum(folder: RunFolder, *names: str) -> str:
    digest = hashlib.sha256()
    with folder.filesystem.open_input_stream(folder.path(*names)) as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def mark_damaged(stored: CheckpointInfo, wrong: Sequence[str]) -> None:
    """Take a checkpoint that is not whole out of the run; what is left of it can still be looked at.

    Its name stays taken: Ray Train remembers it, and may one day delete what lies there.
    """
    stored.folder.write_json(list(wrong), stored.name, DAMAGED)
    stored.folder.delete_file(stored.name, MANIFEST)


def checkpoint_name(folder: RunFolder, step: int) -> str:
    """Folder name of a step's checkpoint; a step taken again after going back gets a number of its own."""
    name, number = f"{PREFIX}{step:06d}", 1
    while folder.exists(name):
        number += 1
        name = f"{PREFIX}{step:06d}.{number}"
    return name


@dataclass(frozen=True)
class CheckpointUploader:
    """One worker's part of writing a checkpoint; `checkpoint_upload_fn` of `ray.train.report`, run in background."""

    folder: RunFolder
    rank: int
    workers: int
    metrics: Mapping[str, Any]
    serial: int
    patience: float
    """Seconds that the storage may be out of reach or full."""
    say: Callable[[str], None]
    """Told when there is trouble, and when it is over."""
    before_naming: Callable[[], None] = lambda: None
    """Done by rank 0 when all files are there and verified."""
    fence: FencingToken | None = None
    """Keeps out an attempt whose place another one has taken."""
    measured_on: Mapping[str, Any] | None = None
    """Contents of the held-out problems, if `metrics` hold a measurement on them."""

    def __call__(self, checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        local = Path(checkpoint.path)
        try:
            self._patiently(lambda: self._write(local, name))
            if self.rank == 0:
                self._patiently(lambda: self._name(name))
        except OSError as error:
            said = " ".join(str(error).split())
            raise CheckpointError(
                f"{name} could not be written to {self.folder.uri}: {said}; what was saved before is whole, and once "
                "the storage is well the same command goes on from there"
            ) from error
        return ray.train.Checkpoint(self.folder.path(name), filesystem=self.folder.filesystem)

    def aside(self, name: str) -> str:
        """Name of the folder until the checkpoint is whole."""
        if self.folder.local is None:
            return name
        return f"{name}.{self.fence.token}{ASIDE}" if self.fence else name + ASIDE

    def _check(self) -> None:
        if self.fence:
            self.fence.check()

    def _patiently(self, action: Callable[[], None]) -> None:
        retry_transient(action, self.patience, self.say)

    def _write(self, local: Path, name: str) -> None:
        """Copy this worker's files, read them back, and leave word of them."""
        aside = self.aside(name)
        if self.folder.local is None:
            self.folder.write_text("", aside, UNFINISHED)
        files = {}
        for path in sorted(path for path in local.rglob("*") if path.is_file()):
            self._check()
            file = path.relative_to(local).as_posix()
            files[file] = {"bytes": path.stat().st_size, "sha256": self._copy(path, aside, *file.split("/"))}
        self.folder.write_json(files, aside, _word(self.rank))

    def _copy(self, path: Path, *names: str) -> str:
        """Copy one file; gives its checksum. Raises OSError if the storage holds something else afterwards."""
        target, digest = self.folder.path(*names), hashlib.sha256()
        self.folder.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        with open(path, "rb") as source, self.folder.filesystem.open_output_stream(target) as stream:
            while block := source.read(BLOCK):
                digest.update(block)
                stream.write(block)
        if _checksum(self.folder, *names) != digest.hexdigest():
            raise OSError(f"{target}: the storage does not hold what was written")
        return digest.hexdigest()

    def _name(self, name: str) -> None:
        """Wait for every worker's files, write the manifest, give the folder its name."""
        aside = self.aside(name)
        if self.folder.local is not None and self.folder.exists(name):  # done, and only the answer was lost
            return
        files: dict[str, Any] = {}
        for rank in range(self.workers):
            while not self.folder.exists(aside, _word(rank)):  # a worker that dies meanwhile ends this one too
                time.sleep(POLL_SECONDS)
                self._check()
            files |= json.loads(self.folder.read_text(aside, _word(rank)))
        self._check()
        self.before_naming()
        manifest = {
            "metrics": dict(self.metrics),
            "measured_on": self.measured_on,
            "serial": self.serial,
            "workers": self.workers,
            "files": files,
        }
        self.folder.write_json(manifest, aside, MANIFEST)
        if self.folder.local is None:
            self.folder.delete_file(aside, UNFINISHED)
        else:
            self.folder.rename_folder(aside, name)


def _word(rank: int) -> str:
    """File in which a worker leaves word that its files are there."""
    return f"files-{rank}.json"


def clear_unfinished(folder: RunFolder) -> None:
    """Delete what workers that died had begun to write. Nothing must be writing."""
    for name in folder.list_folders(PREFIX):
        if name.endswith(ASIDE) or folder.exists(name, UNFINISHED):
            folder.delete_folder(name)


def prune_checkpoints(folder: RunFolder, metric: str, keep: int) -> None:
    """Delete the whole checkpoints that are neither among the best nor the latest, as Ray Train does while it runs.

    A run that was killed in the wrong moment has some that Ray does not know of.
    """
    stored = stored_checkpoints(folder)
    kept = {stored[-1].name} if stored else set()
    rest = list(stored)
    for _ in range(keep):
        if (best := best_checkpoint(rest, metric)) is not None:
            kept.add(best.name)
            rest.remove(best)
    for each in stored:
        if each.name not in kept:
            folder.delete_folder(each.name)


def repair_ray_snapshot(folder: RunFolder, metric: str) -> None:
    """Make Ray Train's own record agree with the checkpoints that are there.

    Ray refuses to start if its record names one that is gone, or was cut short by a full disk; and it would never
    delete one that it does not know.
    """
    stored = stored_checkpoints(folder)
    if _recorded(folder) == [each.name for each in stored]:
        return
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
        _CheckpointManagerState,
        _TrainingResultState,
    )

    def result(each: CheckpointInfo) -> Any:
        metrics = dict(each.metrics) | checkpoint_score(each.metrics, metric)
        return _TrainingResultState(checkpoint_dir_name=each.name, metrics=metrics)

    unranked = float("-inf")
    ranked = sorted(stored, key=lambda each: (checkpoint_score(each.metrics, metric).get(SCORE, unranked), each.serial))
    state = _CheckpointManagerState(
        checkpoint_results=[result(each) for each in ranked],
        checkpoint_report_indices=[each.serial for each in ranked],
        latest_checkpoint_result=result(stored[-1]) if stored else None,
        pending_training_results=[],
        pending_validation_specs=[],
        current_report_index=max((each.serial for each in stored), default=0) + 1,
        validated_checkpoint_dir_names=[],
        timed_out_validation_checkpoint_dir_names=[],
        failed_validation_checkpoint_dir_names=[],
    )
    folder.write_text(state.json(), SNAPSHOT)


def _recorded(folder: RunFolder) -> list[str] | None:
    """Names in Ray Train's record, in the order of reports; None if it cannot be read."""
    if not folder.exists(SNAPSHOT):
        return []
    try:
        record = json.loads(folder.read_text(SNAPSHOT))
        results = zip(record["checkpoint_report_indices"], record["checkpoint_results"], strict=True)
        return [result["checkpoint_dir_name"] for _, result in sorted(results, key=lambda pair: pair[0])]
    except (ValueError, KeyError, TypeError):
        return None


def checkpoint_score(metrics: Mapping[str, Any], metric: str) -> dict[str, float]:
    """What Ray Train ranks a checkpoint by; empty where the metric was not measured."""
    value = metrics.get(metric)
    return {} if value is None else {SCORE: float(value) - 1e-12 * int(metrics["step"])}


def save_reward_states(folder: Path, rank: int, states: dict[str, Any]) -> None:
    """Write the states of one worker's rewards into a checkpoint's folder; nothing where no reward has one."""
    if states:
        (folder / f"rewards_{rank}.json").write_text(json.dumps(states) + "\n", encoding="utf-8")


def load_reward_states(folder: Path, rank: int) -> dict[str, Any]:
    """The states of one worker's rewards; rank 0's for a worker that the run did not have before."""
    for name in (f"rewards_{rank}.json", "rewards_0.json"):
        if (folder / name).exists():
            return json.loads((folder / name).read_text(encoding="utf-8"))
    return {}


ROWS = "metrics.jsonl"
"""The metrics of all steps so far, in a checkpoint as in the run folder."""


def save_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the metrics so far into a checkpoint's folder."""
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def load_rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics so far of a checkpoint."""
    return [json.loads(line) for line in (folder / ROWS).read_text(encoding="utf-8").splitlines()]
