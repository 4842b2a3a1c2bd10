"""Interface between the schedule of bounded staleness and the completions of a round.

A round adds tokens to open batches: rows of later steps with their completions so far. A completion of one turn grows
by segments (`segment_rounds.py`), one with tools by whole turns (`conversation_rounds.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_ray.config.schema import Config
from grpo_ray.learner.rollouts.rollout import Completions, Rows
from grpo_ray.learner.rollouts.sync_probe import Segment
from grpo_ray.storage.records.open_rollouts import OpenRollout


@dataclass(frozen=True)
class OpenBatch:
    """One worker's rows of a step's batch, with their completions so far. B rows."""

    step: int
    """Number of optimizer steps before the one that trains on it."""
    rows: Rows
    """(B,)"""
    prompt_ids: list[list[int]]
    """(B, P_b)"""
    rollouts: list[OpenRollout]
    """(B,)"""


@dataclass(frozen=True)
class RoundRequest:
    """Unfinished completion to which a round adds tokens."""

    row: dict[str, Any]
    prompt_ids: list[int]
    """(P,)"""
    rollout: OpenRollout
    limit: int
    """Largest number of its tokens in this round, or largest number of its turns after this round."""


class Rounds(Protocol):
    """Kind of completions that rounds sample. `run` may be called in a thread, the other methods between rounds."""

    @property
    def config(self) -> Config: ...

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that open rollouts depend on, in JSON types; with others, they are discarded."""

    def render(self, rows: Rows) -> list[list[int]]:
        """Return the token ids of the rows' prompts, (B, P_b)."""

    def limit(self, rollout: OpenRollout, batch: int, version: int) -> int:
        """Return the limit of a completion's request.

        Args:
            batch: step of its batch.
            version: number of optimizer steps taken; equal to `batch` if the step waits for the completion.
        """

    def run(self, requests: Sequence[RoundRequest]) -> Sequence[Any]:
        """Sample a round; collective among the workers that share engines. Returns the results for `add`."""

    def add(self, requests: Sequence[RoundRequest], results: Sequence[Any], version: int) -> list[Segment]:
        """Add the tokens of a round to its completions, and return those to be proven."""

    def completions(self, batch: OpenBatch, *, is_on_policy: bool) -> Completions:
        """Return the finished completions of a batch; collective."""


def age_of(rollout: OpenRollout, version: int) -> int:
    """Return the number of versions since a completion's first token; 0 without tokens."""
    return version - rollout.began if rollout.runs else 0
