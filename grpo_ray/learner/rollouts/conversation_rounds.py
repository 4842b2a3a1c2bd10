"""Rounds of completions with tools or an environment, which grow by whole turns.

In each round a completion takes an equal part of the turns that it may still take (`StalenessSchedule.turn_limit`). A
turn is sampled with one version of the weights, and its results join before the round ends. The next turns of all
completions begin together, so no result depends on how long a tool takes.

Between two rounds the processes of an unfinished completion stay. After a resume they are new, and get the earlier
requests again (`tools/open_conversation.py`).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.errors import CheckpointError
from grpo_ray.inference.conversation_sampler import ConversationSampler
from grpo_ray.inference.sampling import Completion
from grpo_ray.learner.rollouts.rollout import Completions, Rows
from grpo_ray.learner.rollouts.rounds import OpenBatch, RoundRequest, age_of
from grpo_ray.learner.rollouts.sampler import MultiTurn
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule
from grpo_ray.learner.rollouts.sync_probe import Segment
from grpo_ray.models.tokenizer import tokenize_prompts
from grpo_ray.storage.records.open_rollouts import FILE_NAME, OpenRollout, RolloutKey, optional_logps
from grpo_ray.tools.open_conversation import OpenConversation

RULES = ("tools", "environment", "settings", "max_turns", "max_calls", "max_result_tokens")
"""Fields of `rollout` that unfinished completions depend on."""


@dataclass(frozen=True)
class RoundTurns:
    """Turns of one conversation in a round."""

    conversation: OpenConversation
    sampled: list[tuple[list[int], Completion]] = field(default_factory=list)
    """Context and tokens of each."""


class ConversationRounds:
    """Rounds of completions with tools or an environment; implements `Rounds`."""

    def __init__(self, turns: MultiTurn, source: ConversationSampler, schedule: StalenessSchedule) -> None:
        self.turns = turns
        self.source = source
        self.schedule = schedule
        self.config: Config = turns.config
        rollout = self.config.rollout
        rules = repr([getattr(rollout, name) for name in RULES])
        # A digest, since settings may hold secrets.
        self.settings = {"tools and environments": hashlib.blake2b(rules.encode(), digest_size=8).hexdigest()}
        self._open: dict[RolloutKey, OpenConversation] = {}
        """Conversations of open batches."""

    def render(self, rows: Rows) -> list[list[int]]:
        """Return the token ids of the rows' prompts, without tools and observations, (B, P_b)."""
        kwargs = self.config.chat_template_kwargs
        return tokenize_prompts(self.source.template.tokenizer, [row["prompt"] for row in rows], kwargs)

    def limit(self, rollout: OpenRollout, batch: int, version: int) -> int:
        turns = self._turns_of(rollout)
        return self.schedule.turn_limit(batch, version, turns, self.config.rollout.max_turns)

    def _turns_of(self, rollout: OpenRollout) -> int:
        """Return the number of turns that a completion has taken."""
        known = self._open.get(rollout.key)
        turns = known.turns if known is not None else (rollout.conversation or {}).get("turns", 0)
        if not isinstance(turns, int):
            raise CheckpointError(f"{FILE_NAME}: problem {rollout.key.problem}: turns is {turns!r}")
        return turns

    def run(self, requests: Sequence[RoundRequest]) -> list[RoundTurns]:
        turns = [RoundTurns(self._conversation(each.row, each.rollout)) for each in requests]
        for place, each in enumerate(turns):
            each.conversation.row = place
        with self.turns.generating() as generate:
            loop = self.source.turn_loop(
                generate,
                is_any_active=self.turns.engine.is_any_active,
                on_turn=lambda place, context, turn: turns[place].sampled.append((context, turn)),
                on_ended=lambda place, conversation: self.turns.grade(requests[place].row, conversation),
                on_result=self.turns.profiler.note_progress,
            )
            loop.take_turns([each.conversation for each in turns], [each.limit for each in requests])
        return turns

    def _conversation(self, row: dict[str, Any], rollout: OpenRollout) -> OpenConversation:
        """Return the conversation of a completion: the present one, that of the checkpoint, or a new one."""
        if (known := self._open.get(rollout.key)) is not None:
            return known
        conversation = self.source.begin(row, self.turns.engine.training_sampling)
        if rollout.conversation:
            try:
                conversation.restore(
                    rollout.conversation,
                    rollout.token_ids,
                    rollout.own,
                    optional_logps(rollout.logps),
                    optional_logps(rollout.unprocessed_logps),
                )
            except ValueError as error:
                raise CheckpointError(f"{FILE_NAME}: problem {rollout.key.problem}: {error}") from error
        self._open[rollout.key] = conversation
        return conversation

    def add(self, requests: Sequence[RoundRequest], results: Sequence[RoundTurns], version: int) -> list[Segment]:
        segments = []
        for request, turns in zip(requests, results, strict=True):
            rollout, conversation = request.rollout, turns.conversation
            if conversation.has_begun_anew:
                rollout.delete_tokens()
                conversation.has_begun_anew = False
            age, known = age_of(rollout, version), len(rollout.token_ids)
            rollout.add_segment(
                version,
                conversation.token_ids[known:],
                conversation.logps[known:],
                conversation.unprocessed[known:],
                conversation.own[known:],
            )
            rollout.finished, rollout.conversation = conversation.finished, conversation.state()
            segments += [
                Segment(context, turn.token_ids, turn.unprocessed_logps or turn.logps, age, turn.shard)
                for context, turn in turns.sampled
            ]
        return segments

    def completions(self, batch: OpenBatch, *, is_on_policy: bool) -> Completions:
        conversations = [
            self._conversation(row, rollout).conversation()
            for row, rollout in zip(batch.rows, batch.rollouts, strict=True)
        ]
        for rollout in batch.rollouts:
            del self._open[rollout.key]
        self.turns.report(conversations)
        is_processed = bool(self.config.sampling.processing)
        return Completions(
            [each.prompt_ids for each in conversations],
            [each.token_ids.tolist() for each in batch.rollouts],
            [optional_logps(each.logps) for each in batch.rollouts],
            [optional_logps(each.unprocessed_logps) for each in batch.rollouts] if is_processed else None,
            [each.own.tolist() for each in batch.rollouts],
            conversations,
            is_on_policy=is_on_policy,
        )
