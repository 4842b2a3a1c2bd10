"""Export of a checkpoint's policy as a plain Hugging Face folder: config, safetensors, tokenizer, and a model card.

A LoRA adapter is merged. The other files of a checkpoint (optimizer, random states, ledger, metrics, the trainer's own)
are left out, and nothing is unpickled.
"""

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_ray.config.heldout_keys import heldout_keys, ranking_metric
from grpo_ray.config.recorded import RECORDED_CONFIG
from grpo_ray.config.schema import RunConfig
from grpo_ray.errors import CheckpointError, ConfigError, DamagedFileError, GrpoRayError
from grpo_ray.export import model_card
from grpo_ray.export.card_facts import gather_facts
from grpo_ray.models.adapter_folders import base_policy_path, fetch_from_run, has_adapter, write_policy
from grpo_ray.models.plausible_policy import require_plausible_policy
from grpo_ray.storage.checkpoint_integrity import find_faults
from grpo_ray.storage.checkpoints import (
    MANIFEST,
    PREFIX,
    CheckpointInfo,
    best_checkpoint,
    list_checkpoints,
    may_have_checkpoint,
    require_listed_files,
)
from grpo_ray.storage.recorded_config import read_recorded
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.uris import redact_credentials, split_path

ORIGIN = "export.json"
"""File of an exported folder that identifies its checkpoint."""


def export(
    path: str,
    target: Path,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    reuse: bool = False,
    on_progress: Callable[[str], None] = lambda phase: None,
) -> str:
    """Write the policy of a checkpoint, and its model card, into a new folder.

    The checkpoint's files are first compared with the checksums of its manifest. The new folder is written elsewhere
    and moved into place once it is complete.

    Args:
        path: path or URI of a checkpoint, or of a run folder, whose best checkpoint is exported.
        dtype: precision of the weights: "float32", "bfloat16" or "float16". None keeps the checkpoint's precision, or
            for an adapter that of its base policy.
        reuse: accept an existing folder with an export of the same checkpoint and precision, and leave it as it is.
        on_progress: called with a description of each phase.

    Returns:
        URI of the exported checkpoint.

    Raises:
        CheckpointError: there is no complete checkpoint, it is damaged, it has files that its manifest does not list,
            or its run deletes it meanwhile.
        ConfigError: the target exists, or the base policy of an adapter does not exist.
        DamagedFileError: the run folder has links that lead out of it, or files that grpo_ray does not write.
    """
    if target.exists() and not reuse:
        raise ConfigError(f"{target} exists; name a new folder")
    checkpoint = find_checkpoint(path)
    origin = describe_origin(checkpoint, dtype)
    if has_export(target, checkpoint, dtype):
        on_progress(f"{target} has the export of {checkpoint.uri} already; it is left as it is")
        return checkpoint.uri
    on_progress(f"reading {checkpoint.uri}")
    with _while_kept(checkpoint):
        if faults := find_faults(checkpoint):
            raise CheckpointError(f"{checkpoint.uri} is damaged: {'; '.join(faults)}")
        require_listed_files(checkpoint)
        card = model_card.render_card(gather_facts(checkpoint))
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="grpo_ray-export-") as scratch,
        tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as staging,
    ):
        folder = Path(staging, target.name)
        with _while_kept(checkpoint, checkpoint.files):
            local = fetch_from_run(checkpoint.folder, checkpoint.name, scratch)
            require_plausible_policy(local)
            base_policy = base_policy_path(local, checkpoint.folder, scratch) if has_adapter(local) else None
            on_progress(f"writing {target}")
            write_policy(local, base_policy, folder, dtype, trust_remote_code)
        (folder / model_card.FILE).write_text(card, encoding="utf-8")
        (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        _move_to_new(folder, target)
    return checkpoint.uri


@contextmanager
def _while_kept(checkpoint: CheckpointInfo, files: Iterable[str] = ()) -> Iterator[None]:
    """Read a checkpoint in the block, and check after it that its run, which may go on, has not deleted it meanwhile.

    Libraries read some files only if they exist, so a deletion during the block may fail nothing in it.

    Args:
        files: files of the checkpoint that existed before the block.

    Raises:
        CheckpointError: the manifest or one of the files is missing after the block, even if the block has failed.
    """

    def require_kept() -> None:
        if {MANIFEST, *files} - checkpoint.folder.file_sizes(checkpoint.name).keys():
            raise CheckpointError(
                f"{checkpoint.uri} was deleted while it was exported: its run goes on, and keeps run.keep_checkpoints "
                "of its checkpoints; run the same command again, or name another checkpoint"
            )

    try:
        yield
    except (FileNotFoundError, GrpoRayError):
        require_kept()
        raise
    require_kept()


def _move_to_new(folder: Path, target: Path) -> None:
    """Move a folder to a path at which there is nothing, or an empty folder. Raises ConfigError for any other path."""
    try:
        os.rename(folder, target)
    except OSError as error:  # another export may have written it meanwhile
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise ConfigError(f"{target} exists; name a new folder") from None
        raise


def has_export(target: Path, checkpoint: CheckpointInfo, dtype: str | None) -> bool:
    """Return True if a folder has the export of a checkpoint in a precision already, False if it does not exist.

    Raises:
        ConfigError: the folder exists, and is no such export.
    """
    if not target.exists():
        return False
    if read_origin(target) != describe_origin(checkpoint, dtype):
        raise ConfigError(f"{target} exists, and is no export of {checkpoint.uri}; name a new folder")
    return True


def describe_origin(checkpoint: CheckpointInfo, dtype: str | None) -> dict[str, Any]:
    """Return the identity of an export: the checkpoint by name and content, and the precision."""
    return {
        "run": checkpoint.folder.name,
        "checkpoint": checkpoint.name,
        "step": checkpoint.step,
        "checkpoint_sha256": checkpoint.digest,
        "dtype": dtype,
    }


def read_origin(folder: Path) -> Any:
    """Read the origin of an exported folder (`describe_origin`); None if the folder is no export."""
    try:
        return json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def find_checkpoint(path: str) -> CheckpointInfo:
    """Find the checkpoint at a path or URI, or the best one of a run folder by the run's own `run.best_metric`.

    Raises:
        CheckpointError: there is no complete checkpoint.
        DamagedFileError: the run's config cannot be read, or the run folder has links that lead out of it or files that
            grpo_ray does not write.
    """
    if "://" not in path:
        path = os.path.abspath(os.path.expanduser(path))
    parent, name = split_path(path)
    found = None
    if name.startswith(PREFIX):
        run = RunFolder(*split_path(parent))
        if may_have_checkpoint(run, name):
            run.require_plain_files()
            found = next((checkpoint for checkpoint in list_checkpoints(run) if checkpoint.name == name), None)
    elif may_have_checkpoint(run := RunFolder(parent, name)):
        run.require_plain_files()
        stored = list_checkpoints(run)
        found = best_checkpoint(stored, _best_metric(run)) or (stored[-1] if stored else None)
    if found is None:
        raise CheckpointError(f"{redact_credentials(path)} is neither a complete checkpoint nor a run folder with one")
    return found


def _best_metric(run: RunFolder) -> str:
    """Return the metric that a run ranks its checkpoints by."""
    if not run.exists(RECORDED_CONFIG):
        return RunConfig().best_metric
    try:
        recorded = read_recorded(run)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; name one of the run's checkpoints instead of the run") from None
    best_metric = str(recorded.get("run", {}).get("best_metric", RunConfig().best_metric))
    data = recorded.get("data", {})
    return ranking_metric(best_metric, heldout_keys(data.get("heldout"), data.get("train")))
