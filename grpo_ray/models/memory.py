"""Estimate of a worker's GPU memory from the model's config alone, before a GPU is rented.

A worker holds the policy twice: the learner's copy (float32, computed in 16 bits under autocast) and the engine's.
With N parameters, L layers of hidden size h, MLPs of intermediate size f, attention with q query and k key numbers per
token, T tokens in one micro-batch, and e bytes per number in `model.dtype`, the terms in bytes are:

    weights            4 N
    reference model    4 N if grpo.beta > 0, else 0
    gradients          4 N, and with several workers 4 N more: the buckets in which DDP all-reduces them
    optimizer states   8 N: AdamW's two moments
    activations        4 L T h (the residual stream at each layer's input, kept for the backward pass)
                       + the larger of  e N (autocast's copies of the weights during the forward pass; 0 in float32)
                                  and   2 T (34 h + 10 (q + k) + 8 f) e/2  (activations inside one layer, and their
                                        gradients)
                       Without gradient checkpointing the activations inside every layer are kept: L times one layer's,
                       without their gradients, plus the copies.
    engine weights     e N / tensor parallel size
    KV cache           2 L k e per token: the worker's completions, each with its prompt at the maximum length

With a LoRA adapter (model.lora) of A parameters, A replaces N in gradients, optimizer states and copies, the weights
are e N + 4 A, and there is no reference model. A is counted as if every linear layer of a Llama-like policy had an
adapter. A sharded learner (cluster.shard_learner) on W workers holds 1/W of weights, reference model, gradients and
optimizer states, needs no buckets, and has two layers unsharded at a time, copies included: the layer being computed
and the layer being fetched.

Logits are not counted: TRL computes them one tile at a time. ENGINE_OVERHEAD stands for vLLM's CUDA graphs and its own
activations, RESERVE for the CUDA context and fragmentation; both are rules of thumb, and so is the number of
activations inside a layer, which was counted for a Llama-like layer. The formulas were derived from the code and have
not yet been compared with measurements on a GPU.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError

GIB = 1 << 30
GPU_SIZES_GIB = (24, 40, 80)
"""Memory of common GPUs, GiB."""
ENGINE_OVERHEAD = 3 * GIB // 2
"""vLLM's CUDA graphs and activations, bytes."""
RESERVE = GIB
"""CUDA context and fragmentation, bytes."""
BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes in a model's config that determine its memory."""

    parameters: int
    """Number of parameters, tied weights counted once."""
    layers: int
    hidden_size: int
    intermediate_size: int
    """Width of an MLP; in a mixture of experts, of all active experts of a token together."""
    query_size: int
    """Query heads x head size."""
    key_value_size: int
    """Key heads x head size; equal for the values."""
    context_length: int
    """Longest sequence that the model supports, in tokens."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one worker, in bytes, and the fraction of a GPU that its engine should reserve."""

    parameters: int
    """Number of parameters of the policy (not bytes)."""
    weights: int
    reference_model: int
    gradients: int
    optimizer_states: int
    activations: int
    engine_weights: int
    kv_cache: int
    """Memory for all completions of a worker at once, at full length; with less, vLLM schedules them in turns."""
    kv_cache_per_sequence: int
    """Memory for one completion at its maximum length: the minimum that the engine can work with."""
    sleep_mode: bool
    """The engine releases its memory while the learner computes (grpo.vllm_enable_sleep_mode)."""

    @property
    def parts(self) -> dict[str, int]:
        """The terms of the estimate by display name, in bytes."""
        return {
            "weights": self.weights,
            "reference model": self.reference_model,
            "gradients": self.gradients,
            "optimizer states": self.optimizer_states,
            "activations": self.activations,
            "engine weights": self.engine_weights,
            "KV cache of all completions": self.kv_cache,
        }

    @property
    def learner(self) -> int:
        """The learner's peak memory, in bytes."""
        return self.weights + self.reference_model + self.gradients + self.optimizer_states + self.activations

    @property
    def engine(self) -> int:
        """The engine's memory with a KV cache for all completions at once, in bytes."""
        return self.engine_weights + ENGINE_OVERHEAD + self.kv_cache

    def gpu_memory_utilization(self, gpu_gib: int) -> float | None:
        """Recommend `engine.gpu_memory_utilization` for one GPU size.

        Args:
            gpu_gib: memory of the GPU, in GiB.

        Returns:
            A fraction of the GPU's memory, in hundredths: enough for all completions at once, or else everything that
            the learner leaves free. None if the worker does not fit on such a GPU.
        """
        available = gpu_gib * GIB - RESERVE
        if self.sleep_mode:
            if self.learner > available:
                return None
            # While the engine is awake there are no gradients and no activations.
            available -= self.weights + self.reference_model + self.optimizer_states
        else:
            available -= self.learner
        if available < self.engine_weights + ENGINE_OVERHEAD + self.kv_cache_per_sequence:
            return None
        enough = math.ceil(100 * self.engine / (gpu_gib * GIB))
        percent = min(enough, math.floor(100 * available / (gpu_gib * GIB)))
        return percent / 100 if percent else None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, the two sums, and the recommended `gpu_memory_utilization` by GPU size in GiB."""
        fractions = {str(gib): self.gpu_memory_utilization(gib) for gib in GPU_SIZES_GIB}
        return asdict(self) | {"learner": self.learner, "engine": self.engine, "gpu_memory_utilization": fractions}


def estimate_memory(config: Config, shape: ModelShape, sequence_length: int) -> MemoryEstimate:
    """Estimate the memory of one worker of a run; see the module's docstring for the formulas.

    Args:
        sequence_length: longest prompt with its completion, in tokens.
    """
    trl, workers, number_bytes = config.grpo.trl, config.cluster.max_workers, BYTES_PER_NUMBER[config.dtype]
    lora, sharded = config.model.lora, config.cluster.shard_learner
    trained = adapter_parameters(shape, lora.rank) if lora else shape.parameters
    shards = workers if sharded else 1
    weights = number_bytes * shape.parameters + 4 * trained if lora else 4 * shape.parameters
    unsharded_layers = 2 * weights // shape.layers if sharded else 0
    ddp_buckets = workers > 1 and not sharded
    kv_cache_per_sequence = 2 * shape.layers * shape.key_value_size * number_bytes * sequence_length
    return MemoryEstimate(
        parameters=shape.parameters,
        weights=weights // shards + unsharded_layers,
        reference_model=4 * shape.parameters // shards if trl.get("beta", 0.0) and not lora else 0,
        gradients=4 * trained // shards * (2 if ddp_buckets else 1),
        optimizer_states=8 * trained // shards,
        activations=_activations(config, shape, trained, config.micro_batch_size // workers * sequence_length),
        engine_weights=number_bytes * shape.parameters // int(trl.get("vllm_tensor_parallel_size", 1)),
        kv_cache=kv_cache_per_sequence * (config.completions_per_step // workers),
        kv_cache_per_sequence=kv_cache_per_sequence,
        sleep_mode=bool(trl.get("vllm_enable_sleep_mode", False)),
    )


def _activations(config: Config, shape: ModelShape, trained: int, tokens: int) -> int:
    """Estimate the learner's activations and autocast copies at their peak, in bytes.

    Args:
        trained: number of trained parameters.
        tokens: tokens of one micro-batch on one worker.
    """
    number_bytes = BYTES_PER_NUMBER[config.dtype]
    residual_stream = 4 * shape.layers * tokens * shape.hidden_size
    numbers_per_token = (
        34 * shape.hidden_size + 10 * (shape.query_size + shape.key_value_size) + 8 * shape.intermediate_size
    )
    one_layer = tokens * numbers_per_token * number_bytes // 2
    # Only float32 weights have copies; with an adapter the policy itself is in 16 bits already.
    copies = number_bytes * trained if number_bytes < 4 else 0
    if config.cluster.shard_learner:
        copies = 2 * copies // shape.layers
    if config.grpo.trl.get("gradient_checkpointing", config.cluster.use_gpu):
        return residual_stream + max(copies, 2 * one_layer)
    return residual_stream + copies + shape.layers * one_layer


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Count the parameters of an adapter on every linear layer: rank x (inputs + outputs) of each layer."""
    attention = 2 * (shape.hidden_size + shape.query_size) + 2 * (shape.hidden_size + shape.key_value_size)
    return rank * shape.layers * (attention + 3 * (shape.hidden_size + shape.intermediate_size))


def model_shape(path: str, trust_remote_code: bool = False) -> ModelShape:
    """Read a model's config and count its parameters, without loading its weights.

    Args:
        path: local folder or hub id.

    Raises:
        ConfigError: the config cannot be read, or is not that of a causal language model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):  # parameters without memory: a 72B model takes a tenth of a second
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path}: the config cannot be read: {str(error).splitlines()[0]}") from None
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    intermediate_size = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if getattr(text, "moe_intermediate_size", None):
        intermediate_size = text.moe_intermediate_size * getattr(text, "num_experts_per_tok", 1)
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),  # yields tied weights once
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size,
        query_size=heads * head_size,
        key_value_size=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        context_length=text.max_position_embeddings,
    )
