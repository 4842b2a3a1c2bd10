"""LoRA: the adapter that is trained in place of the whole policy, and how the two become one again.

Merging adds up in float32 and rounds once, for the engine and for folders alike, and never touches the weights that
training goes on with.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor

from grpo_ray.config.schema import Config, ModelConfig
from grpo_ray.errors import CheckpointError, ConfigError
from grpo_ray.storage.run_folder import RunFolder, fetch_folder, redact_credentials, split_path

DESCRIPTION = "adapter_config.json"
"""Lies in a folder that holds an adapter; one with a whole policy has `config.json` instead."""
WEIGHTS = "adapter_model.safetensors"


def has_adapter(folder: str | Path) -> bool:
    """Whether a local folder holds an adapter and not a whole policy."""
    return Path(folder, DESCRIPTION).exists()


def peft_settings(config: Config) -> LoraConfig | None:
    """What `model.lora` says, for PEFT; None without it. The adapter's first weights follow from `run.seed`.

    To be called right before the policy is loaded: it sets torch's seed, so that all workers draw the same (law 1).
    """
    lora = config.model.lora
    if lora is None:
        return None
    torch.manual_seed(config.run.seed)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules),
    )


def merged_weights(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight of each parameter of a policy, as they would be with its adapter merged; nothing is changed.

    Names are those of the policy without an adapter. Gathers shards, so every worker must iterate.
    """
    policy = model.get_base_model()
    layers = {f"{name}.base_layer.weight": layer for name, layer in policy.named_modules() if _is_adapted(layer)}
    for name, parameter in policy.named_parameters():
        if model.prefix not in name:  # the adapter's own are in the sums
            weight = _sum(layers[name]) if name in layers else _whole(parameter)
            yield name.replace(".base_layer", ""), weight.detach()


def merge(model: PeftModel, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The policy with its adapter merged into its weights; the adapter is gone then.

    dtype: precision of the merged policy; None keeps the policy's own.
    """
    for layer in filter(_is_adapted, model.modules()):
        weight = layer.get_base_layer().weight
        weight.data = _sum(layer).detach().to(dtype or weight.dtype)
    policy = model.unload()
    return policy if dtype is None else policy.to(dtype)


def _is_adapted(module: torch.nn.Module) -> bool:
    return isinstance(module, LoraLayer)


def _sum(layer: Any) -> torch.Tensor:
    """An adapted layer's weight with its update, in float32."""
    weight = _whole(layer.get_base_layer().weight).float()
    for adapter in layer.active_adapters:
        weight = weight + _whole(layer.get_delta_weight(adapter))
    return weight


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """All of a weight, of which each worker may hold a shard."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def record_base_policy(folder: Path, config: Config) -> None:
    """Let an adapter's folder name the policy that it belongs to as the config does, and nothing else.

    PEFT names the worker's own copy, which is gone after the run, and writes a model card.
    """
    settings = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = redact_credentials(config.model.path)
    (folder / DESCRIPTION).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").unlink(missing_ok=True)


def base_policy_of(adapter: str, run: RunFolder, scratch: str) -> str:
    """Local folder or hub id of the policy that an adapter belongs to.

    adapter: local folder of the adapter.
    run: folder of its run, in which the embedded policy lies.
    scratch: local folder for what must be fetched.
    """
    named = json.loads(Path(adapter, DESCRIPTION).read_text(encoding="utf-8"))["base_model_name_or_path"]
    if named != ModelConfig().path:
        return fetch_folder(os.path.expanduser(named), into=scratch)
    if not run.exists("policy"):
        raise CheckpointError(f"{run.uri} has no folder `policy`, to which its adapters belong")
    return fetch_below(run, "policy", scratch)


def fetch_below(run: RunFolder, name: str, scratch: str) -> str:
    """A local copy of a folder of the run in `scratch`; the folder itself where it is local."""
    local = run.fetch(name)
    return local if run.local else str(shutil.move(local, Path(scratch, name)))


def merged_policy_path(path: str, config: Config, scratch: str) -> str:
    """A local folder, or a hub id, with a whole policy: what a path, URI or hub id names, an adapter merged.

    scratch: local folder for what must be fetched or merged; it can go once the policy is loaded.
    """
    local = fetch_folder(path, into=scratch)
    if not has_adapter(local):
        return local
    run = RunFolder(*split_path(split_path(path)[0]))
    merged = Path(scratch, "merged")
    write_policy(local, base_policy_of(local, run, scratch), merged, config.dtype, config.model.trust_remote_code)
    return str(merged)


def write_policy(
    checkpoint: str, policy: str | None, target: Path, dtype: str | None, trust_remote_code: bool = False
) -> None:
    """Write a plain Hugging Face folder: config, safetensors, tokenizer.

    checkpoint: local folder with a whole policy or an adapter, and a tokenizer.
    policy: what the adapter belongs to, local folder or hub id; None for a whole policy.
    dtype: precision of the weights; None keeps the policy's own.
    Raises ConfigError if the policy cannot be read, or has no safetensors: nothing is ever unpickled.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = policy or checkpoint
    try:
        # What an adapter is added to is read as it is, so that the sums are rounded once.
        precision = "auto" if policy is not None or dtype is None else dtype
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=precision, use_safetensors=True, trust_remote_code=trust_remote_code
        )
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: cannot be read: {str(error).splitlines()[0]}") from None
    if policy is not None:
        if not Path(checkpoint, WEIGHTS).exists():
            raise CheckpointError(f"{checkpoint} has no {WEIGHTS}")
        adapted = PeftModel.from_pretrained(model, checkpoint)
        model = merge(adapted, getattr(torch, dtype) if dtype else None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
