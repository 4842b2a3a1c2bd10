"""The embedded dataset: small arithmetic problems in DeepMath's shape, made from a seed, no download.

Four kinds over two-digit numbers, each with a right way of working it and a common mistake; the embedded policy
(`tiny.py`) is warmed up on both. Problems are drawn without repetition from all that exist, and the held-out
split is cut off the same shuffled list, so that it shares no problem with the training split.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_ray.problem import Problem, problem_id

QUESTIONS = {
    "sum": "What is {a} + {b}?",
    "larger": "Which is larger, {a} or {b}?",
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
        return {"sum": a + b, "larger": max(a, b), "last_digit": a * b % 10, "remainder": (a + b) % 10}[self.kind]

    def problem(self) -> Problem:
        prompt = [{"role": "user", "content": QUESTIONS[self.kind].format(a=self.a, b=self.b)}]
        solution = f"${self.answer}$"
        return Problem(id=problem_id(prompt, solution), prompt=prompt, solution=solution, columns={"topic": self.kind})

    def worked(self) -> str:
        """The right way: digit by digit, then the boxed answer."""
        return self._completion(self._work(carry=True), self.answer)

    def mistaken(self) -> str:
        """A common mistake: the carry forgotten, the smaller number named, the wrong digit picked."""
        (s, u), (t, v) = divmod(self.a, 10), divmod(self.b, 10)
        slip = {
            "sum": 10 * (s + t) + (u + v) % 10,
            "larger": min(self.a, self.b),
            "last_digit": u * v // 10,
            "remainder": u + v,
        }[self.kind]
        return self._completion(self._work(carry=False), slip)

    def _work(self, carry: bool) -> str:
        (s, u), (t, v) = divmod(self.a, 10), divmod(self.b, 10)
        if self.kind == "sum":
            one = 1 if carry and u + v > 9 else 0
            return f"{u}+{v}={u + v}, {s}+{t}{'+1' if one else ''}={s + t + one}"
        if self.kind == "larger":
            left, right = (s, t) if s != t else (u, v)
            return f"{left}{'<' if left < right else '>' if left > right else '='}{right}"
        return f"{u}*{v}={u * v}" if self.kind == "last_digit" else f"{u}+{v}={u + v}"

    @staticmethod
    def _completion(work: str, answer: int) -> str:
        return f"{work} \\boxed{{{answer}}}"


def tasks(split: str, seed: int = 0) -> list[Task]:
    """All tasks of one split: "train" (31,800) or "heldout" (600)."""
    numbers = range(10, 100)
    every = [Task(kind, a, b) for kind in QUESTIONS for a in numbers for b in numbers]
    random.Random(seed).shuffle(every)
    return {"heldout": every[:HELDOUT], "train": every[HELDOUT:]}[split]


def arithmetic(split: str, seed: int = 0) -> Iterator[Problem]:
    """The problems of one split, in a fixed order."""
    return (task.problem() for task in tasks(split, seed))
