"""Schedule of bounded staleness (`rollout.max_staleness`): which tokens are sampled with which weights.

Version t of the weights is that after t optimizer steps. The learner trains batch t in step t, with version t. While it
does, round t samples with version t:

- it begins batch t + k, where k is the maximum staleness,
- and continues the unfinished completions of batches t + 1 to t + k - 1.

A completion gets at most ceil(L / k) tokens in a round, where L is the longest completion. After k rounds its batch is
complete, and its oldest tokens are k versions old. Nothing is dropped, and no clock takes part.

A completion with tools gets turns in place of tokens, at most an equal part of those that are left to it.

At the start of a run, batch s is sampled with the weights that train it, and batches s + 1 to s + k all begin in round
s. Batch s + j then has j rounds, with ceil(L / j) tokens in each.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessSchedule:
    """Rules for the rounds of a run. Batches, rounds and versions count from 0."""

    max_staleness: int
    """Largest number of versions by which a token may be older than the weights that are trained on it; at least 1."""
    longest: int
    """Longest completion, tokens."""
    max_steps: int
    """Steps of the run; later batches are not begun."""

    def batches(self, version: int) -> range:
        """Return the batches of which a round samples tokens, the oldest first."""
        return range(version + 1, min(version + self.max_staleness + 1, self.max_steps))

    def token_limit(self, batch: int, began: int, sampled: int) -> int:
        """Return the largest number of tokens that a completion gets in its next round.

        Args:
            batch: batch of the completion.
            began: version of its first token; the batch itself if it is sampled with the weights that train it.
            sampled: number of its tokens so far.
        """
        rounds = max(1, batch - began)
        return min(-(-self.longest // rounds), self.longest - sampled)

    def turn_limit(self, batch: int, version: int, turns: int, max_turns: int) -> int:
        """Return the largest number of turns that a completion with tools has after a round.

        The turns that it may still take are divided equally among the rounds that are left; a turn is not divided.

        Args:
            batch: batch of the completion.
            version: version of the round; the batch itself if the step waits for the completion.
            turns: number of its turns so far.
            max_turns: `rollout.max_turns`.
        """
        rounds = max(1, batch - version)
        return turns - (turns - max_turns) // rounds
