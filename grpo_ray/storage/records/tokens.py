"""Records of the tokens of sampled completions, bounded in size."""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

COMPLETION_TOKENS, GROUP_TOKENS = 256, 2048
"""Most tokens recorded of one completion, and of all completions of a group."""
Sample = Literal["first", "signal"]
"""Reason why the texts and tokens of a group are recorded; see the docstring of `rollout_files`."""
B = TypeVar("B", bytes, "array[float]")


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """Recorded tokens of one completion, K in all: every token, or only the first and the last ones of a long one."""

    text: bytes
    """Text of the K tokens in UTF-8. Without a gap it is the completion's text, without special tokens such as its end.
    """
    ends: "array[int]"
    """(K,) int32, end of each token in `text`, bytes. Where several tokens share one character, all but the last end
    where the character begins. Special tokens are empty."""
    head: int
    """Number of tokens before the gap. The gap has the completion's length minus K tokens; it is usually empty."""
    engine_logps: "array[float]"
    """(K,) float32, log-probabilities that the tokens were sampled with, nats; NaN where the engine returned none."""
    learner_logps: "array[float] | None" = None
    """(K,) float32, the learner's under the weights that generated the completion, nats. None if the learner did not
    read the completion, for example because it has no advantage."""
    masked: bytes
    """(K,) 1 for a token without gradient though the completion has an advantage: excluded by a mask of the loss, or
    clipped."""
    results: bytes | None = None
    """(K,) 1 for a token of a tool's result, which the policy did not generate; None in a run without tools."""

    @property
    def texts(self) -> list[str]:
        """Text of each token, (K,)."""
        return [self.text[start:end].decode() for start, end in pairwise((0, *self.ends))]


@dataclass(frozen=True)
class LossTokens:
    """Tokens of a sampled completion as the loss read them, with the gap of `keep_ends`."""

    step: int
    """Step that the group was drawn for."""
    sample: Sample
    """Sample of that step that the completion belongs to."""
    index: int
    """Index of the completion in its group."""
    logps: "array[float]"
    """(K,) float32, the learner's log-probabilities, nats."""
    masked: bytes | None
    """(K,) 1 for a token without gradient; None if the completion was read outside of the loss."""


def keep_ends(count: int, completions: int) -> tuple[int, int]:
    """Return how many of a completion's first and last tokens are recorded.

    Args:
        count: tokens of the completion.
        completions: completions of its group.
    """
    limit = min(COMPLETION_TOKENS, max(2, GROUP_TOKENS // max(1, completions)))
    if count <= limit:
        return count, 0
    return limit - limit // 3, limit // 3


def cut_middle(values: B, head: int, tail: int) -> B:
    """Return the first `head` and the last `tail` values."""
    if head + tail >= len(values):
        return values
    return values[:head] + values[len(values) - tail :]


def bound_text(tokens: TokenRecord, limit: int) -> TokenRecord:
    """Leave out tokens next to the gap until the text has at most `limit` bytes: a vocabulary may have long tokens."""
    if len(tokens.text) <= limit:
        return tokens
    sizes = token_sizes(tokens)
    has_gap = tokens.head < len(sizes)
    head = min(tokens.head, _count_fitting(sizes, limit - limit // 3))
    tail = min(len(sizes) - (tokens.head if has_gap else head), _count_fitting(sizes[::-1], limit // 3))
    kept = np.concatenate([sizes[:head], sizes[len(sizes) - tail :]])
    first, last = int(sizes[:head].sum()), int(sizes[len(sizes) - tail :].sum())
    return replace(
        tokens,
        text=tokens.text[:first] + tokens.text[len(tokens.text) - last :],
        ends=array("i", np.cumsum(kept).astype(np.int32).tobytes()),
        head=head,
        engine_logps=cut_middle(tokens.engine_logps, head, tail),
        learner_logps=None if tokens.learner_logps is None else cut_middle(tokens.learner_logps, head, tail),
        masked=cut_middle(tokens.masked, head, tail),
        results=None if tokens.results is None else cut_middle(tokens.results, head, tail),
    )


def without_token_texts(tokens: TokenRecord) -> TokenRecord:
    """Return the tokens with empty texts: those of a completion with a secret, which may span several tokens."""
    return replace(tokens, text=b"", ends=array("i", bytes(4 * len(tokens.ends))))


def token_sizes(tokens: TokenRecord) -> NDArray[np.int32]:
    """Return the bytes of each token's text, (K,)."""
    return np.diff(np.frombuffer(tokens.ends, np.int32), prepend=np.int32(0))


def _count_fitting(sizes: NDArray[np.int32], limit: int) -> int:
    """Return the number of first sizes that add up to at most `limit`."""
    return int(np.searchsorted(np.cumsum(sizes), limit, side="right"))


def importance_ratios(tokens: Mapping[str, Any]) -> list[float | None]:
    """Return exp(learner - engine) of each token, (K,), for an entry of the column `tokens`.

    None where one of the two log-probabilities is unknown. A ratio of 1 means that both computed the same.
    """
    learner, engine = tokens["learner_logps"], tokens["engine_logps"]
    if learner is None:
        return [None] * len(engine)
    # A file may be damaged or hostile: exp overflows for a gap beyond 700.
    gaps = [
        math.nan if ours is None or theirs is None else ours - theirs
        for ours, theirs in zip(learner, engine, strict=False)
    ]
    return [math.exp(min(gap, 700.0)) if math.isfinite(gap) else None for gap in gaps]
