"""GRPO post-training of a language model on verifiable rewards, on a Ray cluster.

    from grpo_ray import load_config, train

    summary = train(load_config("run.yaml", ["grpo.max_steps=100"]))

The names in `__all__` are the public interface. Each is imported at its first use, so that `import grpo_ray` loads
neither Ray, torch nor vLLM.
"""

import logging
from typing import TYPE_CHECKING

# PEFT imports bitsandbytes wherever it is installed, which on some CPUs warns that a kernel needs another package.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

if TYPE_CHECKING:
    from grpo_ray.config.loader import load_config
    from grpo_ray.config.schema import Config
    from grpo_ray.data.problem import Problem
    from grpo_ray.driver.run import prepare, train
    from grpo_ray.driver.stage_config import load_stages
    from grpo_ray.driver.stage_runs import train_stages
    from grpo_ray.errors import (
        CheckpointError,
        ConfigError,
        ConfinementError,
        DamagedFileError,
        DataError,
        EngineError,
        GrpoRayError,
        HubError,
        LedgerError,
        NonFiniteError,
        RefusedRewardError,
        RepeatedWorkerError,
        RewardError,
        RolloutError,
        SupersededError,
        SyncError,
        TakenRunError,
        ToolError,
        TrainingError,
        VerifierError,
    )
    from grpo_ray.experiments.run import Run
    from grpo_ray.inference.rollout_function import RolloutPolicy
    from grpo_ray.inference.trajectories import EndpointAccess, RolloutRow, Trajectory
    from grpo_ray.rewards.correctness import accuracy_reward
    from grpo_ray.rewards.registry import load_reward

    __version__: str

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "ConfinementError",
    "DamagedFileError",
    "DataError",
    "EndpointAccess",
    "EngineError",
    "GrpoRayError",
    "HubError",
    "LedgerError",
    "NonFiniteError",
    "Problem",
    "RefusedRewardError",
    "RepeatedWorkerError",
    "RewardError",
    "RolloutError",
    "RolloutPolicy",
    "RolloutRow",
    "Run",
    "SupersededError",
    "SyncError",
    "TakenRunError",
    "ToolError",
    "TrainingError",
    "Trajectory",
    "VerifierError",
    "__version__",
    "accuracy_reward",
    "load_config",
    "load_reward",
    "load_stages",
    "prepare",
    "train",
    "train_stages",
]

_MODULES = {
    "Config": "grpo_ray.config.schema",
    "Problem": "grpo_ray.data.problem",
    "EndpointAccess": "grpo_ray.inference.trajectories",
    "RolloutPolicy": "grpo_ray.inference.rollout_function",
    "RolloutRow": "grpo_ray.inference.trajectories",
    "Run": "grpo_ray.experiments.run",
    "Trajectory": "grpo_ray.inference.trajectories",
    "accuracy_reward": "grpo_ray.rewards.correctness",
    "load_config": "grpo_ray.config.loader",
    "load_reward": "grpo_ray.rewards.registry",
    "load_stages": "grpo_ray.driver.stage_config",
    "prepare": "grpo_ray.driver.run",
    "train": "grpo_ray.driver.run",
    "train_stages": "grpo_ray.driver.stage_runs",
}
"""Public name -> module that defines it. The errors, and `__version__`, are not in the table."""


def __getattr__(name: str) -> object:
    """Import a public name at its first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = _version() if name == "__version__" else _import(_MODULES.get(name, "grpo_ray.errors"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import(module: str, name: str) -> object:
    from importlib import import_module

    return getattr(import_module(module), name)


def _version() -> str:
    """Read the version of the installed package.

    A job's working directory brings the code to nodes where the package is not installed; there it is "0+unknown".
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("grpo-ray")
    except PackageNotFoundError:
        return "0+unknown"
