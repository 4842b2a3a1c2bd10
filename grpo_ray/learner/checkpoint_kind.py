"""Kind of weights and of optimizer state of a checkpoint: recorded when it is saved, checked when it is loaded."""

from pathlib import Path

from grpo_ray.config.schema import Config
from grpo_ray.errors import CheckpointError
from grpo_ray.models.adapter_folders import has_adapter, record_base_policy
from grpo_ray.models.quantized import Quantization, read_quantization, record_quantization
from grpo_ray.models.shards import has_shards


def record_checkpoint_kind(folder: Path, config: Config) -> None:
    """Record the base of an adapter: `model.path`, not the path of this worker's copy, and its number format."""
    if config.model.adapter:
        record_base_policy(folder, config)
        record_quantization(folder, Quantization.of(config))


def check_checkpoint_kind(checkpoint: str, config: Config) -> None:
    """Raise CheckpointError if a checkpoint was written with another adapter, base or `cluster.shard_learner`."""
    is_adapter = has_adapter(checkpoint)
    if is_adapter != (config.model.adapter is not None):
        content = "an adapter" if is_adapter else "a whole policy"
        raise CheckpointError(
            f"the checkpoint holds {content}, which does not match model.lora or model.peft; to begin with another "
            "kind, export the checkpoint (grpo-ray export) and name the folder as model.path"
        )
    base = read_quantization(checkpoint)
    if is_adapter and base != Quantization.of(config):
        raise CheckpointError(
            f"the checkpoint's adapter belongs to {Quantization.describe(base)}, and the config names "
            f"{Quantization.describe(Quantization.of(config))}; set model.quantization and model.dtype as they were"
        )
    was_sharded = has_shards(checkpoint)
    if was_sharded != config.cluster.shard_learner:
        raise CheckpointError(
            f"the checkpoint was written with cluster.shard_learner={str(was_sharded).lower()}, and its optimizer "
            "state can only be loaded with the same setting; set it as it was"
        )
