"""Records of a step's groups, for the ledger and `rollouts/`, and for the study of groups with non-finite numbers."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from grpo_ray.data.problem import SOURCE
from grpo_ray.learner.advantages import combine_rewards
from grpo_ray.learner.batch import loss_mask
from grpo_ray.learner.rollouts.recorded_samples import SAMPLES, marked_rows, round_logps
from grpo_ray.learner.rollouts.rollout import Rollout
from grpo_ray.models.tokenizer import token_texts
from grpo_ray.rewards.completions import transcript
from grpo_ray.storage.records.groups import GROUP_BYTES, TEXT_BYTES, GroupRecord, attach_texts
from grpo_ray.storage.records.tokens import TokenRecord, bound_text, cut_middle, keep_ends, without_token_texts
from grpo_ray.text.redaction import redact_record
from grpo_ray.tools.conversation import Conversation
from grpo_ray.tools.conversation_record import record_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CONTEXT_TOKENS = 8
"""Tokens decoded before the recorded end of a long completion, since a character of that end may begin in them."""


def find_truncated(
    completions: Sequence[Sequence[int]],
    end_tokens: Collection[int],
    conversations: Sequence[Conversation] | None = None,
) -> list[bool]:
    """Return, for each completion, True if it was cut off at the maximum length and so has no end token.

    Args:
        conversations: (N,) conversations of the completions. Those of a rollout function have their own flag: they may
            end with a stop string or a message instead of an end token.
    """
    truncated = [not ids or ids[-1] not in end_tokens for ids in completions]
    reported = [each.truncated for each in conversations or ()] or [None] * len(truncated)
    return [own if other is None else other for own, other in zip(truncated, reported, strict=True)]


@dataclass(frozen=True)
class GroupRecorder:
    """Converter of one worker's scored completions to group records."""

    num_generations: int
    reward_names: Sequence[str]
    """(R,), name of each reward function."""
    reward_weights: torch.Tensor
    """(R,)"""
    tokenizer: "PreTrainedTokenizerBase"
    end_tokens: Collection[int]
    """Token ids with which a completion can end."""

    def records(self, rollout: Rollout, step: int) -> list[GroupRecord]:
        """Return a record for each group of `rollout`, in order; samples (`SAMPLES`) with texts and tokens.

        Args:
            step: the step that the groups were drawn for, from 1.
        """
        rows, token_ids = rollout.rows, rollout.token_ids
        rewards = combine_rewards(rollout.rewards, self.reward_weights)
        correct = None
        if "correctness" in self.reward_names:
            correct = rollout.rewards[:, self.reward_names.index("correctness")].tolist()
        truncated = find_truncated(token_ids, self.end_tokens)
        conversations = None
        if rollout.conversations is not None:  # a turn may be complete, but its results too long for another one
            truncated = [each.ended == "length" for each in rollout.conversations]
            conversations = [record_conversation(each, None) for each in rollout.conversations]
        groups = []
        for first in range(0, len(rows), self.num_generations):
            group = slice(first, first + self.num_generations)
            groups.append(
                GroupRecord(
                    step=step,
                    epoch=rows[first]["epoch"],
                    problem=rows[first]["id"],
                    source=rows[first].get(SOURCE, ""),
                    rewards=tuple(rewards[group].tolist()),
                    correct=tuple(correct[group]) if correct is not None else None,
                    lengths=tuple(len(ids) for ids in token_ids[group]),
                    truncated=tuple(truncated[group]),
                    conversations=tuple(conversations[group]) if conversations is not None else None,
                )
            )
        for place, mark in marked_rows(rollout.batch):
            number, index = divmod(mark, self.num_generations)
            if index == 0:
                first = place // self.num_generations
                groups[first] = self._sample(groups[first], rollout, place, number)
        return groups

    def _sample(self, group: GroupRecord, rollout: Rollout, first: int, number: int) -> GroupRecord:
        """Return a group with its texts and tokens.

        Args:
            first: the group's first row.
            number: the sample's number in `SAMPLES`.
        """
        part = slice(first, first + self.num_generations)
        token_ids = rollout.token_ids[part]
        results: list[bytes] | list[None] = [None] * len(token_ids)
        if rollout.conversations is None:
            texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        else:
            own = rollout.conversations[part]
            texts = [transcript(each.messages) for each in own]
            limit = min(TEXT_BYTES, GROUP_BYTES // self.num_generations)
            group = replace(group, conversations=tuple(record_conversation(each, limit) for each in own))
            results = [bytes(not own for own in each.own) for each in own]
        group = attach_texts(group, rollout.rows[first]["prompt"], texts)
        columns = {
            name: rollout.batch[name][part].cpu()
            for name in ("advantages", "completion_mask", "tool_mask", "sampling_per_token_logps")
            if rollout.batch.get(name) is not None
        }
        masked = (loss_mask(columns) == 0).numpy()
        logps = columns.get("sampling_per_token_logps")
        engine_logps = np.full(masked.shape, np.nan, np.float32) if logps is None else round_logps(logps)
        tokens = list(map(self._tokens, token_ids, engine_logps, masked, results))
        whole = texts if rollout.conversations is None else self.tokenizer.batch_decode(token_ids)
        for index, text in enumerate(whole):
            if redact_record(text) != text:
                tokens[index] = without_token_texts(tokens[index])
        return replace(
            group, sample=SAMPLES[number], advantages=tuple(columns["advantages"].tolist()), tokens=tuple(tokens)
        )

    def _tokens(
        self, ids: Sequence[int], engine_logps: NDArray[np.float32], masked: NDArray[np.bool_], results: bytes | None
    ) -> TokenRecord:
        """Return the tokens of a completion, from its row of padded log-probabilities and masks, (T,) each.

        Args:
            results: 1 for tokens that the policy did not generate, (len(ids),); None in a run without tools.
        """
        head, tail = keep_ends(len(ids), self.num_generations)
        texts = token_texts(self.tokenizer, ids[:head])
        if tail:
            texts += token_texts(self.tokenizer, ids[-tail - CONTEXT_TOKENS :])[-tail:]
        parts = [text.encode("utf-8", "replace") for text in texts]
        tokens = TokenRecord(
            text=b"".join(parts),
            ends=array("i", accumulate(map(len, parts))),
            head=head,
            engine_logps=cut_middle(array("f", engine_logps[: len(ids)].tobytes()), head, tail),
            masked=cut_middle(masked[: len(ids)].tobytes(), head, tail),
            results=None if results is None else cut_middle(results, head, tail),
        )
        return bound_text(tokens, min(TEXT_BYTES, GROUP_BYTES // self.num_generations))

    def study(self, rollout: Rollout, step: int) -> list[dict[str, Any]]:
        """Return the groups of `rollout` in JSON types, with completions, advantages and a flag `finite`."""
        batch, studied = rollout.batch, []
        texts = self.tokenizer.batch_decode(batch["completion_ids"])
        for number, group in enumerate(self.records(rollout, step)):
            part = slice(number * self.num_generations, (number + 1) * self.num_generations)
            values = [batch["advantages"][part]]
            values += [batch[k][part] for k in ("old_per_token_logps", "sampling_per_token_logps") if k in batch]
            studied.append(
                asdict(replace(group, tokens=None))
                | {
                    "completions": texts[part],
                    "advantages": batch["advantages"][part].tolist(),
                    "finite": all(bool(each.isfinite().all()) for each in values if each is not None),
                }
            )
        return studied
