"""The embedded dataset: small arithmetic problems in DeepMath's shape, made from a seed, no download.

Four kinds over two-digit numbers, each with a right way of working it and a common mistake; the embedded policy
(`tiny.py`) is warmed up on both. Problems are drawn without repetition from all that exist, and the held-out
split is cut off the same shuffled list, so that it shares no problem with the training split.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_ray.data.problem import Problem, problem_id

QUESTIONS = {
    "sum": "What is {a} + {b}?",
    "difference": "What is {a} - {b}?",
    "last_digit": "What is the last digit of {a} * {b}?",
    "remainder": "What is the remainder of {a} + {b} divided by 10?",
}
"""Kind -> the question's words, for two whole numbers from 10 to 99."""

HELDOUT = 600
"""Problems in the held-out split."""


@dataclass(frozen=True)
class Task:
    """One arithmetic task: its kind and its two numbers."""

    kind: str
    a: int
    b: int

    @property
    def answer(self) -> int:
        a, b = self.a, self.b
        return {"sum": a + b, "difference": a - b, "last_digit": a * b % 10, "remainder": (a + b) % 10}[self.kind]

    def problem(self) -> Problem:
        prompt = [{"role": "user", "content": QUESTIONS[self.kind].format(a=self.a, b=self.b)}]
        solution = f"${self.answer}$"
        return Problem(id=problem_id(prompt, solution), prompt=prompt, solution=solution, columns={"topic": self.kind})

    def worked(self) -> str:
        """The right way: digit by digit, then the boxed answer."""
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

    def mistaken(self) -> str:
        """A common mistake: the carry or the borrowing forgotten, the wrong digit picked."""
        (s, u), (t, v) = divmod(self.a, 10), divmod(self.b, 10)
        work, slip = {
            "sum": (f"{u}+{v}={u + v}, {s}+{t}={s + t}", 10 * (s + t) + (u + v) % 10),
            "difference": (f"{max(u, v)}-{min(u, v)}={abs(u - v)}, {s}-{t}={s - t}", 10 * (s - t) + abs(u - v)),
            "last_digit": (f"{u}*{v}={u * v}", u * v // 10),
            "remainder": (f"{u}+{v}={u + v}", u + v),
        }[self.kind]
        return f"{work} \\boxed{{{slip}}}"


def tasks(split: str, seed: int = 0) -> list[Task]:
    """All tasks of one split: "train" (19,179) or "heldout" (600)."""
    numbers = range(10, 100)
    every = [
        task
        for kind in QUESTIONS
        for a in numbers
        for b in numbers
        if (kind != "difference" or a >= b)
        # Two thirds of the tasks in which nothing can be forgotten are left out: they need no learning.
        and ((task := Task(kind, a, b)).worked() != task.mistaken() or (a + b) % 3 == 0)
    ]
    random.Random(seed).shuffle(every)
    return {"heldout": every[:HELDOUT], "train": every[HELDOUT:]}[split]


def arithmetic(split: str, seed: int = 0) -> Iterator[Problem]:
    """The problems of one split, in a fixed order."""
    return (task.problem() for task in tasks(split, seed))
