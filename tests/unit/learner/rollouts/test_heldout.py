"""Tests of the held-out solver of a worker, with a fake engine and no process group."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from grpo_ray.config.loader import from_mapping
from grpo_ray.data.problem import Problem
from grpo_ray.inference.sampling import Completion, OnFinished, RunRound
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.heldout import HeldoutSolver

PROBLEMS = [
    Problem(id=f"{n:016x}", prompt=[{"role": "user", "content": f"{n}"}], solution=f"${n}$") for n in range(1, 4)
]


class NumberTokenizer:
    """Tokenizer of numbers: the token of a number is the number."""

    def apply_chat_template(self, prompts: list[Any], **variables: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(prompt[-1]["content"])] for prompt in prompts]}

    def batch_decode(self, completions: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [f"$\\boxed{{{token}}}$" for (token,) in completions]


class SyncedEngine:
    """Engine that repeats the prompt once it has the learner's weights; every fourth completion is wrong."""

    is_synced = False
    requests = 0

    def sync(self) -> None:
        self.is_synced = True

    @contextmanager
    def heldout_rounds(self) -> Iterator[RunRound]:
        yield self._run_round

    def _run_round(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished
    ) -> list[Completion]:
        assert self.is_synced
        self.requests += len(prompts)
        return [Completion([99 if i % 4 == 3 else token], False, [], []) for i, (token,) in enumerate(prompts)]


def solver(workers: Workers, samples: int = 1) -> HeldoutSolver:
    engine = SyncedEngine()
    config = from_mapping({"heldout": {"num_samples": samples, "temperature": 1.0}})
    return HeldoutSolver(config, engine, NumberTokenizer(), workers, engine.sync)  # type: ignore[arg-type]


def test_solve_takes_every_nth_problem() -> None:
    rows = solver(Workers(rank=1, count=2)).solve(PROBLEMS)
    assert [row["id"] for row in rows] == [PROBLEMS[1].id]


def test_accuracy_several_samples_is_mean_over_problems() -> None:
    # Two samples of three problems are six completions, of which the fourth is wrong: 1, 1/2 and 1.
    result = solver(Workers(), samples=2).evaluate({"heldout": PROBLEMS})["heldout"]
    assert result.pass_at_1.value == pytest.approx(2.5 / 3)
    assert (result.pass_at_k.value, result.num_samples) == (1.0, 2)


def test_evaluate_counts_all_workers() -> None:
    other: dict[str, Any] = {"id": "other", "scores": [0.0], "answers": [""], "truncated": [True], "lengths": [3]}
    other |= {"texts": ["?"], "seconds": 1.0}
    workers = Workers(gather_objects=lambda own: [own, [other]])
    problems = [*PROBLEMS, replace(PROBLEMS[0], id="other")]
    # Three of four are solved; the fourth was solved elsewhere, as the engine here fails every fourth.
    result = solver(workers).evaluate({"heldout": problems})["heldout"]
    assert (result.pass_at_1.value, result.truncated_share) == (0.75, 0.25)


def test_evaluate_result_has_records_in_the_order_of_the_set() -> None:
    result = solver(Workers(), samples=2).evaluate({"heldout": PROBLEMS[::-1]})["heldout"]
    assert [record.problem for record in result.records] == [problem.id for problem in PROBLEMS[::-1]]
    first, second, _ = result.records
    assert (first.prompt, first.solution, first.correct) == ("3", "$3$", (1.0, 1.0))
    assert (second.completions, second.correct) == (("$\\boxed{2}$", "$\\boxed{99}$"), (1.0, 0.0))
    assert (second.lengths, second.truncated) == ((1, 1), (False, False))


def test_evaluate_problem_of_two_sets_is_solved_once() -> None:
    sets = {"heldout/a": PROBLEMS[:2], "heldout/b": PROBLEMS[1:]}
    held = solver(Workers())
    results = held.evaluate(sets)
    assert held.engine.requests == 3
    assert [(key, result.problems, result.pass_at_1.value) for key, result in results.items()] == [
        ("heldout/a", 2, 1.0), ("heldout/b", 2, 1.0),
    ]  # fmt: skip
