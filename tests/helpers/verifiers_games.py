"""Environments of the package verifiers, version 0, and classes that adapt them."""

from typing import Any

import verifiers as vf
from datasets import Dataset

from grpo_ray.tools.adapters.verifiers import Verifiers

ROWS = [{"question": "What is 2 + 3?", "answer": "5"}]


def exact(completion: list[Any], answer: str) -> float:
    """Return 1 if the last message is the answer."""
    return float(completion[-1].content.strip() == answer)


async def turns(state: dict[str, Any], level: str) -> float:
    """Return the number of turns; the weight makes it a small cost. `level` is a column."""
    assert level == "easy"
    return float(len(state["trajectory"]))


def load_single(weight: float = 1.0) -> vf.Environment:
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(ROWS), system_prompt="Be brief.", rubric=vf.Rubric(funcs=[exact], weights=[weight])
    )


class CorrectionsEnv(vf.MultiTurnEnv):
    """Game that answers a wrong number with `higher` or `lower`, and ends with the right one or after three turns."""

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        state["tries"] = 0
        state["prompt"][-1].content += " Reply with a number."
        return state

    async def env_response(self, messages: list[Any], state: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
        state["tries"] += 1
        text = messages[-1].content
        if text == "break":
            raise vf.InfraError("the game broke")
        if text == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="correct")]
            return []
        return [{"role": "user", "content": "higher" if int(text) < int(state["answer"]) else "lower"}]


def load_corrections() -> vf.Environment:
    def found(completion: list[Any], answer: str) -> float:
        return float(any(message.content == answer for message in completion if message.role == "assistant"))

    rubric = vf.Rubric(funcs=[found, turns], weights=[1.0, -0.125])
    return CorrectionsEnv(dataset=Dataset.from_list(ROWS), rubric=rubric, max_turns=3)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


CORRECTIONS = load_corrections()
ADDING = vf.ToolEnv(tools=[add], dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[exact]))


class Corrections(Verifiers):
    def __init__(self) -> None:
        super().__init__(CORRECTIONS)


class Adding(Verifiers):
    def __init__(self) -> None:
        super().__init__(ADDING)
