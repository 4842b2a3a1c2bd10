"""Adapters of PEFT in `model.peft`: the types and fields that are passed on, and those that are refused.

An adapter is merged into the engine's weights at every sync (`models/adapters.py`), so only types whose update is part
of a weight are taken.

| table | in `model.peft` |
|---|---|
| `REFUSED_TYPES` | a type that is refused, with the reason |
| `REFUSED_FIELDS` | a field that is refused in every type that has it |
| `REFUSED_VALUES` | a value that is refused |
| `STARTS_ELSEWHERE` | a type that begins as another policy than `model.path`, unless a field says otherwise |

Every other field of the type's config passes to PEFT as it is. Nothing here imports PEFT. Fields and types are in
peft_fields.json, which `python scripts/peft_field_table.py` generates; tests/integration/config/test_peft_fields.py
compares it with the installed release.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_ray.config.json_fields import JsonField
from grpo_ray.config.similar_names import suggestion
from grpo_ray.errors import ConfigError

DATA = Path(__file__).with_name("peft_fields.json")

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers except the output layer."""

OURS = {
    "peft_type": "model.peft.type",
    "task_type": "nothing: it is CAUSAL_LM",
    "inference_mode": "nothing: an adapter is trained",
    "base_model_name_or_path": "model.path",
    "revision": "model.path to the folder of a revision",
    "auto_mapping": "model.path",
    "peft_version": "nothing: it is that of the installed PEFT",
}
"""Field of PEFT that cannot be set -> what to set in its place."""

_PROMPTS = "adds tokens or keys to the prompt, and is no part of the weights that the engine holds"
_BY_INPUT = "has weights that depend on the input, so it cannot be merged into the engine's"

REFUSED_TYPES: dict[str, str] = {
    **dict.fromkeys(
        ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE"), _PROMPTS
    ),
    **dict.fromkeys(("XLORA", "POLY", "LILY", "ADAPTION_PROMPT", "SHADOW"), _BY_INPUT),
    "ADALORA": "needs its ranks reallocated in each step, which a run does not do: it would train as plain LoRA",
    "OSF": "projects gradients outside of the optimizer, and replaces each weight by a product that is rounded",
    "ADAMSS": "needs scikit-learn, and was never tried",
    "PVERA": "draws noise in each pass of the loss, so that the gradient would depend on the division into passes",
}
"""Type that is refused -> the rest of the sentence "model.peft.type=<type> ..."."""

_MODULES = "names a module to import"
_DATA = "needs a pass over data before training, which a run does not make"
_QUANTIZED = "changes the quantized weights under the adapter, which are those of model.path"
_UNTRIED = "was never tried with a merge into the engine"

REFUSED_FIELDS: dict[str, str] = {
    **dict.fromkeys(("megatron_config", "megatron_core"), _MODULES),
    **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config"), _DATA),
    **dict.fromkeys(("loftq_config", "use_qalora", "qalora_group_size"), _QUANTIZED),
    **dict.fromkeys(("velora_config", "monteclora_config", "use_bdlora", "kasa_config", "target_parameters"), _UNTRIED),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config"), _BY_INPUT),
    "layer_replication": "makes a policy with more layers than the engine loads",
    "runtime_config": "moves weights between devices while they are merged",
    "runtime_offload_base_weight": "moves weights between devices while they are merged",
    "ensure_weight_tying": "is about the output layer, which cannot have an adapter: TRL computes the loss from its "
    "weight alone",
    "progressbar": "is off: workers have no terminal",
}
"""Field that is refused -> the rest of the sentence "model.peft.<field> ..."."""

REFUSED_VALUES: dict[tuple[str, Any], str] = {
    **dict.fromkeys((("init_lora_weights", each) for each in ("eva", "corda", "lora_ga")), _DATA),
    ("init_lora_weights", "loftq"): _QUANTIZED,
    ("save_only_topk_weights", True): "writes checkpoints from which no run can continue",
}
"""Field and value that is refused -> the rest of the sentence "model.peft.<field>=<value> ..."."""

STARTS_ELSEWHERE: dict[str, tuple[str, Any]] = {
    "FOURIERFT": ("init_weights", True),
    "C3A": ("init_weights", True),
    "VBLORA": ("", None),
    "UNILORA": ("", None),
}
"""Type whose update is not zero at the start -> the field and the value with which it is; ("", None) if none is."""

INITIAL = ("init_lora_weights", "init_ia3_weights", "init_weights")
"""Fields whose value false gives an adapter random weights, with an update that is not zero."""

NOT_QUANTIZED = frozenset({"GLORA"})
"""Types that PEFT builds on plain linear layers only."""

MOVES_THE_BASE = ("pissa", "olora")
"""Values of `init_lora_weights` that subtract the first update from the frozen weights, up to rounding."""

LEAST = {"num_cayley_neumann_terms": 2, "psoft_alpha": 1, "vector_length": 1, "topk": 1}
"""Field -> its least value, below which an adapter trains nothing or is not a number."""

NO_LINEAR_LAYERS = frozenset({"LN_TUNING", "TRAINABLE_TOKENS", "BEFT"})
"""Types that do not adapt every linear layer, so that `target_modules` has no default."""


PLAIN_LORA = frozenset({"type", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora"})
"""Fields of LoRA with which each update is two matrices, and nothing else is trained."""

REQUESTED_LORA = PLAIN_LORA | {
    "init_lora_weights",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
}
"""The same with fields of its first weights, and of ranks, scales and places: what a LoRA request of vLLM can apply."""

REQUEST_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of the slot in which vLLM holds the adapter of a LoRA request, in all supported releases."""

NOT_SHARDED = frozenset(
    {"DELORA", "FROD", "GLORA", "PSOFT", "RANDLORA", "SUPERTUNING", "TINYLORA", "UNILORA", "VBLORA", "VERA"}
)
"""Types that a sharded learner (`cluster.shard_learner`) cannot train: they keep tensors beside their weights, which
accelerate does not send or divide, or share weights between layers."""


@functools.cache
def peft_types() -> Mapping[str, Mapping[str, JsonField]]:
    """Read peft_fields.json: type -> name of a field -> description."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))["types"]
    return MappingProxyType(
        {
            kind: MappingProxyType(
                {name: JsonField(**{key: tuple(value) for key, value in row.items()}) for name, row in fields.items()}
            )
            for kind, fields in rows.items()
        }
    )


def check_peft_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the section `model.peft`.

    Raises:
        ConfigError: the type or a field is unknown, refused, or has a wrong value; one line per field.
    """
    kind = settings.get("type")
    if not isinstance(kind, str) or kind not in peft_types():
        raise ConfigError(_type_mistake(kind))
    mistakes = [find_mistake(kind, name, value) for name, value in settings.items() if name != "type"]
    if any(mistakes):
        raise ConfigError("\n".join(filter(None, mistakes)))
    if kind in NO_LINEAR_LAYERS and not settings.get("target_modules"):
        raise ConfigError(
            f"model.peft.type={kind} does not adapt every linear layer; set model.peft.target_modules to the names of "
            "its layers"
        )
    return settings


def _type_mistake(kind: Any) -> str:
    if isinstance(kind, str) and kind in REFUSED_TYPES:
        return f"model.peft.type={kind} {REFUSED_TYPES[kind]}"
    known = sorted(peft_types())
    if kind is None:
        return f"model.peft.type is required: one of {', '.join(known)}"
    hint = suggestion(str(kind).upper(), known) or f"; it is one of {', '.join(known)}"
    return f"model.peft.type={kind!r} is no type of adapter{hint}"


def find_mistake(kind: str, name: str, value: Any) -> str | None:
    """Describe in one line why a field cannot have a value in `model.peft`; None if it can."""
    path = f"model.peft.{name}"
    if name in OURS:
        return f"{path} is derived; set {OURS[name]}"
    if name not in peft_types()[kind]:
        allowed = sorted(set(peft_types()[kind]) - set(REFUSED_FIELDS))
        return f"{path} is not a field of {kind} in PEFT{suggestion(name, allowed)}"
    if name in REFUSED_FIELDS:
        return f"{path} {REFUSED_FIELDS[name]}"
    if isinstance(value, str | bool) and (name, value) in REFUSED_VALUES:
        return f"{path}={value!r} {REFUSED_VALUES[name, value]}"
    if name == "init_lora_weights" and str(value).startswith("pissa_niter"):
        return f"{path}={value!r} begins with random numbers that no export has; set {path}=pissa"
    field = peft_types()[kind][name]
    if not field.fits(value):
        return f"{path}={value!r} must be {field.allowed}"
    return _range_mistake(path, name, value)


def _range_mistake(path: str, name: str, value: Any) -> str | None:
    """Describe why a value of the right type is out of range, where PEFT would take it."""
    if "dropout" in name and isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value < 1:
        return f"{path}={value!r} must be a number of at least 0 and below 1"
    if name in LEAST and isinstance(value, int | float) and value < LEAST[name]:
        return f"{path}={value!r} must be at least {LEAST[name]}"
    if name in ("token_indices", "trainable_token_indices") and value is not None and not value:
        return f"{path}={value!r} must name at least one token"
    if name == "modules_to_save" and isinstance(value, str):
        return f"{path}={value!r} must be a list"
    return None


def peft_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the type's config in PEFT, with the defaults that differ from PEFT's own."""
    fields = peft_types()[settings["type"]]
    arguments = {name: value for name, value in settings.items() if name != "type"}
    if arguments.get("target_modules") is None and "target_modules" in fields:
        # PEFT's own default is a table of model types, without most of today's.
        arguments["target_modules"] = ALL_LINEAR
    if "progressbar" in fields:
        arguments["progressbar"] = False
    return arguments


def is_requestable(name: str, value: Any) -> bool:
    """Return whether a LoRA request of vLLM can apply LoRA with this field of `model.peft`."""
    if name == "init_lora_weights":
        return str(value).lower() != "mica"  # a variant of PEFT, with a forward pass of its own
    return name in REQUESTED_LORA or not value or (name, value) == ("bias", "none")


def largest_rank(settings: Mapping[str, Any]) -> int:
    """Return the largest rank of a LoRA adapter's layers; PEFT's default if none is given."""
    ranks = (settings.get("rank_pattern") or {}).values()  # PEFT refuses values that are no numbers
    return max([int(settings.get("r") or 8), *(each for each in ranks if isinstance(each, int))])


def starts_elsewhere(settings: Mapping[str, Any]) -> bool:
    """Return whether the policy with its new adapter is another one than `model.path`, beyond rounding in float32."""
    kind = settings["type"]
    if kind in STARTS_ELSEWHERE:
        name, value = STARTS_ELSEWHERE[kind]
        return not name or settings.get(name) != value
    if any(not settings[name] for name in INITIAL if name in settings):
        return True
    if kind == "HRA":  # reflections undo each other in pairs
        return bool(settings.get("apply_GS")) or int(settings.get("r", 8)) % 2 == 1
    return kind == "DEFT" and bool(settings.get("para"))


def moves_the_base(settings: Mapping[str, Any]) -> bool:
    """Return whether the weights under the adapter are others than those of `model.path`, or are trained too."""
    return settings.get("init_lora_weights") in MOVES_THE_BASE or settings.get("bias", "none") != "none"
