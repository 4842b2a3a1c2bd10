"""The embedded dataset: small arithmetic problems in DeepMath's form, generated from a seed, without a download.

There are four kinds of problems over two-digit numbers. Each has a worked solution and a mistaken one with a common
mistake; the policy `tiny-arithmetic` (`models/demonstrations.py`) is warmed up on both. Both splits are cut from one
shuffled list without repetitions, so they have no problem in common.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from grpo_ray.data.problem import Problem, problem_id

QUESTIONS = {
    "sum": "What is {a} + {b}?",
    "difference": "What is {a} - {b}?",
    "last_digit": "What is the last digit of {a} * {b}?",
    "remainder": "What is the remainder of {a} + {b} divided by 10?",
}
"""Kind -> template of the question, for two whole numbers from 10 to 99."""

HELDOUT = 600
"""Problems in the held-out split."""


@dataclass(frozen=True)
class ArithmeticTask:
    """One arithmetic task: its kind and its two numbers."""

    kind: str
    a: int
    b: int

    @property
    def answer(self) -> int:
        a, b = self.a, self.b
        return {"sum": a + b, "difference": a - b, "last_digit": a * b % 10, "remainder": (a + b) % 10}[self.kind]

    def problem(self) -> Problem:
        """Return the task as a problem."""
        prompt = [{"role": "user", "content": QUESTIONS[self.kind].format(a=self.a, b=self.b)}]
        solution = f"${self.answer}$"
        # The kind follows from the question, so it is not part of the id.
        return Problem(id=problem_id(prompt, solution), prompt=prompt, solution=solution, columns={"topic": self.kind})

    def worked_solution(self) -> str:
        """Return a correct completion: digit by digit, then the boxed answer."""
        (s, u), (t, v) = divmod(self.a, 10), divmod(self.b, 10)
        carry = 1 if u + v > 9 else 0
        borrow = 1 if u < v else 0
        work = {
            "sum": f"{u}+{v}={u + v}, {s}+{t}{'+1' * carry}={s + t + carry}",
            "difference": f"{'1' * borrow}{u}-{v}={10 * borrow + u - v}, {s}-{t}{'-1' * borrow}={s - t - borrow}",
            "last_digit": f"{u}*{v}={u * v}",
            "remainder": f"{u}+{v}={u + v}",
        }
        return f"{work[self.kind]} \\boxed{{{self.answer}}}"

    def mistaken_solution(self) -> str:
        """Return a completion with a common mistake: a forgotten carry or borrow, or the wrong digit."""
        (s, u), (t, v) = divmod(self.a, 10), divmod(self.b, 10)
        work, wrong_answer = {
            "sum": (f"{u}+{v}={u + v}, {s}+{t}={s + t}", 10 * (s + t) + (u + v) % 10),
            "difference": (f"{max(u, v)}-{min(u, v)}={abs(u - v)}, {s}-{t}={s - t}", 10 * (s - t) + abs(u - v)),
            "last_digit": (f"{u}*{v}={u * v}", u * v // 10),
            "remainder": (f"{u}+{v}={u + v}", u + v),
        }[self.kind]
        return f"{work} \\boxed{{{wrong_answer}}}"


def list_tasks(split: str, seed: int = 0) -> list[ArithmeticTask]:
    """Return all tasks of one split, "train" (19,179) or "heldout" (600), in an order that the seed determines."""
    tasks = _shuffled_tasks(seed)
    return list({"heldout": tasks[:HELDOUT], "train": tasks[HELDOUT:]}[split])


@cache
def _shuffled_tasks(seed: int) -> tuple[ArithmeticTask, ...]:
    numbers = range(10, 100)
    tasks = [
        task
        for kind in QUESTIONS
        for a in numbers
        for b in numbers
        if (kind != "difference" or a >= b)
        # A task whose mistaken solution is the worked one teaches nothing, so only a third of these tasks is kept.
        and ((task := ArithmeticTask(kind, a, b)).worked_solution() != task.mistaken_solution() or (a + b) % 3 == 0)
    ]
    random.Random(seed).shuffle(tasks)
    return tuple(tasks)


def arithmetic_problems(split: str, seed: int = 0) -> Iterator[Problem]:
    """Yield the problems of one split, in the order of `list_tasks`."""
    return (task.problem() for task in list_tasks(split, seed))
