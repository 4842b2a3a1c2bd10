"""Tests of solving held-out problems, with a tokenizer of words and an engine that knows the sums."""

import json
from typing import Any

import pytest

from grpo_ray.config.loader import from_mapping
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.metrics import EvaluationResult, summarize_evaluation
from grpo_ray.evaluation.records import make_records
from grpo_ray.evaluation.solve import solve_problems
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.sampling import Completion
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.models.tokenizer import load_tokenizer
from grpo_ray.storage.records.conversation_columns import MessageRecord
from grpo_ray.tools.conversation import Conversation

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
    columns = solve_problems(PROBLEMS, config, tokenizer, engine.run_requests, {PROBLEMS[1].id})
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


@pytest.mark.parametrize("score", ["correctness", "reward"])
def test_solve_problems_none_of_a_small_set_are_no_rows(score: str) -> None:
    config = from_mapping({"heldout": {"score": score}, "rewards": {"functions": ["boxed_format"]}})
    # The real tokenizer: for no completions transformers returns one text.
    columns = solve_problems([], config, load_tokenizer(str(embedded_policy())), lambda prompts, sampling: [], set())
    assert set(map(len, columns.values())) == {0}


def converse(rows: list[dict[str, Any]], sampling: dict[str, Any]) -> list[Conversation]:
    """Return conversations in which a tool returns the right answer, and every second one goes on to state it."""
    assert sampling["temperature"] == 0.5 and "seed" not in sampling
    conversations = []
    for row in rows:
        messages = [{"role": "assistant", "content": ""}, {"role": "tool", "name": "add", "content": row["solution"]}]
        if row["index"]:
            messages.append({"role": "assistant", "content": rf"\boxed{{{row['solution'].strip('$')}}}"})
        conversations.append(
            Conversation(
                prompt_ids=[1],
                token_ids=[2, 3, 4],
                logps=[-1.0, 0.0, -1.0],
                unprocessed_logps=None,
                own=[1, 0, 1],
                messages=messages,
                reward=float(row["index"]) * 3,
                ended="stop" if row["index"] else "length",
                turns=2,
                calls=[],
            )
        )
    return conversations


def solve_with_turns(**rewards: Any) -> dict[str, list[Any]]:
    config = from_mapping({
        "heldout": {"num_samples": 2, "temperature": 0.5},
        "rollout": {"environment": "package.games:Guess"},
        "rewards": rewards,
    })  # fmt: skip
    return solve_problems(PROBLEMS, config, WordTokenizer(), never_run, {PROBLEMS[1].id}, converse)


def never_run(*arguments: Any) -> list[Completion]:
    raise AssertionError("completions of several turns are not sampled in one request")


def test_solve_problems_grades_the_policys_own_last_turn() -> None:
    columns = solve_with_turns()
    assert columns["scores"] == [[0.0, 1.0]] * 2 and columns["rewards"] == [[0.0, 3.0]] * 2
    assert columns["lengths"] == [[2, 2]] * 2 and columns["truncated"] == [[True, False]] * 2
    assert columns["texts"][1][1].splitlines() == ["[tool add] $4$", r"\boxed{4}"]
    assert columns["conversations"][0] is None
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    assert summarize_evaluation(rows, 2).maj_at_k is not None
    first, second = make_records(rows, PROBLEMS)
    assert first.conversations is None and second.conversations is not None
    assert [(each.ended, each.turns, each.calls) for each in second.conversations] == [("length", 2, 0), ("stop", 2, 0)]
    assert second.conversations[0].messages == (MessageRecord("tool", "add", "$4$"),)


def test_solve_problems_score_of_an_environment_is_limited_and_its_reward_is_not() -> None:
    columns = solve_with_turns(functions=["environment"])
    assert columns["scores"] == [[0.0, 1.0]] * 2 and columns["rewards"] == [[0.0, 3.0]] * 2
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    result = summarize_evaluation(rows, 2)
    assert result.reward == 1.5 and result.measures()["reward"] == 1.5 and result.pass_at_1.value == 0.5
    # The best of two is 1; a vote needs answers.
    assert result.pass_at_k.value == 1.0 and result.maj_at_k is None and "maj_at_k" not in result.measures()
    assert EvaluationResult.from_dict(result.to_dict()) == result
