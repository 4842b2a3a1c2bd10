"""Estimate of a worker's GPU memory from the model's config alone, and the plan of the learner's passes that follows.

A worker holds the policy twice: the learner's copy (float32, computed in 16 bits under autocast) and the engine's. With
dedicated engines (engine.placement) its GPU holds the learner's copy alone, and the engine's terms are those of another
GPU.
With N parameters, of which V H are in an embedding or output layer (V the vocabulary), L layers of hidden size H, MLPs
of intermediate size F, attention with Q query and K key numbers per token, T tokens in one forward and backward pass of
the learner, and e bytes per number in `model.dtype`, the terms in bytes are:

    always there
      weights             4 N
      reference model     4 N if grpo.beta > 0, else 0
      optimizer states    8 N: AdamW's two moments
      gradient buckets    4 N with several workers: the buffers that DDP reduces, which are no views of the gradients
    until the optimizer step
      gradients           4 N
      kept activations    with recomputation: the input of each layer, 4 L T H
                          without: all that autograd keeps of each layer (`ActivationSizes`), and autocast's copies of
                          the weights, e N, which the backward pass needs too
      working memory      the largest of
                            the output layer:  its float32 gradient 4 V H, one tile of logits (4096 tokens x 32768
                                               columns), the columns' copies, 20 T H for hidden states and gradients
                            one layer:         the gradients inside it, one weight's gradient in 16 bits and float32;
                                               with recomputation also all that autograd keeps of this layer; beside
                                               the output layer's gradient 4 V H, which a tied embedding still needs
                            the embedding:     its dense gradient 4 V H, beside the output layer's
                            the optimizer:     4 N without the kept activations, for `optim=adamw_torch` (foreach);
                                               nothing for the fused default
    fragmentation         a tenth of kept activations and working memory: rows of different lengths leave gaps
    the engine
      weights             e N / tensor parallel size; with `engine.adapter=request` also the slot of the adapter, e A
                          for a slot of its rank
      activations         of vLLM's profiling pass: ENGINE_TOKENS tokens through one layer, and 24 bytes for each logit
                          of one token per request (16-bit and float32 logits, their sort, probabilities)
      CUDA graphs         CUDA_GRAPHS; none with `engine.vllm.enforce_eager`
      KV cache            2 L K e per token (e = 1 with `engine.vllm.kv_cache_dtype=fp8`) of the worker's completions,
                          each with its prompt at the maximum length; of a dedicated engine's part of a batch
    reward models         beside one of the workers, with rewards.model_gpus below 1: e for each parameter, CONTEXT of
                          their own process, and one layer's activations in a pass of REWARD_MODEL_TOKENS
    other                 CONTEXT: CUDA's context, cuBLAS workspaces; NCCL: buffers, with several workers

With an adapter (model.lora, model.peft) of A parameters, A replaces N in gradients, optimizer states and copies, the
weights are e N + 4 A (with QUANTIZED_BYTES in place of e for layers in four bits), there is no reference model, the
output layer has no gradient, and a weight sync needs three float32 copies of the largest weight for the merge, or none
if requests name the adapter (`engine.adapter`). PEFT counts A on a policy without weights; where it cannot, A is that
of LoRA on every linear layer. Some types also build whole weights in each pass (`ADAPTER_COSTS`).

A sharded learner (cluster.shard_learner) on W workers holds 1/W of weights, reference model, gradients and optimizer
states, and needs no buckets. Its unsharded copies in 16 bits are embedding and output layer for the whole pass, the
layer that is computed and the one that is fetched, with the buffer of its all-gather; in the backward pass also one
layer's gradients, in 16 bits and twice in float32 for the reduction. That holds if gradients are reduced after each
micro-batch; otherwise (`no_sync`) another 4 N would stay unsharded. A weight sync gathers one weight at a time.

In sleep mode (grpo.vllm_enable_sleep_mode) the engine's weights and KV cache are gone while the learner computes, but
not its CUDA graphs; while the engine generates, gradients and activations are gone.

The terms were derived from the sources of torch, transformers, TRL and vLLM. Tests compare kept activations and working
memory with the allocations of a traced pass on the CPU. CUDA_GRAPHS, CONTEXT, NCCL and FRAGMENTATION are rules of
thumb. Two runs on an H100 used what was estimated, within 2 % (docs/gpu-memory.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_ray.config.peft_fields import REQUEST_RANKS, largest_rank
from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20

GPU_CARDS: Mapping[str, float] = {
    "24 GB": 22.0,
    "40 GB": 39.4,
    "48 GB": 44.4,
    "80 GB": 79.1,
    "141 GB": 139.7,
    "192 GB": 178.3,
}
"""Nominal size of common GPUs -> memory that CUDA reports for them (`total_memory`), GiB; the minimum of each class:
L4, A10 and RTX 4090; A100; L40S and RTX A6000; A100 and H100; H200; B200."""

CONTEXT = 768 * MIB
"""CUDA's context and workspaces of its libraries, bytes."""
NCCL = 512 * MIB
"""Buffers of NCCL's communicators with several workers, bytes: the learner's, and the engine's on the same workers."""
CUDA_GRAPHS = GIB
"""vLLM's CUDA graphs, bytes: up to 51 sizes of some 5 to 26 MiB each."""
ENGINE_TOKENS = 4096
"""Tokens of the engine's profiling pass, as in `inference/arguments.py`, unless `engine.vllm` sets them."""
FRAGMENTATION = 0.1
"""Part of the learner's activations and working memory that is lost to gaps of the allocator."""
TILE_TOKENS, TILE_COLUMNS = 4096, 32768
"""Tile of logits that TRL's output layer computes at a time, tokens x vocabulary."""
BYTES_PER_LOGIT = 24
"""Peak of vLLM's sampler for one logit: 2 + 4 (16-bit and float32 logits), 4 + 8 (sorted values and indices),
4 (probabilities), and 2 for masks."""

MARGIN = 0.05
"""Part of a GPU that a plan leaves free for errors of the estimate."""
MAX_TOKENS = 32_768
"""Largest budget of tokens that a plan chooses. The fixed cost of a pass of this size is below a tenth of it."""
BUDGET_UNIT = 256
"""Budgets of a plan are multiples of this number of tokens, or one longest sequence."""
PASS_COST = 2048
"""Fixed cost of one forward and backward pass on a GPU, in tokens: each pass reads all weights, casts them and adds to
all gradients (about 20 bytes per parameter, the time of 450 tokens at an H100's ratio of arithmetic to bandwidth), and
small passes leave the GPU idle between kernels. An assumption: the choice of recomputation hardly depends on it."""
BUSY_TOKENS = 8192
"""Tokens of the learner's pass for which a recommended engine size leaves memory; a fifth of its time is fixed cost."""
ASSUMED_PROMPT = 2048
"""Longest prompt that a plan assumes, tokens, if neither `data.max_prompt_length` nor `engine.max_model_len` is set."""

REWARD_MODEL_TOKENS = 16_384
"""Most tokens of a reward model's forward pass, padding included, unless a single text is longer."""

LEAST_QUANTIZED = 0.9
"""Least part of a policy's weights without embeddings that `model.quantization=int4` quantizes."""
QUANTIZED_BYTES = {"nf4": 0.5 + 4 / 64, "int4": 0.5 + 2 / 64}
"""Bytes of a weight in four bits, with its part of a scale (`models/quantized.py`)."""

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
    vocabulary: int
    """Rows of the embedding, and of the output layer."""
    tied_embeddings: bool
    """True if the output layer's weight is the embedding."""
    context_length: int
    """Longest sequence that the model supports, in tokens."""
    adapter_parameters: int | None = None
    """Parameters of the adapter that is trained; None: there is none, or it was not counted."""
    adapter_sizes: int | None = None
    """Inputs and outputs of all layers with LoRA together; None: there are none, or they were not counted."""
    quantized_parameters: int = 0
    """Parameters of the layers that the learner keeps in four bits (model.quantization)."""

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embedding and output layer together."""
        return self.vocabulary * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return (self.parameters - self.embedding_parameters) // self.layers


@dataclass(frozen=True)
class PerToken:
    """Bytes per token of one layer, as multiples of its sizes."""

    hidden: int
    query: int
    key_value: int
    intermediate: int

    def bytes(self, shape: ModelShape) -> int:
        """Return the bytes per token in a layer of this shape."""
        return (
            self.hidden * shape.hidden_size
            + self.query * shape.query_size
            + self.key_value * shape.key_value_size
            + self.intermediate * shape.intermediate_size
        )


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """Activations of a Llama-like layer in one kind of precision."""

    stream: int
    """Bytes per number of a layer's input, which recomputation keeps."""
    kept: PerToken
    """Activations of one layer that are kept for its backward pass, its input included."""
    backward: PerToken
    """Gradients inside one layer at the peak of its backward pass."""


AUTOCAST = ActivationSizes(stream=4, kept=PerToken(26, 4, 4, 8), backward=PerToken(6, 0, 0, 4))
"""float32 weights under 16-bit autocast."""
ADAPTER = ActivationSizes(stream=2, kept=PerToken(18, 6, 4, 8), backward=PerToken(14, 0, 0, 6))
"""Frozen 16-bit weights with a float32 adapter under autocast; `ADAPTER_RANK` is for the adapter's own activations."""
HALF = ActivationSizes(stream=2, kept=PerToken(16, 4, 4, 8), backward=PerToken(6, 0, 0, 4))
"""16-bit weights: the unsharded layers of a sharded learner."""
FULL = ActivationSizes(stream=4, kept=PerToken(24, 8, 8, 16), backward=PerToken(6, 0, 0, 8))
"""float32 weights and no autocast."""
ADAPTER_RANK = 14
"""Bytes per token and rank that are kept for the adapters of one layer, on seven linear layers."""

ADAPTER_COSTS: Mapping[str, tuple[float, float]] = {
    "BEFT": (0.8, 0.0), "BOFT": (1.4, 11.0), "C3A": (1.45, 0.0), "DEFT": (1.6, 1.2), "DELORA": (1.15, 0.4),
    "FOURIERFT": (1.1, 2.2), "GLORA": (1.0, 2.8), "GRALORA": (1.15, 0.4), "HIRA": (1.1, 2.4), "HRA": (1.0, 34.0),
    "IA3": (1.45, 0.1), "LN_TUNING": (0.8, 0.0), "LOHA": (1.0, 2.0), "LOKR": (1.1, 2.1), "MISS": (0.8, 0.2),
    "OFT": (1.1, 4.3), "PEANUT": (1.0, 4.4), "PSOFT": (0.8, 0.5), "RANDLORA": (0.95, 2.7),
    "SUPERTUNING": (1.0, 2.1), "TINYLORA": (0.8, 0.2), "UNILORA": (1.1, 0.2), "VBLORA": (1.1, 1.0),
    "VERA": (1.25, 0.7), "WAVEFT": (1.0, 4.2),
}  # fmt: skip
"""Type of `model.peft` -> activations of one layer, in terms of those with frozen weights, and bytes per weight of the
layer that are kept whatever the number of tokens: whole weights that the type builds in each pass. Traced with ranks of
8 on layers of Qwen2.5's proportions; a larger rank needs more. The estimate is 0.8 to 1.3 times a traced pass."""
OTHER_ADAPTER = (1.6, 12.0)
"""The same for types that were not traced: as much as nearly all others need."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one worker in bytes, for passes of a given size."""

    parameters: int
    """Number of parameters of the policy (not bytes)."""
    tokens_per_micro_batch: int
    """Tokens of one forward and backward pass of the learner."""
    gradient_checkpointing: bool
    """True if the backward pass recomputes the activations inside each layer."""
    weights: int
    """The learner's own; frozen weights that it shares with the engine are among the engine's."""
    reference_model: int
    optimizer_states: int
    gradient_buckets: int
    gradients: int
    kept_activations: int
    """Activations of all layers, copies of weights and unsharded weights, kept from the forward to the backward pass.
    """
    working_memory: int
    """Largest temporary memory: in the output layer, in one layer's backward pass, or in the optimizer."""
    weight_sync: int
    """Temporary copies while the engine receives weights."""
    engine_weights: int
    engine_activations: int
    cuda_graphs: int
    kv_cache: int
    """Memory for all completions of an engine at once, at full length; with less, vLLM schedules them in turns."""
    kv_cache_per_sequence: int
    """Memory for one completion at its maximum length: the minimum that the engine can work with."""
    context: int
    """CUDA's context, libraries' workspaces and NCCL's buffers."""
    reward_models: int
    """Reward models that share the GPU of one worker, and their process's context."""
    before_sharing: int
    """The learner's own copy of frozen weights until the first sync, after which it reads the engine's
    (model.share_base); 0 if it keeps its own."""
    sleep_mode: bool
    """True if the engine releases its memory while the learner computes (grpo.vllm_enable_sleep_mode)."""
    is_dedicated: bool
    """True if the engine has a GPU of its own (engine.placement)."""

    @property
    def parts(self) -> dict[str, int]:
        """The terms of the estimate by display name, in bytes; those of a dedicated engine are on another GPU."""
        return {
            "weights": self.weights,
            "reference model": self.reference_model,
            "optimizer states": self.optimizer_states,
            "gradients": self.gradients,
            "gradient buckets": self.gradient_buckets,
            "activations kept": self.kept_activations,
            "working memory": self.working_memory,
            "fragmentation": self.fragmentation,
            "engine weights": self.engine_weights,
            "engine activations": self.engine_activations,
            "CUDA graphs": self.cuda_graphs,
            "KV cache of all completions": self.kv_cache,
            "reward models": self.reward_models,
            "CUDA context and NCCL": self.context,
        }

    @property
    def others(self) -> int:
        """Memory of neither learner nor engine, in bytes."""
        return self.context + self.reward_models

    @property
    def resident(self) -> int:
        """The learner's memory between two steps, in bytes."""
        return self.weights + self.reference_model + self.optimizer_states + self.gradient_buckets

    @property
    def fragmentation(self) -> int:
        """Memory that the allocator cannot use while the learner computes, in bytes."""
        return math.ceil(FRAGMENTATION * (self.kept_activations + self.working_memory))

    @property
    def learner(self) -> int:
        """The learner's peak memory, in bytes."""
        return self.resident + self.gradients + self.kept_activations + self.working_memory + self.fragmentation

    @property
    def engine_fixed(self) -> int:
        """The engine's memory without its KV cache, in bytes."""
        return self.engine_weights + self.engine_activations + self.cuda_graphs

    @property
    def engine(self) -> int:
        """The engine's memory with a KV cache for all completions at once, in bytes."""
        return self.engine_fixed + self.kv_cache

    def engine_space(self, gpu_bytes: int) -> int:
        """Return the memory that the learner leaves to the engine while it generates, in bytes; may be negative."""
        beside = self.resident + self.weight_sync if self.sleep_mode else max(self.learner, self.before_sharing)
        return gpu_bytes - self.others - beside

    def used(self, gpu_bytes: int, gpu_memory_utilization: float) -> int:
        """Return the peak of a worker's whole GPU, in bytes, with an engine there that takes its fraction in full."""
        if self.is_dedicated:
            return self.others + max(self.learner, self.resident + self.weight_sync)
        engine = int(gpu_memory_utilization * gpu_bytes)
        if not self.sleep_mode:
            return self.others + max(self.learner, self.before_sharing) + engine
        return self.others + max(self.learner + self.cuda_graphs, self.resident + self.weight_sync + engine)

    def completions_at_once(self, gpu_bytes: int, gpu_memory_utilization: float) -> int:
        """Return the number of completions at full length for which the engine's KV cache has space."""
        cache = int(gpu_memory_utilization * gpu_bytes) - self.engine_fixed
        return max(0, cache // self.kv_cache_per_sequence)

    def fits(self, gpu_bytes: int, gpu_memory_utilization: float) -> bool:
        """Return True if a worker's GPU holds the learner and, unless it is dedicated, the engine.

        The engine needs space for at least one completion at full length.
        """
        has_engine = self.is_dedicated or self.completions_at_once(gpu_bytes, gpu_memory_utilization) > 0
        return self.used(gpu_bytes, gpu_memory_utilization) <= gpu_bytes and has_engine

    def gpu_memory_utilization(self, gpu_bytes: int) -> float | None:
        """Recommend `engine.gpu_memory_utilization` for one GPU size.

        Args:
            gpu_bytes: memory of the GPU.

        Returns:
            A fraction of the GPU's memory, in hundredths: enough for all completions at once, or else everything that
            the learner and MARGIN leave free. None if the worker does not fit on such a GPU, and for a dedicated
            engine, which leaves nothing to others.
        """
        if self.is_dedicated:
            return None
        enough = math.ceil(100 * self.engine / gpu_bytes)
        percent = min(enough, math.floor(100 * self.engine_space(gpu_bytes) / gpu_bytes - 100 * MARGIN))
        if percent <= 0 or self.used(gpu_bytes, percent / 100) > (1 - MARGIN) * gpu_bytes:
            return None
        return percent / 100 if self.completions_at_once(gpu_bytes, percent / 100) else None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the sums in JSON's types."""
        return asdict(self) | {
            "fragmentation": self.fragmentation,
            "learner": self.learner,
            "engine": self.engine,
        }


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Size of the learner's passes on one GPU, chosen by the memory estimate."""

    gpu_bytes: int
    gpu_memory_utilization: float
    """The engine's fraction of its GPU (engine.gpu_memory_utilization)."""
    estimate: MemoryEstimate

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of one forward and backward pass of a worker."""
        return self.estimate.tokens_per_micro_batch

    @property
    def gradient_checkpointing(self) -> bool:
        """True if the backward pass recomputes the activations inside each layer."""
        return self.estimate.gradient_checkpointing

    @property
    def used(self) -> int:
        """Estimated peak of a worker's whole GPU, in bytes."""
        return self.estimate.used(self.gpu_bytes, self.gpu_memory_utilization)

    @property
    def fits(self) -> bool:
        """True if learner and engine fit into the GPU, according to the estimate; a dedicated engine is elsewhere."""
        return self.estimate.fits(self.gpu_bytes, self.gpu_memory_utilization)

    @property
    def has_margin(self) -> bool:
        """True if all that a worker's GPU holds fits, and leaves MARGIN of it free."""
        return self.fits and self.used <= (1 - MARGIN) * self.gpu_bytes

    @property
    def relative_cost(self) -> float:
        """Time per token of the learner, relative to one forward pass without a fixed cost."""
        # A backward pass takes the time of two forward passes, and recomputation that of one more.
        return (4 if self.gradient_checkpointing else 3) * (1 + PASS_COST / self.tokens_per_micro_batch)


def plan_memory(
    config: Config, shape: ModelShape, gpu_bytes: int, *, sequence_length: int | None = None, reward_models: int = 0
) -> MemoryPlan:
    """Choose the size of the learner's passes, and whether they recompute activations, for one GPU.

    The size is the largest number of tokens that fits, beside a colocated engine if there is one, and leaves MARGIN of
    the GPU free, up to MAX_TOKENS and the worker's part of a step, and at least one sequence of the maximum length.
    Recomputation costs a third more arithmetic, and smaller passes pay their fixed cost (PASS_COST) more often; the
    choice with the lower cost per token is taken. Passes without recomputation cost less than passes of MAX_TOKENS with
    it from about 5,000 tokens on. Settings of the config (`grpo.tokens_per_micro_batch`, `grpo.micro_batch_size`,
    `grpo.gradient_checkpointing`) are kept.

    Args:
        gpu_bytes: memory of the GPU, the smallest over all workers.
        sequence_length: longest prompt with its completion, in tokens; None: the limit that follows from the config.
        reward_models: memory of the reward models on this GPU, in bytes (`reward_model_memory`).

    Returns:
        The plan; if not even the smallest passes fit, a plan with these, whose `fits` is False.
    """
    length = sequence_length or longest_sequence(config, shape.context_length)
    configured = config.grpo.trl.get("gradient_checkpointing")
    plans = [
        _plan_passes(config, shape, gpu_bytes, length, bool(recompute), reward_models)
        for recompute in ((False, True) if configured is None else (configured,))
    ]
    candidates = [plan for plan in plans if plan.has_margin] or [plan for plan in plans if plan.fits] or plans[-1:]
    return min(candidates, key=lambda plan: plan.relative_cost)


def _plan_passes(
    config: Config, shape: ModelShape, gpu_bytes: int, length: int, recompute: bool, reward_models: int
) -> MemoryPlan:
    """Plan the largest passes that fit with a margin, with or without recomputation; the smallest if none do."""

    configured = configured_tokens(config, length)

    def plan(tokens: int) -> MemoryPlan:
        return MemoryPlan(
            gpu_bytes=gpu_bytes,
            gpu_memory_utilization=config.engine_fraction,
            estimate=estimate_memory(
                config,
                shape,
                sequence_length=length,
                tokens=tokens,
                gradient_checkpointing=recompute,
                reward_models=reward_models,
            ),
        )

    if configured is not None:
        return plan(configured)
    step = config.sizes.completions_per_step // config.cluster.max_workers * length
    smallest, largest = length, max(length, min(MAX_TOKENS, step))
    for tokens in [largest, *range(largest // BUDGET_UNIT * BUDGET_UNIT, smallest, -BUDGET_UNIT)]:
        if (larger := plan(tokens)).has_margin:
            return larger
    return plan(smallest)


def configured_tokens(config: Config, length: int) -> int | None:
    """Return the maximum number of tokens in a pass that the config sets; None if it sets none.

    Args:
        length: longest prompt with its completion, in tokens.
    """
    if config.grpo.tokens_per_micro_batch is not None:
        return max(config.grpo.tokens_per_micro_batch, length)
    if config.grpo.micro_batch_size is not None or config.sizes.needs_one_pass:
        return config.sizes.micro_batch_size // config.cluster.max_workers * length
    return None


def longest_sequence(config: Config, context_length: int) -> int:
    """Return the longest prompt with its completion that the config allows, in tokens.

    Args:
        context_length: longest sequence that the model supports.
    """
    limit = config.sizes.longest_sequence
    if limit is None:
        limit = min(context_length, ASSUMED_PROMPT + config.grpo.max_completion_length)
    return limit


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """A worker's memory on one of the GPU_CARDS."""

    card: str
    plan: MemoryPlan
    recommended_utilization: float | None
    """Recommended `engine.gpu_memory_utilization`; None if the worker does not fit at any value, and for dedicated
    engines."""

    @property
    def engine_fits(self) -> bool:
        """True if an engine fits with at least one completion at full length, on such a GPU or its part of it."""
        return self.completions_at_once > 0

    @property
    def completions_at_once(self) -> int:
        """Completions at full length that the engine generates at once with the config's fraction."""
        return self.plan.estimate.completions_at_once(self.plan.gpu_bytes, self.plan.gpu_memory_utilization)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the results in JSON's types."""
        return asdict(self) | {
            "used": self.plan.used,
            "fits": self.plan.fits,
            "engine_fits": self.engine_fits,
            "completions_at_once": self.completions_at_once,
            "plan": asdict(self.plan) | {"estimate": self.plan.estimate.to_dict()},
        }


def plan_cards(
    config: Config, shape: ModelShape, sequence_length: int, reward_models: int = 0
) -> tuple[CardMemory, ...]:
    """Plan the memory of one worker on each of the GPU_CARDS, smallest first.

    Args:
        sequence_length: longest prompt with its completion, in tokens.
        reward_models: memory of the reward models on the same GPU, in bytes (`reward_model_memory`).
    """
    sizes = {card: int(gib * GIB) for card, gib in GPU_CARDS.items()}
    return tuple(
        CardMemory(
            card=card,
            plan=plan_memory(config, shape, size, sequence_length=sequence_length, reward_models=reward_models),
            recommended_utilization=_recommend_utilization(config, shape, size, sequence_length, reward_models),
        )
        for card, size in sizes.items()
    )


def _recommend_utilization(
    config: Config, shape: ModelShape, gpu_bytes: int, length: int, reward_models: int
) -> float | None:
    """Recommend the engine's fraction beside a learner whose passes are large enough to keep a GPU busy."""
    configured = config.grpo.trl.get("gradient_checkpointing")
    tokens_of_config = configured_tokens(config, length)
    for tokens in [max(BUSY_TOKENS, length), length] if tokens_of_config is None else [tokens_of_config]:
        estimate = estimate_memory(
            config,
            shape,
            sequence_length=length,
            tokens=tokens,
            gradient_checkpointing=True if configured is None else bool(configured),
            reward_models=reward_models,
        )
        if fraction := estimate.gpu_memory_utilization(gpu_bytes):
            return fraction
    return None


def estimate_memory(
    config: Config,
    shape: ModelShape,
    *,
    sequence_length: int,
    tokens: int,
    gradient_checkpointing: bool,
    reward_models: int = 0,
) -> MemoryEstimate:
    """Estimate the memory of one worker of a run; see the module's docstring for the terms.

    Args:
        sequence_length: longest prompt with its completion, in tokens.
        tokens: tokens of one forward and backward pass of the learner, in its own layout.
        gradient_checkpointing: recompute the activations inside each layer.
        reward_models: memory of the reward models on the same GPU, in bytes (`reward_model_memory`).
    """
    trl, workers, number_bytes = config.grpo.trl, config.cluster.max_workers, BYTES_PER_NUMBER[config.dtype]
    adapter, sharded = config.model.adapter, config.cluster.shard_learner
    tensor_parallel = config.tensor_parallel_size
    trained = _trained_parameters(shape, adapter)
    shards = workers if sharded else 1
    completions = config.sizes.completions_per_engine
    # A tensor-parallel engine divides each sequence's cache over its GPUs.
    cache_bytes = 1 if str(config.engine.vllm.get("kv_cache_dtype", "auto")).startswith("fp8") else number_bytes
    kv_cache_per_sequence = 2 * shape.layers * shape.key_value_size * cache_bytes * sequence_length // tensor_parallel
    passes = _Passes(config, shape, trained, tokens, gradient_checkpointing)
    return MemoryEstimate(
        parameters=shape.parameters,
        tokens_per_micro_batch=tokens,
        gradient_checkpointing=gradient_checkpointing,
        weights=_learner_weights(config, shape, trained) // shards,
        reference_model=4 * shape.parameters // shards if trl.get("beta", 0.0) and not adapter else 0,
        optimizer_states=8 * trained // shards,
        gradient_buckets=4 * trained if workers > 1 and not sharded else 0,
        gradients=4 * trained // shards,
        kept_activations=passes.kept,
        working_memory=passes.working,
        weight_sync=_weight_sync(config, shape),
        engine_weights=_engine_weights(config, shape) // tensor_parallel + _adapter_slot(config, shape, trained),
        engine_activations=_engine_activations(config, shape, completions, tensor_parallel),
        cuda_graphs=0 if config.engine.vllm.get("enforce_eager") else CUDA_GRAPHS,
        kv_cache=kv_cache_per_sequence * completions,
        kv_cache_per_sequence=kv_cache_per_sequence,
        context=CONTEXT + (NCCL if workers > 1 else 0),
        reward_models=reward_models,
        before_sharing=number_bytes * shape.parameters + 4 * trained if config.model.share_base else 0,
        sleep_mode=bool(trl.get("vllm_enable_sleep_mode", False)),
        is_dedicated=config.engine.is_dedicated,
    )


def _learner_weights(config: Config, shape: ModelShape, trained: int) -> int:
    """Return the bytes of the learner's weights before they are divided over workers."""
    if not config.model.adapter:
        return 4 * shape.parameters
    if config.model.share_base:
        return 4 * trained
    plain = BYTES_PER_NUMBER[config.dtype] * (shape.parameters - shape.quantized_parameters)
    codes = QUANTIZED_BYTES[config.model.quantization] * shape.quantized_parameters if config.model.quantization else 0
    return plain + int(codes) + 4 * trained


@dataclass(frozen=True)
class _Passes:
    """Memory of the learner's forward and backward pass beyond weights, gradients and optimizer states, in bytes."""

    config: Config
    shape: ModelShape
    trained: int
    """Number of trained parameters."""
    tokens: int
    gradient_checkpointing: bool

    @property
    def _number_bytes(self) -> int:
        return BYTES_PER_NUMBER[self.config.dtype]

    @property
    def _sharded(self) -> bool:
        return self.config.cluster.shard_learner

    @property
    def _sizes(self) -> ActivationSizes:
        if self._number_bytes == 4:
            return FULL
        if self.config.model.adapter:
            return ADAPTER
        return HALF if self._sharded else AUTOCAST

    @property
    def _copies(self) -> int:
        """Copies of all weights of layers in 16 bits that autocast makes in a forward pass."""
        if self._number_bytes == 4 or self._sharded:
            return 0
        weights = self.trained if self.config.model.adapter else self.shape.layer_parameters * self.shape.layers
        return self._number_bytes * weights

    @property
    def _output_gradient(self) -> int:
        """float32 gradient of the output layer's weight; an adapter trains no output layer."""
        return 0 if self.config.model.adapter else 4 * self.shape.vocabulary * self.shape.hidden_size

    @property
    def _one_layer(self) -> int:
        kept, adapter = self._sizes.kept.bytes(self.shape), self.config.model.adapter
        if not adapter:
            return self.tokens * kept
        if adapter["type"] == "LORA":
            return self.tokens * (kept + ADAPTER_RANK * _rank(adapter))
        factor, per_weight = self._adapter_costs
        return int(self.tokens * kept * factor + per_weight * self.shape.layer_parameters)

    @property
    def _adapter_costs(self) -> tuple[float, float]:
        """Row of `ADAPTER_COSTS`; without an adapter and for LoRA, which `ADAPTER` describes, (1, 0)."""
        adapter = self.config.model.adapter
        if not adapter or adapter["type"] == "LORA":
            return 1.0, 0.0
        return ADAPTER_COSTS.get(adapter["type"], OTHER_ADAPTER)

    @property
    def kept(self) -> int:
        """Activations, copies and unsharded weights kept from the forward to the backward pass."""
        stream = self.shape.layers * self.tokens * self._sizes.stream * self.shape.hidden_size
        activations = stream if self.gradient_checkpointing else self.shape.layers * self._one_layer + self._copies
        return activations + self._unsharded_ends

    @property
    def _unsharded_ends(self) -> int:
        """Embedding and output layer of a sharded learner, unsharded for the whole pass."""
        return self._number_bytes * self.shape.embedding_parameters if self._sharded else 0

    @property
    def working(self) -> int:
        """Largest temporary memory beside `kept`."""
        # The optimizer runs after the kept activations have been freed.
        optimizer = 4 * self.trained if self.config.grpo.trl.get("optim") == "adamw_torch" else 0
        return max(self._end_of_forward, self._output_layer, self._one_backward, self._embedding, optimizer - self.kept)

    @property
    def _end_of_forward(self) -> int:
        """Autocast's copies of all layers (with recomputation; otherwise they are in `kept`), and a tile of logits."""
        return (self._copies if self.gradient_checkpointing else 0) + self._tile + self._gathered

    @property
    def _tile(self) -> int:
        """One tile of logits, with 16-bit copies of its columns."""
        columns = min(self.shape.vocabulary, TILE_COLUMNS)
        return self._number_bytes * columns * (min(self.tokens, TILE_TOKENS) + 2 * self.shape.hidden_size)

    @property
    def _output_layer(self) -> int:
        """Backward pass of the output layer, and the hidden states and gradients between it and the last layer."""
        # Bytes: kept by the last norm (8) and for the tokens with a label (4); gradients of these (4) and of all (4).
        return self._output_gradient + self._tile + 20 * self.tokens * self.shape.hidden_size

    @property
    def _gathered(self) -> int:
        """Unsharded layers of a sharded learner: the one computed, the one fetched, and its all-gather buffer."""
        return 3 * self._number_bytes * self.shape.layer_parameters if self._sharded else 0

    @property
    def _one_backward(self) -> int:
        """Backward pass of one layer."""
        recomputed = 0
        if self.gradient_checkpointing:
            recomputed = self._one_layer + self._copies // self.shape.layers
        reduced = (self._number_bytes + 8) * self.shape.layer_parameters if self._sharded else 0
        weight = self.shape.hidden_size * self.shape.intermediate_size
        weight_gradient = (
            0 if self.config.model.adapter or self._number_bytes == 4 else (self._number_bytes + 4) * weight
        )
        gradients = int(self.tokens * self._sizes.backward.bytes(self.shape) * max(1.0, self._adapter_costs[0]))
        others = weight_gradient + self._dequantized + self._gathered + reduced
        return self._output_gradient + recomputed + gradients + others

    @property
    def _dequantized(self) -> int:
        """Largest dequantized weight, as far as it takes more than activations that are gone while it is there."""
        method, intermediate = self.config.model.quantization, self.shape.intermediate_size
        if method is None:
            return 0
        per_weight = self._number_bytes + (method == "int4")  # int4 is dequantized by way of bytes
        gone = 4 * self.tokens * intermediate  # two gradients inside the MLP
        return max(0, per_weight * self.shape.hidden_size * intermediate - gone)

    @property
    def _embedding(self) -> int:
        """Dense gradient of the embedding; if sharded, also the reduction of embedding and output layer gradients."""
        reduced = (self._number_bytes + 4) * self.shape.embedding_parameters if self._sharded else 0
        # The kept activations have been freed by then.
        return 2 * self._output_gradient + reduced - self.kept


def _weight_sync(config: Config, shape: ModelShape) -> int:
    """Return the peak of the temporary copies in a weight sync, in bytes; weights are copied one at a time."""
    largest = shape.hidden_size * max(shape.intermediate_size, shape.query_size)
    merged = 12 * largest if config.model.adapter and config.adapter_sync == "merge" else 0
    if config.model.quantization and merged:  # dequantized, and copied once more
        merged += (BYTES_PER_NUMBER[config.dtype] + 4) * largest
    if not config.cluster.shard_learner:
        return merged
    # The previous weight is still allocated, and rows that do not divide are copied once more without their padding.
    copies = 1 if shape.vocabulary % config.cluster.max_workers == 0 else 2
    return max(merged, 4 * (copies * shape.vocabulary * shape.hidden_size + largest))


def _engine_weights(config: Config, shape: ModelShape) -> int:
    """Return the bytes of the engine's weights, all its GPUs together; int4 is the same format there."""
    number_bytes = BYTES_PER_NUMBER[config.dtype]
    if config.model.quantization != "int4":
        return number_bytes * shape.parameters
    plain = number_bytes * (shape.parameters - shape.quantized_parameters)
    return plain + int(QUANTIZED_BYTES["int4"] * shape.quantized_parameters)


def _adapter_slot(config: Config, shape: ModelShape, trained: int) -> int:
    """Return the engine's memory for an adapter that requests name, in bytes: its matrices, at the rank of a slot."""
    adapter = config.model.adapter
    if not adapter or config.adapter_sync != "request":
        return 0
    slot = next(each for each in REQUEST_RANKS if each >= largest_rank(adapter))
    sizes = trained // _rank(adapter) if shape.adapter_sizes is None else shape.adapter_sizes
    return BYTES_PER_NUMBER[config.dtype] * slot * sizes


def _engine_activations(config: Config, shape: ModelShape, requests: int, tensor_parallel: int) -> int:
    """Return the memory of vLLM's profiling pass in bytes.

    Args:
        requests: maximum number of completions that the engine generates at once.
    """
    tokens = int(config.engine.vllm.get("max_num_batched_tokens") or max(ENGINE_TOKENS, requests))
    layer = _forward_layer(shape, tokens, BYTES_PER_NUMBER[config.dtype], tensor_parallel)
    return layer + BYTES_PER_LOGIT * requests * shape.vocabulary


def _forward_layer(shape: ModelShape, tokens: int, number_bytes: int, parts: int = 1) -> int:
    """Return the activations of one layer in a forward pass without gradients, in bytes.

    Args:
        parts: GPUs that the layer's inner sizes are divided over.
    """
    split = (shape.query_size + 2 * shape.key_value_size + 3 * shape.intermediate_size) // parts
    return tokens * number_bytes * (4 * shape.hidden_size + split)


def reward_model_memory(config: Config) -> int:
    """Return the memory of a run's reward models beside a worker, in bytes; 0 if they are elsewhere, or none.

    Raises:
        ConfigError: the config of a reward model cannot be read.
    """
    if not 0 < config.reward_model_gpus < 1:
        return 0
    number_bytes = BYTES_PER_NUMBER[config.dtype]
    shapes = [reward_model_shape(path, config.model.trust_remote_code) for path in config.rewards.models]
    layer = max(_forward_layer(shape, REWARD_MODEL_TOKENS, number_bytes) for shape in shapes)
    return CONTEXT + layer + sum(number_bytes * shape.parameters for shape in shapes)


def _trained_parameters(shape: ModelShape, adapter: Mapping[str, Any] | None) -> int:
    """Return the number of trained parameters; that of an adapter which was not counted is that of LoRA."""
    if not adapter:
        return shape.parameters
    if shape.adapter_parameters is not None:
        return shape.adapter_parameters
    attention = 2 * (shape.hidden_size + shape.query_size) + 2 * (shape.hidden_size + shape.key_value_size)
    # LoRA on every linear layer of a Llama-like policy: rank x (inputs + outputs) of each layer.
    return _rank(adapter) * shape.layers * (attention + 3 * (shape.hidden_size + shape.intermediate_size))


def _rank(adapter: Mapping[str, Any]) -> int:
    """Return the rank of an adapter; PEFT's default for LoRA if it has none."""
    return int(adapter.get("r") or 8)


def policy_shape(config: Config, path: str) -> ModelShape:
    """Read the config of a run's policy; count its parameters, and those that are trained or quantized.

    Nothing is loaded: the adapter is tried on the policy without its weights.

    Args:
        path: local folder or hub id of the policy.

    Raises:
        ConfigError: the policy's config cannot be read, or is not that of a causal language model; the adapter does not
            fit, or no layer can be quantized.
    """
    from transformers import AutoModelForCausalLM

    trusts = config.model.trust_remote_code
    model_config, model = _model_without_weights(path, AutoModelForCausalLM, trusts, "model.path")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    shape = _shape_of(model_config, model, tied)
    adapter = config.model.adapter
    if adapter is None:
        return shape
    from grpo_ray.models.adapters import adapted_linear_layers, try_adapter
    from grpo_ray.models.quantized import kept_modules, quantizable_layers

    names = quantizable_layers(model, kept_modules(adapter)) if config.model.quantization else []
    shape = replace(shape, quantized_parameters=sum(model.get_submodule(name).weight.numel() for name in names))
    requested = config.adapter_sync == "request"
    shape = replace(shape, adapter_parameters=try_adapter(model, adapter, requested=requested))
    layers = adapted_linear_layers(model)
    if config.model.quantization == "int4":
        _require_int4(shape, sorted(layers.keys() - set(names)))
    return replace(shape, adapter_sizes=sum(layers.values())) if requested else shape


def _require_int4(shape: ModelShape, plain: Sequence[str]) -> None:
    """Require a policy that int4 is for: linear layers in four bits, and the adapter on these. Raises ConfigError.

    Args:
        plain: names of layers with an adapter that stay in 16 bits.
    """
    if plain:
        raise ConfigError(
            f"model.quantization=int4 does not go with an adapter on {plain[0]}, which stays in 16 bits, as its inputs "
            "are no multiple of 64; leave the layer out of target_modules, or set model.quantization=nf4"
        )
    others = shape.parameters - shape.embedding_parameters
    if shape.quantized_parameters < LEAST_QUANTIZED * others:
        raise ConfigError(
            f"model.quantization=int4: only {shape.quantized_parameters / others:.0%} of the policy's weights are in "
            "linear layers that can be quantized, as in a mixture of experts; set model.quantization=null"
        )


def reward_model_shape(path: str, trust_remote_code: bool = False) -> ModelShape:
    """Read a reward model's config and count its parameters, without loading its weights.

    Args:
        path: local folder or hub id.

    Raises:
        ConfigError: the config cannot be read, or transformers has no sequence classifier of this kind.
    """
    from transformers import AutoModelForSequenceClassification

    model_class = AutoModelForSequenceClassification
    config, model = _model_without_weights(path, model_class, trust_remote_code, "rewards.functions")
    return _shape_of(config, model, tied_embeddings=True)  # there is no output embedding


def _model_without_weights(path: str, model_class: Any, trust_remote_code: bool, field: str) -> tuple[Any, Any]:
    """Return a model's config, and the model on torch's meta device."""
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):  # parameters without memory: a 72B model takes a tenth of a second
            return config, model_class.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}={path}: the config cannot be read: {str(error).splitlines()[0]}") from None


def _shape_of(config: Any, model: Any, tied_embeddings: bool) -> ModelShape:
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
        vocabulary=text.vocab_size,
        tied_embeddings=tied_embeddings,
        context_length=text.max_position_embeddings,
    )
