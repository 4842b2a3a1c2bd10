"""Learners on tokens of older weights: ours, and TRL's on the same batches without our code.

The scripted completions do not depend on any weights, so TRL's trainer gets the same batches when it samples them at
once. Its gradient on a batch is then that of the present weights, with the engine's log-probabilities as behaviour.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from stock_trl import NEAR, ScriptedEngine, ScriptedLearner, largest_difference, reference_steps, train_steps
from trl import GRPOTrainer

from grpo_ray.inference.sampling import Completion

UNGRADED = "rewards.functions=['stock_trl:pay']"
"""The reward of the scripted problems, which have no solution that could be graded early."""


class SegmentEngine(ScriptedEngine):
    """Scripted engine that samples a completion in segments of at most `max_tokens` tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rest: dict[tuple[int, ...], tuple[list[int], list[float | None]]] = {}
        """Context -> the tokens and log-probabilities that follow, of each unfinished completion."""
        self.rounds: list[list[int]] = []
        """Limit of each request, for each call."""

    def run_requests(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: Callable[[int, list[int]], None]
    ) -> list[Completion]:
        """Return the next tokens of each completion; a context that no unfinished one has begins a new one."""
        self.rounds.append([each.get("max_tokens", self.longest) for each in sampling])
        completions = []
        for prompt, limit in zip(prompts, self.rounds[-1], strict=True):
            if tuple(prompt) in self.rest:
                ids, logps = self.rest.pop(tuple(prompt))
            else:
                _, [ids], [values], _ = self.generate([prompt])
                logps = [value for (value,) in values]
            if rest := ids[limit:]:
                self.rest[*prompt, *ids[:limit]] = rest, logps[limit:]
            completions.append(Completion(ids[:limit], bool(rest), logps[:limit], []))
        return completions


class StaleLearner(ScriptedLearner):
    """Our learner, one step off-policy."""

    overrides: Sequence[str] = ("rollout.max_staleness=1", UNGRADED)
    engine_class = SegmentEngine


class OlderLearner(ScriptedLearner):
    """Our learner on completions of three segments."""

    overrides: Sequence[str] = ("rollout.max_staleness=3", UNGRADED)
    engine_class = SegmentEngine


class BehaviourLearner(ScriptedLearner):
    """Our learner that clips against the behaviour policy."""

    overrides: Sequence[str] = ("rollout.max_staleness=3", "rollout.anchor=behaviour", UNGRADED)
    engine_class = SegmentEngine


class BehaviourTrainer(GRPOTrainer):
    """TRL's trainer whose old policy is the one that sampled the batch."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        engine_logps = batch["sampling_per_token_logps"]
        batch["old_per_token_logps"] = torch.where(engine_logps.isnan(), batch["old_per_token_logps"], engine_logps)
        batch["importance_sampling_ratio"] = torch.ones_like(batch["importance_sampling_ratio"])
        return batch


def compare_stale(kind: type[ScriptedLearner], folder: Path, **settings: Any) -> ScriptedLearner:
    """Train our learner and TRL's for four steps, compare their gradients, and return ours."""
    settings = {"max_steps": 4, "epsilon": 0.02} | settings
    stock = reference_steps(BehaviourTrainer if issubclass(kind, BehaviourLearner) else GRPOTrainer, folder, **settings)
    stale, trainer = train_steps(kind, folder, **settings)
    assert len(stale.gradients) == 4
    assert largest_difference(stale, stock) < NEAR
    return trainer
