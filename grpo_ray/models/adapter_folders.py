"""Folders of adapters: reading an adapter of any run, finding its policy, and writing both as one policy."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel

from grpo_ray.config.peft_fields import REFUSED_FIELDS, check_peft_settings, peft_types
from grpo_ray.config.recorded import RECORDED_CONFIG
from grpo_ray.config.schema import Config
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.errors import CheckpointError, ConfigError
from grpo_ray.models.adapters import build_config, merge_adapter
from grpo_ray.models.plausible_policy import require_plausible_policy
from grpo_ray.models.quantized import read_quantization, round_policy
from grpo_ray.models.shards import NOT_POLICY, consolidate, has_shards
from grpo_ray.storage.filesystem import fetch_folder
from grpo_ray.storage.recorded_config import read_recorded
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.uris import redact_credentials, split_path

ADAPTER_CONFIG = "adapter_config.json"
"""Present in a folder with an adapter; a folder with a whole policy has `config.json` instead."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"

WRITTEN_BY_PEFT = frozenset({"base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "task_type"})
"""Fields of an adapter's config that no setting gives."""


def has_adapter(folder: str | Path) -> bool:
    """Return True if a local folder contains an adapter, False if it contains a whole policy."""
    return Path(folder, ADAPTER_CONFIG).exists()


def record_base_policy(folder: Path, config: Config) -> None:
    """Write `model.path` as the base policy into an adapter's folder, and delete the model card.

    PEFT records the worker's temporary copy of the policy, which is deleted after the run, and writes a model card.
    """
    settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = redact_credentials(config.model.path)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").unlink(missing_ok=True)


def read_adapter_config(folder: str | Path) -> PeftConfig:
    """Read the config of an adapter, which may come with a stranger's run folder.

    Only fields that `model.peft` takes are read. PEFT's other fields name modules to import and files to load.

    Raises:
        CheckpointError: the config is damaged, or sets other fields, so that the merged weights would be wrong.
    """
    path = Path(folder, ADAPTER_CONFIG)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kind = settings["peft_type"]
        if kind not in peft_types() or not isinstance(settings["base_model_name_or_path"], str):
            raise ValueError("it is no adapter of a named policy")
        fields = peft_types()[kind].keys() - REFUSED_FIELDS.keys()
        given = {name: value for name, value in settings.items() if name in fields}
        if kind == "IA3":
            given["feedforward_modules"] = _whole_names(given)
        config = build_config(check_peft_settings({"type": kind, **given}))
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {' '.join(repr(error).split())[:200]}") from None
    defaults = config.to_dict()
    for name in settings.keys() - fields - WRITTEN_BY_PEFT:
        if settings[name] and settings[name] != defaults.get(name):
            raise CheckpointError(f"{path} sets {name}={settings[name]!r}, which adapters of grpo_ray never have")
    return config


def _whole_names(settings: Mapping[str, Any]) -> list[str] | str | None:
    """Return IA3's `feedforward_modules` as PEFT accepts them: it saves whole names of the layers, but not of these."""
    targets, ends = settings.get("target_modules"), settings.get("feedforward_modules")
    if not isinstance(targets, list) or not isinstance(ends, list):
        return ends
    return [name for name in targets if any(name == end or name.endswith(f".{end}") for end in ends)]


def base_policy_path(adapter: str, run: RunFolder, scratch: str) -> str:
    """Return the local folder or hub id of the policy that an adapter belongs to; fetch it if necessary.

    Args:
        adapter: local folder of the adapter.
        run: folder of the adapter's run; it contains the policy if that is an embedded one.
        scratch: local folder for downloads.

    Raises:
        CheckpointError: the policy is an embedded one, and the run folder does not contain it; or its config or
            weights declare impossible sizes.
        DamagedFileError: the policy may have moved, and the config of the run cannot be read.
    """
    read_adapter_config(adapter)
    base = json.loads(Path(adapter, ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    if base in EMBEDDED_POLICIES:
        if not run.exists("policy"):
            raise CheckpointError(
                f"{run.uri} has no folder `policy`, the base policy of the run's adapters; restore it from a backup"
            )
        local = fetch_from_run(run, "policy", scratch)
    else:
        may_have_moved = "://" in base or (os.path.isabs(base) and not os.path.isdir(base))
        if may_have_moved and run.exists(RECORDED_CONFIG):
            # The run's latest launch recorded where the policy is, which may have changed since this adapter was saved.
            recorded = read_recorded(run)
            base = str(recorded.get("model", {}).get("path", base))
        local = fetch_folder(os.path.expanduser(base), into=scratch)
    require_plausible_policy(local)
    return local


def fetch_from_run(run: RunFolder, name: str, scratch: str) -> str:
    """Return a local path of a policy's folder in the run: the folder itself if it is local, else a copy in `scratch`.

    A copied checkpoint has no optimizer state.
    """
    local = run.fetch(name, without=NOT_POLICY)
    return local if run.local else str(shutil.move(local, Path(scratch, name)))


def merged_policy_path(path: str, config: Config, scratch: str) -> str:
    """Return a local folder or hub id with a whole policy.

    An adapter is merged into its base policy first, and a sharded checkpoint is consolidated.

    Args:
        path: local folder, URI or hub id of a policy or an adapter.
        scratch: local folder for downloads and the merged policy; it may be deleted once the policy is loaded.

    Raises:
        CheckpointError: its config or weights declare impossible sizes.
    """
    local = fetch_folder(path, into=scratch, without=NOT_POLICY)
    require_plausible_policy(local)
    if not has_adapter(local) and not has_shards(local):
        return local
    base_policy = None
    if has_adapter(local):
        base_policy = base_policy_path(local, RunFolder(*split_path(split_path(path)[0])), scratch)
    merged = Path(scratch, "merged")
    write_policy(local, base_policy, merged, config.dtype, config.model.trust_remote_code)
    return str(merged)


def write_policy(
    checkpoint: str, policy: str | None, target: Path, dtype: str | None, trust_remote_code: bool = False
) -> None:
    """Write a plain Hugging Face folder: config, safetensors, tokenizer.

    Args:
        checkpoint: local folder with a tokenizer and either a policy, whole or sharded, or an adapter.
        policy: local folder or hub id of the adapter's base policy; None if the checkpoint is a whole policy.
        dtype: precision of the weights; None keeps the policy's own.

    Raises:
        ConfigError: the policy cannot be read, or has no safetensors (pickled weights are never loaded).
        CheckpointError: the checkpoint has no adapter weights, or parts of a sharded tensor overlap or leave gaps.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = policy or checkpoint
    base = read_quantization(checkpoint) if policy is not None else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        if policy is None and has_shards(checkpoint):
            consolidate(checkpoint, target, dtype, trust_remote_code)
            tokenizer.save_pretrained(target)
            return
        # The base of an adapter is loaded in its own precision, so that the merged weights are rounded only once; a
        # quantized one in that from which it was quantized.
        precision = base.dtype if base else "auto" if policy is not None or dtype is None else dtype
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=precision, use_safetensors=True, trust_remote_code=trust_remote_code
        )
    except CheckpointError:
        raise
    except Exception as error:  # three libraries read untrusted files; tokenizers raises no narrower one
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{source}: the policy cannot be read: {reason}") from error
    if policy is not None:
        if not Path(checkpoint, ADAPTER_WEIGHTS).exists():
            raise CheckpointError(f"{checkpoint} has no {ADAPTER_WEIGHTS}, so its adapter cannot be merged")
        adapter = read_adapter_config(checkpoint)
        if base is not None:
            round_policy(model, base.method, adapter.modules_to_save or ())
        adapted = PeftModel.from_pretrained(model, checkpoint, config=adapter)
        model = merge_adapter(adapted, getattr(torch, dtype) if dtype else None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
