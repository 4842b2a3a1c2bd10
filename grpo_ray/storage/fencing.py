"""Which attempt may write into a run folder: the last one that took it.

A worker that the cluster has lost may still live behind a cut network, with an upload under way to storage that it
still sees, while another attempt has long taken its place. It must not give its checkpoint a name any more.
"""

import uuid
from dataclasses import dataclass

from grpo_ray.errors import SupersededError
from grpo_ray.storage.run_folder import RunFolder

NAME = "attempt"
"""File of the run folder that holds the token of the attempt that it belongs to."""


@dataclass(frozen=True)
class FencingToken:
    """One attempt's hold on a run folder."""

    folder: RunFolder
    token: str

    @classmethod
    def take(cls, folder: RunFolder) -> "FencingToken":
        """Take the folder from whichever attempt had it; done once for all workers of an attempt."""
        fence = cls(folder, uuid.uuid4().hex)
        folder.write_text(fence.token, NAME)
        return fence

    def check(self) -> None:
        """Raises SupersededError if another attempt has taken the folder."""
        if self.folder.read_text(NAME) != self.token:
            raise SupersededError(
                f"{self.folder.uri}: another attempt, or another launch of the same run, has taken this run's place"
            )
