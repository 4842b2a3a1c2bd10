"""Dry run of a reward: call it as TRL would, on right and wrong completions of a few problems."""

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_ray.config.reward_names import is_reward_model, reward_name
from grpo_ray.config.schema import RewardsConfig
from grpo_ray.data.problem import Problem
from grpo_ray.models.plain_prompts import uses_plain_prompts
from grpo_ray.rewards.isolated import IsolatedReward
from grpo_ray.rewards.outside_training import read_rewards, reward_arguments
from grpo_ray.rewards.registry import load_rewards
from grpo_ray.rewards.solution_check import boxed_completion, stated_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DryRun:
    """Rewards that one function returned in a dry run."""

    reward: str
    """Name in `rewards.functions`."""
    right: tuple[float | None, ...]
    """Rewards of completions that state the problem's own solution."""
    wrong: tuple[float | None, ...]
    """Rewards of completions that state another problem's solution."""
    note: str = ""
    """Reason why the reward was not called, or its values on problems without solutions; else ""."""


def right_and_wrong_completions(problems: Sequence[Problem]) -> list[tuple[Problem, str]]:
    """Pair all problems but the last with right completions, then the same problems with wrong completions.

    A wrong completion states the next problem's solution. A single problem is paired with a right completion and with
    one that has no answer.
    """
    solutions = [boxed_completion(stated_answer(problem.solution)) for problem in problems]
    if len(problems) == 1:
        return [(problems[0], solutions[0]), (problems[0], "I do not know.")]
    right = zip(problems[:-1], solutions[:-1], strict=True)
    return [*right, *zip(problems[:-1], solutions[1:], strict=True)]


PLAIN_TEXTS = ("Here is a short answer.", "I do not know.")
"""Completions with which a reward is tried on problems without solutions."""


def plain_completions(problems: Sequence[Problem]) -> list[tuple[Problem, str]]:
    """Return the first problem with each of `PLAIN_TEXTS`."""
    return [(problems[0], text) for text in PLAIN_TEXTS]


def dry_run_reward(
    config: RewardsConfig, index: int, problems: Sequence[Problem], tokenizer: "PreTrainedTokenizerBase"
) -> DryRun:
    """Call `config.functions[index]` on right and wrong completions of the problems.

    Args:
        config: Reward functions and their settings.
        index: Position in `config.functions`.
        problems: At least one problem; all with the same columns.
        tokenizer: Makes the `completion_ids` that TRL would pass.

    Raises:
        RewardError: The function did not return a sequence with one reward for each completion.
        Exception: Any error that the reward function raises.
    """
    name, reward = config.functions[index], load_rewards(config)[index]
    if is_reward_model(name):
        return DryRun(name, (), (), note="a reward model, which is loaded when the run begins")
    if name == "environment":
        note = "given by the environment, which is tried with the tools, or by rollout.function, which is not tried"
        return DryRun(name, (), (), note=note)
    names = [reward_name(each) for each in config.functions]
    has_solutions = all(problem.solution for problem in problems)
    rows = right_and_wrong_completions(problems) if has_solutions else plain_completions(problems)
    texts = [text for _, text in rows]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    completions = texts if uses_plain_prompts(tokenizer) else messages
    call = reward.try_once if isinstance(reward, IsolatedReward) else reward  # a failure must reach the user
    returned = call(
        **reward_arguments([problem for problem, _ in rows], completions, tokenizer(texts)["input_ids"], names)
    )
    rewards = read_rewards(name, asyncio.run(returned) if inspect.iscoroutine(returned) else returned, len(rows))
    if not has_solutions:
        printed = " ".join("none" if value is None else f"{value:g}" for value in rewards)
        return DryRun(name, (), (), note=f"problems without solutions; {PLAIN_TEXTS} get {printed}")
    return DryRun(name, tuple(rewards[: len(rows) // 2]), tuple(rewards[len(rows) // 2 :]))
