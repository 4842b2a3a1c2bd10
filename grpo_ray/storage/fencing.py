"""Fencing token: only the attempt that took a run folder last may write into it.

A worker that the cluster has lost may still be alive behind a network partition, with an unfinished upload to storage
that it can still reach, while a new attempt has replaced it. It must not commit its checkpoint any more.
"""

import uuid
from dataclasses import dataclass

from grpo_ray.errors import SupersededError
from grpo_ray.storage.run_folder import RunFolder

NAME = "attempt"
"""File of the run folder that contains the token of the current attempt."""


@dataclass(frozen=True)
class FencingToken:
    """Token of one attempt; all workers of the attempt have the same one."""

    folder: RunFolder
    token: str

    @classmethod
    def take(cls, folder: RunFolder) -> "FencingToken":
        """Take the folder over from the attempt that had it; called once per attempt, by one worker."""
        fence = cls(folder, uuid.uuid4().hex)
        folder.write_text(fence.token, NAME)
        return fence

    def check(self) -> None:
        """Check that this attempt is still the current one.

        Raises:
            SupersededError: another attempt has taken the folder.
        """
        if self.folder.read_text(NAME) != self.token:
            raise SupersededError(
                f"{self.folder.uri}: another attempt, or another launch of the same run, has replaced this attempt"
            )
