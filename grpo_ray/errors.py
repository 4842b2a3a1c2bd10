"""Every error that grpo_ray raises on purpose: one small tree, each also the standard error it resembles.

All of them survive pickling (they cross process borders inside Ray), so each takes plain positional arguments.
"""


class GrpoRayError(Exception):
    """Root of the tree: `except GrpoRayError` catches what is the user's to mend, and nothing else."""


class ConfigError(GrpoRayError, ValueError):
    """A run's settings contradict each other or the cluster; the message names the fields and the mend."""


class DataError(GrpoRayError, ValueError):
    """A row, file or dataset cannot be used; the message names field, file and row."""


class RewardError(GrpoRayError, ValueError):
    """A reward does not exist, cannot be loaded, or is set up wrongly."""


class VerifierError(GrpoRayError, RuntimeError):
    """The verifier processes cannot be started or kept alive. Never raised for what a completion says."""


class SyncError(GrpoRayError, RuntimeError):
    """The engine does not hold the learner's weights (law 4): its log-probabilities disagree with the learner's."""


class CheckpointError(GrpoRayError, OSError):
    """A checkpoint is missing or not whole."""


class SupersededError(GrpoRayError, RuntimeError):
    """Another attempt, or another launch of the same run, writes into the run folder now."""


class LedgerError(GrpoRayError, RuntimeError):
    """The ledger would count a problem twice, or more problems than the dataset holds (law 2)."""


class TrainingError(GrpoRayError, RuntimeError):
    """The workers failed for good; the message says what the first of them said, and where its log lies."""


class RepeatedWorkerError(TrainingError):
    """The same error came at the same step a second time: starting the workers again does not help."""


class NonFiniteError(GrpoRayError, ArithmeticError):
    """Loss or gradient was not a finite number too many steps in a row; the message says where the groups lie."""
