"""Tests of solving held-out problems, with a tokenizer of words and an engine that knows the sums."""

import json
from typing import Any

import pytest

from grpo_ray.config.loader import from_mapping
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.solve import solve_problems
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.sampling import Completion

PROBLEMS = [
    Problem(id=f"{n:016x}", prompt=[{"role": "user", "content": f"{n} + 1"}], solution=f"${n + 1}$") for n in (2, 3)
]


class WordTokenizer:
    """Tokenizer with a token for each text that it has seen; its template writes out its variables."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def token(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)

    def apply_chat_template(self, prompts: list[Any], **variables: Any) -> dict[str, list[list[int]]]:
        assert variables.pop("add_generation_prompt") and variables.pop("return_dict")
        return {"input_ids": [[self.token(prompt[-1]["content"] + json.dumps(variables))] for prompt in prompts]}

    def batch_decode(self, completions: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["".join(self.texts[token] for token in ids) for ids in completions]


class AddingEngine:
    """Engine that adds one to the number in the prompt; the second completion of a problem is wrong and truncated."""

    def __init__(self, tokenizer: WordTokenizer, samples: int) -> None:
        self.tokenizer, self.samples = tokenizer, samples
        self.prompts: list[str] = []
        self.sampling: list[dict[str, Any]] = []

    def run_requests(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[Completion]:
        self.prompts, self.sampling = [self.tokenizer.texts[token] for (token,) in prompts], sampling
        answers = [int(text.partition(" ")[0]) + 1 + i % self.samples for i, text in enumerate(self.prompts)]
        texts = [f"The answer is $\\boxed{{{answer}}}$." for answer in answers]
        return [Completion([self.tokenizer.token(text)], i % self.samples == 1, [], []) for i, text in enumerate(texts)]


def solve(samples: int, **grpo: Any) -> tuple[dict[str, list[Any]], AddingEngine]:
    heldout = {"num_samples": samples, "temperature": 0.5 if samples > 1 else 0.0}
    tokenizer = WordTokenizer()
    engine = AddingEngine(tokenizer, samples)
    config = from_mapping({"grpo": grpo, "heldout": heldout, "run": {"seed": 3}})
    columns = solve_problems(PROBLEMS, config, tokenizer, engine.run_requests, {PROBLEMS[1].id})  # type: ignore[arg-type]
    return columns, engine


def test_solve_problems_renders_prompts_as_training() -> None:
    _, engine = solve(1, chat_template_kwargs={"enable_thinking": False})
    assert engine.prompts == ['2 + 1{"enable_thinking": false}', '3 + 1{"enable_thinking": false}']


@pytest.mark.parametrize("samples", [1, 2])
def test_solve_problems_samples_each_with_its_own_seed(samples: int) -> None:
    columns, engine = solve(samples)
    assert [each["seed"] for each in engine.sampling] == [
        request_seed(3, problem.id, 0, index) for problem in PROBLEMS for index in range(samples)
    ]
    assert {each["temperature"] for each in engine.sampling} == {0.5 if samples > 1 else 0.0}
    assert columns["scores"] == [[1.0, 0.0][:samples]] * 2
    assert columns["truncated"] == [[False, True][:samples]] * 2 and columns["lengths"] == [[1] * samples] * 2
    assert columns["texts"][0] is None and columns["texts"][1][0] == "The answer is $\\boxed{4}$."
