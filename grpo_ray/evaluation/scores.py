"""Scores of completions of held-out problems: what `heldout.score` names.

score = heldout_score(config)
score(problems, answers)  # (B,) numbers; None where a completion has no score
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.config.reward_names import reward_name
from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem, reward_columns
from grpo_ray.errors import RewardError
from grpo_ray.rewards.environment import COLUMN as ENVIRONMENT_REWARD
from grpo_ray.rewards.metrics import reward_metric
from grpo_ray.rewards.registry import heldout_correctness, load_reward, load_rewards
from grpo_ray.storage.records.conversation_columns import ConversationRecord

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """Scored and recorded parts of one completion of a held-out problem."""

    text: str
    """Text in which the final answer is searched."""
    shown: str
    """Text that is recorded."""
    length: int
    """Tokens that the policy generated."""
    truncated: bool
    """True if it was cut off at the maximum length."""
    reward: float | None = None
    """Reward of the environment; None without one."""
    conversation: ConversationRecord | None = None
    """Record of a completion of several turns; None in a run without tools."""
    is_unscorable: bool = False
    """True if its environment failed, so that there is no verdict."""
    messages: Messages = ()
    """Messages after the prompt, as rewards receive them; empty where the score does not read them."""
    token_ids: Sequence[int] = ()
    """Tokens that the policy generated, as rewards receive them."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of rewards, which a rollout function gives."""


@dataclass(frozen=True)
class HeldoutScore:
    """Score of held-out completions."""

    compute: Callable[[Sequence[Problem], Sequence[Answer]], Sequence[float | None]]
    """Function of the (B,) problems and their (B,) completions that returns (B,) numbers, None without a score."""
    is_verdict: bool = False
    """True if every score is 1 (right) or 0 (wrong), so that the answers to a problem can vote."""
    is_share: bool = False
    """True if every score is between 0 and 1."""
    reads_messages: bool = False
    """True if it is computed from `Answer.messages`."""

    def __call__(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[float | None]:
        """Return the score of each completion; None for those whose environment failed.

        Raises:
            RewardError: a reward function did not return a number or None for each completion.
        """
        scores = self.compute(problems, answers)
        return [None if each.is_unscorable else score for each, score in zip(answers, scores, strict=True)]


def heldout_score(config: Config) -> HeldoutScore:
    """Return the score that `heldout.score` names, or that is derived from the rewards.

    Raises:
        RewardError: a reward cannot be loaded.
    """
    name = config.heldout_score
    if name == "correctness":
        correctness = heldout_correctness(config.rewards)
        return HeldoutScore(
            lambda problems, answers: correctness(
                completions=[each.text for each in answers], solution=[each.solution for each in problems]
            ),
            is_verdict=True,
            is_share=True,
        )
    if name == "environment":
        return HeldoutScore(lambda problems, answers: [_limited(each.reward) for each in answers], is_share=True)
    if name == "reward":
        functions: list[Any] = load_rewards(config.rewards)  # no reward model is among them (`heldout_score_is_known`)
        names = config.rewards.functions
        weights = config.grpo.trl.get("reward_weights") or [1.0] * len(functions)
    else:
        functions, names = [load_reward(name, **config.rewards.settings.get(name, {}))], (name,)
        weights = [1.0]
    weighted = WeightedRewards(functions, [reward_name(each) for each in names], weights)
    return HeldoutScore(weighted, reads_messages=True)


def _limited(reward: float | None) -> float | None:
    """Return an environment's reward limited to the range from 0 to 1."""
    return None if reward is None else min(1.0, max(0.0, reward))


@dataclass(frozen=True)
class WeightedRewards:
    """Weighted sum of reward functions, as TRL adds them up: a reward that does not apply (None) counts as 0."""

    functions: Sequence[Callable[..., Any]]
    names: Sequence[str]
    """Name of each function in messages and metrics."""
    weights: Sequence[float]

    def __call__(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[float | None]:
        """Return the sum for each completion; None if no reward applies to it. Raises RewardError."""
        if not answers:
            return []
        arguments = self._arguments(problems, answers)
        returned = [function(**arguments) for function in self.functions]
        if coroutines := [each for each in returned if inspect.iscoroutine(each)]:
            awaited = iter(asyncio.run(_gather(coroutines)))
            returned = [next(awaited) if inspect.iscoroutine(each) else each for each in returned]
        columns = [self._column(name, each, len(answers)) for name, each in zip(self.names, returned, strict=True)]
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def _sum(self, rewards: Sequence[float | None]) -> float | None:
        applied = [weight * reward for weight, reward in zip(self.weights, rewards, strict=True) if reward is not None]
        return sum(applied) if applied else None

    def _arguments(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the keyword arguments that training passes to rewards, with metrics that are not recorded."""
        from transformers import TrainerState

        columns = [
            reward_columns(problem.as_row(epoch=0, index=0)) | dict(each.columns)
            for problem, each in zip(problems, answers, strict=True)
        ]
        return {
            **{name: [row[name] for row in columns] for name in columns[0] if name != "prompt"},
            ENVIRONMENT_REWARD: [each.reward for each in answers],
            "prompts": [problem.prompt for problem in problems],
            "completions": [list(each.messages) for each in answers],
            "completion_ids": [list(each.token_ids) for each in answers],
            "trainer_state": TrainerState(),
            "log_extra": lambda column, values: None,
            "log_metric": lambda name, value: reward_metric(name, value, self.names),
        }

    def _column(self, name: str, returned: Any, completions: int) -> list[float | None]:
        """Return the rewards of a function as numbers; NaN counts as None. Raises RewardError."""
        values = returned.tolist() if hasattr(returned, "tolist") else returned  # a NumPy array or a tensor
        if not isinstance(values, Sequence) or len(values) != completions:
            size = f"{len(values)} rewards" if isinstance(values, Sequence) else type(values).__name__
            raise RewardError(
                f"the reward {name} returned {size} for {completions} held-out completions; return one for each, None "
                "where it does not apply"
            )
        numbers = [None if value is None else float(value) for value in values]
        return [None if value is None or value != value else value for value in numbers]


async def _gather(coroutines: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*coroutines))
