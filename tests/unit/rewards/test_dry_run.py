"""Tests of the dry run of a reward: its completions, its arguments, and results that TRL would refuse."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ray.config.schema import RewardsConfig
from grpo_ray.data.problem import Problem, parse_problem
from grpo_ray.errors import RewardError
from grpo_ray.rewards.dry_run import DryRun, dry_run_reward, right_and_wrong_completions


class LetterTokenizer:
    """A tokenizer with one token for each letter."""

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(map(ord, text)) for text in texts]}


def problem(solution: str, **columns: object) -> Problem:
    return parse_problem({"prompt": f"{solution}?", "solution": solution, **columns}, where="here")


PROBLEMS = [problem("$1$", level=1), problem("$2$", level=2), problem("$3$", level=3)]


def dry_run(name: str) -> DryRun:
    return dry_run_reward(RewardsConfig(functions=(name,)), 0, PROBLEMS, LetterTokenizer())


# Reward functions, loaded by their names in this module.


def level_column(
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


async def asynchronous(completions: Any, **kw: Any) -> list[float]:
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def too_few(completions: Any, **kw: Any) -> list[float]:
    return [1.0]


def array(completions: Any, **kw: Any) -> Any:
    return np.linspace(0, 1, len(completions))


def tensor(completions: Any, **kw: Any) -> Any:
    return torch.linspace(0, 1, len(completions))


class AsynchronousCall:
    async def __call__(self, completions: Any, **kw: Any) -> list[float]:
        return [0.5] * len(completions)


def infinite(completions: Any, **kw: Any) -> list[float]:
    return [float("inf"), 1.0, float("-inf"), float("nan")]


def nothing(completions: Any, **kw: Any) -> None:
    return None


def test_completions_pair_own_then_next_solution() -> None:
    assert [(row.solution, text) for row, text in right_and_wrong_completions(PROBLEMS)] == [
        ("$1$", "The answer is \\boxed{1}."),
        ("$2$", "The answer is \\boxed{2}."),
        ("$1$", "The answer is \\boxed{2}."),
        ("$2$", "The answer is \\boxed{3}."),
    ]


def test_completions_single_problem_adds_wrong_text() -> None:
    assert [text for _, text in right_and_wrong_completions(PROBLEMS[:1])] == [
        "The answer is \\boxed{1}.",
        "I do not know.",
    ]


def test_dry_run_correctness_separates_right_from_wrong() -> None:
    assert dry_run("correctness") == DryRun("correctness", (1.0, 1.0), (0.0, 0.0))


def test_dry_run_passes_the_arguments_of_trl() -> None:
    assert dry_run(f"{__name__}:level_column") == DryRun(f"{__name__}:level_column", (1.0, None), (1.0, None))


@pytest.mark.parametrize("name", ["array", "tensor"])
def test_dry_run_array_or_tensor_is_taken(name: str) -> None:
    result = dry_run(f"{__name__}:{name}")
    assert (*result.right, *result.wrong) == pytest.approx((0, 1 / 3, 2 / 3, 1))


def test_dry_run_class_with_asynchronous_call_raises() -> None:
    with pytest.raises(RewardError, match="AsynchronousCall' has an asynchronous __call__, which TRL does not await"):
        dry_run(f"{__name__}:AsynchronousCall")


def test_dry_run_async_function_is_awaited() -> None:
    assert dry_run(f"{__name__}:asynchronous").wrong == (0.5, 0.5)


@pytest.mark.parametrize(("name", "message"), [("too_few", "1 rewards for 4"), ("nothing", "NoneType for 4")])
def test_dry_run_result_refused_by_trl_raises(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        dry_run(f"{__name__}:{name}")


def test_dry_run_infinite_rewards_do_not_apply(caplog: pytest.LogCaptureFixture) -> None:
    result = dry_run(f"{__name__}:infinite")
    assert (result.right, result.wrong) == ((None, 1.0), (None, None))
    assert f"the reward {__name__}:infinite is infinite for 2 of 4 completions" in caplog.text


def test_dry_run_of_an_isolated_reward_that_fails_raises() -> None:
    name = "failing_rewards:too_few"
    with pytest.raises(RewardError, match=f"^reward '{name}' failed: RewardError: .* returned 1 rewards for 4"):
        dry_run_reward(RewardsConfig(functions=(name,), isolate=True), 0, PROBLEMS, LetterTokenizer())


def test_dry_run_reward_model_is_not_called() -> None:
    assert "reward model" in dry_run("some/model").note
