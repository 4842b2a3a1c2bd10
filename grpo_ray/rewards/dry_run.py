"""Call a reward as TRL would, on a few problems with a right and a wrong completion each, to see what it gives."""

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_ray.config.schema import RewardsConfig
from grpo_ray.data.problem import Problem
from grpo_ray.errors import RewardError
from grpo_ray.rewards.registry import load_rewards
from grpo_ray.rewards.solution_check import boxed, stated_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DryRun:
    """What one reward function returned for each of a few problems."""

    reward: str
    right: tuple[float | None, ...]
    """For completions that state the solution."""
    wrong: tuple[float | None, ...]
    """For completions that state another problem's."""
    note: str = ""
    """Why it was not run; "" if it was."""


def completions_for(problems: Sequence[Problem]) -> list[tuple[Problem, str]]:
    """All problems but the last with their own solutions, then with their successors'.

    A single problem has no successor, and is answered with nothing.
    """
    solutions = [boxed(stated_answer(problem.solution)) for problem in problems]
    if len(problems) == 1:
        return [(problems[0], solutions[0]), (problems[0], "I do not know.")]
    right = zip(problems[:-1], solutions[:-1], strict=True)
    return [*right, *zip(problems[:-1], solutions[1:], strict=True)]


def try_reward(
    config: RewardsConfig, index: int, problems: Sequence[Problem], tokenizer: "PreTrainedTokenizerBase"
) -> DryRun:
    """Call the config's reward of this index. Raises what it raises, and RewardError for what TRL would not take."""
    name, reward = config.functions[index], load_rewards(config)[index]
    if isinstance(reward, str):
        return DryRun(name, (), (), note="a reward model: TRL loads it in the workers")
    from transformers import TrainerState

    rows = completions_for(problems)
    texts = [text for _, text in rows]
    columns = [problem.row() | {"epoch": 0, "index": 0} for problem, _ in rows]
    returned = reward(
        prompts=[problem.prompt for problem, _ in rows],
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=tokenizer(texts)["input_ids"],
        trainer_state=TrainerState(),
        log_extra=lambda column, values: None,
        log_metric=lambda metric, value: None,
        **{key: [row.get(key) for row in columns] for key in columns[0] if key != "prompt"},
    )
    values = asyncio.run(returned) if inspect.iscoroutine(returned) else returned
    if not isinstance(values, Sequence) or len(values) != len(rows):
        size = f"{len(values)} rewards" if isinstance(values, Sequence) else type(values).__name__
        raise RewardError(f"reward {name!r} returned {size} for {len(rows)} completions; give a list of one for each")
    numbers = [None if value is None else float(value) for value in values]
    return DryRun(name, tuple(numbers[: len(rows) // 2]), tuple(numbers[len(rows) // 2 :]))
