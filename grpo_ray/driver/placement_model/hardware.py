"""Durations of engine and learner from a model's sizes and a GPU's published figures.

The efficiencies are rules of thumb for 16-bit weights. A run's own steps replace them (`advice.py`).
"""

from dataclasses import dataclass

from grpo_ray.driver.placement_model.engine import EngineSpeed


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Published figures of a GPU."""

    name: str
    flops: float
    """Dense 16-bit operations per second."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: float
    """Bytes."""


H20 = Gpu(name="H20", flops=148e12, bandwidth=4.0e12, memory=96e9)
H100 = Gpu(name="H100", flops=989e12, bandwidth=3.35e12, memory=80e9)
GB200 = Gpu(name="GB200", flops=2500e12, bandwidth=8.0e12, memory=186e9)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model that determine its speed."""

    parameters: float
    active: float
    """Parameters that a token uses: all of them, except in a mixture of experts."""
    cache_bytes: float
    """Keys and values of one token, bytes."""


OVERHEAD_SECONDS = 0.005
"""Fixed cost of a decode step: 224 completions of a model with 0.5B parameters take 5.2 ms a step on an H100
(docs/performance.md), of which reading the weights takes 0.3."""
READ_EFFICIENCY = 0.8
"""Part of the bandwidth at which weights, keys and values are read."""
DECODE_EFFICIENCY = 0.5
"""Part of the operations per second that decoding and computing prompts reach."""
LEARN_EFFICIENCY = 0.4
"""The same of forward and backward passes."""
PASSES = 8
"""Operations per active parameter and token of the learner: 2 forward, 4 backward, 2 for recomputed activations."""


def engine_speed(
    model: ModelSize,
    gpu: Gpu,
    gpus: int = 1,
    *,
    memory_share: float = 0.8,
    overhead_seconds: float = OVERHEAD_SECONDS,
    max_running: int = 256,
) -> EngineSpeed:
    """Return the speed of an engine on some GPUs.

    A decode step of a mixture of experts reads all of its weights, since a batch uses all experts.

    Args:
        memory_share: part of the GPUs' memory for weights, keys and values.
    """
    bandwidth, flops = gpus * gpu.bandwidth * READ_EFFICIENCY, gpus * gpu.flops * DECODE_EFFICIENCY
    free = gpus * gpu.memory * memory_share - 2 * model.parameters
    return EngineSpeed(
        step_seconds=overhead_seconds + 2 * model.parameters / bandwidth,
        sequence_seconds=2 * model.active / flops,
        context_seconds=model.cache_bytes / bandwidth,
        prefill_seconds=2 * model.active / flops,
        max_running=max_running,
        cache_tokens=max(0.0, free) / model.cache_bytes,
    )


def learner_token_seconds(model: ModelSize, gpu: Gpu, efficiency: float = LEARN_EFFICIENCY) -> float:
    """Return the seconds in which one GPU computes all passes over one token."""
    return PASSES * model.active / (gpu.flops * efficiency)
