"""Catalogue of a run's checkpoints: which ones exist, which one is best, and which one a run resumes from.

A checkpoint is a plain Hugging Face folder (`config.json`, safetensors, tokenizer), so `from_pretrained` and
`vllm serve` load it directly; that of a sharded learner has its weights in parts (`models/shards.py`). Beside the
weights it contains the optimizer, the scheduler, the trainer's state, the random states of every worker, the states of
rewards, the ledger, and the metrics of the latest steps.

A checkpoint is either complete or does not exist; its manifest, which is written last, makes it complete. See
`checkpoint_upload` (writing), `checkpoint_integrity` (verification) and `ray_snapshot` (Ray Train's own record).
"""

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_ray.config.sources import CHECKPOINT_PREFIX
from grpo_ray.errors import CheckpointError, DamagedFileError, RewardError
from grpo_ray.storage.numbers import to_finite
from grpo_ray.storage.run_folder import RECORD_BYTES, SMALL_FILE_BYTES, RunFolder
from grpo_ray.storage.uris import split_path

PREFIX = CHECKPOINT_PREFIX
STAGING_SUFFIX = ".part"
"""Suffix of a checkpoint's folder on a file system until it is complete."""
NAME_PATTERN = re.compile(
    rf"(?P<final>{PREFIX}\d{{6,}}(?:\.\d{{1,6}})?)(?P<staging>(?:\.[0-9a-f]{{32}})?{re.escape(STAGING_SUFFIX)})?"
)
"""Names of the folders of our checkpoints, complete or not. A folder with any other name belongs to the user."""
MANIFEST = "manifest.json"
"""Metrics of a checkpoint, and size and checksum of each file; present only in a complete checkpoint."""
DAMAGED = "damaged.json"
"""Replaces the manifest of a checkpoint that failed verification; lists the faults."""
FILE_LIST = re.compile(r"files-\d{1,6}\.json")
"""Files with which each worker lists its own files while a checkpoint is written (`checkpoint_upload.py`)."""
MEASURED = "measured.json"
"""Metrics that were measured after the checkpoint was written, and the conditions of the measurement."""
TEMPORARY = re.compile(r"(?:manifest|measured)\.json\.\d{1,10}\.tmp")
"""Temporary files with which `RunFolder.write_bytes` writes these two; a killed process may leave one."""
RETURNS = "returns.json"
"""File of the run folder: for each return to an older checkpoint, its serial number and the newest one then."""
SCORE = "checkpoint/score"
"""Metric that Ray Train ranks checkpoints by; see `checkpoint_score`."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint of a run folder, with its metrics."""

    folder: RunFolder
    name: str
    metrics: Mapping[str, Any]
    serial: int
    """Number in the order of writing. A run that went back to an older checkpoint writes a later step's checkpoint
    again, under a higher serial number."""
    files: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """File -> `bytes` and `sha256`."""
    measured_on: Mapping[str, Any] | None = None
    """Key of each held-out set -> conditions under which it was measured; None: not measured."""

    @property
    def path(self) -> str:
        """Path in the form that the run folder's filesystem takes."""
        return self.folder.path(self.name)

    @property
    def uri(self) -> str:
        """Path or URI without credentials."""
        return self.folder.uri_of(self.name)

    @property
    def step(self) -> int:
        return int(self.metrics["step"])

    @property
    def digest(self) -> str:
        """Hash of the names and contents of its files, 64 hex digits."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()


def list_checkpoints(folder: RunFolder) -> list[CheckpointInfo]:
    """Return all complete checkpoints of a run, in the order of writing."""
    checkpoints = [_read_info(folder, name) for name in _names_with_manifest(folder)]
    return sorted((each for each in checkpoints if each is not None), key=lambda each: each.serial)


def unreadable_manifests(folder: RunFolder) -> list[str]:
    """Return the names of checkpoints whose manifest is damaged; `list_checkpoints` leaves them out."""
    return [name for name in _names_with_manifest(folder) if _read_info(folder, name) is None]


def manifest_serial(folder: RunFolder, name: str) -> int | None:
    """Return the serial number in the manifest of a folder; None if it has no manifest, or a damaged one."""
    if not folder.exists(name, MANIFEST):
        return None
    info = _read_info(folder, name)
    return info.serial if info else None


def _names_with_manifest(folder: RunFolder) -> list[str]:
    names = [name for name in folder.list_folders(PREFIX) if not name.endswith(STAGING_SUFFIX)]
    return [name for name in names if folder.exists(name, MANIFEST)]


def has_damaged_checkpoints(folder: RunFolder) -> bool:
    """Return True if a run has checkpoints that were complete and are damaged, so that it has taken steps."""
    names = [name for name in folder.list_folders(PREFIX) if not name.endswith(STAGING_SUFFIX)]
    return any(folder.exists(name, DAMAGED) for name in names) or bool(unreadable_manifests(folder))


def no_intact_checkpoint(folder: RunFolder) -> CheckpointError:
    """Return the error of a run of whose checkpoints none is intact."""
    return CheckpointError(
        f"{folder.uri}: all checkpoints are damaged; set run.resume=never to start over, which keeps this folder"
    )


def _read_info(folder: RunFolder, name: str) -> CheckpointInfo | None:
    """Read a checkpoint's manifest and later measurements; None if the manifest is damaged."""
    try:
        manifest = folder.read_json(name, MANIFEST, limit=RECORD_BYTES)
        metrics, serial, files = dict(manifest["metrics"]), manifest["serial"], manifest["files"]
        is_plausible = isinstance(serial, int) and 0 <= metrics["step"] < 1e15
        is_plausible &= all(isinstance(file, Mapping) for file in files.values())
    except (DamagedFileError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not is_plausible:
        return None
    measured = _read_measurement(folder, name) or {"metrics": {}, "measured_on": manifest.get("measured_on")}
    return CheckpointInfo(folder, name, metrics | measured["metrics"], serial, files, measured["measured_on"])


def _read_measurement(folder: RunFolder, name: str) -> Mapping[str, Any] | None:
    """Read the measurements made after a checkpoint was written; None if there are none, or the file is damaged."""
    if not folder.exists(name, MEASURED):
        return None
    try:
        measured = folder.read_json(name, MEASURED, limit=RECORD_BYTES)
        numbers = [float(value) for value in measured["metrics"].values()]
        return measured if isinstance(measured["measured_on"], Mapping) and numbers else None
    except (DamagedFileError, ValueError, KeyError, TypeError, AttributeError):
        return None


def damaged_measurements(folder: RunFolder) -> list[str]:
    """Return the names of checkpoints whose later measurement is damaged; they count as not measured."""
    names = [name for name in _names_with_manifest(folder) if folder.exists(name, MEASURED)]
    return [name for name in names if _read_measurement(folder, name) is None]


def best_checkpoint(checkpoints: Sequence[CheckpointInfo], metric: str) -> CheckpointInfo | None:
    """Return the checkpoint with the highest value of a metric, the earliest of equals; None if no value is finite."""
    ranked = rank_checkpoints(checkpoints, metric)
    return ranked[0] if ranked and to_finite(ranked[0].metrics.get(metric)) is not None else None


def rank_checkpoints(checkpoints: Sequence[CheckpointInfo], metric: str) -> list[CheckpointInfo]:
    """Return the checkpoints by falling value of a metric, the earliest of equals first.

    Those without a finite value come last, the latest of them first. Ray Train ranks the same way.
    """

    def rank(checkpoint: CheckpointInfo) -> tuple[float, ...]:
        value = to_finite(checkpoint.metrics.get(metric))
        if value is None:
            return (True, -checkpoint.serial)
        return (False, -value, checkpoint.step, checkpoint.serial)

    return sorted(checkpoints, key=rank)


def checkpoint_score(metrics: Mapping[str, Any], metric: str) -> dict[str, float]:
    """Return the score that Ray Train ranks a checkpoint by, as a metric; empty if `metric` has no finite value.

    The score is the metric minus 1e-12 per step. Ray ranks by one number, and of checkpoints with equal metrics the
    earliest is the best, as in `best_checkpoint`.
    """
    value = to_finite(metrics.get(metric))
    return {} if value is None else {SCORE: value - 1e-12 * int(metrics["step"])}


def resume_candidates(folder: RunFolder, resume: str, metric: str, after: int | None = None) -> list[CheckpointInfo]:
    """Return the checkpoints that a run may resume from: the preferred one, then those to fall back on.

    Those older than the best one are preferred to newer ones. Checkpoints that `run.resume=best` has discarded
    (`record_return`) are left out.

    Args:
        folder: the run folder.
        resume: `run.resume`: "latest", or "best" by `metric`.
        metric: `run.best_metric`.
        after: highest serial number of earlier launches. Checkpoints of this launch come first, the latest one at
            the front, whatever `resume` is: this launch has already gone back to the best one. None: this launch has
            not begun, so there are none.
    """
    returns = read_returns(folder)
    latest_first = [
        each for each in list_checkpoints(folder)[::-1] if not any(to < each.serial <= newest for to, newest in returns)
    ]
    new = [each for each in latest_first if after is not None and each.serial > after]
    old = latest_first[len(new) :]
    if resume == "best" and (best := best_checkpoint(old, metric)) is not None:
        newer = [each for each in old if each.serial > best.serial]
        old = [best, *(each for each in old if each.serial < best.serial), *newer]
    return [*new, *old]


def record_return(folder: RunFolder, to: int, newest: int) -> None:
    """Record that the run goes on from an older checkpoint, before the rollouts of later steps are deleted.

    Without a record, a launch that follows before the next checkpoint would resume from the newest one, whose rollouts
    are gone; the curriculum of the next epochs is derived from them.

    Args:
        to: serial number of the checkpoint; 0 for the beginning.
        newest: highest serial number of the run so far.
    """
    returns = read_returns(folder)
    if to < newest and (to, newest) not in returns:
        folder.write_json([*returns, (to, newest)], RETURNS)


def read_returns(folder: RunFolder) -> list[tuple[int, int]]:
    """Read the records of `record_return`. Raises DamagedFileError if the file cannot be read."""
    if not folder.exists(RETURNS):
        return []
    try:
        return [(int(to), int(newest)) for to, newest in folder.read_json(RETURNS)]
    except (DamagedFileError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"{folder.uri_of(RETURNS)} is damaged: {error}; it lists the checkpoints that run.resume=best discarded; "
            "delete it to let the run resume from the newest checkpoint"
        ) from None


def list_checkpoints_at(path: str) -> list[CheckpointInfo]:
    """Return the complete checkpoints of the run at the path or URI of a run folder, or of one of its checkpoints."""
    parent, name = split_path(path)
    return list_checkpoints(RunFolder(*split_path(parent)) if name.startswith(PREFIX) else RunFolder(parent, name))


def resolve_checkpoint(path: str, metric: str) -> CheckpointInfo:
    """Return the checkpoint at `run.from_checkpoint`.

    Args:
        path: path or URI of a checkpoint, or of a run folder: then its best checkpoint, or the latest if none has
            the metric.
        metric: `run.best_metric`.

    Raises:
        CheckpointError: there is no complete checkpoint, or it has files that its manifest does not name.
        DamagedFileError: the run folder has links that lead out of it, or files that grpo_ray does not write.
    """
    checkpoint = _resolve_checkpoint(path, metric)
    require_listed_files(checkpoint)
    return checkpoint


def may_have_checkpoint(run: RunFolder, name: str | None = None) -> bool:
    """Return False if a local folder is not a run with complete checkpoints; nothing is read.

    Call it before `require_plain_files`, which would report the links of a folder even if the folder is not a run.

    Args:
        name: name of a checkpoint; None: any checkpoint.
    """
    pattern = f"{PREFIX}*" if name is None else glob.escape(name)
    return run.local is None or any(run.local.glob(f"{pattern}/{MANIFEST}"))


def _resolve_checkpoint(path: str, metric: str) -> CheckpointInfo:
    parent, name = split_path(path)
    if name.startswith(PREFIX):
        run = RunFolder(*split_path(parent))
        if may_have_checkpoint(run, name):
            run.require_plain_files()
            for checkpoint in list_checkpoints(run):
                if checkpoint.name == name:
                    return checkpoint
        raise CheckpointError(f"run.from_checkpoint={path}: is not a complete checkpoint")
    run = RunFolder(parent, name)
    checkpoints = []
    if may_have_checkpoint(run):
        run.require_plain_files()
        checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise CheckpointError(f"run.from_checkpoint={path}: has no complete checkpoint")
    return best_checkpoint(checkpoints, metric) or checkpoints[-1]


def require_listed_files(checkpoint: CheckpointInfo) -> None:
    """Check that a checkpoint, which may be untrusted, has no files that its manifest does not name.

    Libraries read every file with a certain name, such as a chat template. Hidden files are left alone.

    Raises:
        CheckpointError: it has one.
    """
    for name in sorted(checkpoint.folder.file_sizes(checkpoint.name).keys() - checkpoint.files.keys()):
        is_ours = name in (MANIFEST, MEASURED) or FILE_LIST.fullmatch(name) or TEMPORARY.fullmatch(name)
        if not is_ours and not any(part.startswith(".") for part in name.split("/")):
            raise CheckpointError(
                f"{checkpoint.folder.uri_of(checkpoint.name, *name.split('/'))} is not in the checkpoint's manifest; "
                "delete it, or move it out of the checkpoint"
            )


def checkpoint_name(folder: RunFolder, step: int) -> str:
    """Return an unused folder name for a step's checkpoint; a step that is taken again gets a suffix `.2`, `.3` ..."""
    name, number = f"{PREFIX}{step:06d}", 1
    while folder.exists(name):
        number += 1
        name = f"{PREFIX}{step:06d}.{number}"
    return name


def surplus_checkpoints(checkpoints: Sequence[CheckpointInfo], metric: str, keep: int) -> list[CheckpointInfo]:
    """Return all checkpoints but the latest one and the first `keep` of `rank_checkpoints`, in the order of writing."""
    kept = {each.name for each in (*checkpoints[-1:], *rank_checkpoints(checkpoints, metric)[:keep])}
    return [each for each in checkpoints if each.name not in kept]


def prune_checkpoints(folder: RunFolder, metric: str, keep: int) -> None:
    """Delete all complete checkpoints except the latest one and the first `keep` of `rank_checkpoints`.

    Ray Train prunes the same way during a run, but Ray's record may lack checkpoints of a run that was killed.
    """
    for checkpoint in surplus_checkpoints(list_checkpoints(folder), metric, keep):
        # The manifest first: if a crash then leaves other files, the folder does not count as a checkpoint.
        folder.delete_file(checkpoint.name, MANIFEST)
        folder.delete_folder(checkpoint.name)


def save_reward_states(folder: Path, rank: int, states: dict[str, Any]) -> None:
    """Write the states of one worker's rewards into a checkpoint's folder; no file if no reward has a state.

    Raises:
        RewardError: they are larger than `load_reward_states` reads.
    """
    if not states:
        return
    data = json.dumps(states).encode() + b"\n"
    if len(data) > SMALL_FILE_BYTES:
        sizes = {name: len(json.dumps(state)) for name, state in states.items()}
        largest = max(sizes, key=sizes.__getitem__)
        raise RewardError(
            f"the states of the rewards have {len(data)} bytes in JSON, and that of {largest} has {sizes[largest]}; "
            f"the limit is {SMALL_FILE_BYTES}; keep less in its state"
        )
    (folder / f"rewards_{rank}.json").write_bytes(data)


def load_reward_states(folder: Path, rank: int) -> dict[str, Any]:
    """Read the states of one worker's rewards; those of rank 0 for a rank that the run did not have before.

    Raises:
        DamagedFileError: the file is larger than `SMALL_FILE_BYTES`.
    """
    for name in (f"rewards_{rank}.json", "rewards_0.json"):
        if (path := folder / name).exists():
            if (size := path.stat().st_size) > SMALL_FILE_BYTES:
                raise DamagedFileError(f"{path} is damaged: it has {size} bytes; the limit is {SMALL_FILE_BYTES}")
            return json.loads(path.read_text(encoding="utf-8"))
    return {}
