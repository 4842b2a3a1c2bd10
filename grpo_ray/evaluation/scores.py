"""Scores of completions of held-out problems (`heldout.score`)."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.config.reward_names import REWARD_SCORES, reward_name
from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.rewards.environment import COLUMN as ENVIRONMENT_REWARD
from grpo_ray.rewards.outside_training import read_rewards, reward_arguments
from grpo_ray.rewards.registry import heldout_correctness, load_reward, load_rewards, own_reward
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
    messages: Messages | str = ()
    """Messages after the prompt, or plain text, as rewards receive them; empty where the score does not read them."""
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

    def of(self, problem: Problem) -> "HeldoutScore":
        """Return the score of a problem's completions: this one."""
        return self

    def __call__(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[float | None]:
        """Return the score of each completion; None for those whose environment failed.

        Raises:
            RewardError: a reward function did not return a number or None for each completion.
        """
        scores = self.compute(problems, answers)
        return [None if each.is_unscorable else score for each, score in zip(answers, scores, strict=True)]


@dataclass(frozen=True)
class MixtureScore:
    """Score of held-out completions of a mixture: each source has a score of its own."""

    scores: Mapping[str, HeldoutScore]
    """Source -> its score; "" for problems of no source."""

    @property
    def reads_messages(self) -> bool:
        """True if one of the scores is computed from `Answer.messages`."""
        return any(score.reads_messages for score in self.scores.values())

    def of(self, problem: Problem) -> HeldoutScore:
        """Return the score of a problem's completions."""
        return self.scores[problem.source]

    def __call__(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[float | None]:
        """Return the score of each completion; see `HeldoutScore.__call__`."""
        found: list[float | None] = [None] * len(answers)
        for source in dict.fromkeys(problem.source for problem in problems):
            places = [place for place, problem in enumerate(problems) if problem.source == source]
            scores = self.scores[source]([problems[place] for place in places], [answers[place] for place in places])
            for place, score in zip(places, scores, strict=True):
                found[place] = score
        return found


def heldout_scores(config: Config) -> HeldoutScore | MixtureScore:
    """Return the score of the run's held-out completions. Raises RewardError if a reward cannot be loaded."""
    sources = dict.fromkeys(map(config.source_of, config.heldout_keys))
    if not config.is_mixture and list(sources) == [""]:
        return heldout_score(config)
    return MixtureScore({source: heldout_score(config, source) for source in sources})


def heldout_score(config: Config, source: str = "") -> HeldoutScore:
    """Return the score that `heldout.score` names, or that is derived from the rewards.

    Args:
        source: name of the source of a mixture, or of the benchmark, that is meant; "" for all rewards.

    Raises:
        RewardError: a reward cannot be loaded.
    """
    name = config.heldout_score_of(source)
    if name == "correctness":
        correctness = heldout_correctness(config.rewards)
        return HeldoutScore(
            lambda problems, answers: correctness(
                completions=[each.text for each in answers], solution=[each.solution for each in problems]
            ),
            is_verdict=True,
            is_share=True,
        )
    if name in REWARD_SCORES:
        settings = dict(config.rewards.settings.get(name, {})) | ({"partial": False} if name == "code_tests" else {})
        compute = WeightedRewards([load_reward(name, **settings)], [name], [1.0])
        return HeldoutScore(compute, is_share=True, reads_messages=True)
    if name == "environment":
        return HeldoutScore(lambda problems, answers: [_limited(each.reward) for each in answers], is_share=True)
    if name == "reward":
        return combined_reward(config, source)
    return HeldoutScore(
        WeightedRewards([own_reward(config.rewards, name)], [reward_name(name)], [1.0]), reads_messages=True
    )


def combined_reward(config: Config, source: str = "") -> HeldoutScore:
    """Return the weighted sum of the run's rewards as a score.

    Args:
        source: name of the source of a mixture whose rewards are meant; "" for all.

    Raises:
        RewardError: a reward cannot be loaded.
    """
    names = config.rewards_of(source)
    functions: list[Any] = load_rewards(config.rewards, names)
    all_weights = config.grpo.trl.get("reward_weights") or [1.0] * len(config.rewards.functions)
    weight_of = dict(zip(config.rewards.functions, all_weights, strict=True))
    weights = [weight_of[each] for each in names]
    return HeldoutScore(WeightedRewards(functions, list(map(reward_name, names)), weights), reads_messages=True)


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
        """Return the sum for each completion; None if no reward applies to it or one has failed. Raises RewardError."""
        if not answers:
            return []
        messages, ids = [each.messages for each in answers], [each.token_ids for each in answers]
        arguments = reward_arguments(problems, messages, ids, self.names)
        arguments[ENVIRONMENT_REWARD] = [each.reward for each in answers]
        # A rollout function gives the same names in all completions.
        arguments |= {name: [each.columns[name] for each in answers] for name in answers[0].columns}
        returned = [function(**arguments) for function in self.functions]
        failed = {place for each in self.functions for place in getattr(each, "failed_places", ())}
        if coroutines := [each for each in returned if inspect.iscoroutine(each)]:
            awaited = iter(asyncio.run(_gather(coroutines)))
            returned = [next(awaited) if inspect.iscoroutine(each) else each for each in returned]
        columns = [read_rewards(name, each, len(answers)) for name, each in zip(self.names, returned, strict=True)]
        # The sum without a part that failed would be another score.
        rows = enumerate(zip(*columns, strict=True))
        return [None if place in failed else self._sum(row) for place, row in rows]

    def _sum(self, rewards: Sequence[float | None]) -> float | None:
        applied = [weight * reward for weight, reward in zip(self.weights, rewards, strict=True) if reward is not None]
        return sum(applied) if applied else None


async def _gather(coroutines: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*coroutines))
