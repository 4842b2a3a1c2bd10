"""Copy of a run as it was right after one of its checkpoints, in a run folder of its own.

A run resumes from its folder alone. So a folder with the checkpoint, and with the records of the steps up to it,
continues as the run itself would: weights, optimizer, schedule, ledger, random states, rewards' states and completions
of later steps are those of the checkpoint. The original is only read.
"""

import fnmatch
import re
import tempfile
from pathlib import Path

from grpo_ray.config.recorded import RECORDED_CONFIG
from grpo_ray.driver.launch import BEGUN_WITH, UNVERIFIABLE_FILE, UPLOADED
from grpo_ray.driver.preflight.overlong import OVERLONG_FILE
from grpo_ray.driver.preflight.same_run import FINGERPRINT_FILE, POLICY_CONTENTS
from grpo_ray.errors import CheckpointError, DamagedFileError
from grpo_ray.models.plausible_policy import require_plausible_policy
from grpo_ray.rewards import verdicts
from grpo_ray.storage.checkpoint_integrity import find_faults
from grpo_ray.storage.checkpoints import MANIFEST, CheckpointInfo, require_listed_files, resume_candidates
from grpo_ray.storage.jsonl import MetricsFile, read_metrics
from grpo_ray.storage.recorded_config import read_recorded
from grpo_ray.storage.records.heldout_files import drop_heldout_after
from grpo_ray.storage.records.rollout_files import FOLDER as ROLLOUTS
from grpo_ray.storage.records.rollout_files import drop_rollouts_after
from grpo_ray.storage.run_folder import RunFolder

COPIED = (
    *(RECORDED_CONFIG, FINGERPRINT_FILE, POLICY_CONTENTS, BEGUN_WITH, UNVERIFIABLE_FILE, OVERLONG_FILE),
    "heldout*_before.json",
    f"{UPLOADED[0]}/*",
    f"{verdicts.FOLDER}/*",
)
"""Files of the run that are copied whole, as patterns. Those of the run's launches are not: events, lease, fencing
token, Ray Train's record, logs, traces, trackers, summary."""
AT_THE_START = (
    *(RECORDED_CONFIG, FINGERPRINT_FILE, POLICY_CONTENTS, UNVERIFIABLE_FILE, OVERLONG_FILE),
    *("heldout*_before.json", f"{verdicts.FOLDER}/*"),
)
"""The same for a branch at step 0, which has no checkpoint and begins with `model.path`."""
_OF_STEPS = (
    re.compile(rf"{ROLLOUTS}/steps-(\d{{8,}})-\d{{8,}}\.parquet"),
    re.compile(r"heldout/(?:[^/]+/)?step-(\d{8,15})\.parquet"),
)
"""Files with records of steps; the group is the first one."""


def find_start(source: RunFolder, step: int) -> CheckpointInfo | None:
    """Return the run's checkpoint of a step; None for step 0, at which it had none.

    Raises:
        CheckpointError: the run does not have it any more, or it is damaged.
    """
    if step == 0:
        return None
    kept = resume_candidates(source, "latest", "")  # without those that `run.resume=best` has discarded
    found = next((each for each in kept if each.step == step), None)
    if found is None:
        steps = ", ".join(map(str, sorted({each.step for each in kept}))) or "none"
        raise CheckpointError(
            f"{source.uri} has no checkpoint of step {step}; steps with a checkpoint: {steps} (and 0, the start); "
            "run.keep_checkpoints decides how many are kept"
        )
    return found


def require_sound(checkpoint: CheckpointInfo) -> None:
    """Check a checkpoint, which may be untrusted, before it is copied and loaded.

    Raises:
        CheckpointError: it is damaged, has files that its manifest does not name, or the run deletes it meanwhile.
    """
    try:
        faults = find_faults(checkpoint)
    except FileNotFoundError as error:
        faults = [str(error)]
    if not checkpoint.folder.exists(checkpoint.name, MANIFEST):  # deleted first, before the other files
        raise _deleted_meanwhile(checkpoint.uri)
    if faults:
        raise CheckpointError(f"{checkpoint.uri} is damaged: {'; '.join(faults)}")
    require_listed_files(checkpoint)
    if checkpoint.folder.local is not None:
        require_plausible_policy(checkpoint.folder.local / checkpoint.name)


def write_branch(source: RunFolder, checkpoint: CheckpointInfo | None, target: RunFolder) -> None:
    """Copy a run, as of a checkpoint, into a new run folder.

    Args:
        checkpoint: one of the run's; None: a branch at step 0.
        target: folder without files of a run.

    Raises:
        CheckpointError: the run deletes the checkpoint meanwhile.
    """
    step = 0 if checkpoint is None else checkpoint.step
    patterns = AT_THE_START if checkpoint is None else (*COPIED, f"{checkpoint.name}/*")
    names = [name for name in source.file_sizes() if _is_of_branch(name, patterns, step)]
    if checkpoint is not None and f"{checkpoint.name}/{MANIFEST}" not in names:
        raise _deleted_meanwhile(checkpoint.uri)  # a branch without it would begin at step 0
    if RECORDED_CONFIG in names and not _is_readable(source):
        names.remove(RECORDED_CONFIG)  # the settings are given by hand
    # The manifest last: without it the folder has no checkpoint.
    for name in sorted(names, key=lambda name: (name.endswith(f"/{MANIFEST}"), name)):
        try:
            _copy(source, target, name)
        except FileNotFoundError:
            raise _deleted_meanwhile(source.uri_of(*name.split("/"))) from None
    drop_rollouts_after(target, step)
    drop_heldout_after(target, step)
    metrics = MetricsFile(target)
    for row in read_metrics(source):
        if row["step"] <= step:
            metrics.add(row)
    metrics.flush()


def _deleted_meanwhile(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} was deleted while it was copied: the run goes on, and keeps run.keep_checkpoints of its checkpoints; "
        "begin with another step"
    )


def _is_of_branch(name: str, patterns: tuple[str, ...], step: int) -> bool:
    """Return True if a file, given by its path below the run folder, belongs to the branch."""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        return True
    return any((match := pattern.fullmatch(name)) and int(match[1]) <= step for pattern in _OF_STEPS)


def _is_readable(source: RunFolder) -> bool:
    """Return False if the recorded config is damaged."""
    try:
        read_recorded(source)
    except DamagedFileError:
        return False
    return True


def _copy(source: RunFolder, target: RunFolder, name: str) -> None:
    """Copy one file, of any size, from one run folder to another, on any storage."""
    parts = name.split("/")
    if source.local is not None:
        target.upload_file(source.local.joinpath(*parts), *parts)
        return
    with tempfile.TemporaryDirectory(prefix="grpo_ray-") as scratch:
        local = Path(scratch, "file")
        source.download_file(local, *parts)
        target.upload_file(local, *parts)
