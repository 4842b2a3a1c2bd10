"""Memory of the workers: on GPUs planned before the policy is loaded, measured while it trains, and compared."""

import dataclasses
import platform
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_ray.config.schema import Config
from grpo_ray.device import gpu_bytes
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.models.memory import GIB, MemoryPlan, plan_memory, policy_shape, reward_model_memory

MEASURED_STEP = 2
"""Step of an attempt after which memory is measured first: the optimizer's states exist from the first one on."""


def plan_for_workers(config: Config, model_path: str) -> MemoryPlan | None:
    """Plan the learner's passes for the smallest GPU of all workers; collective. None without GPUs.

    Args:
        model_path: local folder or hub id of the policy.
    """
    if not config.cluster.use_gpu:
        return None
    smallest = min(all_gather_object(gpu_bytes()))
    shape = policy_shape(config, model_path)
    return plan_memory(config, shape, smallest, reward_models=reward_model_memory(config))


def apply_plan(config: Config, plan: MemoryPlan | None) -> Config:
    """Return the config with the plan's choices in the fields that are not set; unchanged without a plan."""
    if plan is None:
        return config
    grpo = dataclasses.replace(
        config.grpo, trl={"gradient_checkpointing": plan.gradient_checkpointing, **config.grpo.trl}
    )
    if config.sizes.chooses_token_limit:
        tokens = max(plan.tokens_per_micro_batch, config.sizes.least_token_limit)
        grpo = dataclasses.replace(grpo, tokens_per_micro_batch=tokens)
    return dataclasses.replace(config, grpo=grpo)


def describe_plan(plan: MemoryPlan) -> str:
    """Describe a plan in one line, with advice if it does not fit."""
    recomputes = "with" if plan.gradient_checkpointing else "without"
    text = (
        f"GPU memory: passes of up to {plan.tokens_per_micro_batch:,} tokens {recomputes} recomputation; estimated use "
        f"{plan.used / GIB:.1f} of {plan.gpu_bytes / GIB:.1f} GiB"
    )
    if plan.fits:
        return text
    if plan.estimate.is_dedicated:
        return (
            f"{text}, which may run out of memory although engine.placement=dedicated leaves the whole GPU to the "
            "learner; set cluster.shard_learner=true with more workers, or model.lora, or use larger GPUs (see "
            "grpo-ray check)"
        )
    return (
        f"{text}, which may run out of memory; lower engine.gpu_memory_utilization={plan.gpu_memory_utilization:g} or "
        "engine.max_model_len, set grpo.vllm_enable_sleep_mode=true, or use larger GPUs (see grpo-ray check)"
    )


def measure_memory(device: torch.device) -> dict[str, float]:
    """Measure this worker's memory so far, in GiB: that of its GPU, or of its process on a CPU.

    Returns:
        On a GPU: `allocated_peak_gib` and `reserved_peak_gib` of torch's allocator since training began, the engine's
        part included; `used_gib` of the whole GPU now, other processes included; `total_gib`. Otherwise
        `resident_peak_gib` of the process. `host_used_share` of the machine's memory now, where it is known.
    """
    share = host_used_share()
    host = {} if share is None else {"host_used_share": round(share, 3)}
    if device.type != "cuda":
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"resident_peak_gib": round(kilobytes / 2**20, 2), **host}
    free, total = torch.cuda.mem_get_info(device)
    measured = {
        "allocated_peak_gib": torch.cuda.max_memory_allocated(device),
        "reserved_peak_gib": torch.cuda.max_memory_reserved(device),
        "used_gib": total - free,
        "total_gib": total,
    }
    return {name: round(size / GIB, 2) for name, size in measured.items()} | host


def host_used_share(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Measure the share of this machine's memory in use, or of this container's limit; None where it is unknown.

    Caches that can be freed do not count.
    """
    try:
        memory = {name: int(size) for name, size, *_ in map(str.split, (proc / "meminfo").read_text().splitlines())}
        total, free = 1024 * memory["MemTotal:"], 1024 * memory["MemAvailable:"]
    except (OSError, ValueError, KeyError):  # not Linux
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())
        freeable = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(freeable["inactive_file"])
    except (OSError, ValueError, KeyError):  # no limit, or the first version of control groups
        return 1 - free / total
    return used / limit if limit < total else 1 - free / total


def describe_device(device: torch.device) -> str:
    """Return the name of this worker's GPU; on a CPU, the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def estimated_memory(plan: MemoryPlan | None) -> dict[str, Any] | None:
    """Return a plan's estimate in GiB, with its passes; None without a plan."""
    if plan is None:
        return None
    estimate = plan.estimate
    return {
        "used_gib": round(plan.used / GIB, 2),
        "learner_gib": round(estimate.learner / GIB, 2),
        "engine_gib": 0.0 if estimate.is_dedicated else round(plan.gpu_memory_utilization * plan.gpu_bytes / GIB, 2),
        "total_gib": round(plan.gpu_bytes / GIB, 2),
        "tokens_per_micro_batch": plan.tokens_per_micro_batch,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "fits": plan.fits,
    }


def describe_use(estimated: Mapping[str, Any], measured: Mapping[str, float]) -> str:
    """Describe in one line the estimated memory beside the measured one; `measured` is that of a GPU."""
    return (
        f"GPU memory: {measured['used_gib']:.1f} of {measured['total_gib']:.1f} GiB used, {estimated['used_gib']:.1f} "
        f"estimated; torch's peak {measured['allocated_peak_gib']:.1f} allocated, "
        f"{measured['reserved_peak_gib']:.1f} reserved"
    )


class MemoryCallback(TrainerCallback):
    """Reporter of the workers' memory, after the first steps of an attempt, at checkpoints and at its end; collective.

    Args:
        plan: plan of the run; None without GPUs.
        record: gets the event's fields, `estimated`, `measured` and `device`, on rank 0.
        notify: shows the user a line, on rank 0.
    """

    def __init__(
        self,
        plan: MemoryPlan | None,
        record: Callable[[dict[str, Any]], None],
        notify: Callable[[str], None],
    ) -> None:
        self.plan, self.record, self.notify = plan, record, notify
        self._steps = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reset the peak statistics, so that they do not include the start of the engine."""
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure after the first steps, and show the comparison where there is one."""
        self._steps += 1
        if self._steps == MEASURED_STEP:
            measured, estimated = self._measure(args.device)
            if is_rank_zero() and estimated is not None and "used_gib" in measured:
                self.notify(describe_use(estimated, measured))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure again: later steps may have had longer completions."""
        self._measure(args.device)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure for the last time, for the summary."""
        self._measure(args.device)

    def _measure(self, device: torch.device) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Record the largest use over all workers beside the estimate, and return both."""
        each = all_gather_object(measure_memory(device))
        names = dict.fromkeys(name for worker in each for name in worker)  # some nodes know less than others
        measured = {name: max(worker[name] for worker in each if name in worker) for name in names}
        estimated = estimated_memory(self.plan)
        if is_rank_zero():
            self.record({"estimated": estimated, "measured": measured, "device": describe_device(device)})
        return measured, estimated
