"""Reward functions of a user, named by path in configs of the tests."""

import asyncio
from typing import Any

import numpy as np


def count_words(completions: list[Any], prompts: list[Any], solution: list[Any], **kwargs: Any) -> list[float | None]:
    """Reward the number of words; None for an empty completion."""
    assert [prompt[-1]["content"] for prompt in prompts] == ["Write."] * len(completions) and set(solution) == {None}
    texts = [completion[-1]["content"] for completion in completions]
    return [float(len(text.split())) or None for text in texts]


async def tokens(completion_ids: list[list[int]], *, share: float = 1.0, **kwargs: Any) -> np.ndarray:
    """Reward the number of tokens, after other coroutines."""
    await asyncio.sleep(0)
    return np.array([share * len(ids) for ids in completion_ids])


class Level:
    """Reward the column `level`, plus the number of earlier calls."""

    def __init__(self) -> None:
        self.calls = -1

    def __call__(self, level: list[int], environment_reward: list[float | None], **kwargs: Any) -> list[float]:
        self.calls += 1
        return [each + self.calls for each in level]


def answer_with(solution: list[str], completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward that needs a solution."""
    return [0.0 for _ in completions]


def digits(completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward twice the number of digits minus 1: neither 0 or 1, nor a share."""
    return [2.0 * sum(map(str.isdigit, completion[-1]["content"])) - 1.0 for completion in completions]


RECEIVED: list[tuple[Any, Any]] = []
"""Prompts and completions of each call of `characters` in this process."""


def characters(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward the number of characters of plain text, or of messages."""
    RECEIVED.append((prompts, completions))
    return [float(len(each)) for each in completions]
