"""Errors that grpo_ray raises on purpose: one small tree, each also a subclass of the standard error it resembles.

Ray passes them between processes, so all of them survive pickling: each takes plain positional arguments.
"""

from grpo_ray.text.redaction import redact


class GrpoRayError(Exception):
    """Root of the tree: `except GrpoRayError` catches every error that grpo_ray raises on purpose, and no other."""

    def __str__(self) -> str:
        return redact(super().__str__())  # messages quote paths and settings


class ConfigError(GrpoRayError, ValueError):
    """Settings contradict each other or the cluster; the message names the fields and the fix."""


class TakenRunError(ConfigError):
    """A run has a driver already; the message names it."""


class DataError(GrpoRayError, ValueError):
    """A row, file or dataset cannot be used; the message names field, file and row."""


class RewardError(GrpoRayError, ValueError):
    """A reward function does not exist, cannot be loaded, or has wrong arguments or too large a state."""


class RefusedRewardError(RewardError):
    """A service refuses all requests of a reward, or they have cost as much as they may; the message names the mend."""


class RolloutError(GrpoRayError, ValueError):
    """A rollout function returned or requested something invalid; the message names the function, row and problem."""


class VerifierError(GrpoRayError, RuntimeError):
    """Verifier processes cannot be started or kept alive. No completion can cause this error, whatever its text."""


class ToolError(GrpoRayError, RuntimeError):
    """Processes of tools and environments cannot be started or kept alive. No tool call can cause this error."""


class ConfinementError(GrpoRayError, RuntimeError):
    """The system cannot confine a process that runs model-written code, or refused a step of the confinement."""


class SyncError(GrpoRayError, RuntimeError):
    """Engine and learner disagree on log-probabilities after a weight sync (proven weight sync): stale weights."""


class EngineError(GrpoRayError, RuntimeError):
    """Dedicated engines cannot be started, or die on the same completions again."""


class CheckpointError(GrpoRayError, OSError):
    """A checkpoint is missing or incomplete."""


class HubError(GrpoRayError, ConnectionError):
    """The Hugging Face hub is unreachable, or a request to it failed; the same command can be repeated."""


class SupersededError(GrpoRayError, RuntimeError):
    """A newer attempt, or another launch of the same run, writes into the run folder now."""


class DamagedFileError(GrpoRayError, ValueError):
    """A small file of a run folder is empty, truncated or malformed; the message names it and the way out."""


class LedgerError(GrpoRayError, RuntimeError):
    """The ledger would count a problem twice, or more problems than the dataset has (exactly-once)."""


class TrainingError(GrpoRayError, RuntimeError):
    """The workers failed permanently; the message quotes the first worker's error and names its log file."""


class RepeatedWorkerError(TrainingError):
    """The same error occurred at the same step twice, so restarting the workers does not help."""


class NonFiniteError(GrpoRayError, ArithmeticError):
    """Loss or gradient was not finite in too many consecutive steps; the message names where the groups are saved."""
