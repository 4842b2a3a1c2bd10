"""Settings of a learner sharded over the workers (FSDP2, `cluster.shard_learner`).

Separate from `sharding.py`, because the driver checks these settings without importing TRL's trainer and vLLM.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

LOADS_ONCE = "cpu_ram_efficient_loading"
"""Option of FSDP2: rank 0 alone reads the policy's weights, and sends the other workers their parts."""


def sharding_arguments(fsdp_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's arguments for a sharded learner.

    Args:
        fsdp_config: `grpo.fsdp_config`.
    """
    options = {LOADS_ONCE: True} | dict(fsdp_config) | {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    # By default accumulated gradients are reduced with the last micro-batch only, so every worker would keep those of
    # the whole policy until then.
    accumulation = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return {"fsdp": True, "fsdp_config": options, "accelerator_config": accumulation}


def precision_policy(dtype: str) -> "MixedPrecisionPolicy":
    """Return the precision of a sharded learner in 16 bits: float32 weights that compute in `dtype`.

    Gradients are reduced in float32; accelerate's default reduces them in `dtype`, which rounds each partial sum.
    Layers keep the precision of their outputs: in float32 checkpointed activations would take twice the memory, and
    the next layer would round them again.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32, output_dtype=None)
