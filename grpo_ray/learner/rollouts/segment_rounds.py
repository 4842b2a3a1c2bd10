"""Rounds of completions of one turn, which grow by segments.

A continued completion is a new request with prompt and earlier tokens as its prompt, and a seed of its own.
"""

from collections.abc import Sequence
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.inference.sampling import Completion
from grpo_ray.learner.rollouts.rollout import Completions, Rows
from grpo_ray.learner.rollouts.rounds import OpenBatch, RoundRequest, age_of
from grpo_ray.learner.rollouts.sampler import SingleTurn
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule
from grpo_ray.learner.rollouts.sync_probe import Segment
from grpo_ray.storage.records.open_rollouts import OpenRollout, optional_logps


class SegmentRounds:
    """Rounds of completions of one turn; implements `Rounds`."""

    def __init__(self, turn: SingleTurn, schedule: StalenessSchedule) -> None:
        self.turn = turn
        self.schedule = schedule
        self.config: Config = turn.config
        self.settings: dict[str, Any] = {}

    def render(self, rows: Rows) -> list[list[int]]:
        return self.turn.render(rows)

    def limit(self, rollout: OpenRollout, batch: int, version: int) -> int:
        began = rollout.began if rollout.runs else version
        return self.schedule.token_limit(batch, began, len(rollout.token_ids))

    def run(self, requests: Sequence[RoundRequest]) -> list[Completion]:
        def grade(number: int, token_ids: list[int]) -> None:
            # Certainly finished; whether one of this length has ended is known only with the round.
            if len(token_ids) < requests[number].limit:
                self._grade(requests[number], token_ids)

        return self.turn.run_segments(
            [each.row for each in requests],
            [_context(each) for each in requests],
            [each.limit for each in requests],
            [len(each.rollout.runs) for each in requests],
            grade,
        )

    def add(self, requests: Sequence[RoundRequest], results: Sequence[Completion], version: int) -> list[Segment]:
        segments = []
        for request, completion in zip(requests, results, strict=True):
            rollout, length = request.rollout, len(completion.token_ids)
            context, age = _context(request), age_of(rollout, version)
            has_space = len(context) + length < self.turn.engine.max_model_len
            is_cut_here = completion.truncated and length == request.limit and has_space
            rollout.finished = not is_cut_here or len(rollout.token_ids) + length >= self.schedule.longest
            if rollout.finished and length == request.limit:  # shorter ones are graded as soon as they end
                self._grade(request, completion.token_ids)
            rollout.add_segment(version, completion.token_ids, completion.logps, completion.unprocessed_logps)
            proof = completion.unprocessed_logps or completion.logps
            segments.append(Segment(context, completion.token_ids, proof, age, completion.shard))
        return segments

    def _grade(self, request: RoundRequest, token_ids: list[int]) -> None:
        """Start grading a finished completion, given its last segment."""
        self.turn.grade(request.row, [*request.rollout.token_ids, *token_ids])

    def completions(self, batch: OpenBatch, *, is_on_policy: bool) -> Completions:
        is_processed = bool(self.config.sampling.processing)
        return Completions(
            batch.prompt_ids,
            [each.token_ids.tolist() for each in batch.rollouts],
            [optional_logps(each.logps) for each in batch.rollouts],
            [optional_logps(each.unprocessed_logps) for each in batch.rollouts] if is_processed else None,
            is_on_policy=is_on_policy,
        )


def _context(request: RoundRequest) -> list[int]:
    """Return the token ids of the prompt and of earlier segments."""
    return [*request.prompt_ids, *request.rollout.token_ids]
