"""Arguments of vLLM's engine in `engine.vllm`: derived from other keys, refused, or passed on.

| table | the argument in `engine.vllm` |
|---|---|
| `OURS` | follows from other keys of the config, which are named |
| `REFUSED` | is refused: it would have no effect, or break a guarantee of the run |
| `REFUSED_VALUES` | is refused with some of its values |

Every other argument passes to the engines of training and of evaluation (`inference/arguments.py`). Nothing here
imports vLLM. Names and types are in vllm_fields.json, which `python scripts/vllm_field_table.py` generates from the
sources of the oldest and the newest supported release; tests/integration/config/test_vllm_fields.py compares it with
the installed one.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_ray.config.json_fields import JsonField
from grpo_ray.config.similar_names import suggestion
from grpo_ray.errors import ConfigError

DATA = Path(__file__).with_name("vllm_fields.json")

ONLINE_QUANTIZATION = ("fp8", "fp8_per_tensor", "fp8_per_block", "int8_per_channel_weight_only")
"""Values of `quantization` with which vLLM quantizes 16-bit weights itself, at the start and at every sync."""

OURS: dict[str, str] = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "run.seed",
    "max_model_len": "engine.max_model_len",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "model_impl": "grpo.vllm_model_impl",
    "tensor_parallel_size": "grpo.vllm_tensor_parallel_size",
    "enable_sleep_mode": "grpo.vllm_enable_sleep_mode",
    "max_num_seqs": "grpo.steps_per_generation, grpo.prompts_per_step, grpo.num_generations and cluster.num_workers",
}
"""Argument that cannot be set -> the keys that it follows from."""

_PLACEMENT = "is determined by Ray Train's process group; set cluster.num_workers or grpo.vllm_tensor_parallel_size"
_ADAPTER = "follows from the adapter that is trained; set model.lora or model.peft, and engine.adapter"
_OTHER_MODEL = "would not reach the learner, which must have the same policy; set model.path to another folder"
_TEXT_ONLY = "has no effect: the engine generates text from token ids"
_SERVER = "has no effect: there is no server, each worker has an engine in its own process"
_SAMPLING = "has no effect: sampling options are those of the section grpo, for every request"

REFUSED: dict[str, str] = {
    "logprobs_mode": "is fixed: the proof of the weight sync compares log-probabilities after the temperature",
    "moe_backend": "is fixed to triton, whose weights keep the layout of the checkpoint: other backends reorder them "
    "while they load a model, and a weight sync would not",
    "logits_processors": "would sample from other probabilities than the learner computes; set sampling options in the "
    "section grpo",
    "quantization_config": "is not supported; set engine.vllm.quantization",
    "allow_deprecated_quantization": "is not supported; set engine.vllm.quantization",
    "distributed_executor_backend": "is fixed: the engine runs in the worker's own process",
    "hf_token": "belongs in the environment of the nodes; set HF_TOKEN there",
    **dict.fromkeys(("revision", "code_revision", "hf_config_path", "config_format", "hf_overrides"), _OTHER_MODEL),
    **dict.fromkeys(
        ("tokenizer_revision", "tokenizer_mode", "skip_tokenizer_init", "model_class_overrides"), _OTHER_MODEL
    ),
    **dict.fromkeys(("generation_config", "override_generation_config"), _SAMPLING),
    **dict.fromkeys(("runner", "convert", "pooler_config", "enable_prompt_embeds"), _TEXT_ONLY),
    **dict.fromkeys(
        ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
         "data_parallel_size", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
         "data_parallel_address", "data_parallel_rpc_port", "data_parallel_hybrid_lb", "data_parallel_external_lb",
         "data_parallel_multi_port_external_lb", "data_parallel_backend", "enable_elastic_ep", "master_addr",
         "master_port", "nnodes", "node_rank", "device_ids", "ray_workers_use_nsight"),
        _PLACEMENT,
    ),
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "default_mm_loras", "fully_sharded_loras", "max_cpu_loras",
         "lora_dtype", "lora_target_modules", "enable_tower_connector_lora", "specialize_active_lora",
         "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "max_lora_cls_labels"),
        _ADAPTER,
    ),
    **dict.fromkeys(
        ("served_model_name", "tokens_only", "shutdown_timeout", "io_processor_plugin", "reasoning_parser",
         "reasoning_parser_plugin"),
        _SERVER,
    ),
}  # fmt: skip
"""Argument that is refused -> the rest of the sentence "engine.vllm.<argument> ...": reason, and alternative."""

REFUSED_VALUES: dict[tuple[str, Any], str] = {
    ("load_format", "dummy"): "starts an engine with random weights, which evaluation would measure; remove it",
}
"""Argument and value that is refused -> the rest of the sentence "engine.vllm.<argument>=<value> ..."."""


@dataclass(frozen=True)
class VllmField(JsonField):
    """Argument of vLLM's engine."""

    only: tuple[str, ...] = ()
    """Releases that have it; empty if all releases of the table do."""


@functools.cache
def vllm_fields() -> Mapping[str, VllmField]:
    """Read vllm_fields.json: name -> description."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))["fields"]
    return MappingProxyType(
        {name: VllmField(**{key: tuple(value) for key, value in row.items()}) for name, row in rows.items()}
    )


def check_vllm_fields(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the arguments of `engine.vllm`, each on its own.

    Raises:
        ConfigError: an argument is unknown, derived, refused, or has a wrong value; one line per argument.
    """
    mistakes = [find_mistake(name, value) for name, value in settings.items()]
    if any(mistakes):
        raise ConfigError("\n".join(filter(None, mistakes)))
    return settings


def find_mistake(name: str, value: Any) -> str | None:
    """Describe in one line why an argument cannot have a value in `engine.vllm`; None if it can.

    The value of a refused argument is not repeated: it may be a token.
    """
    if name in OURS:
        return f"engine.vllm.{name} is derived; set {OURS[name]}"
    if name in REFUSED:
        return f"engine.vllm.{name} {REFUSED[name]}"
    if name not in vllm_fields():
        allowed = sorted(set(vllm_fields()) - set(OURS) - set(REFUSED))
        return f"engine.vllm.{name} is not an argument of vLLM's engine{suggestion(name, allowed)}"
    field = vllm_fields()[name]
    if not field.fits(value):
        return f"engine.vllm.{name}={value!r} must be {field.allowed}"
    if isinstance(value, str) and (name, value) in REFUSED_VALUES:
        return f"engine.vllm.{name}={value} {REFUSED_VALUES[name, value]}"
    if name == "quantization" and value not in (None, *ONLINE_QUANTIZATION):
        return (
            f"engine.vllm.quantization={value} cannot take the learner's weights at a sync; set one of "
            f"{', '.join(ONLINE_QUANTIZATION)}, or null"
        )
    return None
