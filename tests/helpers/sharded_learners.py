"""Functions that tests run on each worker of a group whose learner is sharded; see `worker_group.py`."""

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

STEPS = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "ignore_data_skip": True, "optim": "adamw_torch",
    "learning_rate": 1e-2, "lr_scheduler_type": "linear", "weight_decay": 0.1, "max_grad_norm": 1.0,
}  # fmt: skip
"""Settings of a run of four steps with checkpoints after the second and the fourth."""


def train_sharded(
    rank: int, folder: str, resume: str | None = None, *, policy: str | None = None, shard: bool = True, **settings: Any
) -> dict[str, Any]:
    """Train on the stream of `problem_stream.py`, each step in two micro-batches; checkpoints go to `folder/<rank>`.

    Args:
        resume: checkpoint to continue from, after its number of steps.
        policy: folder of the policy; None: one in float64.
        shard: False: every worker has a whole learner.

    Returns:
        The whole weights at the end (on rank 0), for each micro-batch the shares of the gradients that this worker held
        after it with the kinds of their tensors, and the number of modules of the reference that are gathered alone.
    """
    import torch
    from problem_stream import STREAM, StreamLearner, train_on_stream
    from stock_trl import GROUP, exact_llama
    from torch.distributed.fsdp import FSDPModule

    from grpo_ray.learner.sharding import gather_weights, trained_weights
    from grpo_ray.learner.sharding_settings import sharding_arguments

    workers = int(os.environ["WORLD_SIZE"])
    held: list[tuple[set[str], float]] = []

    class ShardedLearner(StreamLearner):
        overrides = (f"cluster.shard_learner={str(shard).lower()}", f"cluster.num_workers={workers}")

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            held.append(held_gradients(self.model))
            # As the proof of a round does with `rollout.max_staleness`: a pass without gradient before the optimizer.
            tokens = torch.tensor([[2, 3, 4]])
            row = {"ids": tokens, "mask": torch.ones_like(tokens)}
            self.logps({f"{part}_{name}": each for part in ("prompt", "completion") for name, each in row.items()})
            return loss

    first = 4 * int(resume.rpartition("-")[2]) if resume else 0
    _, trainer = train_on_stream(
        ShardedLearner, Path(folder, str(rank)), range(len(STREAM))[first:], resume=Path(resume) if resume else None,
        per_device_train_batch_size=4 * GROUP // workers // 2, ddp_backend="gloo",
        make_model=(lambda: policy) if policy else exact_llama,
        **(STEPS | (sharding_arguments({}) if shard else {}) | settings),
    )  # fmt: skip
    weights = gather_weights(trained_weights(trainer.accelerator.unwrap_model(trainer.model)), keep=rank == 0)
    modules = trainer.ref_model.modules() if trainer.ref_model else ()
    return {
        "weights": {name: weight.numpy() for name, weight in weights.items()},
        "held": held,
        "reference": sum(isinstance(module, FSDPModule) for module in modules),
    }


def train_adapters(rank: int, folder: str, names: Sequence[str], shard: bool) -> dict[str, Any]:
    """Train an adapter of each type for four steps, with checkpoints in `folder/<name>/<rank>`.

    Returns:
        By type the merged weights at the end, gathered (on rank 0), and the largest difference between these and the
        whole weights of which the proof of the sync reads this worker's parts.
    """
    from adapters import narrow_llama
    from problem_stream import STREAM, StreamLearner, train_on_stream
    from stock_trl import GROUP
    from torch.distributed.tensor import DTensor

    from grpo_ray.inference.weight_proof import learner_weights
    from grpo_ray.learner.sharding_settings import sharding_arguments
    from grpo_ray.models.adapters import merged_weights

    workers = int(os.environ["WORLD_SIZE"])

    class AdapterLearner(StreamLearner):
        overrides = (
            f"cluster.shard_learner={str(shard).lower()}", f"cluster.num_workers={workers}", "model.peft={type: LORA}",
        )  # fmt: skip

    found = {}
    for name in names:
        _, trainer = train_on_stream(
            AdapterLearner, Path(folder, name, str(rank)), range(len(STREAM)), ddp_backend="gloo",
            per_device_train_batch_size=4 * GROUP // workers // 2, make_model=partial(narrow_llama, name),
            **(STEPS | (sharding_arguments({}) if shard else {})),
        )  # fmt: skip
        model = trainer.accelerator.unwrap_model(trainer.model)
        merged = {each: weight.clone() for each, weight in merged_weights(model)}
        wrong = 0.0
        for each, weight in learner_weights(model):
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            wrong = max(wrong, float((whole - merged[each]).abs().max()))
        found[name] = {"merged": {each: weight.numpy() for each, weight in merged.items()}, "wrong": wrong}
    return found


def compare_wide_lora(rank: int) -> float:
    """Return the largest difference of the weights that are sent and those that the proof reads, of a sharded policy.

    Its layers are so wide that a product of shards is a sum over the workers.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM, Qwen2Config

    from grpo_ray.inference.weight_proof import learner_weights
    from grpo_ray.models.adapters import merged_weights

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=896, intermediate_size=1792, num_hidden_layers=1, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), LoraConfig(r=64, target_modules="all-linear")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    fully_shard(model, mesh=init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)))
    sent = {name: weight.clone() for name, weight in merged_weights(model)}
    worst = 0.0
    for name, weight in learner_weights(model):
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        worst = max(worst, float((whole - sent.pop(name)).abs().max()))
    assert not sent
    return worst


def held_gradients(model: Any) -> tuple[set[str], float]:
    """Return the kinds of a model's gradients, and the share of their numbers that this worker holds."""
    from torch.distributed.tensor import DTensor

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    share = sum(each.numel() for each in local) / sum(parameter.numel() for parameter in model.parameters())
    # FSDP2 keeps gradients that it has not reduced yet in a place of its own.
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    groups = [group for state in states for group in state._fsdp_param_groups]
    unreduced = [p for g in groups for p in g.fsdp_params if p.unsharded_accumulated_grad is not None]
    return {type(each).__name__ for each in gradients} | {"unreduced" for _ in unreduced}, share


def join_checkpoint(folder: Path, workers: int, step: int) -> Path:
    """Copy the files of all workers into one folder, as the upload does; no two workers may write the same file."""
    joined = folder / f"checkpoint-{step}"
    for file in files_of(folder, workers, step):
        target = joined / file.relative_to(folder).relative_to(f"{file.relative_to(folder).parts[0]}/checkpoint-{step}")
        assert not target.exists(), target
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return joined


def files_of(folder: Path, workers: int, step: int) -> Iterator[Path]:
    """Yield the files of a checkpoint that the workers have written."""
    for rank in range(workers):
        yield from (path for path in (folder / str(rank) / f"checkpoint-{step}").rglob("*") if path.is_file())


def load_and_compute(rank: int, policy: str, dtype: str) -> dict[str, Any]:
    """Load a policy as a sharded learner does, shard it, and take a forward and a backward pass with checkpointing.

    Returns:
        The sum of the absolute weights after loading (on rank 0) and of this worker's part after sharding, the memory
        that loading took in bytes, the precisions of each sharded module, of log-probabilities and of gradients, the
        gradients of rank 0, and the number of collective calls.
    """
    import torch
    from accelerate import Accelerator
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor.debug import CommDebugMode
    from trl.trainer.utils import add_fused_lm_head

    from grpo_ray.config.loader import load_config
    from grpo_ray.learner.sharding import load_everywhere, load_policy
    from grpo_ray.learner.trl_config import trl_arguments
    from grpo_ray.learner.trl_internals import shard_without_gpus

    config = load_config(
        None, ["cluster.shard_learner=true", f"model.dtype={dtype}", "grpo.gradient_checkpointing=true"]
    )
    torch.distributed.init_process_group("gloo")
    args = trl_arguments(config, "unused")
    before = resident_memory()
    model = load_policy(policy, args)
    taken = resident_memory() - before
    loaded = sum(weight.abs().sum().item() for weight in model.parameters()) if rank == 0 else 0.0
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if dtype == "bfloat16" else "no")
    shard_without_gpus(accelerator, args.fsdp_plugin_args)
    load_everywhere()
    model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    model.train()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    sharded = sum(weight.to_local().abs().sum().item() for weight in model.parameters())
    tokens = torch.arange(3, 19)[None]
    with CommDebugMode() as calls:
        scores = model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs
        scores.sum().backward()
    policies = [module._get_fsdp_state()._mp_policy for module in model.modules() if isinstance(module, FSDPModule)]
    return {
        "loaded": loaded,
        "taken": taken,
        "sharded": sharded,
        "precisions": {(str(p.param_dtype), str(p.reduce_dtype), str(p.output_dtype)) for p in policies},
        "modules": len(policies),
        "scores": str(scores.dtype),
        "weights": {str(weight.dtype) for weight in model.parameters()},
        "gradients": {str(weight.grad.dtype) for weight in model.parameters()},
        "calls": {str(name): count for name, count in calls.get_comm_counts().items()},
        "gradient": [weight.grad.full_tensor().numpy() for weight in model.parameters()][: None if rank == 0 else 0],
    }


def resident_memory() -> int:
    """Return this process's memory that is not a file's, bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10
