"""Adapters of every type in `model.peft`, with small settings for the embedded policies."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

Settings = Mapping[str, Any]

SMALL: dict[str, dict[str, Any]] = {
    "BEFT": {"target_modules": ["q_proj", "k_proj", "v_proj"]},
    "BOFT": {},
    "C3A": {"block_size": 32},
    "DEFT": {},
    "DELORA": {},
    "FOURIERFT": {"n_frequency": 100, "init_weights": True, "scaling": 10.0},
    "FROD": {},
    "GLORA": {},
    "GRALORA": {"r": 8, "alpha": 16},
    "HIRA": {"r": 8},
    "HRA": {},
    "IA3": {},
    "LN_TUNING": {"target_modules": ["input_layernorm", "post_attention_layernorm", "norm"]},
    "LOHA": {},
    "LOKR": {},
    "LORA": {"lora_alpha": 16},
    "MISS": {"r": 8},
    "OFT": {},
    "PEANUT": {"r": 8},
    "PSOFT": {"r": 8, "psoft_alpha": 8},
    "RANDLORA": {"r": 8, "randlora_alpha": 160},
    "ROAD": {"group_size": 32},
    "SHIRA": {"r": 8},
    "SUPERTUNING": {"sparsity": 0.9},
    "TINYLORA": {},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5, 6, 7, 8], "target_modules": ["embed_tokens"]},
    "UNILORA": {},
    "VBLORA": {"vector_length": 32, "num_vectors": 16},
    "VERA": {"r": 32},
    "WAVEFT": {"n_frequency": 100},
}
"""Type -> fields with which it fits the embedded policies, whose layers have 64 and 128 inputs."""

NARROW: dict[str, dict[str, Any]] = {
    "C3A": {"block_size": 16},
    "ROAD": {"group_size": 16},
    "SUPERTUNING": {"sparsity": 0.5},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5]},
    "VBLORA": {"vector_length": 16},
}
"""Type -> fields that differ for `stock_trl.exact_llama`, whose layers have 16 to 64 inputs."""

NEED_BIASES = ("BEFT", "biases", "bias of the adapter")
"""Types and variants for layers that have a bias."""

VARIANTS: dict[str, dict[str, Any]] = {
    "DoRA": {"type": "LORA", "use_dora": True},
    "rsLoRA": {"type": "LORA", "use_rslora": True, "r": 16},
    "PiSSA": {"type": "LORA", "init_lora_weights": "pissa"},
    "OLoRA": {"type": "LORA", "init_lora_weights": "olora"},
    "MiCA": {"type": "LORA", "init_lora_weights": "mica"},
    "ranks": {"type": "LORA", "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 32}},
    "norms": {"type": "LORA", "target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "biases": {"type": "LORA", "target_modules": ["q_proj", "v_proj"], "bias": "all"},
    "bias of the adapter": {"type": "LORA", "target_modules": ["q_proj"], "lora_bias": True},
    "some layers": {"type": "OFT", "target_modules": ["q_proj"], "layers_to_transform": [1]},
    "MiSS with batches": {"type": "MISS", "r": 8, "init_weights": "bat"},
    "LoKr of both": {"type": "LOKR", "decompose_both": True},
}
"""Other settings of the types, in the form of `model.peft`."""


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a type or a variant, in the form of `model.peft`."""
    return VARIANTS[name] if name in VARIANTS else {"type": name, **SMALL[name]}


Prepare = Callable[[Any], None]
"""Changes a policy in place, before it gets its adapter."""


def ignore(policy: Any) -> None:
    """Leave a policy as it is."""


def narrow_policy(initial: Any, name: str, seed: int = 1, prepare: Prepare = ignore) -> Any:
    """Give a policy like `stock_trl.exact_llama` a new adapter, in float32, which all types can begin with."""
    from peft import get_peft_model

    from grpo_ray.models.adapters import build_config

    for module in initial.model.modules():
        if name in NEED_BIASES and isinstance(module, torch.nn.Linear):
            module.bias = torch.nn.Parameter(torch.zeros(module.out_features))
    settings = settings_of(name)
    initial.float()
    prepare(initial)
    torch.manual_seed(seed)
    return get_peft_model(initial, build_config(settings | NARROW.get(settings["type"], {})))


def narrow_llama(name: str, prepare: Prepare = ignore) -> Any:
    """Return the policy of `stock_trl.exact_llama` in float32 with a new adapter, as a worker builds it."""
    from stock_trl import exact_llama
    from transformers import LlamaForCausalLM

    initial = exact_llama()
    model = LlamaForCausalLM(initial.config)
    model.load_state_dict({each: weight.float() for each, weight in initial.state_dict().items()}, strict=False)
    return narrow_policy(model, name, prepare=prepare)


def tried(quick: Sequence[str], mark: pytest.MarkDecorator = pytest.mark.slow) -> pytest.MarkDecorator:
    """Parametrize a test with all types and variants, those that are not quick with a mark."""
    names = [name if name in quick else pytest.param(name, marks=mark) for name in (*SMALL, *VARIANTS)]
    return pytest.mark.parametrize("name", names)


def is_tied(name: str) -> bool:
    """Return whether a type or variant is tried on a policy whose output layer is its embedding."""
    return name != "TRAINABLE_TOKENS"


def load(policy: Path | str, dtype: str = "float32", *, tied: bool = True) -> Any:
    """Return a policy; without tied weights the output layer is a copy of the embedding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(policy)
    config.tie_word_embeddings = tied
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=getattr(torch, dtype), config=config)
    if not tied:
        model.lm_head.weight.data = model.get_input_embeddings().weight.detach().clone()
    return model


def adapted(model: Any, name: str, seed: int = 0) -> Any:
    """Give a policy a new adapter, as a run does; its update is the first one."""
    from peft import get_peft_model

    from grpo_ray.models.adapters import build_config, train_in_float32

    config = build_config(settings_of(name))
    torch.manual_seed(seed)
    adapted = get_peft_model(model, config)
    train_in_float32(adapted)
    return adapted


def move(model: Any, seed: int = 1, size: float = 0.02) -> None:
    """Change each trained weight by random numbers of this size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(size * noise.to(parameter.dtype))


def logps(model: Any) -> torch.Tensor:
    """Return log-probabilities of a short text, without dropout or noise: (1, T, vocabulary), float32.

    A policy in 16 bits computes as in a run, under autocast.
    """
    ids = torch.arange(3, 35)[None]
    was_training, in_16_bits = model.training, next(iter(model.parameters())).dtype == torch.bfloat16
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=in_16_bits):
        found: torch.Tensor = model(ids).logits.float().log_softmax(-1)
    model.train(was_training)
    return found


def state(model: Any) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
