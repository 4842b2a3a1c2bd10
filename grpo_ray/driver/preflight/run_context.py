"""Inputs that every phase of a launch shares."""

from dataclasses import dataclass
from functools import cached_property, partial

from grpo_ray.config.schema import Config
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.data.stream import Split, open_splits
from grpo_ray.models.policy_digest import policy_contents
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.rewards.registry import needs_solutions
from grpo_ray.storage.run_folder import RunFolder


@dataclass(frozen=True)
class RunContext:
    """Inputs that every phase of a launch shares."""

    config: Config
    folder: RunFolder
    progress: ProgressLine
    """Observer of the launch: shows phases and notices to the user."""
    owns_cluster: bool = False
    """True if a cluster is started for this run; False if it uses one that was there before."""

    @cached_property
    def splits(self) -> tuple[dict[str, Split], dict[str, Split]]:
        """Training splits by source, and held-out sets by key, opened on first use.

        Raises DataError if a dataset cannot be opened.
        """
        return open_splits(self.config, partial(needs_solutions, self.config))

    @cached_property
    def policy_contents(self) -> dict[str, str]:
        """Contents of the policy `model.path` (`policy_digest.policy_contents`), read on first use.

        Empty for an embedded policy, which is copied to the run folder. Raises ConfigError if a file cannot be read.
        """
        path = self.config.model.path
        return {} if path in EMBEDDED_POLICIES else policy_contents(path, self.config.run.storage_retry_seconds)
