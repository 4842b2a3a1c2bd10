"""The torch device that workers compute on: the one place where a GPU can be replaced by the CPU.

With the environment variable `GRPO_RAY_LOGICAL_GPUS=N` a run with `cluster.use_gpu=true` reserves GPUs in Ray but
computes on the CPU. Ray only counts GPUs, so resources, placement, preflight, evaluation tasks and elastic worker
counts can be tested on a machine without one. The variable is for tests and development, with the CPU build of vLLM.

Code that reserves resources reads `cluster.use_gpu`; code that depends on the hardware calls `compute_device`.
"""

import os
from typing import Literal

from grpo_ray.errors import ConfigError

LOGICAL_GPUS = "GRPO_RAY_LOGICAL_GPUS"
"""Environment variable with the number of GPUs that an embedded cluster declares; a joined cluster declares its own."""
LOGICAL_GPU_BYTES = 80 << 30
"""Memory that a logical GPU is assumed to have, bytes."""
ACCELERATE_DEVICE = "ACCELERATE_TORCH_DEVICE"
"""Environment variable with the device of `accelerate.Accelerator`; Ray Train sets it in every worker."""


def compute_device(use_gpu: bool) -> Literal["cuda", "cpu"]:
    """Return the type of the torch device that learner and engine compute on.

    Args:
        use_gpu: `cluster.use_gpu`.

    Raises:
        ConfigError: `GRPO_RAY_LOGICAL_GPUS` is not a whole number above 0.
    """
    return "cuda" if use_gpu and logical_gpus() is None else "cpu"


def gpu_bytes() -> int:
    """Return the memory of this worker's GPU in bytes; `LOGICAL_GPU_BYTES` for a logical GPU."""
    if logical_gpus() is not None:
        return LOGICAL_GPU_BYTES
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def select_device(use_gpu: bool) -> None:
    """Make accelerate compute on `compute_device` in this worker. Call it before accelerate is imported.

    Ray Train selects the reserved GPU for accelerate without checking that it exists; a logical GPU does not.
    """
    if compute_device(use_gpu) == "cpu":
        os.environ[ACCELERATE_DEVICE] = "cpu"


def logical_gpus() -> int | None:
    """Return the value of `GRPO_RAY_LOGICAL_GPUS`; None if it is unset or empty, so that real GPUs are used.

    Raises:
        ConfigError: `GRPO_RAY_LOGICAL_GPUS` is not a whole number above 0.
    """
    text = os.environ.get(LOGICAL_GPUS)
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ConfigError(
            f"environment variable {LOGICAL_GPUS}={text!r} must be a whole number above 0, such as 2; unset it to "
            "compute on real GPUs"
        )
    return int(text)


def device_environment(use_gpu: bool) -> dict[str, str]:
    """Return the environment variables that make another process of the run compute on the same device.

    Args:
        use_gpu: `cluster.use_gpu`.
    """
    count = logical_gpus()
    return {LOGICAL_GPUS: str(count)} if use_gpu and count else {}
