"""How much GPU memory a worker needs, worked out from the model's config alone, before a GPU is paid for.

A worker holds the whole policy twice: the learner's (float32, computed in 16 bits under autocast) and the engine's.
With N parameters, L layers of width h, MLPs of width f, attention of q query and k key widths, T tokens in one
micro-batch, and e bytes for a number in `model.dtype`, in bytes:

    weights      4 N
    reference    4 N with grpo.beta, else 0
    gradients    4 N, and with several workers 4 N more: the buckets in which DDP adds them up
    optimizer    8 N: AdamW's two moments
    activations  4 L T h  the stream between layers, kept for the backward pass
                 + the larger of  e N (autocast's copies of the weights, while going forward; 0 in float32)
                            and   2 T (34 h + 10 (q + k) + 8 f) e/2  (one layer's insides and their gradients)
                 without gradient checkpointing every layer's insides are kept, so L times that, once
    engine       e N / tensor parallel
    KV cache     2 L k e for each token: the worker's completions, each as long as a prompt and completion can get

With an adapter (model.lora) of A parameters, A stands for N in gradients, optimizer and copies, the weights are
e N + 4 A, and there is no reference. A is counted as if every linear layer of a Llama-like policy had one. A sharded
learner (cluster.shard_learner) of W workers holds 1/W of weights, reference, gradients and optimizer state, needs no
buckets, and has two layers whole at a time, copies included: the one that works and the one that is fetched.

The logits do not count: TRL computes them a tile at a time. What vLLM needs besides (graphs, its own activations) is
set at ENGINE_OVERHEAD, and what CUDA and fragmentation take at RESERVE; both are rules of thumb, and so is the count of
a layer's insides, made for a Llama-like layer. Derived from the code, not yet held against a GPU's own figures.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError

GIB = 1 << 30
GPU_SIZES = (24, 40, 80)
"""Memory of common GPUs, GiB."""
ENGINE_OVERHEAD = 3 * GIB // 2
RESERVE = GIB
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a model's config that decide its memory."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    """Width of an MLP; of all active experts together in a mixture."""
    query: int
    """Attention heads x head size."""
    key_value: int
    """Key heads x head size; the values have as many."""
    context: int
    """Longest sequence, in tokens."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one worker, in bytes, and what of a GPU the engine should have."""

    parameters: int
    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    engine_weights: int
    kv_cache: int
    """All of a worker's completions at once, each at its longest; with less, the engine takes turns."""
    kv_cache_of_one: int
    """One completion at its longest: the least that the engine can work with."""
    sleeps: bool
    """The engine gives its memory back while the learner works (grpo.vllm_enable_sleep_mode)."""

    @property
    def parts(self) -> dict[str, int]:
        """What the memory goes to, by name, in bytes."""
        return {
            "weights": self.weights,
            "reference": self.reference,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "engine's weights": self.engine_weights,
            "KV cache of all completions": self.kv_cache,
        }

    @property
    def learner(self) -> int:
        """The learner at its peak."""
        return self.weights + self.reference + self.gradients + self.optimizer + self.activations

    @property
    def engine(self) -> int:
        """The engine with room for all completions at once."""
        return self.engine_weights + ENGINE_OVERHEAD + self.kv_cache

    def memory_share(self, gib: int) -> float | None:
        """`engine.memory_share` for a GPU of so many GiB, in hundredths; None where the worker does not fit.

        As much as all completions want, or what the learner leaves.
        """
        room = gib * GIB - RESERVE
        if self.sleeps:
            if self.learner > room:
                return None
            room -= self.weights + self.reference + self.optimizer
        else:
            room -= self.learner
        if room < self.engine_weights + ENGINE_OVERHEAD + self.kv_cache_of_one:
            return None
        wanted = math.ceil(100 * self.engine / (gib * GIB))
        share = min(wanted, math.floor(100 * room / (gib * GIB)))
        return share / 100 if share else None

    def to_dict(self) -> dict[str, Any]:
        """All fields, the sums, and the recommended shares by GPU size in GiB."""
        shares = {str(gib): self.memory_share(gib) for gib in GPU_SIZES}
        return asdict(self) | {"learner": self.learner, "engine": self.engine, "memory_share": shares}


def estimate_memory(config: Config, shape: ModelShape, tokens: int) -> MemoryEstimate:
    """What one worker of a run needs.

    tokens: the longest prompt with its completion.
    """
    trl, workers, each = config.grpo.trl, config.cluster.max_workers, BYTES[config.dtype]
    n, layers = shape.parameters, shape.layers
    batch = config.micro_batch_size // workers * tokens
    inside = batch * (34 * shape.hidden + 10 * (shape.query + shape.key_value) + 8 * shape.intermediate) * each // 2
    lora, sharded = config.model.lora, config.cluster.shard_learner
    trained = adapter_parameters(shape, lora.rank) if lora else n
    copies = each * trained if each < 4 else 0  # of what is kept in float32: an adapter's policy is in 16 bits
    if sharded:
        copies = 2 * copies // layers
    stream = 4 * layers * batch * shape.hidden
    checkpointing = bool(trl.get("gradient_checkpointing", config.cluster.use_gpu))
    activations = stream + max(copies, 2 * inside) if checkpointing else stream + copies + layers * inside
    kv_cache_of_one = 2 * layers * shape.key_value * each * tokens
    weights = each * n + 4 * trained if lora else 4 * n
    parts = workers if sharded else 1
    return MemoryEstimate(
        parameters=n,
        weights=weights // parts + (2 * weights // layers if sharded else 0),
        reference=4 * n // parts if trl.get("beta", 0.0) and not lora else 0,
        gradients=4 * trained // parts * (2 if workers > 1 and not sharded else 1),
        optimizer=8 * trained // parts,
        activations=activations,
        engine_weights=each * n // int(trl.get("vllm_tensor_parallel_size", 1)),
        kv_cache=kv_cache_of_one * (config.completions_per_step // workers),
        kv_cache_of_one=kv_cache_of_one,
        sleeps=bool(trl.get("vllm_enable_sleep_mode", False)),
    )


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of an adapter on every linear layer: rank x (inputs + outputs) of each."""
    attention = 2 * (shape.hidden + shape.query) + 2 * (shape.hidden + shape.key_value)
    return rank * shape.layers * (attention + 3 * (shape.hidden + shape.intermediate))


def model_shape(path: str, trust_remote_code: bool = False) -> ModelShape:
    """Read a model's config and count its parameters, without its weights.

    path: local folder or hub id. Raises ConfigError if the config cannot be read or is of no causal language model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):  # shapes without memory: a 72B model takes a tenth of a second
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path}: cannot be read: {str(error).splitlines()[0]}") from None
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if getattr(text, "moe_intermediate_size", None):
        intermediate = text.moe_intermediate_size * getattr(text, "num_experts_per_tok", 1)
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),  # tied weights come once
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=intermediate,
        query=heads * head_size,
        key_value=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        context=text.max_position_embeddings,
    )
