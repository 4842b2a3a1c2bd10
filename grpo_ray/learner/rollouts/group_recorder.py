"""Records of a step's groups, for the ledger and `rollouts/`, and for the study of groups with non-finite numbers."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo_ray.learner.batch import CompletionRows
from grpo_ray.learner.rollouts.dynamic_sampling import combine_rewards
from grpo_ray.storage.rollouts import GroupRecord, attach_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find_truncated(completions: Sequence[Sequence[int]], end_tokens: Collection[int]) -> list[bool]:
    """Return for each completion True if it has no end token, so it was cut off at the longest allowed length."""
    return [not ids or ids[-1] not in end_tokens for ids in completions]


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
    keeps_texts: bool
    """Record the texts of the step's first group; on rank 0 only, so that it is the same group for any number of
    workers."""

    def records(self, rows: CompletionRows, step: int, texts: bool = True) -> list[GroupRecord]:
        """Return a record for each group of `rows`, in order.

        Args:
            step: the step that the groups were drawn for, from 1.
            texts: record the texts of the first group, on a worker that keeps them.
        """
        inputs, token_ids = rows.inputs, rows.token_ids
        rewards = combine_rewards(rows.rewards, self.reward_weights)
        correct = None
        if "correctness" in self.reward_names:
            correct = rows.rewards[:, self.reward_names.index("correctness")].tolist()
        truncated = find_truncated(token_ids, self.end_tokens)
        groups = []
        for first in range(0, len(inputs), self.num_generations):
            group = slice(first, first + self.num_generations)
            groups.append(
                GroupRecord(
                    step=step,
                    epoch=inputs[first]["epoch"],
                    problem=inputs[first]["id"],
                    rewards=tuple(rewards[group].tolist()),
                    correct=tuple(correct[group]) if correct is not None else None,
                    lengths=tuple(len(ids) for ids in token_ids[group]),
                    truncated=tuple(truncated[group]),
                )
            )
        if texts and self.keeps_texts:
            completions = self.tokenizer.batch_decode(token_ids[: self.num_generations], skip_special_tokens=True)
            groups[0] = attach_texts(groups[0], inputs[0]["prompt"], completions)
        return groups

    def study(self, rows: CompletionRows, step: int) -> list[dict[str, Any]]:
        """Return the groups of `rows` in JSON's types, with completions, advantages, and if all numbers are finite."""
        output, studied = rows.output, []
        texts = self.tokenizer.batch_decode(output["completion_ids"])
        for number, group in enumerate(self.records(rows, step)):
            part = slice(number * self.num_generations, (number + 1) * self.num_generations)
            values = [output["advantages"][part]]
            values += [output[k][part] for k in ("old_per_token_logps", "sampling_per_token_logps") if k in output]
            studied.append(
                asdict(group)
                | {
                    "completions": texts[part],
                    "advantages": output["advantages"][part].tolist(),
                    "finite": all(bool(each.isfinite().all()) for each in values if each is not None),
                }
            )
        return studied
