"""Record of one group: its rewards, verdicts and lengths, and the texts and tokens of a sampled one."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_ray.storage.records.conversation_columns import ConversationRecord, without_messages
from grpo_ray.storage.records.tokens import LossTokens, Sample, TokenRecord, cut_middle
from grpo_ray.text.truncation import recorded_text

TEXT_BYTES, GROUP_BYTES = 4096, 32768
"""Largest size of one text, and of all completions of a group, in bytes of UTF-8."""


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """Result of one group; tuples have one value per completion, (num_generations,), in the same order."""

    step: int
    """Step that the group was drawn for, from 1."""
    epoch: int
    """Epoch that the group counts for, from 0."""
    problem: str
    """Id of the problem."""
    source: str = ""
    """Source of a mixture that the problem belongs to; "" for a single dataset, whose files have no such column."""
    rewards: tuple[float, ...]
    """Combined reward; NaN where the completion could not be graded."""
    correct: tuple[float, ...] | None
    """Verdict of the correctness reward, 1 or 0; NaN where it is unknown. None if the run has no such reward."""
    lengths: tuple[int, ...]
    """Completion length in tokens."""
    truncated: tuple[bool, ...]
    """True where the completion reached the token limit."""
    trained: bool = True
    """False if the group was discarded (`grpo.dynamic_sampling`) instead of trained on."""
    prompt: str | None = None
    """Text of the chat messages; None if the texts of this group are not kept."""
    completions: tuple[str, ...] | None = None
    """Text of the completions; None if the texts of this group are not kept."""
    sample: Sample | None = None
    """Reason why texts and tokens are kept; None if they are not."""
    advantages: tuple[float, ...] | None = None
    """Advantage of each completion; None if the texts of this group are not kept."""
    tokens: tuple[TokenRecord, ...] | None = None
    """Tokens of each completion; None if they are not kept."""
    conversations: tuple[ConversationRecord, ...] | None = None
    """Turns and calls of each completion, and its messages if texts are kept; None in a run without tools."""


def attach_texts(group: GroupRecord, prompt: Sequence[Mapping[str, str]], completions: Sequence[str]) -> GroupRecord:
    """Return the group with its texts, redacted and truncated to a size that is negligible beside a checkpoint.

    Args:
        group: a group without texts.
        prompt: chat messages.
        completions: (num_generations,), in the order of the rewards.
    """
    limit = min(TEXT_BYTES, GROUP_BYTES // max(1, len(completions)))
    return replace(
        group,
        prompt=recorded_text(prompt_text(prompt), TEXT_BYTES),
        completions=tuple(recorded_text(text, limit) for text in completions),
    )


def prompt_text(prompt: Sequence[Mapping[str, str]]) -> str:
    """Return chat messages as one text; if there are several, each is prefixed with its role."""
    return "\n\n".join(m["content"] if len(prompt) == 1 else f"{m['role']}: {m['content']}" for m in prompt)


def without_texts(group: GroupRecord) -> GroupRecord:
    """Return the group without texts and tokens, which take most of its memory."""
    conversations = without_messages(group.conversations)
    return replace(
        group, prompt=None, completions=None, sample=None, advantages=None, tokens=None, conversations=conversations
    )


def add_loss_tokens(groups: Sequence[GroupRecord], rows: Iterable[LossTokens]) -> list[GroupRecord]:
    """Add to the sampled groups, for each of their tokens, the learner's log-probability and the mask of the loss.

    Args:
        groups: in any order.
        rows: completions as the loss read them, on any worker. If a completion was read several times (`grpo.epochs`),
            the log-probabilities of the first row and the mask of the last one count; rows of other groups are ignored.
    """
    logps: dict[tuple[int, Sample, int], array[float]] = {}
    masks: dict[tuple[int, Sample, int], bytes] = {}
    for row in rows:
        place = (row.step, row.sample, row.index)
        logps.setdefault(place, row.logps)
        if row.masked is not None:
            masks[place] = row.masked

    def joined(group: GroupRecord, index: int, tokens: TokenRecord) -> TokenRecord:
        assert group.sample is not None and group.advantages is not None
        place, tail = (group.step, group.sample, index), len(tokens.ends) - tokens.head
        if place in logps:
            tokens = replace(tokens, learner_logps=cut_middle(logps[place], tokens.head, tail))
        # Without an advantage no token has a gradient, whatever the loss masks.
        if place in masks and group.advantages[index]:
            tokens = replace(tokens, masked=cut_middle(masks[place], tokens.head, tail))
        return tokens

    return [
        group
        if group.tokens is None
        else replace(group, tokens=tuple(joined(group, index, each) for index, each in enumerate(group.tokens)))
        for group in groups
    ]
