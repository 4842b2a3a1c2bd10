"""Rewards of a user that fail on some completions, each in its own way; used as `failing_rewards:name`."""

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def text_of(completion: Any) -> str:
    """Return the text of a completion."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def treat(text: str) -> float:
    """Return the length of a text; a text that names a failure fails instead."""
    if text == "raise":
        raise ValueError("bad text\nof two lines")
    if text == "late":
        time.sleep(0.2)
        raise ValueError("a service that did not answer")
    if text == "exit":
        sys.exit(3)
    if text == "die":
        os._exit(4)
    if text == "abort":
        os.abort()
    if text == "hang":
        time.sleep(3600)
    if text == "spin":  # C code that never gives other threads a turn
        import re

        re.match(r"(a+)+$", "a" * 64 + "b")
    if text == "memory":
        len(bytearray(8 << 30))
    return float(len(text))


def length(completions: list[Any], **columns: Any) -> list[float]:
    """Reward the length of the text."""
    return [treat(text_of(each)) for each in completions]


def lengths(completions: list[Any], *, factor: float = 1.0, **columns: Any) -> list[float | None]:
    """Reward the length times a factor; None for empty texts."""
    return [factor * treat(text_of(each)) or None for each in completions]


async def slowly(completions: list[Any], **columns: Any) -> list[float]:
    """Reward the length after other coroutines."""
    await asyncio.sleep(0)
    return length(completions)


def facts(
    completions: list[Any],
    prompts: list[Any],
    completion_ids: list[Any],
    level: list[Any],
    trainer_state: Any,
    log_metric: Any,
    log_extra: Any,
    **columns: Any,
) -> list[float]:
    """Report what a reward receives."""
    log_metric("prompts", len(prompts))
    log_extra("column", prompts)
    print("printed")  # must not reach the connection
    device = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [trainer_state.global_step + len(ids) + own for ids, own in zip(completion_ids, level, strict=True)] + (
        [] if device == "" else [0.0]
    )


def lucky(completions: list[Any], **columns: Any) -> list[float]:
    """Reward by chance."""
    return [random.random() for _ in completions]


def days(completions: list[Any], day: list[str], **columns: Any) -> list[float]:
    """Reward the day of a date that arrived as text."""
    return [float(each.rpartition("-")[2]) for each in day]


def process(completions: list[Any], **columns: Any) -> list[float]:
    """Return the id of this process."""
    return [float(os.getpid()) for _ in completions]


def with_a_child(completions: list[Any], *, file: str, **columns: Any) -> list[float]:
    """Start a process that would outlive this one, write its id, and hang."""
    Path(file).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
    time.sleep(3600)
    return []


def too_few(completions: list[Any], **columns: Any) -> list[float]:
    """Return too few rewards."""
    return [1.0]


class Count:
    """Reward the number of texts that were rewarded before."""

    def __init__(self, *, first: int = 0) -> None:
        self.texts = first

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        rewards = []
        for each in completions:
            rewards.append(float(self.texts))
            self.texts += 1
            treat(text_of(each))
        return rewards

    def state_dict(self) -> dict[str, Any]:
        return {"texts": self.texts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.texts = state["texts"]


class Waiting:
    """Reward of a class whose call is a coroutine."""

    async def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return [0.0 for _ in completions]


class Moody:
    """Reward that differs within a group and from call to call. It raises on some problems, and exits on others."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, id: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.calls += 1
        kinds = [int(each, 16) % 4 for each in id]
        if 0 in kinds:
            raise ValueError("a problem that it cannot read")
        if 1 in kinds:
            os._exit(4)
        return [(len(tokens) + sum(tokens) + self.calls) % 7 / 7 for tokens in completion_ids]

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
