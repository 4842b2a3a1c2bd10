"""Attention of the learner over rows that are packed one after the other, without padding.

transformers' default, `sdpa`, keeps packed rows apart by a mask of all pairs of tokens, which for 32 thousand tokens is
a gigabyte. Kernels for rows of different lengths (varlen) take the start offsets of the rows instead. They are in the
packages flash-attn (2, and 3 for Hopper GPUs), which transformers uses under the names `flash_attention_2` and
`flash_attention_3`, and in torch itself (`torch.nn.attention.varlen`, a build of FlashAttention 2), for which
transformers 5.17 has no name. It is registered here as `torch_varlen`.

`score_tokens` in `forward_pass.py` passes the start offsets to the model, once for all layers, under transformers'
names (`FlashAttentionKwargs`), which the models pass on to the attention of each layer. The recomputation of gradient
checkpointing uses them too, since it repeats a layer with the same arguments.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from grpo_ray.errors import ConfigError
from grpo_ray.learner.trl_internals import attention_of, has_attention_interface, has_flash_support

VARLEN = "torch_varlen"
"""Name under which `VarlenAttention` is registered with transformers. It must not contain "flash", or
transformers would mistake it for one of its own implementations."""

HEAD_SIZE_STEP, LARGEST_HEAD = 8, 256
"""FlashAttention has kernels for head sizes that are a multiple of the first number, up to the second."""


@dataclass(frozen=True)
class VarlenAttention:
    """Causal attention over packed rows, in the form that transformers calls (`AttentionInterface`)."""

    kernel: Callable[..., Any]
    """`torch.nn.attention.varlen.varlen_attn`, or a function with its signature."""
    has_grouped_queries: bool
    """True if the kernel takes fewer heads of keys than of queries; torch's does from 2.12 on."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute the attention of one layer.

        Args:
            query: (B, H, L, D). B is 1 for packed rows.
            key, value: (B, K, L, D); K divides H.
            attention_mask: None, or a mask of padded rows, which are computed by `sdpa`.
            scaling: factor of the scores; None: 1 / sqrt(D).
            sliding_window: number of tokens that a token attends to, itself included; None: itself and all before it.
            cu_seq_lens_q: (R + 1,) int32, start offsets of the R rows, and the end; None: B rows of L tokens.
            max_length_q: tokens of the longest row.

        Returns:
            (B, L, H, D), and None in place of the attention weights.

        Raises:
            ConfigError: the model passes an option that the kernel does not have.
        """
        unsupported = [
            name for name in ("dropout", "softcap", "s_aux", "position_bias") if options.get(name) not in (None, 0.0)
        ]
        if unsupported or options.get("is_causal") is False:
            raise ConfigError(
                f"{type(module).__name__} calls its attention with {', '.join(unsupported) or 'is_causal=False'}, "
                f"which {VARLEN} does not have; set grpo.model_init_kwargs={{attn_implementation: sdpa}}"
            )
        if attention_mask is not None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
        batch, _, length, _ = query.shape
        if cu_seq_lens_q is None or max_length_q is None:
            cu_seq_lens_q = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
            max_length_q = length
        groups = query.shape[1] // key.shape[1]
        if self.has_grouped_queries:
            grouped = {"enable_gqa": groups > 1}
        else:
            grouped, key, value = {}, repeat_kv(key, groups), repeat_kv(value, groups)
        # Autocast does not convert the inputs of this kernel: after rotary positions, queries are in float32 again.
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        rows = (each.transpose(1, 2).flatten(0, 1).to(dtype) for each in (query, key, value))
        output = self.kernel(
            *rows,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            **grouped,
        )
        return output.unflatten(0, (batch, length)), None


def varlen_mask(*, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """Build transformers' mask of padded rows; None for rows without padding, which need none."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **options)


def register_varlen(kernel: Callable[..., Any]) -> None:
    """Make a kernel for rows of different lengths available to transformers' models as `torch_varlen`."""
    grouped = "enable_gqa" in inspect.signature(kernel).parameters
    AttentionInterface.register(VARLEN, VarlenAttention(kernel, grouped))
    AttentionMaskInterface.register(VARLEN, varlen_mask)


def packs_rows(model: Any) -> bool:
    """Return True if the attention keeps packed rows apart without a mask of all pairs of tokens."""
    name = attention_of(model)
    return name == VARLEN or "flash" in name


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """Facts about a model and its GPU that determine the attention implementations it can use."""

    current: str
    """Name of the attention that the model has been loaded with."""
    is_chosen: bool
    """True if the config names the attention."""
    head_size: int
    has_interface: bool
    """True if the model calls its attention through transformers' `AttentionInterface`."""
    has_flash: bool
    """True if the model supports transformers' flash attention."""
    has_softcap: bool
    """True if the model bounds the scores of its attention."""
    is_16_bit: bool
    """True if the learner computes in 16 bits."""
    capability: tuple[int, int]
    """Compute capability of the GPU: 8.0 for Ampere, 9.0 for Hopper."""
    has_flash_2: bool
    """True if the package flash-attn is installed."""
    has_flash_3: bool
    """True if the package of FlashAttention 3 is installed."""

    @staticmethod
    def of(model: Any, *, is_chosen: bool, is_16_bit: bool, capability: tuple[int, int]) -> "AttentionFacts":
        """Return the facts about a model and the installed packages."""
        config = model.config.get_text_config()
        return AttentionFacts(
            current=attention_of(model),
            is_chosen=is_chosen,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            has_interface=has_attention_interface(model),
            has_flash=has_flash_support(model),
            has_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
            is_16_bit=is_16_bit,
            capability=capability,
            has_flash_2=is_flash_attn_2_available(),
            has_flash_3=is_flash_attn_3_available(),
        )


def obstacle_to_packing(facts: AttentionFacts) -> str | None:
    """Return the reason why no packed-row kernel can be used; None if one can."""
    obstacles = {
        "grpo.model_init_kwargs names its attention": facts.is_chosen,
        f"its attention is {facts.current}": facts.current != "sdpa",
        "its attention does not go through transformers' interface": not facts.has_interface,
        "it bounds the scores of its attention (attn_logit_softcapping)": facts.has_softcap,
        f"the size of a head, {facts.head_size}, is no multiple of {HEAD_SIZE_STEP} up to {LARGEST_HEAD}": bool(
            facts.head_size % HEAD_SIZE_STEP or facts.head_size > LARGEST_HEAD
        ),
        "the learner computes in float32, not in 16 bits": not facts.is_16_bit,
        f"the GPU's compute capability is {'.'.join(map(str, facts.capability))}, below 8.0": facts.capability < (8, 0),
    }
    return next((reason for reason, holds in obstacles.items() if holds), None)


def choose_attention(facts: AttentionFacts) -> str | None:
    """Return the name of the fastest available attention for packed rows; None if the model keeps its own."""
    if obstacle_to_packing(facts):
        return None
    if facts.has_flash and facts.has_flash_3 and facts.capability[0] == 9:
        return "flash_attention_3"
    return "flash_attention_2" if facts.has_flash and facts.has_flash_2 else VARLEN


def use_packing_attention(models: list[Any], facts: AttentionFacts) -> str:
    """Give models the fastest available attention for packed rows, if there is one.

    Args:
        models: transformers' models of one kind: the policy, and the reference if there is one.

    Returns:
        Line for the log.
    """
    if packs_rows(models[0]):
        return f"learner's attention: {facts.current}, as configured, with rows packed without padding"
    name = choose_attention(facts)
    if name is None:
        return (
            f"learner's attention: {facts.current}, with rows padded to the longest of a pass; rows of this model "
            f"cannot be packed: {obstacle_to_packing(facts)}"
        )
    if name == VARLEN:
        from torch.nn.attention.varlen import varlen_attn

        register_varlen(varlen_attn)
    for model in models:
        model.set_attn_implementation(name)
    source = "torch.nn.attention.varlen" if name == VARLEN else "package of FlashAttention"
    return f"learner's attention: {name} ({source}), rows packed without padding"
