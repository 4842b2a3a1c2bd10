import asyncio
from typing import Any

import pytest

from grpo_ray.errors import RewardError
from grpo_ray.problem import Problem, parse_problem
from grpo_ray.rewards.dryrun import DryRun, completions_for, try_reward
from grpo_ray.sections import RewardsConfig


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(map(ord, text)) for text in texts]}


def problem(solution: str, **columns: object) -> Problem:
    return parse_problem({"prompt": f"{solution}?", "solution": solution, **columns}, where="here")


PROBLEMS = [problem("$1$", level=1), problem("$2$", level=2), problem("$3$", level=3)]


def try_out(name: str) -> DryRun:
    return try_reward(RewardsConfig(functions=[name]), 0, PROBLEMS, Letters())


def by_column(
    prompts: Any,
    completions: Any,
    completion_ids: Any,
    level: list[int],
    trainer_state: Any,
    log_metric: Any,
    **kw: Any,
) -> list[float | None]:
    assert len(prompts) == len(completions) == len(completion_ids) == len(kw["id"]) == len(kw["solution"])
    assert trainer_state.global_step == 0 and completions[0][0]["role"] == "assistant"
    log_metric("reward/tried", 1.0)
    return [None if n == 2 else float(n) for n in level]


async def later(completions: Any, **kw: Any) -> list[float]:
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def too_few(completions: Any, **kw: Any) -> list[float]:
    return [1.0]


def nothing(completions: Any, **kw: Any) -> None:
    return None


def test_problems_are_answered_with_their_own_and_with_the_next_solution():
    said = [(row.solution, text) for row, text in completions_for(PROBLEMS)]
    assert said == [
        ("$1$", "The answer is \\boxed{1}."),
        ("$2$", "The answer is \\boxed{2}."),
        ("$1$", "The answer is \\boxed{2}."),
        ("$2$", "The answer is \\boxed{3}."),
    ]


def test_a_single_problem_has_a_wrong_completion_too():
    assert [text for _, text in completions_for(PROBLEMS[:1])] == ["The answer is \\boxed{1}.", "I do not know."]


def test_correctness_tells_right_from_wrong():
    assert try_out("correctness") == DryRun("correctness", (1.0, 1.0), (0.0, 0.0))


def test_a_reward_is_called_as_trl_calls_it():
    assert try_out(f"{__name__}:by_column") == DryRun(f"{__name__}:by_column", (1.0, None), (1.0, None))


def test_an_async_reward_is_awaited():
    assert try_out(f"{__name__}:later").wrong == (0.5, 0.5)


@pytest.mark.parametrize(("name", "said"), [("too_few", "1 rewards for 4"), ("nothing", "NoneType for 4")])
def test_what_trl_would_not_take_is_refused(name, said):
    with pytest.raises(RewardError, match=said):
        try_out(f"{__name__}:{name}")


def test_a_reward_model_is_left_to_the_workers():
    assert "reward model" in try_out("some/model").note
