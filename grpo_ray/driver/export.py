"""From a checkpoint to a plain Hugging Face folder: config, safetensors and tokenizer, a LoRA adapter merged.

What else a checkpoint holds (optimizer, random states, ledger, metrics, the trainer's own files) stays behind, and
nothing is unpickled on the way.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

from grpo_ray.config.schema import RunConfig
from grpo_ray.errors import CheckpointError, ConfigError
from grpo_ray.models.lora import base_policy_of, fetch_below, has_adapter, write_policy
from grpo_ray.storage.checkpoints import PREFIX, CheckpointInfo, best_checkpoint, find_faults, stored_checkpoints
from grpo_ray.storage.run_folder import RunFolder, redact_credentials, split_path


def export(
    path: str,
    target: Path,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda phase: None,
) -> str:
    """Write the policy of a checkpoint into a new folder; gives the checkpoint's own place.

    path: a checkpoint, or a run folder, whose best one is taken; local, or a URI.
    dtype: precision of the weights, "float32", "bfloat16" or "float16"; None keeps the checkpoint's (of an adapter:
        that of the policy that it belongs to).

    The files are held against the checksums of the manifest first, and the folder gets its name when all is in it.
    Raises CheckpointError if there is no whole checkpoint, ConfigError if the target is there already or the policy
    of an adapter is not.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; name a new folder")
    stored = find(path)
    say(f"reading {stored.uri}")
    if wrong := find_faults(stored):
        raise CheckpointError(f"{stored.uri} is not whole: {'; '.join(wrong)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="grpo_ray-export-") as scratch,
        tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as aside,
    ):
        local = fetch_below(stored.folder, stored.name, scratch)
        policy = base_policy_of(local, stored.folder, scratch) if has_adapter(local) else None
        say(f"writing {target}")
        write_policy(local, policy, Path(aside, target.name), dtype, trust_remote_code)
        os.rename(Path(aside, target.name), target)
    return stored.uri


def find(path: str) -> CheckpointInfo:
    """The checkpoint that a path or URI names: itself, or the best of a run folder, by the run's own measure.

    Raises CheckpointError if there is none.
    """
    if "://" not in path:
        path = os.path.abspath(os.path.expanduser(path))
    parent, name = split_path(path)
    if not name.startswith(PREFIX):
        run = RunFolder(parent, name)
        checkpoints = stored_checkpoints(run)
        found = best_checkpoint(checkpoints, _best_metric(run)) or (checkpoints[-1] if checkpoints else None)
    else:
        found = {stored.name: stored for stored in stored_checkpoints(RunFolder(*split_path(parent)))}.get(name)
    if found is None:
        raise CheckpointError(f"{redact_credentials(path)} is no whole checkpoint, and no run folder that has one")
    return found


def _best_metric(run: RunFolder) -> str:
    """What a run ranks its checkpoints by."""
    described = yaml.safe_load(run.read_text("config.yaml")) if run.exists("config.yaml") else {}
    return described.get("run", {}).get("best_metric", RunConfig().best_metric)
