"""Private parts of TRL, transformers, accelerate and torch that training relies on, each with its reason.

`PRIVATE_ATTRIBUTES` lists those of the trainer that `learner.py` reads or sets on itself; a unit test compares the list
with the source, and `tests/integration/learner/test_learner.py` checks that TRL still has them. The functions below
are the only other places of `learner/` that touch a library's private names.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trl.trainer.utils
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import fsdp2_prepare_model
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.utils.loading_report import LoadStateDictInfo

from grpo_ray.inference.trl_without_trackers import grpo_trainer
from grpo_ray.inference.vllm_internals import MaskReader
from grpo_ray.learner.masked_output_layer import MaskedOutputLayer

PRIVATE_ATTRIBUTES = {
    "_entropy_bonus_enabled": "an entropy bonus gives every row a gradient, so rows cannot be left out",
    "_last_world_entropy": "mean entropy of the step before, which decides whether the adaptive entropy bonus is on",
    "_metrics": "metrics of the step, which TRL averages and logs; it has no public way to add a mean over workers",
    "_step": "number of micro-batches so far; gives the position inside of the generation batch",
}
"""Private attribute of the trainer -> why it is needed. Methods that are overridden are listed in `learner.py`."""

DropoutLayer = _DropoutNd
"""Base class of torch's dropout layers; torch has no public one."""

Metrics = defaultdict[str, list[float]]
"""TRL's `_metrics["train"]`: the values of a metric since the last log."""


def append_metrics(metrics: Metrics, values: Mapping[str, float]) -> None:
    """Add a value to each of several metrics."""
    for name, value in values.items():
        metrics[name].append(value)


def attention_of(model: Any) -> str:
    """Return the name of a model's attention implementation; transformers has no public getter for it."""
    return str(getattr(model.config.get_text_config(), "_attn_implementation", ""))


def has_attention_interface(model: Any) -> bool:
    """Return True if transformers marks a model as calling its attention through `AttentionInterface`."""
    return bool(getattr(model, "_supports_attention_backend", False))


def has_flash_support(model: Any) -> bool:
    """Return True if transformers marks a model as supporting the package flash-attn."""
    return bool(getattr(model, "_supports_flash_attn", False))


def is_recurrent(model: Any) -> bool:
    """Return True if transformers marks a model as having a recurrent state, which padding would change."""
    return bool(getattr(model, "_is_stateful", False))


def shard_without_gpus(accelerator: Accelerator, plugin_args: Mapping[str, Any]) -> None:
    """Switch an accelerator to FSDP.

    accelerate ignores FSDP settings without a GPU, although torch supports it there. The kind of distribution is kept
    in `PartialState`'s shared dictionary and has no setter.
    """
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin_args)
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


@contextmanager
def loading_structure_only() -> Iterator[None]:
    """Make transformers build models as usual, but neither read nor allocate their weights (device "meta").

    Its own option for FSDP (`FSDP_CPU_RAM_EFFICIENT_LOADING`) reads all weights in every worker, and then replaces them
    by zeros of the same size.
    """
    original = PreTrainedModel._load_pretrained_model

    def load_nothing(model: PreTrainedModel, *args: Any, **kwargs: Any) -> tuple[LoadStateDictInfo, None]:
        tied = set(model.all_tied_weights_keys)  # as for a checkpoint that has all weights but the tied ones
        return LoadStateDictInfo(tied, set(), set(), [], {}, set()), None

    PreTrainedModel._load_pretrained_model = staticmethod(load_nothing)
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = original


@contextmanager
def sharding_reference_by_layer(enabled: bool) -> Iterator[None]:
    """Make TRL shard a reference model as accelerate shards the policy: each layer on its own.

    TRL would shard it as one unit, whose forward pass gathers all weights on every worker at once.
    """
    original = grpo_trainer.prepare_fsdp
    if enabled:
        grpo_trainer.prepare_fsdp = lambda model, accelerator: fsdp2_prepare_model(accelerator, model).eval()
    try:
        yield
    finally:
        grpo_trainer.prepare_fsdp = original


@contextmanager
def scoring_allowed_tokens(reader: MaskReader | None) -> Iterator[None]:
    """Make TRL's output layer compute probabilities among the allowed tokens of each position; None: among all tokens.

    TRL's layer has no masks: its probabilities are among all tokens, and the engine samples among the allowed ones.

    Args:
        reader: masks of all positions that the passes in this context score, in their order.
    """
    if reader is None:
        yield
        return
    original = trl.trainer.utils._ChunkedLogProbFunction
    trl.trainer.utils._ChunkedLogProbFunction = MaskedOutputLayer(reader.take)
    try:
        yield
    finally:
        trl.trainer.utils._ChunkedLogProbFunction = original
    assert reader.left == 0, f"{reader.left} tokens with masks have not been scored"


@contextmanager
def scoring_labels_only(enabled: bool) -> Iterator[None]:
    """Make TRL's output layer compute only the positions that have a label on the CPU too.

    TRL does so only on devices with Triton, since changing shapes would cause recompilation on others. torch on the CPU
    compiles nothing, so skipping positions saves work there too. TRL has no setting for it.
    """
    original = trl.trainer.utils._use_triton
    if enabled:
        trl.trainer.utils._use_triton = lambda device: device.type == "cpu" or original(device)
    try:
        yield
    finally:
        trl.trainer.utils._use_triton = original
